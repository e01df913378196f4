"""Port binding and the private runtime directory."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from server.errors import UserError
from server.listen import bind_socket
from server.runtime_dir import create_runtime_dir, remove_stale


def test_a_port_somebody_listens_on_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as owner:
        port = owner.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} on 127.0.0.1 is taken"):
            bind_socket("127.0.0.1", port)


def test_bound_but_closed_until_listen() -> None:
    with bind_socket("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        assert os.get_inheritable(sock.fileno())
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=1)


@pytest.mark.parametrize(
    ("host", "what"), [("no such host.invalid", "cannot be resolved"), ("192.0.2.1", "cannot bind")]
)
def test_bad_hosts_are_one_line(host: str, what: str) -> None:
    with pytest.raises(UserError, match=what) as caught:
        bind_socket(host, 0)
    assert "\n" not in str(caught.value)


def test_ipv6_is_bound_as_such() -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    try:
        sock = bind_socket("::1", 0)
    except UserError:
        pytest.skip("no IPv6 loopback here")
    with sock:
        assert sock.family == socket.AF_INET6


def test_runtime_dir_is_private_and_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    too_long = tmp_path / ("x" * 100)
    too_long.mkdir()
    monkeypatch.setenv("TMPDIR", str(too_long))
    path = create_runtime_dir()
    try:
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        assert too_long not in path.parents
        assert len(os.fsencode(path / "worker-000-in.sock")) < 108
    finally:
        path.rmdir()


def test_leftovers_of_dead_servers_are_removed_and_live_ones_kept(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    dead = tmp_path / f"benchctl-{child.pid}-abc"
    live = tmp_path / f"benchctl-{os.getpid()}-abc"
    foreign = tmp_path / "benchctl-notes-abc"
    for path in (dead, live, foreign):
        path.mkdir()
    remove_stale(tmp_path)
    assert [path.exists() for path in (dead, live, foreign)] == [False, True, True]
