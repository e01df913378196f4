"""A worker in a process of its own, talking to its parent over a pipe."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import multiprocessing
import os
import resource
import signal
import traceback
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

import msgspec
import uvloop

from benchctl.loadgen.assign import Share
from benchctl.loadgen.options import LoadOptions
from benchctl.loadgen.recorder import Report
from benchctl.loadgen.records import RecordFile
from benchctl.loadgen.worker import LoadWorker


class Ready(msgspec.Struct):
    """The worker has loaded everything and waits for its start."""


class Start(msgspec.Struct):
    start_ns: int


class Cancel(msgspec.Struct):
    pass


class Finished(msgspec.Struct):
    """The worker's last message."""

    aborted: str | None
    error_details: dict[str, str]
    write_error: tuple[int, str] | None
    """errno and text of what stopped the writing of records."""


class Crashed(msgspec.Struct):
    """A defect; the traceback."""

    text: str


def start_worker(share: Share, options: LoadOptions, records: Path) -> tuple[multiprocessing.process.BaseProcess, Pipe]:
    """Start the process. It ends by itself when this side of the pipe is closed, by a crash too."""
    context = multiprocessing.get_context("spawn")  # threads of the parent make a fork unsafe
    ours, theirs = context.Pipe()
    process = context.Process(target=_main, args=(theirs, records, options), name=f"load-{share.worker}", daemon=True)
    process.start()
    theirs.close()
    with contextlib.suppress(BrokenPipeError):  # it died while starting; the parent sees that by itself
        ours.send(share)  # not an argument of the process: this way it may be large while the others start
    return process, ours


def _main(pipe: Pipe, records: Path, options: LoadOptions) -> None:
    # Ctrl-C reaches the whole foreground group; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _raise_file_limit()
    try:
        share = pipe.recv()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            finished = runner.run(_serve(share, options, records, pipe))
        pipe.send(finished)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(1)  # the parent is gone
    except Exception:
        with contextlib.suppress(OSError):
            pipe.send(Crashed(traceback.format_exc()))
        raise SystemExit(1) from None


async def _serve(share: Share, options: LoadOptions, path: Path, pipe: Pipe) -> Finished:
    records = RecordFile(path)
    loop = asyncio.get_running_loop()
    started: asyncio.Future[int] = loop.create_future()
    orphaned = False

    def on_report(report: Report) -> None:
        nonlocal orphaned
        try:
            pipe.send(report)
        except OSError:
            orphaned = True
        if orphaned or records.error is not None:
            loop.call_soon(worker.cancel)

    def on_message() -> None:
        nonlocal orphaned
        try:
            message = pipe.recv()
        except (EOFError, OSError):
            orphaned = True
            message = Cancel()
        if isinstance(message, Start):
            started.set_result(message.start_ns)
            return
        if not started.done():
            started.cancel()
        loop.remove_reader(pipe.fileno())
        worker.cancel()

    worker = LoadWorker(share, options, records, on_report)
    loop.add_reader(pipe.fileno(), on_message)
    gc.collect()
    gc.freeze()  # the share stays for good: collections need not look at it
    gc.set_threshold(50_000, 20, 100)
    pipe.send(Ready())
    try:
        with contextlib.suppress(asyncio.CancelledError):
            await worker.run(await started)
    finally:
        loop.remove_reader(pipe.fileno())
        records.close()
    if orphaned:
        raise EOFError
    failed = records.error
    return Finished(
        aborted=worker.aborted,
        error_details=worker.error_details,
        write_error=None if failed is None else (failed.errno or 0, failed.strerror or str(failed)),
    )


def _raise_file_limit() -> None:
    """A connection is a file: take all that the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
