"""What a child process of the server does to stay in touch with its supervisor.

The supervisor starts `python -m server.api|server.engine|server.worker` with two inherited pipes, named by file
descriptor numbers on the command line:

- status (child writes JSON lines): `StatusMessage`s - spans of the start-up timeline, progress, readiness, failure.
- control (child reads JSON lines): `ControlMessage`s - the configuration first, later `drain` and `peer_died`. End of
  file means that the supervisor is gone: the child exits at once.

PR_SET_PDEATHSIG is set as well, so that a child stuck in a system call or in C code dies with its supervisor too.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable

import msgspec

from server.config import ServerConfig
from server.errors import UserError, exhausted
from server.logs import configure_logging
from server.pulse import Pulse
from server.timeline import Span, Timeline, process_start_ns

_PR_SET_PDEATHSIG = 1


SWITCH_INTERVAL_S = 0.0005
"""How long a thread may keep the interpreter while another waits for it, a tenth of Python's default. A thread that
gives it up for every file it opens or message it gets waits that long each time behind one that computes: importing
Inductor beside one such thread takes 9 s instead of 5, beside four 32 s instead of 12, and they get as much done."""


class SpanMessage(msgspec.Struct, tag="span"):
    span: Span


class ProgressMessage(msgspec.Struct, tag="progress"):
    """`done` of `total` units of phase `name`; shown as a bar."""

    name: str
    done: float
    total: float
    unit: str = ""


class LogMessage(msgspec.Struct, tag="log"):
    level: str
    text: str


class ReadyMessage(msgspec.Struct, tag="ready"):
    """The process does its job; for the API process: the port is open and the model answers."""

    info: dict[str, str | int | float | bool | None] = {}


class FailedMessage(msgspec.Struct, tag="failed"):
    """The process is about to exit with an error; `user_error` is a line that a user can act on."""

    text: str
    user_error: bool = False


StatusMessage = SpanMessage | ProgressMessage | LogMessage | ReadyMessage | FailedMessage


class ConfigMessage(msgspec.Struct, tag="config"):
    config: ServerConfig
    listen_fd: int | None = None
    """API process: the bound, not yet listening socket, inherited."""
    pulse: tuple[int, int] | None = None
    """Inherited file descriptor and slot of the page that the process' main loop beats into (see `server.pulse`)."""


class DrainMessage(msgspec.Struct, tag="drain"):
    """Finish what is in flight within `timeout_s`, abort the rest, exit 0."""

    timeout_s: float


class PeerDiedMessage(msgspec.Struct, tag="peer_died"):
    """The engine or worker is dead: fail what is in flight, answer 503, exit non-zero."""

    reason: str


ControlMessage = ConfigMessage | DrainMessage | PeerDiedMessage


class Child:
    """A process' link to its supervisor."""

    def __init__(self, process: str, status_fd: int, control_fd: int) -> None:
        self.process = process
        self.timeline = Timeline(process)
        self._status_fd = status_fd
        self._control = os.fdopen(control_fd, "rb")
        self._encoder = msgspec.json.Encoder()
        self._lock = threading.Lock()
        self._sent_spans = 0
        first = self._control.readline()
        if not first:
            os._exit(1)
        message = msgspec.json.decode(first, type=ControlMessage)
        if not isinstance(message, ConfigMessage):
            raise RuntimeError(f"first control message must be the configuration, got {type(message).__name__}")
        self.config = message.config
        self.listen_fd = message.listen_fd
        self._pulse = Pulse(*message.pulse) if message.pulse is not None else None

    def beat(self) -> None:
        """The main loop turns. Once begun, at least every second: a process that falls silent is killed."""
        if self._pulse is not None:
            self._pulse.beat()

    def send(self, message: StatusMessage) -> None:
        data = self._encoder.encode(message) + b"\n"
        with self._lock:
            view = memoryview(data)
            try:
                while view:
                    view = view[os.write(self._status_fd, view) :]
            except BrokenPipeError:
                os._exit(1)

    def flush_spans(self) -> None:
        """Send spans that were added to the timeline since the last call."""
        spans = self.timeline.spans
        while self._sent_spans < len(spans):
            self.send(SpanMessage(spans[self._sent_spans]))
            self._sent_spans += 1

    def progress(self, name: str, done: float, total: float, unit: str = "") -> None:
        self.send(ProgressMessage(name, done, total, unit))

    def ready(self, **info: str | int | float | bool | None) -> None:
        self.flush_spans()
        self.send(ReadyMessage(info))

    def watch_control(self, on_message: Callable[[DrainMessage | PeerDiedMessage], None]) -> None:
        """Read control messages in a daemon thread; exit the process at end of file."""

        def run() -> None:
            decoder: msgspec.json.Decoder[ControlMessage] = msgspec.json.Decoder(ControlMessage)
            for line in self._control:
                message = decoder.decode(line)
                if not isinstance(message, ConfigMessage):
                    on_message(message)
            os._exit(1)

        threading.Thread(target=run, name="control", daemon=True).start()


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends; exit if it has ended already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before the line above took effect
        os._exit(1)


def run_child(process: str, main: Callable[[Child], int]) -> None:
    """Entry point of a child: parse the pipe numbers, run `main`, report failure on the status pipe, exit."""
    entered_ns = time.monotonic_ns()
    parser = argparse.ArgumentParser(prog=f"server.{process}")
    parser.add_argument("--status-fd", type=int, required=True)
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--supervisor-pid", type=int, required=True)
    parser.add_argument("--index", type=int, default=0)
    arguments = parser.parse_args()
    die_with_parent(arguments.supervisor_pid)
    # The terminal's Ctrl-C and a stray SIGTERM to the group are the supervisor's business: it drains us in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    name = process if process == "engine" else f"{process}-{arguments.index}"
    child = Child(name, arguments.status_fd, arguments.control_fd)
    configure_logging(name, child.config.api.log_level, child.config.api.log_format)
    child.timeline.add("spawn", process_start_ns(), entered_ns)
    try:
        code = main(child)
    except UserError as error:
        child.send(FailedMessage(str(error), user_error=True))
        code = error.exit_code
    except BaseException as error:  # the supervisor must hear of every way to die
        lacking = exhausted(error)
        if lacking is None:
            traceback.print_exc()
        child.send(FailedMessage(str(lacking or f"{type(error).__name__}: {error}"), user_error=lacking is not None))
        code = 1 if lacking is None else lacking.exit_code
    sys.stderr.flush()
    # Threads and CUDA teardown can hang an ordinary exit; everything that must be flushed has been.
    os._exit(code)
