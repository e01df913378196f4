"""The history of a metric in the terminal and as a self-contained HTML page."""

from __future__ import annotations

import html
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from benchctl.history.series import Point, Series
from reports.verdict_text import percent

_BARS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 60


def render_console(series: Sequence[Series]) -> RenderableType:
    """Per series a line of bars over the commits and a table of its stretches."""
    return Group(*(Padding(_one(entry), (0, 0, 1, 0)) for entry in series))


def sparkline(points: Sequence[Point], width: int = SPARK_WIDTH) -> str:
    """The last `width` values as bars between the smallest and the largest of them."""
    values = [point.value for point in points[-width:]]
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return "".join(_BARS[min(int((value - low) / span * len(_BARS)), len(_BARS) - 1)] for value in values)


def render_html(series: Sequence[Series], title: str) -> str:
    """One chart per series, plotly inlined: works from `file://` without a network."""
    import plotly.graph_objects as go
    from plotly.offline import get_plotlyjs

    charts = []
    for entry in series:
        figure = go.Figure()
        _add_points(figure, entry)
        heading = f"{html.escape(entry.cell_id)}<br><sup>{html.escape(entry.machine)}</sup>"
        seconds = entry.metric.unit == "s"
        figure.update_layout(
            title={"text": heading},
            # SI prefixes: 11.5ms, 1.2k.
            yaxis={
                "title": entry.metric.label if seconds else f"{entry.metric.label} ({entry.metric.unit})",
                "tickformat": "~s",
                "ticksuffix": "s" if seconds else "",
                "rangemode": "nonnegative",
            },
            height=420,
            template="plotly_white",
            hovermode="closest",
            xaxis={"type": "category", "tickangle": -45},
        )
        charts.append(figure.to_html(full_html=False, include_plotlyjs=False))
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><script>{get_plotlyjs()}</script>'
    body = f"<h1>{html.escape(title)}</h1>{''.join(charts)}"
    return f"<!doctype html><html><head>{head}</head><body style='font-family:sans-serif'>{body}</body></html>\n"


def _one(entry: Series) -> RenderableType:
    head = Text.assemble((entry.cell_id, "bold"), (f"  {entry.machine}", "dim"))
    better = "more is better" if entry.metric.higher_is_better else "less is better"
    line = Text.assemble(f"{entry.metric.label} ", (sparkline(entry.points), "cyan"), (f"  {better}", "dim"))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("from", "to", "commits", "median", "change"):
        table.add_column(name, justify="right" if name in ("commits", "median", "change") else "left")
    for number, stretch in enumerate(entry.stretches):
        values = sorted(point.value for point in stretch)
        change = entry.changes[number - 1] if number else None
        style = "" if change is None else "red" if entry.worse(change) else "green"
        table.add_row(
            stretch[0].commit[:12], stretch[-1].commit[:12], str(len(stretch)),
            entry.metric.format(values[len(values) // 2]), Text(percent(change.change) if change else "", style),
        )  # fmt: skip
    return Group(head, line, table)


def _add_points(figure: object, entry: Series) -> None:
    import plotly.graph_objects as go

    assert isinstance(figure, go.Figure)
    names = [point.commit[:12] for point in entry.points]
    figure.add_trace(
        go.Scatter(
            x=[name for name, point in zip(names, entry.points, strict=True) for _ in point.values],
            y=[value for point in entry.points for value in point.values],
            mode="markers",
            marker={"color": "#9aa5b1", "size": 6},
            name="runs",
        )
    )
    hover = [f"{point.commit}<br>{html.escape(point.time)}" for point in entry.points]
    figure.add_trace(
        go.Scatter(
            x=names,
            y=[point.value for point in entry.points],
            mode="lines+markers",
            text=hover,
            hovertemplate="%{text}<br>%{y:.4s}<extra></extra>",
            line={"color": "#2f6fb2"},
            name="median of a commit",
        )
    )
    for change in entry.changes:
        color = "#c0392b" if entry.worse(change) else "#1e8449"
        figure.add_vline(x=change.index - 0.5, line={"color": color, "dash": "dash"})
        figure.add_annotation(
            x=change.index - 0.5,
            y=1,
            yref="paper",
            yanchor="bottom",
            text=percent(change.change),
            showarrow=False,
            font={"color": color},
        )
