"""A GPU that is full: before a server starts, while it starts, and after it was ready. Real servers, real memory."""

from __future__ import annotations

import contextlib
import gc
import http.client
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch

from tests.integration.serving import Server, gone, start_server

MIB = 1 << 20
GIB = 1 << 30
# Beside what is left free this is kept: a context of another process takes about half a GiB.
CONTEXT_BYTES = GIB
EXIT_TIMEOUT_S = 120
# Bodies that want more memory than a warm server has touched: long prompts, log-probabilities, penalties.
HUNGRY = {
    "prompt": [[token % 500 for token in range(start, start + 900)] for start in range(16)],
    "max_tokens": 64,
    "ignore_eos": True,
    "logprobs": 20,
    "frequency_penalty": 0.5,
    "temperature": 0.7,
    "top_p": 0.9,
}


@contextlib.contextmanager
def hold_all_but(left_bytes: int) -> Iterator[None]:
    """Take the card's memory until about `left_bytes` are free; give it back at the end."""
    held: list[torch.Tensor] = []
    torch.cuda.init()
    try:
        for piece in (GIB, 64 * MIB, 2 * MIB):
            with contextlib.suppress(torch.OutOfMemoryError):
                while torch.cuda.mem_get_info()[0] - piece >= left_bytes:
                    held.append(torch.empty(piece, dtype=torch.uint8, device="cuda"))
        yield
    finally:
        held.clear()
        gc.collect()
        torch.cuda.empty_cache()


def wait_until(condition: Callable[[], bool], server: Server) -> None:
    deadline = time.monotonic() + EXIT_TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, server.log_text()
        time.sleep(0.05)


def refusal(server: Server) -> str:
    """The one line with which a server that cannot start ends; no process of it is left."""
    children: set[int] = set()

    def ended() -> bool:
        with contextlib.suppress(OSError):
            children.update(server.children())
        return server.process.poll() is not None

    wait_until(ended, server)
    text = server.log_text()
    assert server.process.returncode == 2, text
    assert "Traceback" not in text
    assert children
    assert gone(list(children)), "a process of the server is left"
    [line] = [line for line in text.splitlines() if "benchctl: " in line]
    return line


def post(server: Server, body: dict[str, object]) -> tuple[int, str]:
    """Status and text of a completion; 0 and the reason when the connection breaks."""
    address = urlsplit(server.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=120)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body))
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    except (OSError, http.client.HTTPException) as error:
        return 0, repr(error)
    finally:
        connection.close()


def health(server: Server) -> int:
    """Status of /health; 0: nobody listens any more."""
    address = urlsplit(server.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=10)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status
    except OSError:
        return 0
    finally:
        connection.close()


@pytest.mark.parametrize("mode", ["eager", "compile"])
def test_weights_that_do_not_fit(mode: str, tmp_path: Path) -> None:
    """Sixteen GB of dummy weights beside a process that leaves four."""
    with (
        hold_all_but(4 * GIB + CONTEXT_BYTES),
        start_server(tmp_path, "llama-3.1-8b", "--device", "cuda", "--mode", mode) as server,
    ):
        line = refusal(server)
    assert "no memory for the weights of llama-3.1-8b" in line
    assert "are free" in line
    assert "smaller model" in line


def test_a_card_without_room_for_anything(tmp_path: Path) -> None:
    with hold_all_but(64 * MIB), start_server(tmp_path, "tiny", "--device", "cuda", "--mode", "eager") as server:
        line = refusal(server)
    assert "no memory" in line


def test_more_blocks_than_fit(tmp_path: Path) -> None:
    arguments = ("llama-3.2-1b", "--device", "cuda", "--mode", "eager", "--num-gpu-blocks-override", "10000000")
    with start_server(tmp_path, *arguments) as server:
        line = refusal(server)
    assert "no memory for the KV cache" in line
    assert "lower --num-gpu-blocks-override 10000000" in line


def test_a_share_of_the_card_that_others_hold_already(tmp_path: Path) -> None:
    """--gpu-memory-utilization counts what others hold: two thirds are taken, one third is asked for."""
    total = torch.cuda.mem_get_info()[1]
    arguments = ("tiny", "--device", "cuda", "--mode", "eager", "--gpu-memory-utilization", "0.3")
    with hold_all_but(total // 3), start_server(tmp_path, *arguments) as server:
        line = refusal(server)
    assert "no memory is left for the KV cache: 0.00 GiB available" in line
    assert "raise --gpu-memory-utilization" in line


@pytest.mark.parametrize("mode", ["eager", "compile"])
def test_memory_that_goes_after_readiness(mode: str, tmp_path: Path) -> None:
    """Requests are answered, with success or with an error that says why; /health tells which of both it is."""
    arguments = ("qwen3-0.6b", "--device", "cuda", "--mode", mode, "--gpu-memory-utilization", "0.2")
    with start_server(tmp_path, *arguments, "--max-model-len", "2048") as server:
        server.wait_ready()
        children = server.children()
        api = server.child("server.api")
        with hold_all_but(0):
            status, text = post(server, HUNGRY)
            assert status in (200, 500), text
            if status == 200:
                assert len(json.loads(text)["choices"]) == len(HUNGRY["prompt"])  # type: ignore[arg-type]
                assert health(server) == 200
                assert api in server.children()
            else:
                assert "memory" in text
                assert health(server) in (503, 0)
                assert server.process.wait(EXIT_TIMEOUT_S) == 1
                assert gone(children)
                assert "Traceback" not in server.log_text()
        if status == 200:
            assert post(server, HUNGRY)[0] == 200, "and once there is memory again"


def test_a_server_whose_memory_another_process_took_comes_back(tmp_path: Path) -> None:
    """--restart on-failure: starts fail while another process holds the card, and succeed when it lets go."""
    total = torch.cuda.mem_get_info()[1]
    arguments = ("tiny", "--device", "cuda", "--mode", "eager", "--gpu-memory-utilization", "0.1")
    with start_server(tmp_path, *arguments, "--restart", "on-failure") as server:
        server.wait_ready()
        server.ready_file.unlink()
        free = torch.cuda.mem_get_info()[0]
        os.kill(server.child("server.worker"), signal.SIGKILL)
        wait_until(lambda: torch.cuda.mem_get_info()[0] > free + total // 20, server)
        with hold_all_but(0):
            wait_until(lambda: "no memory" in server.log_text(), server)
        server.wait_ready()
        assert post(server, {"prompt": [1, 2], "max_tokens": 2})[0] == 200
