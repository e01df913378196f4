"""Numbers as people read them. What is not known is a dash, never a zero."""

from __future__ import annotations

import math

UNKNOWN = "–"


def seconds(value: float | None) -> str:
    """`850 µs`, `12.3 ms`, `4.56 s`, `2 min 05 s`."""
    if value is None:
        return UNKNOWN
    size = abs(value)
    if size >= 99.95:
        minutes, rest = divmod(round(size), 60)
        text = f"{minutes} min {rest:02d} s"
        return f"-{text}" if value < 0 else text
    if size >= 0.9995:
        return f"{significant(value)} s"
    if size >= 0.9995e-3:
        return f"{significant(value * 1e3)} ms"
    return "0 s" if value == 0 else f"{significant(value * 1e6)} µs"


def whole_seconds(value: float) -> str:
    """A time that runs while one looks at it: `6 s`, `2 min 05 s`."""
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def significant(value: float | None) -> str:
    """Three significant digits below 1000, whole numbers with commas above: `0.0123`, `45.6`, `12,300`."""
    if value is None:
        return UNKNOWN
    size = abs(value)
    if size >= 999.5:
        return f"{value:,.0f}"
    if size >= 99.95:
        return f"{value:.0f}"
    if size >= 9.995:
        return f"{value:.1f}"
    if size >= 0.9995:
        return f"{value:.2f}"
    return "0" if value == 0 else f"{value:.3g}"


def count(value: int | None) -> str:
    return UNKNOWN if value is None else f"{value:,}"


def share(value: float | None) -> str:
    """A part of a whole, rounded down so that only the whole is `100.0%`: `99.9%` for 0.9996."""
    # What a float falls short of its decimal by is not rounded down: 0.57 * 1000 is 569.99...
    return UNKNOWN if value is None else f"{math.floor(value * 1000 + 1e-6) / 10:.1f}%"


def ratio(value: float | None) -> str:
    """`1.37×`"""
    return UNKNOWN if value is None else f"{value:.2f}×"


def change(value: float | None) -> str:
    """A ratio as people say it: `−49%`, `+4.2%`, and `2.31×` from a doubling on."""
    if value is None:
        return UNKNOWN
    if value >= 2:
        return ratio(value)
    percent = (value - 1) * 100
    digits = 0 if abs(percent) >= 9.95 else 1
    text = f"{abs(percent):.{digits}f}%"
    return f"{'−' if percent < 0 else '+'}{text}" if float(text[:-1]) else f"±{text}"


def byte_size(value: float | None) -> str:
    """Binary units: `1.50 GiB`."""
    if value is None:
        return UNKNOWN
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{significant(value)} {unit}"
        value /= 1024
    return f"{significant(value)} TiB"
