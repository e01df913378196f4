"""`--restart on-failure` brings a killed server back at its old address."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import httpx

from tests.faults.harness import TINY, can_bind, runtime_base, serve, wait_children, wait_until
from tests.integration.serving import Server, gone


def is_healthy(server: Server) -> bool:
    try:
        return httpx.get(f"{server.url}/health", timeout=2).status_code == 200
    except httpx.TransportError:
        return False


def test_a_killed_server_comes_back_and_a_signal_ends_the_pause(tmp_path: Path) -> None:
    with serve(tmp_path, *TINY, "--restart", "on-failure") as server:
        server.wait_ready()
        first = server.children()
        os.kill(server.child("server.worker"), signal.SIGKILL)
        wait_until(lambda: "Restarting in 1 s" in server.log_text())
        assert gone(first)
        wait_until(lambda: is_healthy(server), timeout_s=60, message=server.log_text())
        answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": [1, 2], "max_tokens": 3}, timeout=30)
        assert answer.json()["usage"]["completion_tokens"] == 3
        second = server.children()
        assert not set(first) & set(second)
        phases = httpx.get(f"{server.url}/v1/startup").json()
        assert phases["unaccounted_ns"] < phases["healthy_ns"] - phases["exec_ns"]

        os.kill(server.child("server.engine"), signal.SIGKILL)
        wait_until(lambda: "Restarting in 2 s" in server.log_text())
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) == 143
        assert gone(second)
        assert can_bind(int(server.url.rpartition(":")[2]))
        assert not list(runtime_base(tmp_path).iterdir())


def test_a_server_that_never_was_ready_is_not_restarted(tmp_path: Path) -> None:
    with serve(tmp_path, *TINY, "--restart", "on-failure") as server:
        wait_children(server)
        os.kill(server.child("server.engine"), signal.SIGKILL)
        assert server.process.wait(20) == 1
        assert "Restarting" not in server.log_text()
