"""Prometheus metrics, under vLLM's names with the prefix `benchctl:`.

The engine's counters arrive with every step and are kept as they are; latencies are counted into plain lists, a step
at a time. `prometheus_client` only sees them when somebody scrapes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from server.ipc.engine_to_api import EngineStats

# Bucket bounds as in vLLM's metrics, so that its dashboards fit; the finest ones are ours.
_TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
                 40.0, 80.0, 160.0, 640.0, 2560.0)  # fmt: skip
_ITL_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
                5.0, 7.5, 10.0, 20.0, 40.0, 80.0)  # fmt: skip
_REQUEST_BUCKETS = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
                    120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)  # fmt: skip
_TOKEN_BUCKETS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))


class Histogram:
    """Counts of observations per bucket, without locks: only the event loop's thread touches it."""

    __slots__ = ("_bounds", "_counts", "_sum", "help", "name")

    def __init__(self, name: str, help: str, bounds: tuple[float, ...]) -> None:
        self.name = name
        self.help = help
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Count `value`, `count` times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def state(self) -> tuple[list[int], float]:
        """Counts per bucket and the sum of what was observed."""
        return self._counts, self._sum

    def add(self, counts: list[int], total: float) -> None:
        """Add the state of another histogram of this kind."""
        self._counts = [ours + theirs for ours, theirs in zip(self._counts, counts, strict=True)]
        self._sum += total

    def family(self, model_name: str) -> Metric:
        family = HistogramMetricFamily(self.name, self.help, labels=["model_name"])
        buckets: list[tuple[str, float]] = []
        total = 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, total))
        family.add_metric([model_name], buckets, self._sum)
        return family


class _Snapshot(msgspec.Struct, array_like=True):
    prompt_tokens: int
    generation_tokens: int
    rejected: int
    detokenize_seconds: float
    finished: dict[str, int]
    histograms: list[tuple[list[int], float]]


class Metrics(Collector):
    """Everything that `/metrics` shows."""

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name
        self.stats = EngineStats()
        """The newest the engine sent."""
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.finished: dict[str, int] = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        self.rejected = 0
        self.detokenize_seconds = 0.0
        self.ttft = Histogram("benchctl:time_to_first_token_seconds", "Arrival to first token.", _TTFT_BUCKETS)
        self.inter_token = Histogram(
            "benchctl:inter_token_latency_seconds", "Gap between successive token outputs.", _ITL_BUCKETS
        )
        self.e2e = Histogram("benchctl:e2e_request_latency_seconds", "Arrival to last token.", _REQUEST_BUCKETS)
        self.queue = Histogram("benchctl:request_queue_time_seconds", "Wait in the engine's queue.", _REQUEST_BUCKETS)
        self.prefill = Histogram(
            "benchctl:request_prefill_time_seconds", "First schedule to first token.", _REQUEST_BUCKETS
        )
        self.decode = Histogram("benchctl:request_decode_time_seconds", "First to last token.", _REQUEST_BUCKETS)
        self.request_prompt_tokens = Histogram(
            "benchctl:request_prompt_tokens", "Prompt tokens of a request.", _TOKEN_BUCKETS
        )
        self.request_generation_tokens = Histogram(
            "benchctl:request_generation_tokens", "Generated tokens of a request.", _TOKEN_BUCKETS
        )
        self.iteration_tokens = Histogram(
            "benchctl:iteration_tokens_total", "Generated tokens of an engine step.", _TOKEN_BUCKETS
        )
        self._histograms = (
            self.ttft,
            self.inter_token,
            self.e2e,
            self.queue,
            self.prefill,
            self.decode,
            self.request_prompt_tokens,
            self.request_generation_tokens,
            self.iteration_tokens,
        )

    def exposition(self, others: Iterable[bytes] = ()) -> tuple[bytes, str]:
        """Body and content type of `/metrics`: this process' figures and those in the snapshots of `others`."""
        total = Metrics(self.model_name)
        total.stats = self.stats
        for snapshot in (self.snapshot(), *others):
            total._add(snapshot)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(total)
        return generate_latest(registry), CONTENT_TYPE_LATEST

    def snapshot(self) -> bytes:
        """What this process has counted itself; the engine's figures come to every process."""
        return msgspec.msgpack.encode(
            _Snapshot(
                self.prompt_tokens,
                self.generation_tokens,
                self.rejected,
                self.detokenize_seconds,
                self.finished,
                [histogram.state() for histogram in self._histograms],
            )
        )

    def _add(self, data: bytes) -> None:
        snapshot = msgspec.msgpack.decode(data, type=_Snapshot)
        self.prompt_tokens += snapshot.prompt_tokens
        self.generation_tokens += snapshot.generation_tokens
        self.rejected += snapshot.rejected
        self.detokenize_seconds += snapshot.detokenize_seconds
        for reason, count in snapshot.finished.items():
            self.finished[reason] += count
        for histogram, (counts, total) in zip(self._histograms, snapshot.histograms, strict=True):
            histogram.add(counts, total)

    def collect(self) -> Iterator[Metric]:
        yield from self._gauges()
        yield from self._counters()
        for histogram in self._histograms:
            yield histogram.family(self.model_name)

    def _gauges(self) -> Iterator[Metric]:
        stats = self.stats
        for name, help, value in (
            ("num_requests_running", "Requests in the running batch.", stats.num_running),
            ("num_requests_waiting", "Requests waiting in the engine's queue.", stats.num_waiting),
            ("kv_cache_usage_perc", "Share of KV-cache blocks in use, 1 is all.", stats.kv_cache_usage),
        ):
            family = GaugeMetricFamily(f"benchctl:{name}", help, labels=["model_name"])
            family.add_metric([self.model_name], value)
            yield family

    def _counters(self) -> Iterator[Metric]:
        stats = self.stats
        plain: Iterable[tuple[str, str, float]] = (
            ("prompt_tokens", "Prompt tokens of requests that produced output.", self.prompt_tokens),
            ("generation_tokens", "Generated tokens.", self.generation_tokens),
            ("num_preemptions", "Preemptions by the scheduler.", stats.num_preemptions),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prefix_cache_queries),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.prefix_cache_hits),
            ("num_steps", "Engine steps.", stats.num_steps),
            ("num_compilations", "Graph compilations since readiness.", stats.num_compilations),
            ("num_jit_events", "Kernel compilations since readiness.", stats.num_jit_events),
            ("requests_rejected", "Requests answered 429 because the queue was full.", self.rejected),
        )
        for name, help, value in plain:
            family = CounterMetricFamily(f"benchctl:{name}", help, labels=["model_name"])
            family.add_metric([self.model_name], value)
            yield family
        success = CounterMetricFamily(
            "benchctl:request_success", "Finished requests.", labels=["model_name", "finished_reason"]
        )
        for reason, value in self.finished.items():
            success.add_metric([self.model_name, reason], value)
        yield success
        phases = CounterMetricFamily(
            "benchctl:step_seconds", "Seconds the engine spent per phase of its steps.", labels=["model_name", "phase"]
        )
        for phase, seconds in (*stats.step_seconds.items(), ("detokenize", self.detokenize_seconds)):
            phases.add_metric([self.model_name, phase], seconds)
        yield phases
