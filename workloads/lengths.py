"""Distributions of token counts. Each draws `n` integers from a named generator; bounds truncate, they never clip.

Clipping would pile probability on the bounds; a truncated distribution keeps its shape between them.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt
from scipy.special import ndtr, ndtri

from server.errors import UserError

MAX_TOKENS = 10_000_000
"""Bound on any length: far above every context window, so that a slipped digit is an error and not a full memory."""


class Uniform(msgspec.Struct, tag_field="distribution", tag="uniform", forbid_unknown_fields=True, kw_only=True):
    """Integers from `low` to `high`, both included."""

    low: int
    high: int


class Normal(msgspec.Struct, tag_field="distribution", tag="normal", forbid_unknown_fields=True, kw_only=True):
    """Normal with `mean` and `std`, truncated to [`min`, `max`], rounded."""

    mean: float
    std: float
    min: int = 1
    max: int | None = None


class Lognormal(msgspec.Struct, tag_field="distribution", tag="lognormal", forbid_unknown_fields=True, kw_only=True):
    """exp(Normal(ln `median`, `sigma`)), truncated to [`min`, `max`], rounded."""

    median: float
    sigma: float
    min: int = 1
    max: int | None = None


class Histogram(msgspec.Struct, tag_field="distribution", tag="histogram", forbid_unknown_fields=True, kw_only=True):
    """An empirical histogram.

    As many `weights` as `edges`: each edge is a length of its own. One more edge than weights: bins
    [edge i, edge i+1), uniform inside.
    """

    edges: list[int]
    weights: list[float]


class Fixed(msgspec.Struct, tag_field="distribution", tag="fixed", forbid_unknown_fields=True, kw_only=True):
    """Always `value`; a plain integer means the same."""

    value: int


Lengths = int | Fixed | Uniform | Normal | Lognormal | Histogram


def draw_lengths(lengths: Lengths, n: int, rng: np.random.Generator, *, where: str) -> npt.NDArray[np.int64]:
    """`n` lengths, each at least 1, int64.

    Raises:
        UserError: a length below 1 is asked for, or bounds that leave nothing; names `where`.
    """
    if isinstance(lengths, int):
        lengths = Fixed(value=lengths)
    if isinstance(lengths, Fixed):
        _check_range(lengths.value, lengths.value, where)
        return np.full(n, lengths.value, dtype=np.int64)
    if isinstance(lengths, Uniform):
        _check_range(lengths.low, lengths.high, where)
        return rng.integers(lengths.low, lengths.high + 1, size=n, dtype=np.int64)
    if isinstance(lengths, Histogram):
        return _draw_histogram(lengths, n, rng, where)
    return _draw_truncated(lengths, n, rng, where)


def _check_range(low: int, high: int, where: str) -> None:
    if low < 1:
        raise UserError(f"{where}: length {low} is below 1 token")
    if high < low:
        raise UserError(f"{where}: upper bound {high} is below lower bound {low}")
    if high > MAX_TOKENS:
        raise UserError(f"{where}: length {high} is above {MAX_TOKENS} tokens")


def _draw_histogram(histogram: Histogram, n: int, rng: np.random.Generator, where: str) -> npt.NDArray[np.int64]:
    edges = np.asarray(histogram.edges, dtype=np.int64)
    weights = np.asarray(histogram.weights, dtype=np.float64)
    if len(weights) == 0 or len(edges) - len(weights) not in (0, 1):
        raise UserError(f"{where}: {len(edges)} edges and {len(weights)} weights; want as many edges, or one more")
    if not np.all(np.isfinite(weights)) or weights.min() < 0 or weights.sum() <= 0:
        raise UserError(f"{where}: weights must be finite, not negative, and not all 0")
    _check_range(int(edges.min()), int(edges.max()), where)
    bins = rng.choice(len(weights), size=n, p=weights / weights.sum())
    if len(edges) == len(weights):
        return edges[bins]
    if np.any(np.diff(edges) <= 0):
        raise UserError(f"{where}: edges must rise")
    return rng.integers(edges[bins], edges[bins + 1], dtype=np.int64)


def _draw_truncated(lengths: Normal | Lognormal, n: int, rng: np.random.Generator, where: str) -> npt.NDArray[np.int64]:
    """Inverse-CDF sampling between the bounds: one uniform per value, no rejection loop."""
    low, high = lengths.min, MAX_TOKENS if lengths.max is None else lengths.max
    _check_range(low, high, where)
    if isinstance(lengths, Normal):
        centre, spread = lengths.mean, lengths.std
        bounds = np.array([low - 0.5, high + 0.5])
    else:
        if not (np.isfinite(lengths.median) and lengths.median > 0):
            raise UserError(f"{where}: median {lengths.median} must be above 0")
        centre, spread = float(np.log(lengths.median)), lengths.sigma
        bounds = np.log(np.array([low - 0.5, high + 0.5]))
    if not (np.isfinite(centre) and np.isfinite(spread) and spread >= 0):
        raise UserError(f"{where}: the spread must be finite and not negative")
    if spread == 0:
        values = np.full(n, centre)
        if not bounds[0] <= centre <= bounds[1]:
            raise UserError(f"{where}: the constant lies outside [{low}, {high}]")
    else:
        lower, upper = ndtr((bounds - centre) / spread)
        if upper - lower < 1e-9:
            raise UserError(f"{where}: next to nothing of the distribution lies in [{low}, {high}]")
        values = centre + spread * ndtri(rng.uniform(lower, upper, size=n))
    if isinstance(lengths, Lognormal):
        values = np.exp(values)
    # Rounding half to even and float error at the very edges can step one outside.
    return np.clip(np.rint(values).astype(np.int64), low, high)
