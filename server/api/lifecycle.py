"""Life of the API process: from the configuration to the open port, and down again."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import resource
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn
import uvloop

from server.api.app import create_app
from server.api.chat_template import load_chat_template
from server.api.engine_client import EngineClient
from server.api.errors import aborted, engine_dead
from server.api.http_protocol import HttpProtocol
from server.api.log_limit import LogLimit
from server.api.metrics import Metrics
from server.api.sibling_metrics import SiblingMetrics
from server.api.state import ApiState
from server.api.tokenizer import load_tokenizer
from server.api.validation import Limits
from server.child import Child, DrainMessage, PeerDiedMessage
from server.models.registry import resolve_model

_log = logging.getLogger(__name__)
_BACKLOG = 4096
_KEEP_ALIVE_S = 75
_BEAT_INTERVAL_S = 1.0
# Time for error events to reach clients before a process that can serve no more exits.
_DEATH_GRACE_S = 0.5
# What an aborted stream gets to write its last event after the drain timeout.
_ABORT_GRACE_S = 1.0


class _Server(uvicorn.Server):
    """Signals are the supervisor's business (`server.child`)."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(child: Child, client_index: int) -> int:
    """Run the API process until it is told to stop; its exit code."""
    _raise_file_limit()
    logging.getLogger("uvicorn.error").addFilter(LogLimit())
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_Lifecycle(child, client_index).run())


def _raise_file_limit() -> None:
    """A connection is a file descriptor; take as many as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class _Lifecycle:
    def __init__(self, child: Child, client_index: int) -> None:
        self._child = child
        self._client_index = client_index
        self._stop: asyncio.Future[DrainMessage | PeerDiedMessage] | None = None

    async def run(self) -> int:
        child = self._child
        config = child.config
        loop = asyncio.get_running_loop()
        stop: asyncio.Future[DrainMessage | PeerDiedMessage] = loop.create_future()

        def on_control(message: DrainMessage | PeerDiedMessage) -> None:
            # Called in the control thread.
            loop.call_soon_threadsafe(lambda: None if stop.done() else stop.set_result(message))

        child.watch_control(on_control)
        with child.timeline.span("tokenizer"):
            resolved = resolve_model(config.model)
            template = load_chat_template(resolved.path, config.model.chat_template)
            compiled = asyncio.create_task(template.start())
            await asyncio.sleep(0)  # its process starts while we read the tokenizer
            tokenizer = load_tokenizer(resolved)
        child.flush_spans()
        # Modules and the tokenizer live as long as the process: do not trace them at every collection.
        gc.collect()
        gc.freeze()
        model_name = config.model.served_model_name or config.model.model
        metrics = Metrics(model_name)
        client = EngineClient(config, self._client_index, metrics)
        connect = asyncio.gather(client.connect(), compiled)
        # No span for this wait: what the engine and the worker do meanwhile is theirs to tell.
        await _first(connect, stop)
        if not connect.done():
            connect.cancel()
            return _exit_code(stop.result())
        ready, _ = connect.result()
        state = ApiState(
            config=config,
            model_name=model_name,
            tokenizer=tokenizer,
            chat_template=template,
            engine=ready,
            limits=Limits(ready.max_model_len, resolved.config.vocab_size, resolved.config.eos_token_ids),
            client=client,
            metrics=metrics,
            siblings=SiblingMetrics(metrics, config.runtime_dir, self._client_index, config.api.api_server_count or 1),
        )
        with child.timeline.span("port-open"):
            server, serving = await self._open(state)
        tasks = [
            asyncio.create_task(work)
            for work in (client.run(), state.streams.watch(), state.siblings.publish(), _beat(child))
        ]
        child.ready(
            max_model_len=ready.max_model_len,
            num_blocks=ready.num_blocks,
            block_size=ready.block_size,
            attention_backend=ready.attention_backend,
            device=ready.device,
            dtype=ready.dtype,
            mode=ready.mode,
            max_num_batched_tokens=ready.max_num_batched_tokens,
            model=model_name,
        )
        try:
            await _first(stop, serving, *tasks)
            if stop.done():
                message = stop.result()
            else:
                failed = next(task for task in (serving, *tasks) if task.done())
                message = PeerDiedMessage(f"the API process lost its engine or its server: {failed.exception()!r}")
            if isinstance(message, DrainMessage):
                await _drain(state, message.timeout_s)
            else:
                await _die(state, message.reason)
            server.should_exit = True
            server.force_exit = isinstance(message, PeerDiedMessage)
            await asyncio.wait({serving}, timeout=_ABORT_GRACE_S)
            return _exit_code(message)
        finally:
            for task in tasks:
                task.cancel()
            await template.close()

    async def _open(self, state: ApiState) -> tuple[uvicorn.Server, asyncio.Task[None]]:
        """Start listening on the inherited socket; returns when connections are accepted."""
        if self._child.listen_fd is None:
            raise RuntimeError("the API process needs an inherited socket")
        listener = socket.socket(fileno=self._child.listen_fd)
        config = uvicorn.Config(
            create_app(state),
            http=HttpProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
        )
        server = _Server(config)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            if serving.done():
                serving.result()
                raise RuntimeError("the HTTP server ended before it had begun")
            await asyncio.sleep(0.001)
        return server, serving


async def _beat(child: Child) -> None:
    """Tell the supervisor that the event loop turns, for ever."""
    while True:
        child.beat()
        await asyncio.sleep(_BEAT_INTERVAL_S)


async def _first(*futures: asyncio.Future[Any]) -> None:
    """Wait until one of them is done; the others go on."""
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


def _exit_code(message: DrainMessage | PeerDiedMessage) -> int:
    return 0 if isinstance(message, DrainMessage) else 1


async def _drain(state: ApiState, timeout_s: float) -> None:
    """Refuse new requests, finish those in flight, abort what is left after `timeout_s`."""
    state.phase = "draining"
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await state.client.drained()
    if state.client.num_in_flight:
        _log.warning("aborting %d requests that did not finish in time", state.client.num_in_flight)
        state.client.fail_all(aborted("the server is shutting down"))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ABORT_GRACE_S):
                await state.client.drained()
    # The last events may still be on their way to the clients.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_ABORT_GRACE_S):
            await state.streams.ended()


async def _die(state: ApiState, reason: str) -> None:
    """Answer 503, end what is in flight with an error."""
    state.phase = "dead"
    state.death = reason
    _log.error("the server is down: %s", reason)
    state.client.fail_all(engine_dead(reason))
    await asyncio.sleep(_DEATH_GRACE_S)
