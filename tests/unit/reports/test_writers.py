"""What the reports say: figures as measured, dashes for the unknown, and nothing from outside as markup."""

from __future__ import annotations

import csv
import io
import json
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from reports import formatting
from reports.console import print_report, report_console
from reports.csv import render_csv
from reports.directory import ResultSet
from reports.figures import SHORTER, FigureMaker, order_phases
from reports.html import chart_sections, choice_text, embed_json, render_html, tiles
from reports.markdown import MAX_CHARACTERS, render_markdown
from reports.metrics import METRICS
from reports.reference import reference_rows
from reports.schema import CellResult, Goodput
from reports.startup_phases import UNACCOUNTED
from reports.view import View, summarise
from reports.writers import FORMATS
from tests.unit.reports import samples

EVIL = "<img src=x onerror=alert(1)></script>|`@everyone*_[x](y)\n=1+1"


def only(*results: CellResult) -> ResultSet:
    return ResultSet(title="t", results=list(results))


def unknown_metrics() -> CellResult:
    """A cell of which nothing but one failure is known."""
    result = samples.cell("eager", "TORCH_SDPA", 2.0)
    nothing = samples.unknown("no request was completed")
    assert result.metrics is not None
    latencies = ("ttft_s", "ttft_from_sent_s", "itl_s", "itl_per_token_s", "tpot_s", "e2el_s", "client_lag_s")
    result.metrics = msgspec.structs.replace(result.metrics, **dict.fromkeys(latencies, nothing))
    result.metrics.throughput = msgspec.structs.replace(
        result.metrics.throughput, output_tokens_per_s=None, total_tokens_per_s=None, requests_per_s=None
    )
    result.metrics.steady_state = None
    result.metrics.goodput = []
    result.metrics.timeseries = {}
    result.startup = []
    return result


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0.0, "0 s"),
        (0.00085, "850 µs"),
        (0.0123, "12.3 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1.00 s"),
        (4.5678, "4.57 s"),
        (125.2, "2 min 05 s"),
    ],
)
def test_seconds(value: float | None, text: str) -> None:
    assert formatting.seconds(value) == text


def test_other_numbers() -> None:
    assert [formatting.whole_seconds(value) for value in (0.4, 59.6, 125.2)] == ["0 s", "1 min 00 s", "2 min 05 s"]
    values = (0.0, 0.0123, 4.5678, 45.6, 456.7, 1234.5, None)
    texts = ["0", "0.0123", "4.57", "45.6", "457", "1,234", "–"]
    assert [formatting.significant(value) for value in values] == texts
    assert [formatting.change(value) for value in (0.51, 1.042, 1.0, 2.5, None)] == [
        "−49%",
        "+4.2%",
        "±0.0%",
        "2.50×",
        "–",
    ]
    assert formatting.byte_size(1.5 * 2**30) == "1.50 GiB"
    shares = {1.0: "100.0%", 0.9996: "99.9%", 0.9896: "98.9%", 0.57: "57.0%", 0.0: "0.0%", None: "–"}
    assert {value: formatting.share(value) for value in shares} == shares, "what is missing is never rounded away"


def test_csv_has_raw_numbers_and_empty_fields() -> None:
    rows = list(csv.DictReader(io.StringIO(render_csv(samples.matrix()))))
    assert len(rows) == 24
    measured = next(row for row in rows if row["status"] == "ok")
    source = next(cell for cell in samples.matrix().results if cell.status == "ok")
    assert float(measured["ttft_p50_s"]) == METRICS["ttft_p50_s"].read(source)
    unsupported = next(row for row in rows if row["status"] == "unsupported")
    assert {unsupported[key] for key in METRICS} == {""}
    assert unsupported["reason"].startswith("'-"), "a spreadsheet must not take a text for a formula"


def test_markdown_fits_a_comment_and_says_problems_first() -> None:
    text = render_markdown(samples.matrix())
    assert len(text) < MAX_CHARACTERS
    assert text.index("### Problems") < text.index("### llama-3.1-8b")
    assert "| compile · TRITON\\_ATTN | 320 | 9.28 ms |" in text
    many = ResultSet(title="many", results=[cell for _ in range(60) for cell in samples.matrix().results])
    for number, cell in enumerate(many.results):
        cell.config.seed = number // 24
    assert len(render_markdown(many)) <= MAX_CHARACTERS
    assert "sections did not fit" in render_markdown(many)


def test_the_console_shows_every_status() -> None:
    console = Console(width=120, file=io.StringIO(), record=True)
    print_report(samples.matrix(), console)
    text = console.export_text()
    for word in ("1 failed", "8 unsupported", "client saturated", "out of memory", "needs the package flash-attn-4"):
        assert word in text


def test_unknown_is_a_dash_beside_what_is_known_in_html() -> None:
    text = FORMATS["html"](only(unknown_metrics(), samples.cell("compile", "TORCH_SDPA", 2.0)))
    table = text[text.index('id="cells"') : text.index('id="telemetry"')]
    first, second = re.findall(r"<tr class=.ok.>(.*?)</tr>", table, re.DOTALL)
    figures = re.findall(r'<td class="number">(.*?)</td>', first)
    assert set(figures) == {"–", "0", "400"}, "0 failed and 400 completed are known, the rest is not"
    assert "–" not in re.findall(r'<td class="number">(.*?)</td>', second)


def test_html_says_what_the_servers_said_of_themselves() -> None:
    result = samples.cell("eager", "auto", 2.0)
    assert result.server is not None
    result.server.attention_backend, result.server.num_blocks = "TORCH_SDPA", 1456
    text = FORMATS["html"](only(result))
    assert "TORCH_SDPA, bfloat16, 1,456 KV blocks of 64 tokens, version 0.1.0" in text


def test_a_metric_that_no_cell_has_is_not_a_column() -> None:
    text = FORMATS["html"](only(unknown_metrics()))
    table = text[text.index('id="cells"') : text.index('id="telemetry"')]
    assert re.findall(r'<td class="number">(.*?)</td>', table) == ["400", "0"]


def test_unknown_is_an_empty_field_in_csv() -> None:
    row = next(csv.DictReader(io.StringIO(FORMATS["csv"](only(unknown_metrics())))))
    assert row["ttft_p50_s"] == row["output_tokens_per_s"] == row["to_healthy_cold_s"] == ""


def test_markdown_says_when_results_come_from_several_commits() -> None:
    results = samples.matrix()
    assert "different commits" not in render_markdown(results)
    results.results[-1].provenance.git_commit = "f" * 40
    assert "results of 2 different commits (--resume kept earlier ones)" in render_markdown(results)


@pytest.mark.parametrize("name", ["md", "html"])
def test_what_was_left_out_repeated_or_approximated_is_said(name: str) -> None:
    cell = samples.cell("eager", "TORCH_SDPA", 2.0)
    assert cell.metrics is not None
    assert cell.workload is not None
    cell.metrics.excluded_warmup, cell.metrics.retries, cell.metrics.output_token_source = 7, 31, "events"
    cell.workload.notes += ["an earlier cell sent these prompts", EVIL]
    cell.workload.dropped = {"too long": 3}
    cell.reason = "all 12 requests were answered after 1 of 60 s"
    for text in (FORMATS[name](only(cell)), _printed(only(cell))):
        for words in ("7 warm-up and 0 cool-down", "31 attempts were made again", "count but from: events",
                      "earlier cell sent these", "3 × too long", "after 1 of 60 s"):  # fmt: skip
            assert words in text, words
    assert "<img" not in FORMATS[name](only(cell))


def test_answers_that_meet_no_slo_for_want_of_a_tpot_are_said() -> None:
    cell = samples.cell("eager", "TORCH_SDPA", 2.0)
    assert cell.metrics is not None
    assert "no TPOT" not in render_markdown(only(cell))
    cell.metrics.tpot_s.n = cell.metrics.completed - 3
    assert "3 × no TPOT, as all tokens of the answer came at once" in render_markdown(only(cell))
    cell.metrics.goodput[0].slo = "ttft:1s"
    assert "no TPOT" not in render_markdown(only(cell))


def test_long_remarks_stay_indented_on_a_narrow_screen() -> None:
    cell = samples.cell("eager", "TORCH_SDPA", 2.0)
    assert cell.workload is not None
    cell.workload.notes = ["word " * 60]
    console = Console(width=60, record=True, file=io.StringIO())
    print_report(only(cell), console)
    lines = console.export_text().partition("Remarks")[2].splitlines()[1:]
    assert len([line for line in lines if line.strip()]) > 4
    assert all(line.startswith("  ") for line in lines if line.strip())


def test_answers_shorter_than_forced_are_said() -> None:
    cell = samples.cell("eager", "TORCH_SDPA", 2.0)
    assert cell.metrics is not None

    def shown() -> str:
        return render_markdown(only(cell)).replace("\\", "")

    cell.metrics.throughput.output_tokens = cell.metrics.forced_output_tokens = 64_000
    assert "were forced" not in shown()
    cell.metrics.throughput.output_tokens, cell.metrics.shorter_answers = 1234, 390
    cell.metrics.completed, cell.metrics.failed = 399, 1
    said = "answers hold 1,234 output tokens instead of the 64,000 that were forced (390 shorter of 399): "
    assert f"{said}the server does not keep to ignore_eos" in shown()
    cell.metrics.output_token_source = "events"
    assert "ignore_eos, or counts that are not its own mislead" in shown()
    cell.metrics.shorter_answers, cell.metrics.longer_answers = 0, 2
    assert "(2 longer of 399): the server does not keep to max_tokens" in shown()


@pytest.mark.parametrize("name", ["md", "html", "console"])
def test_answers_without_a_token_are_said(name: str) -> None:
    cell = samples.cell("eager", "TORCH_SDPA", 2.0)
    assert cell.metrics is not None
    cell.metrics.completed = cell.metrics.ttft_s.n

    def shown() -> str:
        return " ".join((_printed(only(cell)) if name == "console" else FORMATS[name](only(cell))).split())

    assert "without any text" not in shown()
    cell.metrics.ttft_s.n -= 7
    assert f"7 of {cell.metrics.completed} completed answers came without any text or token" in shown()


@pytest.mark.parametrize("name", ["md", "html", "console"])
def test_goodput_is_shown_for_every_slo_that_was_stated(name: str) -> None:
    cell = samples.cell("eager", "TORCH_SDPA", 2.0)
    assert cell.metrics is not None
    cell.metrics.goodput = [
        Goodput(slo="ttft:200ms tpot:20ms", requests_per_s=1.873, share=0.9996, met=2499, total=2500),
        Goodput(slo="e2el:5s", requests_per_s=None, share=None, met=0, total=0),
    ]

    def shown(*cells: CellResult) -> str:
        return _printed(only(*cells)) if name == "console" else FORMATS[name](only(*cells))

    text = shown(cell)
    rows = [line for line in text.splitlines() if re.search(r"sharegpt-like · .*(ttft:200ms|e2el:5s)", line)]
    parts = [[part for part in re.split(r"<[^>]*>|\||\s{2,}", line) if part.strip()][-4:] for line in rows]
    assert [[part.strip() for part in row] for row in parts] == [
        ["ttft:200ms tpot:20ms", "1.87", "99.9%", "2,499 of 2,500"],
        ["e2el:5s", "–", "–", "0 of 0"],
    ]
    other = samples.cell("compile", "TORCH_SDPA", 2.0, model="another")
    assert "another · sharegpt-like" in shown(cell, other), "of several models each row says which"
    cell.metrics.goodput = []
    assert "SLO" not in shown(cell).partition('id="provenance"')[0]


def test_the_highest_goodput_is_a_headline() -> None:
    view = View(samples.matrix())
    tile = next(tile for tile in tiles(view) if tile.label == "Highest goodput")
    best = max(METRICS["goodput_requests_per_s"].read(cell) or 0.0 for cell in view.with_status("ok"))
    assert tile.value == f"{formatting.significant(best)} req/s"


def _printed(results: ResultSet) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    print_report(results, console)
    return console.export_text()


def test_unknown_is_a_dash_in_markdown() -> None:
    text = FORMATS["md"](only(unknown_metrics()))
    assert "| eager · TORCH\\_SDPA | – | – | – | – | – |\n" in text
    assert "Cold start" not in text


def test_a_sweep_is_one_table() -> None:
    results = [samples.cell("eager", "TORCH_SDPA", rate) for rate in (1, 2, 4)]
    text = render_markdown(ResultSet(title="sweep", results=results))
    assert text.count("| TTFT p50 |") == 1
    assert re.findall(r"^\| (rate-\d)", text, re.M) == ["rate-1", "rate-2", "rate-4"]
    two = [*results, samples.cell("compile", "TORCH_SDPA", 4)]
    assert render_markdown(ResultSet(title="matrix", results=two)).count("### llama-3.1-8b: ") == 3


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_an_empty_set_renders(name: str) -> None:
    assert FORMATS[name](ResultSet(title="empty", results=[]))


def evil_cell() -> CellResult:
    result = samples.cell("eager", "TORCH_SDPA", 2.0, model=EVIL, failed=1)
    result.config.workload["name"] = EVIL
    result.cell_id = EVIL
    result.metrics.errors = {EVIL: 1}  # type: ignore[union-attr]
    result.telemetry = {"t": [0.0], EVIL: [1.0]}
    result.startup[0].phases[0].name = EVIL
    result.provenance.command = [EVIL]
    result.provenance.gpus = [{"name": EVIL}]
    return result


def test_html_takes_nothing_from_outside_as_markup() -> None:
    failed = samples.cell("compile", "TORCH_SDPA", 2.0, model=EVIL, status="failed", reason=EVIL, log_tail=[EVIL])
    page = render_html(ResultSet(title=EVIL, results=[evil_cell(), failed]))
    own = page[: page.index("<script>/**")] if "<script>/**" in page else page
    assert "<img" not in own
    assert page.count("</script>") == page.count("<script>") + page.count('<script type="application/json"')
    figures = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page, re.DOTALL)
    assert figures is not None
    assert "<" not in figures[1]
    names = json.dumps(json.loads(figures[1]))
    assert "<img" not in names, "Plotly reads HTML in labels"
    assert "&lt;img" in names


def test_markdown_and_console_take_nothing_from_outside_as_markup() -> None:
    results = ResultSet(title=EVIL, results=[evil_cell()])
    text = render_markdown(results)
    assert "<img" not in text.replace("`<img", "")
    assert "@everyone" not in text.replace("`", "") or "@\u200beveryone" in text
    console = Console(width=200, file=io.StringIO())
    print_report(
        only(samples.cell("eager", "[red]x[/red]", 2.0, model="[/nope]", status="failed", reason="[b]")), console
    )


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner)))
def test_embedded_json_reads_back_and_cannot_end_its_element(value: Any) -> None:
    text = embed_json(value)
    assert json.loads(text) == value
    assert not set("<>&\u2028\u2029") & set(text)


def test_embedded_json_refuses_what_is_not_json() -> None:
    with pytest.raises(ValueError, match="JSON"):
        embed_json([float("nan")])


@pytest.mark.parametrize("name", ["md", "html"])
def test_one_token_answers_are_measured_by_all_tokens(name: str) -> None:
    result = samples.cell("eager", "TORCH_SDPA", 2.0)
    assert result.workload is not None
    assert result.metrics is not None
    result.workload.output_tokens_requested = result.workload.requests
    total = METRICS["total_tokens_per_s"]
    text = FORMATS[name](only(result))
    if name == "md":
        assert f"|  | {total.label} | TTFT p50 |" in text
        assert f"| eager · TORCH\\_SDPA | {total.text(result)} |" in text
    view = View(only(result))
    figure = chart_sections(view, FigureMaker(view))[0].figures[0]
    assert figure.subtitle.startswith("Total tok/s")


def test_logs_get_a_width_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert report_console().width == 140
    monkeypatch.setenv("COLUMNS", "70")
    assert report_console().width == 70


@pytest.mark.parametrize("name", ["html", "md", "console"])
def test_reference_figures_stand_beside_ours(name: str) -> None:
    results = samples.matrix()
    if name == "console":
        console = Console(width=160, file=io.StringIO(), record=True)
        print_report(results, console)
        text = console.export_text()
    else:
        text = FORMATS[name](results)
    for word in ("vLLM 0.24.0", "4.71 ms", "3.45 ms", "3.80 ms", "0.67×"):
        assert word in text, word


def test_a_target_is_met_missed_or_unknown() -> None:
    results = samples.matrix()
    assert results.index is not None
    rows = reference_rows(View(results))
    assert [(row.reference, row.tone) for row in rows] == [("19.6 ms", "better"), ("4.71 ms", "better")]
    results.index.reference[0].target = 0.001
    results.index.reference[1].cell_id = "not/run"
    rows = reference_rows(View(results))
    assert [row.tone for row in rows] == ["worse", "same"]
    assert (rows[1].ours, rows[1].ratio) == ("–", "–")


def test_charts_of_the_sample_matrix() -> None:
    view = View(samples.matrix())
    sections = {section.id: section.figures for section in chart_sections(view, FigureMaker(view))}
    assert list(sections) == ["throughput", "ttft", "percentiles", "frontier", "startup", "time"]
    frontier = sections["frontier"][0]
    assert [len(trace["x"]) for trace in frontier.views["TTFT p50"]["data"]] == [4, 4, 4, 3]
    percentiles = sections["percentiles"][0]
    assert set(percentiles.views) >= {"TTFT|rate-2", "E2EL|rate-24"}
    (startup,) = sections["startup"]
    totals = [0.0] * 8
    for trace in startup.views[""]["data"]:
        for row, seconds in zip(trace["y"], trace["x"], strict=True):
            totals[row] += seconds or 0.0
    expected = [start.to_first_token_s for cell in view.servers for start in cell.startup]
    assert sorted(totals) == pytest.approx(sorted(value or 0.0 for value in expected))


def test_start_up_phases_are_drawn_in_time_order_and_slivers_together() -> None:
    rows = [{"a": 1.0, "c": 1.0, UNACCOUNTED: 1.0, "d": 1.0}, {"a": 1.0, "b": 1.0, "c": 1.0}, {SHORTER: 1.0, "e": 2.0}]
    assert order_phases(rows) == ["e", "a", "b", "c", "d", SHORTER, UNACCOUNTED]
    result = samples.cell("compile", "TORCH_SDPA", 2.0)
    figure = FigureMaker(View(only(result))).startup("llama-3.1-8b")
    assert figure is not None
    names = [trace["name"] for trace in figure.views[""]["data"]]
    assert names.index("weights") < names.index("compile/dynamo") < names.index("compile/inductor")
    assert names[-2:] == [SHORTER, UNACCOUNTED]
    assert "first token" not in names, "30 ms of 13 s are a sliver"


def test_a_warm_start_that_compiled_again_is_told_from_a_warm_one() -> None:
    result = samples.cell("compile", "TORCH_SDPA", 2.0)
    warm = next(start for start in result.startup if start.kind == "warm")
    texts = []
    for state in ("hit", "miss"):
        next(phase for phase in warm.phases if "piece" in phase.name).attributes = {"cache": state}
        figure = FigureMaker(View(only(result))).startup("llama-3.1-8b")
        assert figure is not None
        texts.append(json.dumps(figure.views[""]["layout"]["annotations"]))
    assert ["missed in the cache" in text for text in texts] == [False, True]


def test_a_run_of_moments_has_no_course_over_time() -> None:
    result = samples.cell("eager", "TORCH_SDPA", 2.0)
    assert result.metrics is not None
    result.metrics.timeseries = {"t": [0.0, 1.0], "output_tokens_per_s": [55.0, 9.0]}
    view = View(only(result))
    assert FigureMaker(view).over_time(view.panels[0]) is None


def test_percentile_curves_end_where_the_sample_does() -> None:
    result = samples.cell("eager", "TORCH_SDPA", 2.0)
    assert result.metrics is not None
    result.metrics.ttft_s.n = 16
    view = View(only(result))
    (trace,) = FigureMaker(view).percentiles(view.panels[0]).views["TTFT"]["data"]
    assert trace["customdata"][-1] == "p90"


def arriving(name: str, rate: float, mode: str = "eager", **more: Any) -> CellResult:
    result = samples.cell(mode, "TORCH_SDPA", rate)
    result.config.arrival = {"name": name, "rate": rate, **more}
    label = f"rate-{rate:g}" if name == "poisson" else f"{name}-rate-{rate:g}-burstiness-{more['burstiness']:g}"
    result.cell_id = f"{result.cell_id.rpartition('/')[0]}/{label}"
    return result


def test_a_frontier_joins_the_loads_of_one_sweep_in_order_and_no_others() -> None:
    view = View(only(arriving("gamma", 2.0, burstiness=0.25), arriving("poisson", 8.0), arriving("poisson", 2.0)))
    (trace,) = FigureMaker(view).frontier(view.panels[0]).views["TTFT p50"]["data"]
    names = ["gamma-rate-2-burstiness-0.25", "", "rate-2", "rate-8"]
    assert trace["customdata"] == names
    assert [x is None for x in trace["x"]] == [y is None for y in trace["y"]] == [not name for name in names]


def test_points_that_no_line_joins_still_tell_the_modes_apart() -> None:
    view = View(only(*(arriving("poisson", rate, mode) for rate in (2.0, 8.0) for mode in ("compile", "eager"))))
    traces = FigureMaker(view).frontier(view.panels[0]).views["TTFT p50"]["data"]
    assert [trace["marker"]["symbol"] for trace in traces] == ["circle", "circle-open"]


def test_long_names_below_bars_take_lines_and_not_the_room_of_the_chart() -> None:
    view = View(only(arriving("gamma", 2.0, burstiness=0.25), arriving("poisson", 2.0)))
    (trace,) = FigureMaker(view).bars(view.panels[0], METRICS["ttft_p50_s"]).views[""]["data"]
    assert trace["x"] == ["gamma<br>rate-2<br>burstiness-0.25", "rate-2"]


def test_long_latencies_are_drawn_in_seconds() -> None:
    result = samples.cell("eager", "TORCH_SDPA", 2.0)
    assert result.metrics is not None
    result.metrics.ttft_s = samples.distribution(25.0, 0.3)
    view = View(only(result))
    for figure, key in ((FigureMaker(view).percentiles, "TTFT"), (FigureMaker(view).frontier, "TTFT p50")):
        drawn = figure(view.panels[0]).views[key]
        assert drawn["layout"]["yaxis"]["title"]["text"] == "s"
        assert 5 < min(drawn["data"][0]["y"]) < 30


def test_a_comparison_names_what_differs_and_what_does_not() -> None:
    labels = {comparison.label for comparison in View(samples.matrix()).comparisons()}
    assert "compile vs eager · TRITON_ATTN" in labels
    assert "TORCH_SDPA vs TRITON_ATTN · compile" in labels


def test_a_choice_is_compared_with_what_it_replaces() -> None:
    view = View(samples.matrix())
    modes = next(choice for choice in summarise(view) if choice.other == "compile")
    assert (modes.base, modes.pairs) == ("eager", 6)
    assert modes.ratios["tpot_p50_s"] < 1
    assert modes.seconds["to_healthy_cold_s"] > 0
    tones = {label: tone for label, _, tone in choice_text(modes)}
    assert tones["TPOT p50"] == "better"
    assert tones["Cold start"] == "worse"
    assert all({c.base.status, c.other.status} == {"ok"} for c in view.comparisons())
