"""Starts the server's processes, watches them, and takes them down together.

    supervisor ("benchctl serve")
      |- worker-0    heavy: torch, model, device       spawned first, it takes longest
      |    `- builders of kernels, while a cold cache is filled
      |- engine      scheduler, KV-cache bookkeeping
      `- api-0..N    HTTP, tokenizer; several start beside each other, long before the worker has done so
           `- chat templates, two at most each (`server.api.template_process`)

The supervisor imports nothing heavy and runs one selector loop over the children's status pipes, their stderr and
their pidfds. Whatever way it ends, the children end: they hold the other end of a control pipe and die with their
parent (see `server.child`). So does the process that fills the bytecode cache of a first start.
"""

from __future__ import annotations

import collections
import contextlib
import math
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Protocol

import msgspec

from server.bytecode import ByteCompiler, child_environment, choose_folder, wants_compiling
from server.child import (
    ConfigMessage,
    ControlMessage,
    DrainMessage,
    FailedMessage,
    LogMessage,
    PeerDiedMessage,
    ReadyMessage,
    SpanMessage,
    StatusMessage,
)
from server.config import ServerConfig
from server.cores import usable_cores
from server.errors import UserError, exhausted
from server.listen import bind_socket
from server.paths import cache_root
from server.pulse import Pulse, create_pulse_fd
from server.runtime_dir import create_runtime_dir
from server.startup import StartupTimeline, join_timeline
from server.timeline import Timeline
from server.watchdog import CHECK_INTERVAL_S, Watch

_TAIL_LINES = 40
_CORES_FOR_MANY, _MANY_API_PROCESSES = 16, 4
# After a child died the API process has this long to send error events to its streams before everything is killed.
_FAILURE_GRACE_S = 3.0
# Beyond the drain time that the user chose: for writing the last bytes and leaving.
_EXIT_GRACE_S = 5.0


class Observer(Protocol):
    """Hears what happens; shows it to a person or writes it as JSON lines."""

    def on_status(self, process: str, message: StatusMessage) -> None: ...

    def on_stderr(self, process: str, line: str) -> None: ...

    def on_ready(self, url: str, timeline: StartupTimeline) -> None: ...

    def on_stopping(self, reason: str) -> None: ...

    def on_failure(self, text: str, tail: list[str]) -> None: ...

    def on_restart(self, pause_s: float) -> None: ...

    def close(self) -> None: ...


class _Process:
    """One child and the supervisor's ends of its pipes."""

    def __init__(
        self,
        name: str,
        module: str,
        index: int,
        pulse: tuple[int, int],
        listen_fd: int | None,
        environment: dict[str, str] | None,
    ) -> None:
        status_read, status_write = os.pipe()
        control_read, control_write = os.pipe()
        self.name = name
        self.ready = False
        self.failure: FailedMessage | None = None
        self.verdict: str | None = None
        """Why the watchdog killed it."""
        self.tail: collections.deque[str] = collections.deque(maxlen=_TAIL_LINES)
        self._control_fd = control_write
        self.status_buffer = bytearray()
        self.stderr_buffer = bytearray()
        command = [sys.executable, "-P", "-m", module, "--index", str(index)]
        command += ["--status-fd", str(status_write), "--control-fd", str(control_read)]
        command += ["--supervisor-pid", str(os.getpid())]
        try:
            self.popen = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[fd for fd in (status_write, control_read, pulse[0], listen_fd) if fd is not None],
                start_new_session=True,
            )
        finally:
            os.close(status_write)
            os.close(control_read)
        assert self.popen.stdout is not None
        self.output: BinaryIO = self.popen.stdout  # type: ignore[assignment]
        self.status_fd = status_read
        self.pidfd = os.pidfd_open(self.popen.pid)
        self.watch = Watch(self.popen.pid, Pulse(*pulse))
        os.set_blocking(status_read, False)
        os.set_blocking(self.output.fileno(), False)

    def send(self, message: ControlMessage) -> None:
        with contextlib.suppress(BrokenPipeError):  # it is dead already; its pidfd tells
            os.write(self._control_fd, msgspec.json.encode(message) + b"\n")

    @property
    def alive(self) -> bool:
        return self.popen.poll() is None

    def kill(self) -> None:
        """Kill the child with everything it started (it leads its own session)."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.popen.pid, signal.SIGKILL)

    def close(self) -> None:
        for fd in (self._control_fd, self.status_fd, self.pidfd):
            os.close(fd)
        self.output.close()
        self.watch.close()


class Supervisor:
    """Runs one server from start to end; `run()` blocks and returns the exit code."""

    def __init__(self, config: ServerConfig, observer: Observer, timeline: Timeline) -> None:
        self.config = config
        self.observer = observer
        self.timeline = timeline
        self.url = ""
        self._processes: list[_Process] = []
        self._selector = selectors.DefaultSelector()
        self._status_decoder: msgspec.json.Decoder[StatusMessage] = msgspec.json.Decoder(StatusMessage)
        self._signals: list[int] = []
        self._failed: _Process | None = None
        self._deadline: float | None = None
        self._draining = False
        self.ready_at: float | None = None
        """Monotonic seconds when the server became ready; None: not yet."""
        self._watched_at = 0.0
        self._byte_compiler: ByteCompiler | None = None

    @property
    def is_ready(self) -> bool:
        return self.ready_at is not None

    def run(self, on_ready: Callable[[str], None] | None = None) -> int:
        """Start everything, serve until a signal or a death, stop everything.

        Returns 0 after a drain, 130/143 when interrupted during the start or twice, 2 when a child that was starting
        reported something that the user can mend, else 1. Raises UserError when the port cannot be bound, the machine
        has no directory or descriptors to start with, or a value of the configuration makes no sense.
        """
        _check_values(self.config)
        try:
            return self._run(on_ready)
        except OSError as error:
            raise exhausted(error) or error from None

    def _run(self, on_ready: Callable[[str], None] | None) -> int:
        listener = bind_socket(self.config.api.host, self.config.api.port)
        runtime_dir = create_runtime_dir()
        self.config.runtime_dir = str(runtime_dir)
        self.url = _url(listener)
        wakeup_read, wakeup_write = socket.socketpair()
        wakeup_write.setblocking(False)
        wakeup_read.setblocking(False)
        old_wakeup = signal.set_wakeup_fd(wakeup_write.fileno(), warn_on_full_buffer=False)
        old_handlers = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
        self._selector.register(wakeup_read, selectors.EVENT_READ, lambda: self._on_signal(wakeup_read))
        try:
            self._spawn(listener)
            return self._loop(runtime_dir, on_ready)
        finally:
            self._kill_all()
            signal.set_wakeup_fd(old_wakeup)
            for number, handler in old_handlers.items():
                signal.signal(number, handler)
            self._selector.close()
            wakeup_read.close()
            wakeup_write.close()
            listener.close()
            shutil.rmtree(runtime_dir, ignore_errors=True)

    def _spawn(self, listener: socket.socket) -> None:
        with self.timeline.span("spawn") as attributes, contextlib.ExitStack() as stack:
            config, attributes["api_processes"] = self._choose_api_server_count()
            environment = self._keep_bytecode()
            pulse_fd = create_pulse_fd()
            stack.callback(os.close, pulse_fd)
            plan = [("worker-0", "server.worker", 0), ("engine", "server.engine", 0)]
            plan += [(f"api-{i}", "server.api", i) for i in range(config.api.api_server_count or 1)]
            for slot, (name, module, index) in enumerate(plan):
                listen_fd = listener.fileno() if module == "server.api" else None
                process = _Process(name, module, index, (pulse_fd, slot), listen_fd, environment)
                self._processes.append(process)
                process.send(ConfigMessage(config, listen_fd, (pulse_fd, slot)))
                self._selector.register(process.status_fd, selectors.EVENT_READ, lambda p=process: self._read_status(p))
                self._selector.register(process.output, selectors.EVENT_READ, lambda p=process: self._read_output(p))
                self._selector.register(process.pidfd, selectors.EVENT_READ, lambda p=process: self._on_exit(p))

    def _choose_api_server_count(self) -> tuple[ServerConfig, str]:
        """The configuration with a number of API processes, and that number for the start-up report."""
        api = self.config.api
        if api.api_server_count is not None:
            return self.config, str(api.api_server_count)
        cores = usable_cores()
        count = api_servers_for(cores)
        told = f"{count} (auto, {cores} usable {'core' if cores == 1 else 'cores'})"
        self.observer.on_status("supervisor", LogMessage("info", f"API processes: {told}"))
        return msgspec.structs.replace(self.config, api=msgspec.structs.replace(api, api_server_count=count)), told

    def _keep_bytecode(self) -> dict[str, str] | None:
        """The environment of children that are to keep Python's bytecode in our cache (see `server.bytecode`), which
        is filled ahead of them; None where they need no other environment."""
        folder, warning = choose_folder(cache_root(self.config.compilation.cache_dir))
        if warning is not None:
            self.observer.on_stderr("supervisor", warning)
        if folder is None:
            return None
        if wants_compiling(folder):
            with contextlib.suppress(OSError):  # no process to be had: the worker's start will say so
                self._byte_compiler = ByteCompiler(folder)
                self._selector.register(self._byte_compiler.pidfd, selectors.EVENT_READ, self._on_byte_compiled)
        return child_environment(folder)

    def _on_byte_compiled(self) -> None:
        if self._byte_compiler is not None:
            started_ns = self._byte_compiler.started_ns
            self.timeline.add("bytecode", started_ns, time.monotonic_ns(), thread="bytecode", background=True)
            self._selector.unregister(self._byte_compiler.pidfd)
            self._byte_compiler.close()
            self._byte_compiler = None

    def _loop(self, runtime_dir: Path, on_ready: Callable[[str], None] | None) -> int:
        while True:
            timeout = CHECK_INTERVAL_S
            if self._deadline is not None:
                timeout = min(timeout, max(0.0, self._deadline - time.monotonic()))
            for key, _ in self._selector.select(timeout):
                key.data()
            self._watch()
            if not self.is_ready and self._processes and all(p.ready for p in self._processes):
                self.ready_at = time.monotonic()
                self._become_ready(runtime_dir)
                if on_ready is not None:
                    on_ready(self.url)
            if self._signals and (not self.is_ready or len(self._signals) > 1):
                return 128 + self._signals[-1]
            if self._signals and not self._draining:
                self._begin_drain()
            if self._failed is not None and not self._apis_alive():
                return self._exit_code()
            if self._draining and self._failed is None and not self._apis_alive():
                return 0
            if self._deadline is not None and time.monotonic() >= self._deadline:
                return self._exit_code() if self._failed is not None else 0

    def _watch(self) -> None:
        """Kill children that live but do nothing; what a death leads to then follows."""
        now = time.monotonic()
        if now - self._watched_at < CHECK_INTERVAL_S:
            return
        self._watched_at = now
        for process in self._processes:
            if process.verdict is None and process.alive and (verdict := process.watch.check(now)) is not None:
                process.verdict = verdict
                process.kill()

    def _become_ready(self, runtime_dir: Path) -> None:
        timeline = join_timeline(self.timeline.spans, self.config.exec_time_ns, time.monotonic_ns())
        temporary = runtime_dir / "startup.json.tmp"
        try:
            temporary.write_bytes(msgspec.json.encode(timeline))
            temporary.rename(runtime_dir / "startup.json")
        except OSError as error:  # a full disk: the server can do without
            self.observer.on_stderr("supervisor", f"/v1/startup has nothing to show: {temporary}: {error.strerror}")
        self.observer.on_ready(self.url, timeline)

    def _begin_drain(self) -> None:
        self._draining = True
        timeout = self.config.api.shutdown_timeout_s
        name = signal.Signals(self._signals[0]).name
        self.observer.on_stopping(f"{name}: finishing requests in flight, {timeout:g} s at most")
        self._deadline = time.monotonic() + timeout + _EXIT_GRACE_S
        for process in self._apis():
            process.send(DrainMessage(timeout))

    def _apis(self) -> list[_Process]:
        return [process for process in self._processes if process.name.startswith("api-")]

    def _apis_alive(self) -> bool:
        return any(process.alive for process in self._apis())

    def _on_signal(self, wakeup: socket.socket) -> None:
        numbers = wakeup.recv(64)
        self._signals += [number for number in numbers if number in (signal.SIGINT, signal.SIGTERM)]

    def _read_status(self, process: _Process) -> None:
        if not _read_into(process.status_fd, process.status_buffer):
            self._selector.unregister(process.status_fd)
        for line in _take_lines(process.status_buffer):
            message = self._status_decoder.decode(line)
            if isinstance(message, SpanMessage):
                self.timeline.spans.append(message.span)
            elif isinstance(message, ReadyMessage):
                process.ready = True
            elif isinstance(message, FailedMessage):
                process.failure = message
            self.observer.on_status(process.name, message)

    def _read_output(self, process: _Process) -> None:
        fd = process.output.fileno()
        more = _read_into(fd, process.stderr_buffer)
        if not more:
            self._selector.unregister(process.output)
            if process.stderr_buffer:
                process.stderr_buffer += b"\n"
        for line in _take_lines(process.stderr_buffer):
            text = line.decode("utf-8", "replace")
            process.tail.append(text)
            self.observer.on_stderr(process.name, text)

    def _on_exit(self, process: _Process) -> None:
        self._selector.unregister(process.pidfd)
        process.popen.wait()
        self._drain_pipes(process)
        expected = self._draining and process.popen.returncode == 0 and process.name.startswith("api-")
        if expected or self._failed is not None:
            return
        self._failed = process
        if process.failure is not None:
            text = process.failure.text
        else:
            text = f"{process.name} {process.verdict or _how_it_ended(process.popen.returncode)}"
        self.observer.on_failure(text, [] if process.failure and process.failure.user_error else list(process.tail))
        self._deadline = time.monotonic() + (_FAILURE_GRACE_S if self.is_ready else 0.0)
        for api in self._apis():
            api.send(PeerDiedMessage(text))

    def _drain_pipes(self, process: _Process) -> None:
        """Read what the dead child left in its pipes, so that its last words are not lost."""
        registered = self._selector.get_map()
        if process.status_fd in registered:
            self._read_status(process)
        if process.output.fileno() in registered:
            self._read_output(process)

    def _exit_code(self) -> int:
        failure = self._failed.failure if self._failed is not None else None
        return 2 if failure is not None and failure.user_error and not self.is_ready else 1

    def _kill_all(self) -> None:
        """The engine and the worker hold nothing that must be saved: once the API is done they are killed."""
        if self._byte_compiler is not None:
            self._byte_compiler.close()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.popen.wait()
            process.close()


def api_servers_for(cores: int) -> int:
    """API processes for a machine with so many usable cores.

    On one H200 with 256 requests at once to a 0.6B model, four instead of one raised 69 to 71 thousand tokens a second
    and cut the median time to first token from 71 to 46 ms. They want cores of their own, beside those of the engine,
    the worker and a load generator; each start takes half a second of one and 45 MiB.
    """
    return _MANY_API_PROCESSES if cores >= _CORES_FOR_MANY else 1


def _check_values(config: ServerConfig) -> None:
    """UserError for values that cannot be told to a process, or that nobody can mean."""
    for flag, number in (
        ("--shutdown-timeout", config.api.shutdown_timeout_s),
        ("--cpu-kv-cache-gib", config.cache.cpu_kv_cache_gib),
    ):
        if not math.isfinite(number):
            raise UserError(f"{flag} {number}: must be a finite number")
    if not 0 <= config.model.seed < 1 << 63:
        raise UserError(f"--seed {config.model.seed}: must be from 0 to {(1 << 63) - 1}")
    if config.api.api_key == "":
        raise UserError("--api-key is empty: no client could send it; give a key, or leave the flag out")


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _how_it_ended(returncode: int) -> str:
    if returncode < 0:
        return f"was killed by {signal.Signals(-returncode).name}"
    return f"exited with status {returncode}"


def _read_into(fd: int, buffer: bytearray) -> bool:
    """Append what is there; False at end of file."""
    while True:
        try:
            data = os.read(fd, 65536)
        except BlockingIOError:
            return True
        if not data:
            return False
        buffer += data


def _take_lines(buffer: bytearray) -> list[bytes]:
    end = buffer.rfind(b"\n")
    if end < 0:
        return []
    lines = bytes(buffer[:end]).split(b"\n")
    del buffer[: end + 1]
    return lines
