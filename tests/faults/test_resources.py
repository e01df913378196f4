"""A machine that lacks something: descriptors, disk space, directories, shared memory, IPv4, a steady clock."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from server.errors import exhausted
from tests.faults.harness import TINY, can_bind, free_port, in_namespace, namespaces, serve, wait_until
from tests.integration.serving import Server

SERVE = (sys.executable, "-m", "benchctl", "serve", *TINY, "--port", "0")


def refusal(done: subprocess.CompletedProcess[str]) -> str:
    """The one line with which a command refused; nothing else may look like a crash."""
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    [line] = [line for line in done.stderr.splitlines() if line.startswith("benchctl: ")]
    return line


def run(command: tuple[str, ...], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, **environment})


def complete(server: Server) -> None:
    body = {"prompt": [1, 2], "max_tokens": 3, "ignore_eos": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=30)
    assert answer.json()["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("limit", [12, 22])
def test_no_file_descriptors(limit: int) -> None:
    if shutil.which("prlimit") is None:
        pytest.skip("needs prlimit")
    line = refusal(run(("prlimit", f"--nofile={limit}:{limit}", *SERVE)))
    assert "Too many open files" in line
    assert "ulimit -n" in line


@namespaces
def test_no_directory_for_sockets() -> None:
    # What is below /tmp stays, the checkout perhaps, but nothing can be written there.
    command = in_namespace("mount --bind /tmp /tmp", "mount -o remount,bind,ro /tmp", command=SERVE)
    line = refusal(run(command, XDG_RUNTIME_DIR="/nonexistent", TMPDIR="/proc"))
    assert "no directory for ipc sockets" in line
    assert "TMPDIR" in line


@namespaces
def test_no_inodes_for_sockets() -> None:
    command = in_namespace("mount -t tmpfs -o size=64k,nr_inodes=3 none /mnt", command=SERVE)
    line = refusal(run(command, XDG_RUNTIME_DIR="/mnt"))
    assert "No space left on device" in line
    assert "TMPDIR" in line


@namespaces
def test_a_barren_machine_still_serves(tmp_path: Path) -> None:
    """No /dev/shm, a home that is not there, a full disk below the runtime directory, IPv6 alone, the log on a full
    disk, all at once."""
    code = tmp_path / "ask.py"
    code.write_text(_ASK)
    steps = (
        "mount -t tmpfs -o ro,size=4k none /dev/shm",
        "mount -t tmpfs -o size=4k none /mnt",
        "cat /dev/zero > /mnt/full 2>/dev/null || true",
        "ip link set lo up",
        "ip addr del 127.0.0.1/8 dev lo",
    )
    command = in_namespace(*steps, command=(sys.executable, str(code), *SERVE, "--host", "::1"))
    done = run(command, HOME="/proc/nobody", XDG_RUNTIME_DIR="/mnt", XDG_CACHE_HOME="")
    assert done.returncode == 0, done.stderr


_ASK = """
import json, signal, subprocess, sys, tempfile, time, urllib.request
from pathlib import Path
ready = Path(tempfile.mkdtemp()) / "ready.json"
with open("/dev/full", "w") as full:
    server = subprocess.Popen([*sys.argv[1:], "--ready-file", str(ready)], stdout=full, stderr=full)
try:
    while not ready.exists():
        assert server.poll() is None, server.returncode
        time.sleep(0.05)
    url = json.loads(ready.read_text())["url"]
    assert url.startswith("http://[::1]:"), url
    body = json.dumps({"prompt": [1], "max_tokens": 2, "ignore_eos": True}).encode()
    answer = json.load(urllib.request.urlopen(url + "/v1/completions", body, timeout=30))
    assert answer["usage"]["completion_tokens"] == 2
    server.send_signal(signal.SIGTERM)
    assert server.wait(20) == 0, server.returncode
finally:
    server.kill()
"""


@namespaces
def test_a_machine_without_ipv4_is_a_clear_line() -> None:
    line = refusal(run(in_namespace("ip link set lo up", "ip addr del 127.0.0.1/8 dev lo", command=SERVE)))
    assert "cannot bind 127.0.0.1" in line
    assert "choose another --host" in line


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_the_reader_of_the_log_goes_away(tmp_path: Path, log_format: str) -> None:
    """`benchctl serve 2>&1 | head -1`: the server goes on, and its end is no error."""
    ready = tmp_path / "ready.json"
    command = [*SERVE, "--log-format", log_format, "--ready-file", str(ready)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            process.stdout.close()
            server = Server(process, tmp_path / "none", ready)
            server.log_text = lambda: ""  # type: ignore[method-assign]
            server.wait_ready()
            complete(server)
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
        finally:
            process.kill()


def test_a_ready_file_that_cannot_be_written_is_one_line() -> None:
    line = refusal(run((*SERVE, "--ready-file", "/proc/nobody/ready.json")))
    assert "cannot write /proc/nobody/ready.json" in line


_FULL_DISK = """
import sys
from pathlib import Path
from reports.results import write_bytes
from server.compilation.store import CompileCache
from server.errors import UserError
folder = Path("/mnt")
write_bytes(folder / "first.json", b"kept")
source = Path(sys.argv[1])
cache = CompileCache(folder / "compile")
try:
    cache.publish("key", source, {})
except OSError as error:
    assert error.errno == 28, error
else:
    raise SystemExit("published 1 MB on a disk of 64 kB")
assert not cache.fetch("key", source), "no half of an entry"
assert [p.name for p in (folder / "compile").iterdir()] == [], "no leftover either"
try:
    write_bytes(folder / "second.json", bytes(1 << 20))
except UserError as error:
    assert "the disk is full" in str(error), error
else:
    raise SystemExit("wrote 1 MB on a disk of 64 kB")
assert (folder / "first.json").read_bytes() == b"kept"
assert {p.name for p in folder.iterdir()} == {"first.json", "compile"}
"""


@namespaces
def test_a_full_disk_leaves_no_half_of_a_result_or_cache_entry(tmp_path: Path) -> None:
    (tmp_path / "piece.bin").write_bytes(bytes(1 << 20))
    command = (sys.executable, "-c", _FULL_DISK, str(tmp_path))
    done = run(in_namespace("mount -t tmpfs -o size=64k none /mnt", command=command))
    assert done.returncode == 0, done.stderr


def test_a_file_size_limit_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "kept").write_bytes(b"kept")
    code = "import sys, pathlib, reports.results as r; r.write_bytes(pathlib.Path(sys.argv[1]), bytes(9999))"
    done = run(("prlimit", "--fsize=4096:4096", sys.executable, "-c", code, str(tmp_path / "kept")))
    assert "UserError" in done.stderr
    assert (tmp_path / "kept").read_bytes() == b"kept"
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_out_of_kv_blocks(tmp_path: Path) -> None:
    """More requests than the cache holds: some are preempted, all end, nothing is lost."""
    arguments = ("--num-gpu-blocks-override", "24", "--block-size", "16", "--max-model-len", "256")
    with serve(tmp_path, *TINY, *arguments) as server:
        server.wait_ready()
        body = {"prompt": [1, 2, 3], "n": 8, "max_tokens": 60, "ignore_eos": True}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        assert answer.json()["usage"]["completion_tokens"] == 8 * 60
        refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": [1] * 200, "max_tokens": 100}, timeout=30)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
        metrics = httpx.get(f"{server.url}/metrics").text
        values = {line.split("{")[0]: float(line.split()[-1]) for line in metrics.splitlines() if "{" in line}
        assert values["benchctl:num_preemptions_total"] > 0
        assert values["benchctl:kv_cache_usage_perc"] == 0


_STEPPING_CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
/* The wall clock is another one at every look: years ahead, then years behind. */
int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    static int looks;
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(clock, now);
    if (clock == CLOCK_REALTIME) now->tv_sec += (looks++ % 2 ? 1 : -1) * 100000000L;
    return result;
}
"""


def test_a_clock_that_is_stepped(tmp_path: Path) -> None:
    """Deadlines, heartbeats and metrics go by the monotonic clock: the wall clock may say what it likes."""
    if shutil.which("gcc") is None:
        pytest.skip("needs a C compiler")
    (tmp_path / "clock.c").write_text(_STEPPING_CLOCK)
    library = tmp_path / "clock.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, tmp_path / "clock.c", "-ldl"], check=True)
    with serve(tmp_path, *TINY, env={"LD_PRELOAD": str(library)}) as server:
        server.wait_ready()
        complete(server)
        with httpx.stream("POST", f"{server.url}/v1/completions", json={"prompt": [1], "max_tokens": 150,
                          "ignore_eos": True, "stream": True}, timeout=60) as answer:  # fmt: skip
            assert sum(line.startswith("data: ") for line in answer.iter_lines()) > 100
        metrics = httpx.get(f"{server.url}/metrics").text
        sums = [float(line.split()[-1]) for line in metrics.splitlines() if "_seconds_sum{" in line]
        assert sums
        assert all(0 <= value < 60 for value in sums)
        assert server.process.poll() is None


def test_no_memory_for_the_cache() -> None:
    line = refusal(run((*SERVE, "--cpu-kv-cache-gib", "4000000")))
    assert "memory" in line
    assert "--cpu-kv-cache-gib" in line


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--shutdown-timeout", "inf"),
        ("--cpu-kv-cache-gib", "inf"),
        ("--seed", "-1"),
        ("--seed", str(1 << 63)),
        ("--api-key", ""),
    ],
)
def test_values_that_nobody_can_mean(flag: str, value: str) -> None:
    assert flag in refusal(run((*SERVE, flag, value)))


def test_memory_that_goes_while_it_serves(tmp_path: Path) -> None:
    """The worker can get no more from the kernel: the request hears why, and the server comes back."""
    # A first step of so many tokens takes more memory at once than the worker can have left over from its start.
    body = {"prompt": [[start] * 2000 for start in range(20)], "max_tokens": 4}
    with serve(tmp_path, *TINY, "--max-num-batched-tokens", "32768", "--restart", "on-failure") as server:
        server.wait_ready()
        complete(server)
        worker = server.child("server.worker")
        _, hard = resource.prlimit(worker, resource.RLIMIT_AS)
        resource.prlimit(worker, resource.RLIMIT_AS, (1 << 20, hard))
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=30)
        assert answer.status_code == 500
        assert "out of memory" in answer.json()["error"]["message"]
        wait_until(lambda: "Restarting in 1 s" in server.log_text(), message="it is a failure like any other")
        assert "Traceback" not in server.log_text()
        wait_until(lambda: server.log_text().count("Ready after") == 2)
        complete(server)


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        line = refusal(run((*SERVE[:-1], str(port))))
        assert f"port {port} on 127.0.0.1 is taken" in line
    assert can_bind(port)


def test_what_a_machine_can_lack_is_told_with_its_cure() -> None:
    assert "ulimit -n" in str(exhausted(OSError(24, "Too many open files")))
    assert "free some space" in str(exhausted(OSError(28, "No space left on device", "/tmp/x")))
    assert "--cpu-kv-cache-gib" in str(exhausted(MemoryError()))
    assert exhausted(OSError(2, "No such file or directory")) is None
    assert exhausted(ValueError("x")) is None
