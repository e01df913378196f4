"""Charts as plain Plotly JSON. Colours are names that the page's script resolves for light and dark.

A `Figure` has one or more views of the same chart (a metric, an arrival rate); the page offers its `controls` to
switch between them. Labels are escaped: Plotly reads a subset of HTML in text.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from reports import formatting
from reports.metrics import METRICS, Metric, pick
from reports.schema import CellResult, Distribution, StartupReport
from reports.startup_phases import UNACCOUNTED, cache_misses, median_start, stacked_phases
from reports.view import Group, Panel, Variant, View

# Fixed hues for the backends of the bundled server; others follow in order of appearance.
_BACKEND_HUES = {"FLASH_ATTN": 0, "TRITON_ATTN": 1, "TORCH_SDPA": 2}
HUES = 8
PHASE_HUES = 14

SHORTER = "shorter phases"
_SLIVER = 0.01
"""Share of the longest start below which a phase has no colour of its own."""

_FEWEST_SECONDS = 5
"""A run below this has no course over time: its first and last seconds are partial."""

_LATENCIES: dict[str, str] = {"ttft_s": "TTFT", "itl_s": "ITL", "tpot_s": "TPOT", "e2el_s": "E2EL"}
_BEFORE_SETTING = re.compile(r"-(?=[a-z])")
_PERCENTILE_TICKS = (50, 75, 90, 95, 99, 99.9)


@dataclass(slots=True)
class Figure:
    """One chart with its views; `to_json()` is what the page's script reads."""

    id: str
    title: str
    subtitle: str
    views: dict[str, dict[str, Any]]
    controls: list[tuple[str, list[str]]] = field(default_factory=list)
    """(label, options); a view's key is the chosen options joined by "|". No controls: the one view is ""."""
    height: int = 280

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "height": self.height,
            "controls": [{"label": label, "options": options} for label, options in self.controls],
            "views": self.views,
        }


class Palette:
    """Which colour a variant has, the same all over the page: a hue per backend (and engine), eager paler."""

    def __init__(self, view: View) -> None:
        self._hues: dict[tuple[str, str | None], int] = {}
        for variant in view.variants:
            key = (variant.engine, variant.backend)
            if key in self._hues:
                continue
            fixed = _BACKEND_HUES.get(variant.backend or "") if variant.engine == "benchctl" else None
            taken = set(self._hues.values()) | set(_BACKEND_HUES.values())
            free = next((hue for hue in range(HUES) if hue not in taken), len(self._hues) % HUES)
            self._hues[key] = free if fixed is None else fixed

    def color(self, variant: Variant) -> str:
        """`hue-1` or `hue-1-pale`, a CSS custom property without its dashes."""
        return f"hue-{self._hues[variant.engine, variant.backend]}{'-pale' if variant.mode == 'eager' else ''}"


class FigureMaker:
    """Makes the charts of one report."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.palette = Palette(view)
        self._phase_hues: dict[str, int] = {}

    def bars(self, panel: Panel, metric: Metric, whisker: Metric | None = None) -> Figure:
        """One bar per cell; `whisker` reaches to a second metric (p99 over p50)."""
        scale, unit = _scale(metric, [metric.read(cell) for cell in panel.measured])
        groups = [group for group in panel.groups if group.measured]
        if len(groups) == 1:
            data, layout, height = self._single_bars(groups[0], metric, whisker, scale, unit)
        else:
            data, layout = self._grouped_bars(groups, metric, whisker, scale, unit)
            height = 300
        subtitle = metric.label if metric.unit == unit else f"{metric.label}, {unit}"
        if whisker:
            subtitle = f"{metric.label}, whisker to {whisker.label.removeprefix('TTFT ')}, {unit}"
        views = {"": {"data": data, "layout": layout}}
        return Figure(f"{panel.id}-{metric.key}", panel.title, subtitle, views, height=height)

    def percentiles(self, panel: Panel) -> Figure:
        """Latency over percentile, one line per variant; a view per latency and arrival."""
        views = {}
        groups = [group for group in panel.groups if group.measured]
        for name, label in _LATENCIES.items():
            for group in groups:
                traces = []
                drawn = [(cell, _supported_percentiles(getattr(cell.metrics, name))) for cell in group.measured]
                scale, unit = _seconds_scale([value for _, points in drawn for _, value in points])
                for cell, points in drawn:
                    trace = self._line(cell, [_tail(p) for p, _ in points], [v * scale for _, v in points])
                    trace["customdata"] = [f"p{p:g}" for p, _ in points]
                    trace["hovertemplate"] = f"%{{customdata}}: %{{y:.4~g}} {unit}<extra>%{{fullData.name}}</extra>"
                    traces.append(trace)
                last = max((x for trace in traces for x in trace["x"]), default=_tail(99.9))
                axis = {
                    "tickvals": [_tail(p) for p in _PERCENTILE_TICKS],
                    "ticktext": [f"p{p:g}" for p in _PERCENTILE_TICKS],
                    "range": [0, last * 1.08],
                }
                views[_key(label, group.arrival, len(groups))] = {
                    "data": traces,
                    "layout": {"xaxis": axis, "yaxis": {"title": {"text": unit}, "rangemode": "tozero"}},
                }
        controls = _controls(("Latency", list(_LATENCIES.values())), groups)
        return Figure(f"{panel.id}-percentiles", panel.title, "latency over percentile", views, controls, 300)

    def frontier(self, panel: Panel) -> Figure:
        """Throughput against latency over the arrivals of a panel, a line per variant and sweep, in order of load."""
        views = {}
        for metric in pick("ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "e2el_p50_s"):
            traces = []
            scale, unit = _scale(metric, [metric.read(cell) for cell in panel.measured])
            hover = f"%{{customdata}}<br>%{{x:,.4~g}} tok/s, %{{y:.4~g}} {unit}<extra>%{{fullData.name}}</extra>"
            for variant in self.view.variants:
                cells = [cell for cell in panel.measured if Variant.of(cell.config) == variant]
                points: list[tuple[float | None, float | None, str]] = []
                before: str | None = None
                for cell in sorted(cells, key=_load):
                    x, y = METRICS["output_tokens_per_s"].read(cell), metric.read(cell)
                    if x is None or y is None:
                        continue
                    sweep, _ = _load(cell)
                    if before not in (None, sweep):
                        points.append((None, None, ""))  # no line from one kind of arrivals to another
                    before = sweep
                    points.append((x, y * scale, panel.arrival_of(cell)))
                if not points:
                    continue
                trace = self._line(cells[0], [x for x, _, _ in points], [y for _, y, _ in points])
                trace |= {
                    "mode": "lines+markers",
                    "customdata": [_label(name) for _, _, name in points],
                    "hovertemplate": hover,
                    "connectgaps": False,
                    "marker": {"symbol": "circle-open" if variant.mode == "eager" else "circle"},
                }
                traces.append(trace)
            views[metric.label] = {
                "data": traces,
                "layout": {
                    "xaxis": {"title": {"text": "output tok/s"}, "rangemode": "tozero"},
                    "yaxis": {"title": {"text": unit}, "rangemode": "tozero"},
                },
            }
        return Figure(
            f"{panel.id}-frontier",
            panel.title,
            "latency against throughput, right and down is better",
            views,
            [("Latency", list(views))],
            300,
        )

    def over_time(self, panel: Panel) -> Figure | None:
        """Output tokens per second over the run; None when no cell has a time series."""
        views = {}
        groups = [group for group in panel.groups if any(_series(cell) for cell in group.measured)]
        for group in groups:
            traces = []
            for cell in group.measured:
                if series := _series(cell):
                    trace = self._line(cell, series[0], series[1])
                    trace["hovertemplate"] = "%{x:.0f} s: %{y:,.4~g} tok/s<extra>%{fullData.name}</extra>"
                    trace["connectgaps"] = False
                    traces.append(trace)
            views[group.arrival if len(groups) > 1 else ""] = {
                "data": traces,
                "layout": {
                    "xaxis": {"title": {"text": "seconds from the first scheduled request"}},
                    "yaxis": {"title": {"text": "tok/s"}, "rangemode": "tozero"},
                },
            }
        if not views:
            return None
        controls = [("Arrival", list(views))] if len(groups) > 1 else []
        return Figure(f"{panel.id}-time", panel.title, "output tokens per second", views, controls)

    def startup(self, model: str) -> Figure | None:
        """Start-up phases of a model's servers, stacked, cold against warm; None when no phases are known."""
        rows: list[tuple[str, StartupReport, dict[str, float]]] = []
        for cell in self.view.servers:
            if cell.config.model != model:
                continue
            for kind in ("cold", "warm", "unknown"):
                if start := median_start(cell, kind):
                    phases = stacked_phases(start) or {"(phases unknown)": start.to_first_token_s or 0.0}
                    name = self.view.variant_label(cell.config)
                    name = f"{name} · {kind}" if kind != "unknown" else name
                    if kind == "warm" and (missed := cache_misses(start)):
                        name += f" (not so warm: {missed} missed in the cache)"
                    rows.append((name, start, phases))
        if not rows:
            return None
        rows.reverse()  # a bar chart counts upwards
        rows = [(name, start, phases) for (name, start, _), phases in zip(rows, _drawable(rows), strict=True)]
        names = order_phases([phases for _, _, phases in rows])
        traces = []
        for name in names:
            values = [phases.get(name) for _, _, phases in rows]
            traces.append(
                {
                    "type": "bar",
                    "orientation": "h",
                    "name": _label(name),
                    "x": values,
                    "y": list(range(len(rows))),
                    "width": 0.42,
                    "meta": {"color": self.phase_color(name)},
                    "hovertemplate": "%{fullData.name}: %{x:.3~g} s<extra></extra>",
                }
            )
        notes = [
            _row_note(position, f"<b>{_label(name)}</b>  {formatting.seconds(start.to_first_token_s)}")
            for position, (name, start, _) in enumerate(rows)
        ]
        layout = {
            "barmode": "stack",
            "annotations": notes,
            "xaxis": {"title": {"text": "seconds from exec to first token"}},
            "yaxis": {"visible": False, "range": [-0.5, len(rows) - 0.1], "fixedrange": True},
            "margin": {"l": 8},
        }
        number = self.view.models.index(model)
        views = {"": {"data": traces, "layout": layout}}
        height = 80 + 52 * len(rows)
        return Figure(f"startup-{number}", model, "every instant given to one phase", views, height=height)

    def phase_color(self, name: str) -> str:
        if name in (UNACCOUNTED, SHORTER):
            return f"phase-{'unaccounted' if name == UNACCOUNTED else 'shorter'}"
        return f"phase-{self._phase_hues.setdefault(name, len(self._phase_hues) % PHASE_HUES)}"

    @property
    def phase_legend(self) -> list[tuple[str, str]]:
        """(name, colour) of every phase drawn so far."""
        names = [*self._phase_hues, SHORTER, UNACCOUNTED] if self._phase_hues else []
        return [(name, self.phase_color(name)) for name in names]

    def _single_bars(
        self, group: Group, metric: Metric, whisker: Metric | None, scale: float, unit: str
    ) -> tuple[list[dict[str, Any]], dict[str, Any], int]:
        """Horizontal bars with each one's name above it: readable at any width."""
        cells = list(reversed(group.measured))
        traces = []
        for position, cell in enumerate(cells):
            value = metric.read(cell)
            trace = self._bar(cell, whisker, value, scale, horizontal=True)
            trace |= {"y": [position], "width": 0.42}
            traces.append(trace)
        notes = [
            _row_note(position, f"<b>{_label(self._name(cell))}</b>  {metric.text(cell)}")
            for position, cell in enumerate(cells)
        ]
        layout = {
            "annotations": notes,
            "xaxis": {"title": {"text": unit}, "rangemode": "tozero"},
            "yaxis": {"visible": False, "range": [-0.5, len(cells) - 0.1], "fixedrange": True},
            "margin": {"l": 8},
        }
        return traces, layout, 80 + 48 * len(cells)

    def _grouped_bars(
        self, groups: Sequence[Group], metric: Metric, whisker: Metric | None, scale: float, unit: str
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        traces = []
        for variant in self.view.variants:
            by_arrival = [
                next((cell for cell in group.measured if Variant.of(cell.config) == variant), None) for group in groups
            ]
            if not (present := [cell for cell in by_arrival if cell is not None]):
                continue
            values = [None if cell is None else metric.read(cell) for cell in by_arrival]
            trace = self._bar(present[0], None, None, scale, horizontal=False)
            trace |= {
                "x": [_tick(group.arrival) for group in groups],
                "y": [None if value is None else value * scale for value in values],
            }
            if whisker:
                ends = [None if cell is None else whisker.read(cell) for cell in by_arrival]
                trace["error_y"] = _whisker(values, ends, scale)
            traces.append(trace)
        return traces, {
            "barmode": "group",
            "xaxis": {"showgrid": False},
            "yaxis": {"title": {"text": unit}, "rangemode": "tozero"},
        }

    def _bar(
        self, cell: CellResult, whisker: Metric | None, value: float | None, scale: float, *, horizontal: bool
    ) -> dict[str, Any]:
        axis = "x" if horizontal else "y"
        trace: dict[str, Any] = {
            "type": "bar",
            "name": _label(self._name(cell)),
            "meta": {"color": self.palette.color(Variant.of(cell.config))},
            "hovertemplate": f"%{{fullData.name}}: %{{{axis}:,.4~g}}<extra></extra>",
        }
        if horizontal:
            trace |= {"orientation": "h", "x": [None if value is None else value * scale]}
        if whisker:
            trace[f"error_{axis}"] = _whisker([value], [whisker.read(cell)], scale)
        return trace

    def _line(self, cell: CellResult, x: Sequence[float | None], y: Sequence[float | None]) -> dict[str, Any]:
        variant = Variant.of(cell.config)
        return {
            "type": "scatter",
            "mode": "lines",
            "name": _label(self._name(cell)),
            "x": list(x),
            "y": list(y),
            "line": {"width": 2, "dash": "dot" if variant.mode == "eager" else "solid"},
            "meta": {"color": self.palette.color(variant).removesuffix("-pale")},
        }

    def _name(self, cell: CellResult) -> str:
        name = self.view.variant_label(cell.config)
        return name if cell.status == "ok" else f"{name} ({cell.status})"


def order_phases(rows: Sequence[dict[str, float]]) -> list[str]:
    """All phases in the order of time: as in the row with the most of them, the rest behind their predecessors."""
    order: list[str] = []
    for phases in sorted(rows, key=len, reverse=True):
        position = 0
        for name in phases:
            if name in order:
                position = order.index(name) + 1
            else:
                order.insert(position, name)
                position += 1
    return sorted(order, key=lambda name: (SHORTER, UNACCOUNTED).index(name) if name in (SHORTER, UNACCOUNTED) else -1)


def _drawable(rows: Sequence[tuple[str, StartupReport, dict[str, float]]]) -> list[dict[str, float]]:
    """The rows' phases; those that are a sliver of the longest start in every row become one."""
    longest = max(sum(phases.values()) for _, _, phases in rows)
    most: dict[str, float] = {}
    for _, _, phases in rows:
        for name, seconds in phases.items():
            most[name] = max(most.get(name, 0.0), seconds)
    by_size = sorted(most, key=lambda name: -most[name])[:PHASE_HUES]
    shown = {name for name in by_size if most[name] >= _SLIVER * longest} | {UNACCOUNTED}
    merged = []
    for _, _, phases in rows:
        row: dict[str, float] = {}
        for name, seconds in phases.items():
            key = name if name in shown else SHORTER
            row[key] = row.get(key, 0.0) + seconds
        merged.append(row)
    return merged


def _supported_percentiles(distribution: Distribution) -> list[tuple[float, float]]:
    """(percent, value) in order, as far as the sample has a value beyond: p99.9 of a hundred requests is a guess."""
    points = [(float(key[1:]), value) for key, value in distribution.percentiles.items() if value is not None]
    return sorted((p, value) for p, value in points if distribution.n * (100 - p) >= 100)


def _scale(metric: Metric, values: Sequence[float | None]) -> tuple[float, str]:
    """(factor, unit) for an axis: seconds become milliseconds unless the values are long."""
    return (1.0, metric.unit) if metric.unit != "s" else _seconds_scale(values)


def _seconds_scale(values: Sequence[float | None]) -> tuple[float, str]:
    known = [value for value in values if value is not None]
    return (1.0, "s") if known and max(known) >= 10 else (1e3, "ms")


def _whisker(values: Sequence[float | None], ends: Sequence[float | None], scale: float) -> dict[str, Any]:
    reach = [
        None if value is None or end is None else max(0.0, (end - value) * scale)
        for value, end in zip(values, ends, strict=True)
    ]
    return {"type": "data", "symmetric": False, "array": reach, "thickness": 1.2, "width": 4}


def _row_note(position: int, text: str) -> dict[str, Any]:
    return {
        "x": 0,
        "xref": "paper",
        "xanchor": "left",
        "y": position + 0.24,
        "yanchor": "bottom",
        "text": text,
        "showarrow": False,
        "align": "left",
    }


def _series(cell: CellResult) -> tuple[list[float], list[float | None]] | None:
    if cell.metrics is None:
        return None
    times, values = cell.metrics.timeseries.get("t"), cell.metrics.timeseries.get("output_tokens_per_s")
    if not times or not values or len(times) < _FEWEST_SECONDS:
        return None
    return [time for time in times if time is not None], values


def _tail(percent: float) -> float:
    """Position on the percentile axis: every further nine is one unit to the right."""
    return -math.log10(1 - percent / 100)


def _key(label: str, arrival: str, arrivals: int) -> str:
    return f"{label}|{arrival}" if arrivals > 1 else label


def _controls(first: tuple[str, list[str]], groups: Sequence[Group]) -> list[tuple[str, list[str]]]:
    return [first, ("Arrival", [group.arrival for group in groups])] if len(groups) > 1 else [first]


def _load(cell: CellResult) -> tuple[str, float]:
    """(what its arrivals have in common with those of the same sweep, how much load they are)."""
    arrival = cell.config.arrival
    swept = next((key for key in ("rate", "concurrency") if isinstance(arrival.get(key), int | float)), "")
    return repr(sorted((key, value) for key, value in arrival.items() if key != swept)), arrival.get(swept, 0.0)


def _tick(arrival: str) -> str:
    """An arrival's name below a bar, a line per setting: a long one would be turned and take the chart's room."""
    return _BEFORE_SETTING.sub("<br>", _label(arrival))


def _label(text: str) -> str:
    return html.escape(text, quote=False)
