"""`python -m server.api.template_process PARENT`: compiles one chat template and renders it for the API process.

Chat templates come with checkpoints and are code. What a single call into C takes, of time or of memory, nothing can
bound from inside the process that makes it. So templates live in processes of their own: the API process kills one
that takes too long, and the kernel refuses it memory beyond a limit.

Standard input is a socket to the API process (see `server.api.template_messages`). The process ends at the end of its
stream, and with its parent.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from typing import BinaryIO

import msgspec

from server.api.template_messages import (
    LENGTH_BYTES,
    MAX_ANSWER_BYTES,
    MEMORY_LIMIT_MIB,
    Done,
    OutOfMemory,
    Refused,
    RenderRequest,
    TemplateFault,
    TemplateSource,
    frame,
)
from server.api.template_sandbox import SandboxedTemplate
from server.child import die_with_parent

_MAX_FAULT_CHARACTERS = 1000
_OUT_OF_MEMORY = frame(msgspec.msgpack.encode(OutOfMemory()))


def _answer(work: Callable[[], str]) -> bytes:
    """The frame that tells how `work` went."""
    try:
        try:
            payload = msgspec.msgpack.encode(Done(work()))
            if len(payload) > MAX_ANSWER_BYTES:
                raise TemplateFault(f"made a prompt of more than {MAX_ANSWER_BYTES >> 20} MiB")
            return frame(payload)
        except TemplateFault as fault:
            message = str(fault)
        except UnicodeEncodeError:
            message = "made halves of surrogate pairs, which are no text"
        except RecursionError:
            message = "cannot be given values so deeply nested"
        message = message[:_MAX_FAULT_CHARACTERS].encode("utf-8", "backslashreplace").decode()
        return frame(msgspec.msgpack.encode(Refused(message)))
    except MemoryError:
        return _OUT_OF_MEMORY


def _limit_memory() -> None:
    with open("/proc/self/statm", "rb") as file:
        pages = int(file.read().split()[0])
    limit = pages * resource.getpagesize() + (MEMORY_LIMIT_MIB << 20)
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    # A template may crash the interpreter (C stack): nobody wants its gigabyte of memory on disk.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Should the machine run out of memory first, this process goes rather than the server.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "wb") as file:
        file.write(b"1000")


def _read(stream: BinaryIO) -> bytes:
    """The next frame's payload; exits at the end of the stream."""
    length = stream.read(LENGTH_BYTES)
    if len(length) < LENGTH_BYTES:
        sys.exit(0)
    return stream.read(int.from_bytes(length, "little"))


def main() -> None:
    # The terminal's Ctrl-C is the supervisor's business.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(int(sys.argv[1]))
    _limit_memory()
    connection = socket.socket(fileno=os.dup(0))
    stream = connection.makefile("rb")
    connection.sendall(frame(msgspec.msgpack.encode(Done())))
    wanted = msgspec.json.decode(_read(stream), type=TemplateSource)
    template: SandboxedTemplate | None = None

    def compile_template() -> str:
        nonlocal template
        template = SandboxedTemplate(wanted.source, wanted.special_tokens)
        return ""

    def render() -> str:
        assert template is not None
        request = decoder.decode(payload)
        return template.render(request.variables, request.final)

    decoder = msgspec.json.Decoder(RenderRequest)
    connection.sendall(_answer(compile_template))
    while True:
        payload = _read(stream)
        connection.sendall(_answer(render))


if __name__ == "__main__":
    main()
