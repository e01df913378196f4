"""The HTML report: one file, everything inlined, works from `file://` without a network."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import jinja2
from plotly.offline import get_plotlyjs

from reports import formatting
from reports.directory import ResultSet
from reports.figures import Figure, FigureMaker
from reports.goodput import GOODPUT_NOTE, goodput_rows
from reports.metrics import METRICS, pick
from reports.reference import reference_rows
from reports.remarks import remarks
from reports.schema import SCHEMA_VERSION, CellResult, Provenance
from reports.view import Choice, Variant, View, summarise

COLUMNS = pick(
    "output_tokens_per_s",
    "total_tokens_per_s",
    "steady_output_tokens_per_s",
    "requests_per_s",
    "goodput_requests_per_s",
    "ttft_p50_s",
    "ttft_p99_s",
    "tpot_p50_s",
    "itl_p50_s",
    "itl_p99_s",
    "e2el_p50_s",
    "e2el_p99_s",
    "client_lag_p99_s",
    "completed",
    "failed",
    "to_healthy_cold_s",
    "to_healthy_warm_s",
)


@dataclass(frozen=True, slots=True)
class Tile:
    """A headline: a figure, what it is, and whose it is."""

    label: str
    value: str
    detail: str


@dataclass(frozen=True, slots=True)
class Section:
    """Charts under one heading."""

    id: str
    title: str
    text: str
    figures: list[Figure]
    lines: bool = False
    """Lines rather than bars: the legend shows line styles."""


def render_html(results: ResultSet) -> str:
    """The whole page as text. All text from results is escaped; values that are not known are dashes."""
    view = View(results)
    maker = FigureMaker(view)
    sections = chart_sections(view, maker)
    legend = [(view.variant_label(cell.config), cell.config) for cell in _one_per_variant(view)]
    return _template().render(
        view=view,
        title=results.title,
        index=results.index,
        missing=results.missing,
        provenance=[*_provenance_rows(results), *_server_rows(view)],
        summary=summary_line(results),
        counts=view.status_counts(),
        tiles=tiles(view),
        choices=summarise(view),
        choice_text=choice_text,
        columns=[metric for metric in COLUMNS if any(metric.read(cell) is not None for cell in view.cells)],
        metrics=METRICS,
        goodput=goodput_rows(view),
        goodput_note=GOODPUT_NOTE,
        references=reference_rows(view),
        reference_source=results.reference_source,
        unsupported=_unsupported(view),
        remarks=remarks(view.cells),
        telemetry=_telemetry(view),
        sections=sections,
        legend=[(name, maker.palette.color(Variant.of(config)), config.mode) for name, config in legend],
        phase_legend=maker.phase_legend,
        schema_version=SCHEMA_VERSION,
        css=_read("report.css"),
        script=_read("report.js"),
        plotly=get_plotlyjs(),
        figures_json=embed_json([figure.to_json() for section in sections for figure in section.figures]),
    )


def chart_sections(view: View, maker: FigureMaker) -> list[Section]:
    """Charts in reading order; sections without a chart are left out."""
    panels = [panel for panel in view.panels if panel.measured]
    ttft_p50, ttft_p99 = pick("ttft_p50_s", "ttft_p99_s")
    swept = [panel for panel in panels if len(panel.groups) > 1]
    over_time = [figure for panel in panels if (figure := maker.over_time(panel)) is not None]
    starts = [figure for model in view.models if (figure := maker.startup(model)) is not None]
    sections = [
        Section(
            "throughput",
            "Throughput",
            "Tokens of completed requests per second, from the first scheduled request to the last completion.",
            [maker.bars(panel, panel.groups[0].throughput) for panel in panels],
        ),
        Section(
            "ttft",
            "Time to first token",
            "From the time at which a request was scheduled, so that waiting in the client or in a queue counts.",
            [maker.bars(panel, ttft_p50, ttft_p99) for panel in panels],
        ),
        Section(
            "percentiles",
            "Latency percentiles",
            "The axis stretches the tail: every further nine takes the same width.",
            [maker.percentiles(panel) for panel in panels],
            lines=True,
        ),
        Section(
            "frontier",
            "Throughput against latency",
            "One point per arrival rate or concurrency.",
            [maker.frontier(panel) for panel in swept],
            lines=True,
        ),
        Section(
            "startup", "Start-up", "Cold: empty compile caches. Warm: the caches that the cold start filled.", starts
        ),
        Section(
            "time", "Tokens over time", "Output tokens that arrived in each second of the run.", over_time, lines=True
        ),
    ]
    return [section for section in sections if section.figures]


def tiles(view: View) -> list[Tile]:
    """The best measured values, each with its cell."""
    found = []
    for key, label in (
        ("output_tokens_per_s", "Highest output throughput"),
        ("goodput_requests_per_s", "Highest goodput"),
        ("ttft_p50_s", "Lowest median TTFT"),
        ("tpot_p50_s", "Lowest median TPOT"),
        ("to_healthy_cold_s", "Fastest cold start"),
        ("to_healthy_warm_s", "Fastest warm start"),
    ):
        metric = METRICS[key]
        cells = [(value, cell) for cell in view.with_status("ok") if (value := metric.read(cell)) is not None]
        if not cells:
            continue
        value, cell = (max if metric.higher_is_better else min)(cells, key=lambda pair: pair[0])
        unit = f" {metric.unit}" if metric.unit in ("tok/s", "req/s") else ""
        group = next(group for group in view.groups if any(cell is member for member in group.cells))
        where = [view.variant_label(cell.config)]
        if not key.startswith("to_"):
            where.append(group.title)
        if len(view.models) > 1:
            where.insert(0, cell.config.model)
        found.append(Tile(label, f"{metric.format(value)}{unit}", ", ".join(where)))
    return found


def choice_text(choice: Choice) -> list[tuple[str, str, str]]:
    """(metric, text, "better" | "worse" | "same") of what a choice buys and costs."""
    parts = []
    for key, value in choice.ratios.items():
        metric = METRICS[key]
        gain = value if metric.higher_is_better else 1 / value
        tone = "same" if 0.98 < gain < 1.02 else "better" if gain > 1 else "worse"
        parts.append((metric.label, formatting.change(value), tone))
    for key, seconds in choice.seconds.items():
        tone = "same" if abs(seconds) < 0.05 else "worse" if seconds > 0 else "better"
        sign = "+" if seconds > 0 else "−" if seconds < 0 else "±"
        parts.append((METRICS[key].label, f"{sign}{formatting.seconds(abs(seconds))}", tone))
    return parts


def summary_line(results: ResultSet) -> str:
    """When, on what and from which commit, in one line."""
    made = _provenance(results)
    if made is None:
        return ""
    names = [str(gpu.get("name", "GPU")) for gpu in made.gpus]
    gpus = [f"{names.count(name)} × {name}" if names.count(name) > 1 else name for name in dict.fromkeys(names)]
    cpu = f"{made.cpu}, {made.cpu_count} cores" if made.cpu and made.cpu_count else made.cpu
    commit = f"commit {made.git_commit[:10]}{' with changes' if made.git_dirty else ''}" if made.git_commit else None
    when = made.started_at.replace("T", " ").replace("+00:00", " UTC")
    parts = [when, *gpus, None if gpus else cpu, commit]
    return " · ".join(part for part in parts if part)


def embed_json(value: Any) -> str:
    """JSON that is safe inside a <script> element; raises ValueError for NaN and infinities."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _one_per_variant(view: View) -> list[CellResult]:
    chosen: dict[Variant, CellResult] = {}
    for cell in view.cells:
        if cell.metrics is not None:
            chosen.setdefault(Variant.of(cell.config), cell)
    return list(chosen.values())


def _unsupported(view: View) -> list[tuple[str, list[str], int]]:
    """(reason, variants, number of cells) per distinct reason."""
    reasons: dict[str, list[CellResult]] = {}
    for cell in view.with_status("unsupported"):
        reasons.setdefault(cell.reason or "no reason given", []).append(cell)
    several = len(view.models) > 1
    rows = []
    for reason, cells in reasons.items():
        names = [
            f"{cell.config.model} · {view.variant_label(cell.config)}" if several else view.variant_label(cell.config)
            for cell in cells
        ]
        rows.append((reason, list(dict.fromkeys(names)), len(cells)))
    return rows


def _telemetry(view: View) -> list[tuple[CellResult, list[tuple[str, str, str]]]]:
    """Per measured cell: (series, mean, maximum) of what was sampled beside the run."""
    rows = []
    for cell in view.cells:
        figures = []
        for series in (cell.telemetry, cell.server_metrics):
            for name, samples in series.items():
                known = [value for value in samples if value is not None]
                if name != "t" and known:
                    show = formatting.byte_size if name.endswith("_bytes") else formatting.significant
                    figures.append((name, show(sum(known) / len(known)), show(max(known))))
        if figures:
            rows.append((cell, figures))
    return rows


def _provenance(results: ResultSet) -> Provenance | None:
    if results.index is not None:
        return results.index.provenance
    return results.results[0].provenance if results.results else None


def _provenance_rows(results: ResultSet) -> list[tuple[str, str]]:
    made = _provenance(results)
    if made is None:
        return []
    rows: list[tuple[str, str | None]] = [
        ("Started", made.started_at),
        ("Command", " ".join(made.command) or None),
        ("benchctl", made.benchctl_version),
        ("Commit", made.git_commit and f"{made.git_commit}{' (with uncommitted changes)' if made.git_dirty else ''}"),
        ("CPU", made.cpu and f"{made.cpu}, {made.cpu_count} usable cores"),
        ("Memory", formatting.byte_size(made.memory_bytes)),
    ]
    for number, gpu in enumerate(made.gpus):
        details = [str(gpu.get("name", "GPU"))]
        if gpu.get("memory_bytes"):
            details.append(formatting.byte_size(gpu["memory_bytes"]))
        details += [f"{key} {gpu[key]}" for key in ("driver", "cuda") if gpu.get(key)]
        if gpu.get("power_limit_w"):
            details.append(f"power limit {gpu['power_limit_w']:g} W")
        rows.append((f"GPU {number}", ", ".join(details)))
    rows += [
        ("Platform", made.platform),
        ("Python", made.python),
        ("Packages", ", ".join(f"{name} {version}" for name, version in made.packages.items())),
        ("Machine", made.hostname_hash and f"{made.hostname_hash} (hash of the host name)"),
    ]
    digests = {cell.workload.digest[:12]: cell.workload.name for cell in results.results if cell.workload}
    rows.append(("Workloads", ", ".join(f"{name} {digest}" for digest, name in digests.items())))
    commits = {cell.provenance.git_commit for cell in results.results}
    if len(commits) > 1:
        rows.append(("Mixed", f"results come from {len(commits)} different commits (--resume kept earlier ones)"))
    return [(name, text) for name, text in rows if text]


def _server_rows(view: View) -> list[tuple[str, str]]:
    """What each server said of itself."""
    rows = []
    for cell in view.servers:
        info = cell.server
        if info is None:
            continue
        blocks = f"{info.num_blocks:,} KV blocks" if info.num_blocks is not None else None
        if blocks and info.block_size is not None:
            blocks += f" of {info.block_size} tokens"
        context = f"context {info.max_model_len:,}" if info.max_model_len is not None else None
        count = info.api_server_count
        processes = f"{count} API process{'es' if count > 1 else ''}" if count is not None else None
        version = f"version {info.engine_version}" if info.engine_version else None
        parts = [info.attention_backend, info.dtype, info.device, blocks, context, processes, version]
        name = f"{cell.config.model} · {view.variant_label(cell.config)}"
        rows.append((name, ", ".join(part for part in parts if part)))
    return [(name, text) for name, text in rows if text]


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("reports"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.j2")


def _read(name: str) -> str:
    return (resources.files("reports") / "templates" / name).read_text(encoding="utf-8")
