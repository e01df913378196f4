"""The API process' side of the engine: sends requests and aborts, takes the tokens of every step to their sequence."""

from __future__ import annotations

import asyncio
import time
from typing import Any, cast

import zmq

from server.api.errors import ApiError, overloaded
from server.api.generation import Generation, Sequence
from server.api.in_flight import InFlight
from server.api.metrics import Metrics
from server.config import ServerConfig
from server.ipc import api_to_engine, engine_to_api
from server.ipc.api_to_engine import AbortRequests, AddRequest, ApiReady, ToEngine
from server.ipc.engine_to_api import EngineReady, RequestOutput, StepOutputs
from server.profiling import SpanProfile


class EngineClient:
    """Owns both sockets. Used in the event loop only."""

    def __init__(self, config: ServerConfig, client_index: int, metrics: Metrics) -> None:
        self.metrics = metrics
        self._client_index = client_index
        self._context: zmq.Context[Any] = zmq.Context()
        self._receiver = engine_to_api.receiver(self._context, config.runtime_dir, client_index)
        self._sender = api_to_engine.sender(self._context, config.runtime_dir)
        self._fd = cast(int, self._receiver.socket.getsockopt(zmq.FD))
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[EngineReady] = self._loop.create_future()
        self._broken: asyncio.Future[None] = self._loop.create_future()
        self._profile = SpanProfile(f"api-{client_index}", config.profile)
        self._outbox: list[ToEngine] = []
        self._in_flight: dict[str, Sequence] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._all_in_flight = InFlight(config.runtime_dir, client_index, config.api.api_server_count or 1)
        self._max_queue = config.scheduler.max_queue
        self._max_num_seqs = config.scheduler.max_num_seqs

    async def connect(self) -> EngineReady:
        """Tell the engine that we are here and wait until the model can answer. Its messages are taken from now on."""
        self._loop.add_reader(self._fd, self._on_readable)
        self._sender.send(ApiReady(self._client_index))
        self._on_readable()
        return await self._ready

    def fileno(self) -> int:
        """Readable when the engine has sent something."""
        return self._fd

    @property
    def capacity(self) -> int | None:
        """Most sequences that one request can ever have; None: unbounded."""
        return self._max_queue + self._max_num_seqs if self._max_queue else None

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def admit(self, num_sequences: int) -> None:
        """Raises ApiError 429 when `num_sequences` more do not fit the queue.

        At most `max_num_seqs` run, so what is in flight beyond that, of all API processes, waits: this bounds memory
        whatever the engine says. Its own count, a step old, is the better one when KV blocks bound what runs.
        """
        if not self._max_queue:
            return
        in_flight = self._all_in_flight.total()
        waiting = min(self.metrics.stats.num_waiting, in_flight)
        if in_flight + num_sequences > self._max_queue + self._max_num_seqs or waiting >= self._max_queue:
            self.metrics.rejected += 1
            raise overloaded()

    def submit(self, generation: Generation, priority: int) -> None:
        """Put every sequence into the engine. Pair with `release`."""
        self._idle.clear()
        for sequence in generation.sequences:
            self._in_flight[sequence.request_id] = sequence
            self._send(
                AddRequest(
                    sequence.request_id,
                    self._client_index,
                    sequence.prompt.token_ids,
                    sequence.params,
                    generation.arrival_ns,
                    priority,
                )
            )
        self._all_in_flight.set(len(self._in_flight))

    def release(self, generation: Generation) -> None:
        """The handler is done; abort what it did not wait for."""
        aborted = [s.request_id for s in generation.sequences if self._in_flight.pop(s.request_id, None) is not None]
        if aborted:
            self.metrics.finished["abort"] += len(aborted)
            self._send(AbortRequests(aborted))
            self._note_fewer()

    def _send(self, message: ToEngine) -> None:
        """Send it at the end of this turn of the event loop, together with what else comes up: ZMQ wakes its own thread
        for every message that comes alone, which costs more than all the rest of sending it."""
        if not self._outbox:
            self._loop.call_soon(self._flush)
        self._outbox.append(message)

    def _flush(self) -> None:
        outbox, self._outbox = self._outbox, []
        if not self._receiver.socket.closed:
            for message in outbox:
                self._sender.send(message)

    def _note_fewer(self) -> None:
        self._all_in_flight.set(len(self._in_flight))
        if not self._in_flight:
            self._idle.set()

    async def run(self) -> None:
        """Wait for ever. Raises msgspec.DecodeError when the engine sends what is not of the protocol."""
        await self._broken

    def _on_readable(self) -> None:
        """Take one message, if there is one.

        Called by the event loop as soon as its file descriptor is readable, with no task to be woken first, and again
        in the next turn of the loop while there is more: handlers that wait for a slow client write in between. The
        descriptor tells of changes only, so a turn that took a message must ask once more.
        """
        if self._receiver.socket.closed:
            return
        try:
            message = self._receiver.receive(timeout_ms=0)
            if message is None:
                return
            self._loop.call_soon(self._on_readable)
            if isinstance(message, StepOutputs):
                start_ns = time.monotonic_ns()
                self._on_step(message)
                self._note(message, start_ns, time.monotonic_ns())
            elif not self._ready.done():
                self._ready.set_result(message)
        except Exception as error:  # a process that loses tokens must not go on
            self._loop.remove_reader(self._fd)
            waiting = self._broken if self._ready.done() else self._ready
            if not waiting.done():
                waiting.set_exception(error)

    def _note(self, step: StepOutputs, start_ns: int, end_ns: int) -> None:
        """Account for the time that detokenizing and writing the tokens of a step has taken."""
        self.metrics.detokenize_seconds += (end_ns - start_ns) * 1e-9
        if self._profile.is_active and step.stats is not None:
            self._profile.add("detokenize", step.stats.num_steps, start_ns, end_ns)

    def _on_step(self, step: StepOutputs) -> None:
        metrics = self.metrics
        if step.stats is not None:
            metrics.stats = step.stats
        if not step.outputs:
            return
        time_ns = step.time_ns
        in_flight = self._in_flight
        # Most streams got their last token in the same step before: few distinct gaps, each observed once.
        gaps: dict[int, int] = {}
        stopped: list[str] = []
        tokens = 0
        for output in step.outputs:
            sequence = in_flight.get(output.request_id)
            if sequence is None:  # aborted here while the step ran there
                continue
            count = len(output.new_token_ids)
            if count:
                tokens += count
                last = sequence.last_token_ns
                if last:
                    gap = time_ns - last
                    gaps[gap] = gaps.get(gap, 0) + 1
                else:
                    self._on_first_token(sequence, output, time_ns)
                sequence.last_token_ns = time_ns
            sequence.push(output)
            if sequence.finish_reason is not None:
                del in_flight[output.request_id]
                self._on_finish(sequence)
                if output.finish_reason is None:
                    stopped.append(output.request_id)
        metrics.generation_tokens += tokens
        metrics.iteration_tokens.observe(tokens)
        for gap, count in gaps.items():
            metrics.inter_token.observe(gap * 1e-9, count)
        if stopped:
            self._send(AbortRequests(stopped))
        self._note_fewer()

    def _on_first_token(self, sequence: Sequence, output: RequestOutput, time_ns: int) -> None:
        metrics = self.metrics
        sequence.first_token_ns = time_ns
        sequence.scheduled_ns = output.scheduled_ns
        if sequence.prompt.num_cached_tokens is None:
            sequence.prompt.num_cached_tokens = output.num_cached_tokens
        metrics.prompt_tokens += len(sequence.prompt.token_ids)
        metrics.ttft.observe((time_ns - sequence.arrival_ns) * 1e-9)
        if output.scheduled_ns:
            metrics.queue.observe((output.scheduled_ns - output.queued_ns) * 1e-9)
            metrics.prefill.observe((time_ns - output.scheduled_ns) * 1e-9)

    def _on_finish(self, sequence: Sequence) -> None:
        metrics = self.metrics
        reason = sequence.finish_reason
        assert reason is not None
        metrics.finished[reason] += 1
        metrics.request_prompt_tokens.observe(len(sequence.prompt.token_ids))
        metrics.request_generation_tokens.observe(sequence.num_tokens)
        if sequence.first_token_ns:
            metrics.e2e.observe((sequence.last_token_ns - sequence.arrival_ns) * 1e-9)
            metrics.decode.observe((sequence.last_token_ns - sequence.first_token_ns) * 1e-9)

    def fail_all(self, error: ApiError) -> None:
        """Make every generation end with `error`."""
        for sequence in list(self._in_flight.values()):
            sequence.fail(error)

    async def drained(self) -> None:
        """Wait until nothing is in flight."""
        await self._idle.wait()

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        self._sender.close()
        self._receiver.close()
        self._context.destroy(linger=0)
