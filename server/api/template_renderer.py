"""The API process' side of the processes that render chat templates (see `server.api.template_process`)."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys

import msgspec

from server.api.errors import overloaded
from server.api.template_messages import (
    LENGTH_BYTES,
    MAX_ANSWER_BYTES,
    MEMORY_LIMIT_MIB,
    Answer,
    Done,
    OutOfMemory,
    Refused,
    RenderRequest,
    TemplateFault,
    TemplateSource,
    frame,
)

_log = logging.getLogger(__name__)
TIME_LIMIT_S = 5.0
_MOST_PROCESSES = 2
"""The second one is for while the first is busy: rendering takes a tenth of a millisecond, but may take the limit."""
_START_LIMIT_S = 60.0
"""For importing Jinja from a slow disk, on a machine that is busy with a model; none of it is the template's doing."""
_DECODER: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


class _Process:
    """One process, for one request at a time. Raises OSError when there is none to be had."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._writer: asyncio.StreamWriter | None = None
        try:
            # In the loop's thread, which lives as long as we do: with the thread that started it the child is killed.
            self._popen = subprocess.Popen(
                [sys.executable, "-P", "-m", "server.api.template_process", str(os.getpid())],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
            )
        except OSError:
            self._socket.close()
            raise
        finally:
            theirs.close()

    async def prepare(self, source: TemplateSource, time_limit_s: float) -> None:
        """Have the template compiled. Raises TemplateFault or OSError, after which the process is of no use."""
        self._reader, self._writer = await asyncio.open_unix_connection(sock=self._socket)
        try:
            await self._receive(_START_LIMIT_S)
        except TemplateFault as fault:
            raise ChildProcessError("it ends before it has begun, or does not begin") from fault
        answer = await self.ask(msgspec.json.encode(source), time_limit_s)
        if isinstance(answer, Refused):
            raise TemplateFault(answer.fault)

    async def ask(self, payload: bytes, time_limit_s: float) -> Done | Refused:
        """Raises TemplateFault when there is no answer, after which the process is of no use."""
        assert self._writer is not None
        # Not waited for until it is sent: what is not read is in our memory anyway.
        self._writer.write(frame(payload))
        answer = await self._receive(time_limit_s)
        if isinstance(answer, OutOfMemory):
            raise TemplateFault(f"needs more than {MEMORY_LIMIT_MIB} MiB of memory")
        return answer

    async def _receive(self, time_limit_s: float) -> Answer:
        try:
            async with asyncio.timeout(time_limit_s):
                length = int.from_bytes(await self._reader.readexactly(LENGTH_BYTES), "little")
                if length <= MAX_ANSWER_BYTES:
                    return _DECODER.decode(await self._reader.readexactly(length))
        except TimeoutError:
            raise TemplateFault(f"took longer than {time_limit_s:g} s") from None
        except (asyncio.IncompleteReadError, ConnectionError, msgspec.DecodeError, UnicodeDecodeError):
            pass
        raise TemplateFault("ended the process that it ran in")

    @property
    def has_ended(self) -> bool:
        return self._reader.at_eof()

    def kill(self) -> None:
        """Does not wait for the end: that takes a moment where there is a gigabyte to give back."""
        self._popen.kill()

    def close(self) -> None:
        if self._writer is None:
            self._socket.close()
        else:
            self._writer.transport.abort()

    def reap(self) -> None:
        self._popen.wait()


class TemplateRenderer:
    """One template and the processes that render it. Used in the event loop only."""

    def __init__(self, source: TemplateSource, time_limit_s: float = TIME_LIMIT_S) -> None:
        self._source = source
        self._time_limit_s = time_limit_s
        self._processes: set[_Process] = set()
        # The last one used is the next one used: the second process sleeps until there is need for it.
        self._idle: asyncio.LifoQueue[_Process] = asyncio.LifoQueue()
        self._preparing: set[asyncio.Task[None]] = set()
        self._reaping: set[asyncio.Future[None]] = set()
        self._closing = False

    async def start(self) -> None:
        """Start the first process. Raises TemplateFault for a template that cannot be compiled, OSError."""
        await self._prepare(self._spawn())

    async def render(self, request: RenderRequest) -> str:
        """The text. Raises TemplateFault; ApiError 429 when others keep all processes busy for long."""
        try:
            payload = msgspec.json.encode(request)
        except RecursionError:
            raise TemplateFault("cannot be given values so deeply nested") from None
        process = await self._take()
        try:
            answer = await process.ask(payload, self._time_limit_s)
        except BaseException:  # of a request that is cancelled, too: its answer would be taken for the next one's
            self._drop(process)
            self._grow()
            raise
        self._idle.put_nowait(process)
        if isinstance(answer, Refused):
            raise TemplateFault(answer.fault)
        return answer.text

    async def close(self) -> None:
        """Kill the processes, and wait for their end."""
        self._closing = True
        for process in self._processes:
            process.kill()
        await asyncio.gather(*self._preparing)
        for process in list(self._processes):
            self._drop(process)
        await asyncio.gather(*self._reaping)

    async def _take(self) -> _Process:
        while not self._idle.empty():
            process = self._idle.get_nowait()
            if not process.has_ended:  # killed by somebody else, such as a kernel without memory
                return process
            self._drop(process)
        self._grow()
        try:
            async with asyncio.timeout(self._time_limit_s):
                return await self._idle.get()
        except TimeoutError:
            raise overloaded() from None

    def _grow(self) -> None:
        """Start another process, if there may be one, for whoever waits for one that is idle."""
        if self._closing or len(self._processes) == _MOST_PROCESSES:
            return
        try:
            process = self._spawn()
        except OSError as error:
            _log.warning("no process for chat templates: %s", error)
        else:
            task = asyncio.create_task(self._prepare_logged(process))
            self._preparing.add(task)
            task.add_done_callback(self._preparing.discard)

    def _spawn(self) -> _Process:
        process = _Process()
        self._processes.add(process)
        return process

    async def _prepare(self, process: _Process) -> None:
        try:
            await process.prepare(self._source, self._time_limit_s)
        except BaseException:
            self._drop(process)
            raise
        self._idle.put_nowait(process)

    async def _prepare_logged(self, process: _Process) -> None:
        try:
            await self._prepare(process)
        except (TemplateFault, OSError) as error:
            if not self._closing:
                _log.warning("no process for chat templates: %s", error)

    def _drop(self, process: _Process) -> None:
        if process in self._processes:
            self._processes.remove(process)
            process.kill()
            process.close()
            reaping = asyncio.get_running_loop().run_in_executor(None, process.reap)
            self._reaping.add(reaping)
            reaping.add_done_callback(self._reaping.discard)
