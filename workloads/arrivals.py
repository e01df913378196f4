"""Arrival processes: when each request is due, as a pure function of a specification and a seed.

An open-loop schedule fixes every time before the run starts, whatever the server does. A closed loop
(`concurrency`) has no times: a request is due when one before it ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from server.errors import UserError
from workloads.base import schedule_digest
from workloads.parameters import MAX_REQUESTS, convert, near_matches, parse_assignments, with_defaults
from workloads.rng import generator

Times = npt.NDArray[np.float64]

MAX_TIME_S = 1e9
"""Bound on an arrival time: 30 years, within what a digest in nanoseconds can hold."""

MIN_BURSTINESS = 0.001
"""Below it next to all gaps are exactly 0 in floating point, and a duration is never reached."""


class _Arrival(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag_field="name"):
    max_concurrency: int | None = None
    """Most requests in flight; one that waits for a free place keeps its scheduled time, so the wait is in TTFT."""


class Constant(_Arrival, tag="constant"):
    """Request i at i / `rate` seconds."""

    rate: float
    duration_s: float | None = None


class Poisson(_Arrival, tag="poisson"):
    """Independent exponential gaps of mean 1 / `rate`."""

    rate: float
    duration_s: float | None = None
    exact_rate: bool = False
    """Conditioned on its mean rate: a process with one arrival at 0 and the last when `rate` says, (n - 1) / `rate`,
    those between being independent and uniform. A short load then offers its nominal rate, and not what the draw of
    its gaps makes of it, which for 20 arrivals may be half as much again."""


class Gamma(_Arrival, tag="gamma"):
    """Gamma-distributed gaps of mean 1 / `rate`: shape `burstiness`, scale 1 / (rate x burstiness), as in vLLM.

    1 is Poisson, less is burstier, more is more even.
    """

    rate: float
    burstiness: float = 1.0
    duration_s: float | None = None


class Concurrency(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag_field="name", tag="concurrency"):
    """A closed loop of `concurrency` users: each sends its next request when the answer to the last has ended."""

    concurrency: int
    duration_s: float | None = None


class Ramp(_Arrival, tag="ramp"):
    """The rate goes from `start_rate` to `end_rate` over `duration_s`, where the schedule ends."""

    start_rate: float
    end_rate: float
    duration_s: float
    shape: Literal["linear", "exponential"] = "linear"
    spacing: Literal["poisson", "constant"] = "poisson"


class Step(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`rate` requests per second for `duration_s`."""

    rate: float
    duration_s: float


class Steps(_Arrival, tag="steps"):
    """One constant rate after another; the schedule ends with the last step."""

    steps: list[Step]
    spacing: Literal["poisson", "constant"] = "poisson"


class Burst(_Arrival, tag="burst"):
    """Everything is due at once, at 0."""


class TraceTimes(_Arrival, tag="trace"):
    """The workload's own timestamps, `speedup` times as fast."""

    speedup: float = 1.0
    duration_s: float | None = None


Arrival = Constant | Poisson | Gamma | Concurrency | Ramp | Steps | Burst | TraceTimes
ARRIVALS: dict[str, type[msgspec.Struct]] = {
    "constant": Constant,
    "poisson": Poisson,
    "gamma": Gamma,
    "concurrency": Concurrency,
    "ramp": Ramp,
    "steps": Steps,
    "burst": Burst,
    "trace": TraceTimes,
}


class Schedule(msgspec.Struct, kw_only=True):
    """When requests are due."""

    spec: dict[str, Any]
    """The specification, defaults filled in."""
    seed: int
    times_s: Times | None
    """Seconds from the start of the run, not falling, float64 of shape (n,); None: a closed loop."""
    concurrency: int | None = None
    """Closed loop: the number of users. Open loop: most requests in flight, None for no cap."""
    duration_s: float | None = None
    """No request starts at or after this time; None: bounded by the number of requests alone."""

    @property
    def offered_rate(self) -> float | None:
        """Requests per second: (n - 1) / (last time - first); None for a closed loop and when all is due at once."""
        if self.times_s is None or len(self.times_s) == 0:
            return None
        span = float(self.times_s[-1] - self.times_s[0])
        return (len(self.times_s) - 1) / span if span > 0 else None

    @property
    def digest(self) -> str | None:
        """`schedule_digest` of the times; None for a closed loop."""
        return None if self.times_s is None else schedule_digest(self.times_s.tolist())


def parse_arrival(text: str) -> dict[str, Any]:
    """A specification from `NAME`, `NAME:key=value,...` (as `poisson:rate=8,max_concurrency=64`) or a JSON object."""
    if text.lstrip().startswith("{"):
        try:
            spec: dict[str, Any] = msgspec.json.decode(text, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise UserError(f"arrival {text!r}: not a JSON object ({error})") from None
        return spec
    name, _, rest = text.partition(":")
    return {"name": name, **parse_assignments((part for part in rest.split(",") if part), "arrival")}


def build_schedule(
    spec: dict[str, Any], n_requests: int | None, seed: int, *, timestamps_s: Sequence[float | None] | None = None
) -> Schedule:
    """Times for at most `n_requests` requests (None: as many as the process's own duration holds).

    `timestamps_s`: the workload's, for `trace`. A schedule that ends by duration may hold fewer than `n_requests`.

    Raises:
        UserError: unknown process or key, a rate that is not a positive number, no bound, or no arrival at all.
    """
    arrival = _convert(spec)
    _check_positive(arrival)
    if n_requests is not None and n_requests < 1:
        raise UserError(f"arrival {spec['name']}: the number of requests must be at least 1, not {n_requests}")
    duration_s: float | None = getattr(arrival, "duration_s", None)
    if isinstance(arrival, Steps):
        duration_s = sum(step.duration_s for step in arrival.steps)
    if n_requests is None and duration_s is None and not isinstance(arrival, TraceTimes):
        raise UserError(f"arrival {spec['name']}: has no end; give a number of requests or a duration")
    if isinstance(arrival, Concurrency):
        return Schedule(
            spec=with_defaults(arrival),
            seed=seed,
            times_s=None,
            concurrency=arrival.concurrency,
            duration_s=duration_s,
        )
    times_s = _times(arrival, n_requests, duration_s, seed, timestamps_s)
    if len(times_s) == 0:
        raise UserError(f"arrival {spec['name']}: no request falls into {duration_s} s; raise the rate or the duration")
    if not np.all(times_s <= MAX_TIME_S):
        raise UserError(f"arrival {spec['name']}: requests would be due after {MAX_TIME_S:.0f} s; raise the rate")
    return Schedule(
        spec=with_defaults(arrival),
        seed=seed,
        times_s=times_s,
        concurrency=arrival.max_concurrency,
        duration_s=duration_s,
    )


def _convert(spec: dict[str, Any]) -> Arrival:
    name = spec.get("name")
    if not isinstance(name, str) or name not in ARRIVALS:
        raise UserError(f"arrival process {name!r} is unknown; {near_matches(str(name), ARRIVALS)}")
    arrival: Arrival = convert(ARRIVALS[name], spec, where=f"arrival {name}")
    return arrival


def _check_positive(arrival: Arrival) -> None:
    """Every number of a specification is a rate, a duration or a count: each must be finite and above 0."""
    name = arrival.__struct_config__.tag
    if isinstance(arrival, Gamma) and arrival.burstiness < MIN_BURSTINESS:
        raise UserError(f"arrival gamma: burstiness must be a number above 0, at least {MIN_BURSTINESS}")
    parts: list[tuple[str, msgspec.Struct]] = [("", arrival)]
    if isinstance(arrival, Steps):
        if not arrival.steps:
            raise UserError("arrival steps: `steps` is empty")
        parts += [(f"steps[{i}].", step) for i, step in enumerate(arrival.steps)]
    for prefix, part in parts:
        for field in part.__struct_fields__:
            value = getattr(part, field)
            if isinstance(value, bool):
                continue
            if isinstance(value, int | float) and not (math.isfinite(value) and value > 0):
                raise UserError(f"arrival {name}: {prefix}{field} must be a number above 0, not {value}")


def _times(
    arrival: Constant | Poisson | Gamma | Ramp | Steps | Burst | TraceTimes,
    n: int | None,
    duration_s: float | None,
    seed: int,
    timestamps_s: Sequence[float | None] | None,
) -> Times:
    rng = generator(seed, f"arrival.{arrival.__struct_config__.tag}")
    match arrival:
        case Burst():
            assert n is not None
            return np.zeros(n)
        case TraceTimes():
            return _trace_times(arrival, n, timestamps_s)
        case Constant():
            return _even(arrival.rate, n, duration_s)
        case Poisson(exact_rate=True):
            times = _even(arrival.rate, n, duration_s)
            times[1:-1] = times[-1] * np.sort(rng.random(max(0, len(times) - 2)))
            return times
        case Poisson():
            return _renewal(lambda size: rng.exponential(1 / arrival.rate, size), arrival.rate, n, duration_s)
        case Gamma():
            shape = arrival.burstiness
            return _renewal(
                lambda size: rng.gamma(shape, 1 / (arrival.rate * shape), size), arrival.rate, n, duration_s
            )
        case Ramp():
            return _time_rescaled(_ramp_total(arrival), arrival.spacing, n, rng, _ramp_inverse(arrival))
        case Steps():
            knots = np.cumsum([0.0] + [step.rate * step.duration_s for step in arrival.steps])
            ends = np.cumsum([0.0] + [step.duration_s for step in arrival.steps])
            return _time_rescaled(float(knots[-1]), arrival.spacing, n, rng, lambda work: np.interp(work, knots, ends))


def _bound(n: int | None, expected: float | None, name: str, *, margin: bool) -> int:
    """How many arrivals to draw at first."""
    count = math.inf if expected is None else expected + (6 * math.sqrt(expected) + 16 if margin else 1)
    count = count if n is None else min(count, n)
    if count > MAX_REQUESTS:
        raise UserError(f"arrival {name}: more than {MAX_REQUESTS} requests; lower the rate or the duration")
    return max(1, math.ceil(count))


def _cut(times: Times, n: int | None, duration_s: float | None) -> Times:
    if duration_s is not None:
        times = times[: int(np.searchsorted(times, duration_s, side="left"))]
    return times if n is None else times[:n]


def _even(rate: float, n: int | None, duration_s: float | None) -> Times:
    count = _bound(n, None if duration_s is None else duration_s * rate, "of this rate", margin=False)
    return _cut(np.arange(count) / rate, n, duration_s)


def _renewal(gaps: Callable[[int], Times], rate: float, n: int | None, duration_s: float | None) -> Times:
    """Cumulative sums of gaps, drawn in portions until `n` or `duration_s` is reached."""
    portion = _bound(n, None if duration_s is None else rate * duration_s, "of this rate", margin=True)
    drawn = gaps(portion)
    while (n is None or len(drawn) < n) and duration_s is not None and float(drawn.sum()) < duration_s:
        drawn = np.concatenate([drawn, gaps(max(16, len(drawn) // 2))])
        _bound(len(drawn), None, "of this rate", margin=False)
    return _cut(np.cumsum(drawn), n, duration_s)


def _time_rescaled(
    total: float, spacing: str, n: int | None, rng: np.random.Generator, inverse: Callable[[Times], Times]
) -> Times:
    """Arrivals of a changing rate: unit-rate arrivals mapped through the inverse of the cumulative rate.

    `total`: expected arrivals over the whole duration. (Time-rescaling theorem; exact for Poisson spacing.)
    """
    count = _bound(n, total, "of this rate", margin=True)
    if spacing == "constant":
        work = np.arange(min(count, math.ceil(total)), dtype=np.float64)
    else:
        work = _renewal(lambda size: rng.exponential(1.0, size), 1.0, n, total)
    return inverse(work[work < total])[:n]


def _ramp_total(ramp: Ramp) -> float:
    r0, r1, length = ramp.start_rate, ramp.end_rate, ramp.duration_s
    if ramp.shape == "linear" or r0 == r1:
        return (r0 + r1) / 2 * length
    return length * (r1 - r0) / math.log(r1 / r0)


def _ramp_inverse(ramp: Ramp) -> Callable[[Times], Times]:
    r0, r1, length = ramp.start_rate, ramp.end_rate, ramp.duration_s
    if r0 == r1:
        return lambda work: work / r0
    if ramp.shape == "linear":
        # work = r0 t + slope t^2 / 2, solved for t in the form that does not cancel for small slopes.
        slope = (r1 - r0) / length
        return lambda work: 2 * work / (r0 + np.sqrt(np.maximum(r0 * r0 + 2 * slope * work, 0.0)))
    growth = math.log(r1 / r0) / length
    return lambda work: np.log1p(work * growth / r0) / growth


def _trace_times(arrival: TraceTimes, n: int | None, timestamps_s: Sequence[float | None] | None) -> Times:
    if timestamps_s is None or len(timestamps_s) == 0 or any(time is None for time in timestamps_s):
        raise UserError("arrival trace: the workload has no timestamps; use a trace workload or another process")
    times = np.asarray(timestamps_s, dtype=np.float64) / arrival.speedup
    if not np.all(np.isfinite(times)) or np.any(np.diff(times) < 0) or times[0] < 0:
        raise UserError("arrival trace: the workload's timestamps must be numbers from 0 on that never fall")
    return _cut(times, n, arrival.duration_s)
