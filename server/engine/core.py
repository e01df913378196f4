"""The engine core's loop: take in requests and results, keep the worker supplied with steps, hand out tokens."""

from __future__ import annotations

import gc
import logging
import time
from collections import defaultdict
from typing import Any

import msgspec
import zmq

from server.child import Child, DrainMessage, PeerDiedMessage
from server.engine.kv_cache_manager import KVCacheManager
from server.engine.pacing import Pacer
from server.engine.request import Request
from server.engine.scheduler import Scheduler
from server.ipc import api_to_engine, engine_to_api, engine_to_worker, worker_to_engine
from server.ipc.api_to_engine import AbortRequests, AddRequest, ApiReady, ToEngine
from server.ipc.engine_to_api import EngineReady, FromEngine, RequestOutput, StepOutputs
from server.ipc.engine_to_worker import ScheduleStep
from server.ipc.sockets import Receiver, Sender
from server.ipc.worker_to_engine import FromWorker, StepResult, WorkerReady
from server.profiling import SpanProfile
from server.timerfd import TimerFd

logger = logging.getLogger(__name__)

MIXED_PREFILL_FLOP = 33e12
"""Default of `--max-mixed-prefill-tokens` on CUDA, as work: 2 FLOP a parameter and token, about 45 ms of an H200, which
is 2048 tokens of the 8B shape. It runs those as efficiently as 8192 (42.5 and 172 ms of matrix products), so that a
shorter step costs those who wait next to nothing and spares those who generate three quarters of the pause. A small
model is through with a whole budget of 8192 sooner: with the Qwen3-0.6B shape 256 streams start in 71 ms, not 118."""
_LEAST_MIXED_PREFILL = 512
STEP_LIMIT_S = 300.0
"""vLLM's default for VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS."""
_LAUNCH_PHASES = ("prepare", "forward", "logits", "sample")
_STATS_NS = 100_000_000
# Longest turn of the loop: the supervisor takes one that does not turn for dead.
_TURN_MS = 1000


class EngineCore:
    """Sockets and state of the engine process. `start()` waits for the worker; `run()` never returns."""

    def __init__(self, child: Child) -> None:
        self.config = child.config
        self.child = child
        runtime_dir = self.config.runtime_dir
        self._context: zmq.Context[Any] = zmq.Context()
        self._from_api: Receiver[ToEngine] = api_to_engine.receiver(self._context, runtime_dir)
        self._from_worker: Receiver[FromWorker] = worker_to_engine.receiver(self._context, runtime_dir)
        self._to_worker: Sender[ScheduleStep] = engine_to_worker.sender(self._context, runtime_dir)
        self._to_api: dict[int, Sender[FromEngine]] = {}
        self._poller = zmq.Poller()
        self._poller.register(self._from_api.socket, zmq.POLLIN)
        self._poller.register(self._from_worker.socket, zmq.POLLIN)
        self._alarm = TimerFd()
        """Wakes the loop when a step is due that could be scheduled before."""
        self._poller.register(self._alarm, zmq.POLLIN)
        self._depth = 2 if self.config.scheduler.async_scheduling else 1
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._num_compilations = 0
        self._num_jit_events = 0
        self._profile = SpanProfile("engine", self.config.profile)
        self._silence_s = 0.0
        self._pacer = Pacer()
        self._schedule_ns = 0
        self._told_ns = 0
        """When every client last heard the statistics."""

    def start(self) -> None:
        """Wait until the worker can run steps. Requests that come meanwhile wait in the socket."""
        with self.child.timeline.span("wait-for-worker"):
            while not isinstance(ready := _receive(self._from_worker), WorkerReady):
                logger.error("expected the worker's readiness, got %s", type(ready).__name__)
        options = self.config.scheduler
        kv = KVCacheManager(ready.num_blocks, ready.block_size, self.config.cache.enable_prefix_caching)
        self.scheduler = Scheduler(
            kv,
            max_num_seqs=options.max_num_seqs,
            token_budget=ready.max_num_batched_tokens,
            max_model_len=ready.max_model_len,
            policy=options.policy,
            long_prefill_token_threshold=options.long_prefill_token_threshold,
            max_mixed_prefill_tokens=options.max_mixed_prefill_tokens or mixed_prefill_tokens(ready),
        )
        self._ready = EngineReady(
            max_model_len=ready.max_model_len,
            num_blocks=ready.num_blocks,
            block_size=ready.block_size,
            attention_backend=ready.attention_backend,
            device=ready.device,
            dtype=ready.dtype,
            mode=ready.mode,
            max_num_batched_tokens=ready.max_num_batched_tokens,
        )
        # Modules and the block pool live as long as the process: do not trace them at every collection.
        gc.collect()
        gc.freeze()
        self.child.ready(num_blocks=ready.num_blocks, block_size=ready.block_size)

    def run(self) -> None:
        """One turn per event: sleeps when there is nothing to do, the worker has its steps, or the next is not due."""
        while True:
            self.child.beat()
            before = time.perf_counter()
            events = dict(self._poller.poll(_TURN_MS))
            waited = time.perf_counter() - before
            self._seconds["wait"] += waited
            self._check_worker(waited, heard=self._from_worker.socket in events)
            if self._alarm.fileno() in events:
                self._alarm.clear()
            if self._from_api.socket in events:
                for message in _drain(self._from_api):
                    self._handle_request(message)
            if self._from_worker.socket in events:
                for result in _drain(self._from_worker):
                    self._handle_result(result)
            self._supply()

    def _check_worker(self, waited_s: float, *, heard: bool) -> None:
        """Raises RuntimeError when the worker owes a step for longer than any step can take.

        Turns are summed up, each for no more than it was meant to last, so that a suspended machine is not blamed.
        """
        if heard or not self.scheduler.num_in_flight:
            self._silence_s = 0.0
            return
        self._silence_s += min(waited_s, _TURN_MS / 1000)
        if self._silence_s > STEP_LIMIT_S:
            raise RuntimeError(f"the worker has not finished a step within {STEP_LIMIT_S:g} s")

    def _supply(self) -> None:
        """Schedule until the worker has as many steps as it may have, a second one only when it is due; a third where
        steps are short."""
        depth = self._depth + (self._depth > 1 and self._pacer.are_steps_short())
        while self.scheduler.num_in_flight < depth and self.scheduler.requests:
            before = time.monotonic_ns()
            if self.scheduler.num_in_flight:
                due_ns = self._pacer.due_ns(has_prompts=self.scheduler.has_prompts)
                if due_ns > before:
                    self._alarm.arm(due_ns)
                    return
            step = self.scheduler.schedule()
            scheduled = time.monotonic_ns()
            self._note("schedule", before, scheduled)
            if step is None:
                return
            self._to_worker.send(step)
            sent = time.monotonic_ns()
            self._note("send", scheduled, sent)
            self._schedule_ns = sent - before
            counts = step.scheduled.values()
            num_decodes = list(counts).count(1)
            self._pacer.scheduled(sent, sum(counts) - num_decodes, num_decodes)

    def _handle_request(self, message: ToEngine) -> None:
        if isinstance(message, AddRequest):
            refusal = self.scheduler.add(Request(message, time.monotonic_ns()))
            if refusal is not None:
                self._send_outputs({message.client_index: [refusal]})
        elif isinstance(message, AbortRequests):
            outputs: dict[int, list[RequestOutput]] = {}
            for request in self.scheduler.abort(message.request_ids):
                output = RequestOutput(request.request_id, [], finish_reason="abort")
                outputs.setdefault(request.client_index, []).append(output)
            self._send_outputs(outputs)
        elif isinstance(message, ApiReady):
            sender = engine_to_api.sender(self._context, self.config.runtime_dir, message.client_index)
            self._to_api[message.client_index] = sender
            sender.send(self._ready)

    def _handle_result(self, message: FromWorker) -> None:
        if isinstance(message, StepResult):
            self._num_compilations = message.num_compilations
            self._num_jit_events = message.num_jit_events
            for phase, seconds in message.step_seconds.items():
                self._seconds[phase] += seconds
            before = time.monotonic_ns()
            launch_s = sum(message.step_seconds.get(phase, 0.0) for phase in _LAUNCH_PHASES)
            self._pacer.finished(before, self._schedule_ns + int(launch_s * 1e9))
            outputs: dict[int, list[RequestOutput]] = {}
            for client_index, output in self.scheduler.update(message):
                outputs.setdefault(client_index, []).append(output)
            updated = time.monotonic_ns()
            self._note("update", before, updated)
            self._send_outputs(outputs)
            self._note("send", updated, time.monotonic_ns())
        else:
            logger.error("the worker said that it is ready twice")

    def _note(self, phase: str, start_ns: int, end_ns: int) -> None:
        self._seconds[phase] += (end_ns - start_ns) * 1e-9
        if self._profile.is_active:
            self._profile.add(phase, self.scheduler.num_steps, start_ns, end_ns)

    def _send_outputs(self, outputs: dict[int, list[RequestOutput]]) -> None:
        """One message for each client that waits for something. The others hear the statistics, so that any of them can
        answer /metrics, ten times a second and when the last request has ended: a step waits for every message."""
        now = time.monotonic_ns()
        everybody = now - self._told_ns >= _STATS_NS or not self.scheduler.requests
        if everybody:
            self._told_ns = now
        clients = self._to_api if everybody else outputs
        if not clients:
            return
        stats = self.scheduler.stats()
        stats.num_compilations = self._num_compilations
        stats.num_jit_events = self._num_jit_events
        stats.step_seconds = dict(self._seconds)
        for client_index in clients:
            self._send(client_index, StepOutputs(outputs.get(client_index, []), stats, now))

    def _send(self, client_index: int, message: FromEngine) -> None:
        sender = self._to_api.get(client_index)
        if sender is None:
            logger.error("no API process %d to send %s to", client_index, type(message).__name__)
            return
        sender.send(message)


def mixed_prefill_tokens(ready: WorkerReady) -> int | None:
    """Default of `--max-mixed-prefill-tokens`: None (the token budget) on a CPU, which nobody has measured for it."""
    if not ready.device.startswith("cuda"):
        return None
    tokens = int(MIXED_PREFILL_FLOP / (2 * ready.num_parameters))
    return max(_LEAST_MIXED_PREFILL, tokens // 256 * 256)


def on_control(message: DrainMessage | PeerDiedMessage) -> None:
    """The supervisor drains the API processes first: when the engine hears of it, nobody waits for it any more."""
    import os

    os._exit(0 if isinstance(message, DrainMessage) else 1)


def _receive(receiver: Receiver[Any]) -> Any:
    while True:
        try:
            return receiver.receive()
        except msgspec.DecodeError as error:
            logger.error("dropped a malformed message: %s", error)


def _drain(receiver: Receiver[Any]) -> list[Any]:
    """All messages that are here; one that does not decode is logged and dropped."""
    messages: list[Any] = []
    while True:
        try:
            message = receiver.receive(timeout_ms=0)
        except msgspec.DecodeError as error:
            logger.error("dropped a malformed message: %s", error)
            continue
        if message is None:
            return messages
        messages.append(message)
