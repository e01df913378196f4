"""Metrics as pure functions of raw records; every definition is in docs/load-generator.md."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from benchctl.loadgen.histogram import GapHistogram
from benchctl.loadgen.records import CAUSE_LABELS, Cause, Events, Records, Rows, TokenSource
from benchctl.loadgen.steady_state import in_flight, steady_window
from reports.schema import PERCENTILES, Distribution, Goodput, LoadMetrics, Throughput
from server.errors import UserError

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Lengths = npt.NDArray[np.int32]

_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0}
_NUMBER = r"(\d+(?:\.\d*)?|\.\d+)"
_SLO = re.compile(rf"(ttft|tpot|e2el)[:=]{_NUMBER}(us|ms|s|m)")
_EXCLUSION = re.compile(rf"{_NUMBER}(us|ms|s|m|%)?")
LAG_SHARE_OF_TTFT = 0.1
_COUNT_SLACK = 0.1
"""Of a forced length, by how much an answer may be off when the server did not count its tokens itself: events may wait
for the rest of a character, and text may be cut into other tokens than it was made of."""


class Slo(msgspec.Struct, frozen=True):
    """An objective: every limit (seconds) must be met."""

    text: str
    limits: dict[str, float]


class Exclusion(msgspec.Struct, frozen=True):
    """How much of a run's beginning or end is left out."""

    amount: float
    unit: Literal["s", "requests", "share"]


def parse_slo(text: str) -> Slo:
    """`ttft:200ms tpot:20ms e2el:5s`: metric, colon, time with unit (us, ms, s, m); blanks or commas between.

    Raises UserError for anything else.
    """
    limits: dict[str, float] = {}
    for term in text.replace(",", " ").split():
        match = _SLO.fullmatch(term)
        if match is None:
            raise UserError(f"SLO {text!r}: {term!r} is not METRIC:TIME, as in ttft:200ms tpot:20ms e2el:5s")
        if match[1] in limits:
            raise UserError(f"SLO {text!r}: {match[1]} is there twice")
        limits[match[1]] = float(match[2]) * _UNITS[match[3]]
    if not limits:
        raise UserError("an SLO is empty; give one as ttft:200ms tpot:20ms e2el:5s")
    return Slo(" ".join(text.replace(",", " ").split()), limits)


def parse_exclusion(text: str, option: str) -> Exclusion:
    """`5s` (time), `20` (requests) or `10%` (of the requests). Raises UserError naming `option`."""
    match = _EXCLUSION.fullmatch(text.strip())
    if match is None:
        raise UserError(f"{option} {text!r}: expected a time (5s), a number of requests (20) or a share (10%)")
    amount, unit = float(match[1]), match[2]
    if unit == "%":
        if amount >= 100:
            raise UserError(f"{option} {text}: would leave nothing; must be below 100%")
        return Exclusion(amount / 100, "share")
    if unit is None:
        if not amount.is_integer():
            raise UserError(f"{option} {text}: a number of requests is whole; for a time add a unit, as in {text}s")
        return Exclusion(amount, "requests")
    return Exclusion(amount * _UNITS[unit], "s")


NO_EXCLUSION = Exclusion(0.0, "s")


def compute_metrics(
    records: Records,
    *,
    start_ns: int,
    slos: Sequence[Slo] = (),
    warmup: Exclusion = NO_EXCLUSION,
    cooldown: Exclusion = NO_EXCLUSION,
    lag_bound_s: float = 0.005,
    offered_rate: float | None = None,
    workers: int = 1,
    forced_lengths: Lengths | None = None,
) -> LoadMetrics:
    """Everything that the records say. Requests that an interrupt ended are counted apart from completed and failed.

    `forced_lengths`: by position in the workload, the output tokens that the request was forced to (0: none).
    """
    sent_ns = records.rows["sent_ns"]
    cut_off = records.rows["cause"] == Cause.INTERRUPTED
    rows = records.rows[~cut_off]
    begin_ns = int(rows["scheduled_ns"].min()) if len(rows) else start_ns
    table = _Requests(rows, records, begin_ns)
    early, late = _excluded(table.scheduled, warmup, cooldown)
    kept = ~(early | late)
    table.measure_gaps(kept)
    ok = table.ok & kept
    failed = rows[~table.ok & kept]
    nothing = "no request was completed" if not ok.any() else "no completed request has one"
    lag = (rows["sent_ns"] - rows["ready_ns"])[(rows["sent_ns"] > 0) & kept] / 1e9
    client_lag = distribution(lag, "no request ended" if (sent_ns > 0).any() else "no request was sent")
    ttft = distribution(table.ttft[ok], nothing)
    bound = max(lag_bound_s, LAG_SHARE_OF_TTFT * (ttft.percentiles.get("p50") or 0.0))
    lag_p99 = client_lag.percentiles.get("p99")
    window = steady_window(table.scheduled, table.end)
    steady = np.zeros(len(rows), bool) if window is None else (table.scheduled >= window[0]) & table.ok
    throughput = _throughput(table, ok, kept)
    forced, shorter, longer = _against_forced(rows[ok], forced_lengths)
    return LoadMetrics(
        ttft_s=ttft,
        ttft_from_sent_s=distribution(table.ttft_from_sent[ok], nothing),
        itl_s=table.gaps.distribution("no answer has two token events"),
        itl_per_token_s=table.token_gaps.distribution("no answer has two token events"),
        tpot_s=distribution(table.tpot[ok], "no answer has tokens after its first event"),
        e2el_s=distribution(table.e2el[ok], nothing),
        client_lag_s=client_lag,
        prompt_tokens=distribution(
            _known(rows["prompt_tokens"][ok]), "the server gives no usage" if ok.any() else nothing
        ),
        output_tokens=distribution(_known(rows["output_tokens"][ok]), nothing),
        throughput=throughput,
        steady_state=None if window is None else _steady_throughput(table, window),
        steady_ttft_s=None if window is None else distribution(table.ttft[steady], nothing),
        steady_tpot_s=None if window is None else distribution(table.tpot[steady], nothing),
        goodput=[_goodput(table, slo, ok, int(kept.sum()), throughput.window_s) for slo in slos],
        completed=int(ok.sum()),
        failed=len(failed),
        interrupted=int((cut_off & (sent_ns > 0)).sum()),
        unsent=int((cut_off & (sent_ns == 0)).sum()),
        errors=_errors(failed),
        retries=int(rows["retries"].sum()),
        excluded_warmup=int(early.sum()),
        excluded_cooldown=int((late & ~early).sum()),
        output_token_source=_token_source(rows[ok]),
        forced_output_tokens=forced,
        shorter_answers=shorter,
        longer_answers=longer,
        achieved_rate=_rate(sent_ns),
        offered_rate=offered_rate,
        client_saturated=lag_p99 is not None and lag_p99 > bound,
        client_lag_bound_s=bound,
        timeseries=_timeseries(table),
        workers=workers,
    )


def distribution(values: npt.ArrayLike, reason: str) -> Distribution:
    """Statistics of the values that are not NaN; null with `reason` when there is none."""
    known = np.asarray(values, np.float64)
    known = known[~np.isnan(known)]
    if len(known) == 0:
        return Distribution(n=0, reason=reason)
    points = np.percentile(known, PERCENTILES)
    return Distribution(
        n=len(known),
        mean=float(known.mean()),
        std=float(known.std()),
        min=float(known.min()),
        max=float(known.max()),
        percentiles={f"p{p:g}": float(point) for p, point in zip(PERCENTILES, points, strict=True)},
    )


class _Requests:
    """Columns over the requests, times in seconds after `begin_ns`, NaN for what is not known."""

    def __init__(self, rows: Rows, records: Records, begin_ns: int) -> None:
        self.rows = rows
        self.begin_ns = begin_ns
        self._records = records
        self.ok: Mask = rows["cause"] == Cause.OK
        self.scheduled = (rows["scheduled_ns"] - begin_ns) / 1e9
        self.end = (rows["end_ns"] - begin_ns) / 1e9
        answered = rows["n_events"] > 0
        first = np.where(answered, rows["first_ns"], 0)
        self.first: Floats = np.where(answered, (first - begin_ns) / 1e9, np.nan)
        self.last: Floats = np.where(answered, (rows["last_ns"] - begin_ns) / 1e9, np.nan)
        self.ttft: Floats = np.where(answered, (first - rows["scheduled_ns"]) / 1e9, np.nan)
        self.ttft_from_sent: Floats = np.where(answered, (first - rows["sent_ns"]) / 1e9, np.nan)
        self.e2el: Floats = np.where(answered, (rows["last_ns"] - rows["scheduled_ns"]) / 1e9, np.nan)
        self.tpot: Floats = np.full(len(rows), np.nan)
        self.gaps = GapHistogram()
        self.token_gaps = GapHistogram()
        n_seconds = math.ceil(float(np.nanmax(self.end))) if len(rows) else 0
        self.tokens_per_second = np.zeros(n_seconds + 1)

    @property
    def completion(self) -> Floats:
        """Last token event, or the end of an answer without one."""
        return np.where(np.isnan(self.last), self.end, self.last)

    def blocks(self) -> Iterator[_Block]:
        """The completed requests that have token events, block by block."""
        position = 0
        for rows, events in self._records.blocks():
            counts = rows["n_events"].astype(np.int64)
            counted = rows["cause"] != Cause.INTERRUPTED
            positions = np.where(counted, position + np.cumsum(counted) - 1, -1)
            position += int(counted.sum())
            wanted = (rows["cause"] == Cause.OK) & (counts > 0)
            if not wanted.any():
                continue
            chosen = np.repeat(wanted, counts)
            yield _Block(positions[wanted], rows[wanted], events[chosen], counts[wanted])

    def measure_gaps(self, kept: Mask) -> None:
        """ITL, TPOT and tokens over time, in one pass over the events."""
        for block in self.blocks():
            tokens = block.tokens
            seconds = (block.times_ns - self.begin_ns) // 1_000_000_000
            self.tokens_per_second += np.bincount(seconds, tokens, len(self.tokens_per_second))
            first = block.firsts
            after_first = block.outputs - tokens[first]
            spread = (block.rows["last_ns"] - block.rows["first_ns"]) / 1e9
            with np.errstate(divide="ignore", invalid="ignore"):
                # Tokens without an event of their own (an end token) do not make one event's time a spread.
                measurable = (after_first > 0) & (block.counts > 1)
                self.tpot[block.positions] = np.where(measurable, spread / after_first, np.nan)
            offsets = block.events["offset_us"].astype(np.int64)
            inner = np.ones(len(offsets), bool)
            inner[first] = False
            inner &= np.repeat(kept[block.positions], block.counts)
            at = np.flatnonzero(inner)
            gaps = offsets[at] - offsets[at - 1]
            self.gaps.add(gaps)
            whole = np.maximum(1, np.round(tokens[at])).astype(np.int64)
            self.token_gaps.add(np.round(gaps / whole).astype(np.int64), whole)


class _Block:
    """Completed requests of one block with their token events."""

    def __init__(
        self, positions: npt.NDArray[np.int64], rows: Rows, events: Events, counts: npt.NDArray[np.int64]
    ) -> None:
        self.positions, self.rows, self.events, self.counts = positions, rows, events, counts
        self.firsts = np.cumsum(counts) - counts

    @property
    def times_ns(self) -> npt.NDArray[np.int64]:
        times: npt.NDArray[np.int64] = (
            np.repeat(self.rows["first_ns"], self.counts) + self.events["offset_us"].astype(np.int64) * 1000
        )
        return times

    @property
    def outputs(self) -> Floats:
        known = self.rows["output_tokens"].astype(np.float64)
        return np.where(known < 0, self.counts, known)

    @property
    def tokens(self) -> Floats:
        """Tokens of each event: as the stream says; else the answer's tokens spread evenly over its events.

        Where the even share is within a tenth of 1 (a server holds back the odd half of a character) it is 1 for the
        first event, whose tokens TPOT subtracts.
        """
        said = self.events["tokens"].astype(np.float64)
        share = self.outputs / self.counts
        even = np.repeat(share, self.counts)
        complete = np.repeat(np.minimum.reduceat(said, self.firsts) > 0, self.counts)
        tokens = np.where(complete, said, even)
        near_one = (np.abs(share - 1) < 0.1) & ~complete[self.firsts]
        tokens[self.firsts[near_one]] = 1.0
        return tokens


def _excluded(scheduled: Floats, warmup: Exclusion, cooldown: Exclusion) -> tuple[Mask, Mask]:
    """Masks of the requests that warm-up and cool-down leave out; order is that of `scheduled`."""
    if len(scheduled) == 0:
        return np.zeros(0, bool), np.zeros(0, bool)
    rank = np.empty(len(scheduled), np.int64)
    rank[np.argsort(scheduled, kind="stable")] = np.arange(len(scheduled))
    early = _first(warmup, scheduled - scheduled.min(), rank)
    late = _first(cooldown, scheduled.max() - scheduled, len(scheduled) - 1 - rank)
    return early, late


def _first(exclusion: Exclusion, since: Floats, rank: npt.NDArray[np.int64]) -> Mask:
    if exclusion.amount == 0:
        return np.zeros(len(rank), bool)
    if exclusion.unit == "s":
        return np.asarray(since < exclusion.amount)
    count = exclusion.amount if exclusion.unit == "requests" else exclusion.amount * len(rank)
    return np.asarray(rank < round(count))


def _throughput(table: _Requests, ok: Mask, kept: Mask) -> Throughput:
    """Work of the requests `ok`, from the first scheduled of all that are `kept`: those that failed took time too."""
    if not ok.any():
        return Throughput()
    rows = table.rows[ok]
    begin = float(table.scheduled[kept].min())
    window_s = float(table.completion[ok].max()) - begin
    prompt, output = _total(rows["prompt_tokens"]), _total(rows["output_tokens"])
    if window_s <= 0:
        return Throughput(requests=len(rows), prompt_tokens=prompt, output_tokens=output)
    return Throughput(
        window_s=window_s,
        window_start_s=begin,
        requests_per_s=len(rows) / window_s,
        output_tokens_per_s=None if output is None else output / window_s,
        total_tokens_per_s=None if output is None or prompt is None else (output + prompt) / window_s,
        requests=len(rows),
        prompt_tokens=prompt,
        output_tokens=output,
    )


def _steady_throughput(table: _Requests, window: tuple[float, float]) -> Throughput:
    """Work done within the window: tokens by the time of their events, prompts by that of the first token."""
    begin, end = window
    span = end - begin
    output = 0.0
    for block in table.blocks():
        seconds = (block.times_ns - table.begin_ns) / 1e9
        output += float(block.tokens[(seconds >= begin) & (seconds < end)].sum())
    completed = table.ok & (table.completion >= begin) & (table.completion < end)
    prompts = table.ok & (table.first >= begin) & (table.first < end)
    prompt = _total(table.rows["prompt_tokens"][prompts])
    return Throughput(
        window_s=span,
        window_start_s=begin,
        requests_per_s=int(completed.sum()) / span,
        output_tokens_per_s=output / span,
        total_tokens_per_s=None if prompt is None else (output + prompt) / span,
        requests=int(completed.sum()),
        prompt_tokens=prompt,
        output_tokens=round(output),
    )


def _goodput(table: _Requests, slo: Slo, ok: Mask, total: int, window_s: float | None) -> Goodput:
    met = ok.copy()
    for name, limit in slo.limits.items():
        values: Floats = getattr(table, name)
        with np.errstate(invalid="ignore"):
            met &= values <= limit  # a NaN is not
    count = int(met.sum())
    return Goodput(
        slo=slo.text,
        requests_per_s=count / window_s if window_s else None,
        share=count / total if total else None,
        met=count,
        total=total,
    )


def _errors(failed: Rows) -> dict[str, int]:
    counts: dict[str, int] = {}
    for row in failed:
        label = CAUSE_LABELS.get(Cause(int(row["cause"]))) or f"http {row['http_status']}"
        counts[label] = counts.get(label, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def _timeseries(table: _Requests) -> dict[str, list[float | None]]:
    """Per second: what happened in [t, t + 1); requests in flight at its middle."""
    if len(table.rows) == 0:
        return {}
    seconds = np.arange(len(table.tokens_per_second), dtype=np.float64)
    if table.tokens_per_second[-1] == 0 and len(seconds) > 1:
        seconds = seconds[:-1]
    n = len(seconds)
    completed = np.bincount(table.completion[table.ok].astype(np.int64), minlength=n)
    answered = table.ok & ~np.isnan(table.ttft)
    by_second = table.first[answered].astype(np.int64)
    order = np.argsort(by_second, kind="stable")
    groups = np.split(table.ttft[answered][order], np.searchsorted(by_second[order], np.arange(1, n)))
    return {
        "t": seconds.tolist(),
        "output_tokens_per_s": table.tokens_per_second[:n].tolist(),
        "requests_in_flight": in_flight(table.scheduled, table.end, seconds + 0.5).tolist(),
        "ttft_p50_s": [float(np.median(group)) if len(group) else None for group in groups],
        "completed_per_s": completed[:n].astype(float).tolist(),
    }


def _token_source(rows: Rows) -> Literal["usage", "tokenizer", "events", "mixed"]:
    names: dict[int, Literal["usage", "tokenizer", "events"]] = {
        TokenSource.USAGE: "usage",
        TokenSource.TOKENIZER: "tokenizer",
        TokenSource.EVENTS: "events",
    }
    found = {names[source] for source in np.unique(rows["token_source"]).tolist() if source in names}
    return "mixed" if len(found) > 1 else found.pop() if found else "usage"


def _against_forced(rows: Rows, forced_lengths: Lengths | None) -> tuple[int | None, int, int]:
    """Output tokens of these requests had each its forced length, and how many answers are shorter and longer."""
    if forced_lengths is None or len(rows) == 0:
        return None, 0, 0
    wanted, made = forced_lengths[rows["index"]], rows["output_tokens"]
    forced = wanted > 0
    if not forced.any():
        return None, 0, 0
    slack = np.where(rows["token_source"] == TokenSource.USAGE, 0.0, _COUNT_SLACK * wanted)
    shorter, longer = forced & (made < wanted - slack), forced & (made > wanted + slack)
    return int(np.where(forced, wanted, made).sum(dtype=np.int64)), int(shorter.sum()), int(longer.sum())


def _rate(sent_ns: npt.NDArray[np.int64]) -> float | None:
    sent = sent_ns[sent_ns > 0]
    span_s = (int(sent.max()) - int(sent.min())) / 1e9 if len(sent) else 0.0
    return (len(sent) - 1) / span_s if span_s > 0 else None


def _known(counts: npt.NDArray[np.int32]) -> Floats:
    return counts[counts >= 0].astype(np.float64)


def _total(counts: npt.NDArray[np.int32]) -> int | None:
    """Sum, or None when any is unknown."""
    return int(counts.sum(dtype=np.int64)) if (counts >= 0).all() else None
