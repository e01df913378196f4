"""The real server on a chosen port, streams against it, and what is left of it afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest

from tests.integration.serving import Server, start_server

TINY = ("tiny", "--enforce-eager", "--device", "cpu", "--max-num-seqs", "64", "--cpu-kv-cache-gib", "0.3")
# However many cores there are.
TINY += ("--api-server-count", "1")
MODULES = ("server.worker", "server.engine", "server.api")


def free_port(host: str = "127.0.0.1") -> int:
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as sock:
        port: int = sock.getsockname()[1]
        return port


@contextlib.contextmanager
def serve(
    tmp_path: Path,
    *arguments: str,
    port: int = 0,
    env: dict[str, str] | None = None,
    prefix: tuple[str, ...] = (),
) -> Iterator[Server]:
    """As `start_server`, with the server's runtime directory below a base of the test's own."""
    base = runtime_base(tmp_path)
    environment = {"XDG_RUNTIME_DIR": str(base), **(env or {})}
    try:
        with start_server(tmp_path, *arguments, port=port, env=environment, prefix=prefix) as server:
            yield server
    finally:
        shutil.rmtree(base)


def runtime_base(tmp_path: Path) -> Path:
    """A short private directory per test: a socket's address has room for 107 bytes."""
    base = Path("/tmp") / f"bcf-{os.getpid()}-{abs(hash(tmp_path)) % 10**6}"
    base.mkdir(mode=0o700, exist_ok=True)
    return base


def wait_until(condition: Callable[[], object], timeout_s: float = 20.0, message: str = "it never came true") -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, message
        time.sleep(0.02)


def wait_children(server: Server) -> list[int]:
    """Pids of the server's three children, once each runs its own program."""

    def running() -> list[int]:
        pids = []
        for pid in server.children():
            with contextlib.suppress(OSError):
                if b"--status-fd" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    pids.append(pid)
        return pids

    wait_until(lambda: len(running()) == len(MODULES), message=server.log_text())
    return running()


def can_bind(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


@dataclass
class Stream:
    """One streamed completion and how it ended."""

    events: list[str] = field(default_factory=list)
    started: asyncio.Event = field(default_factory=asyncio.Event)
    transport_error: str | None = None
    ended_at: float = 0.0

    @property
    def ending(self) -> str:
        """`done`, `error` (an error event came) or `cut` (the connection broke)."""
        if self.events and self.events[-1] == "data: [DONE]":
            return "done"
        if self.events and '"error"' in self.events[-1]:
            return "error"
        return "cut"

    async def run(self, session: aiohttp.ClientSession, url: str, **fields: object) -> None:
        body = {"prompt": [1, 2, 3], "max_tokens": 4000, "ignore_eos": True, "stream": True, **fields}
        try:
            async with session.post(f"{url}/v1/completions", json=body) as response:
                async for line in response.content:
                    if text := line.decode().strip():
                        self.events.append(text)
                        self.started.set()
        except aiohttp.ClientError as error:
            self.transport_error = repr(error)
        finally:
            self.ended_at = time.monotonic()
            self.started.set()


@contextlib.asynccontextmanager
async def open_session() -> AsyncIterator[aiohttp.ClientSession]:
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        yield session


async def health_statuses(session: aiohttp.ClientSession, url: str, process: subprocess.Popen[bytes]) -> list[int]:
    """What `/health` says until the server ends; 0 stands for no answer."""
    statuses: list[int] = []
    while process.poll() is None:
        try:
            async with session.get(f"{url}/health", timeout=aiohttp.ClientTimeout(total=1)) as response:
                statuses.append(response.status)
        except (aiohttp.ClientError, TimeoutError):
            statuses.append(0)
        await asyncio.sleep(0.02)
    return statuses


def in_namespace(*steps: str, command: tuple[str, ...] = ()) -> tuple[str, ...]:
    """A command line that takes `steps` in private mount and network namespaces and then becomes `command`."""
    script = "set -e; " + "; ".join([*steps, 'exec "$@"'])
    return ("unshare", "--user", "--map-root-user", "--mount", "--net", "sh", "-c", script, "sh", *command)


def has_namespaces() -> bool:
    try:
        return subprocess.run(in_namespace("mount -t tmpfs none /mnt", command=("true",)), timeout=10).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


namespaces = pytest.mark.skipif(not has_namespaces(), reason="needs user, mount and network namespaces")
