"""The search for the highest rate, on servers whose edge is known."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchctl.loadgen.sweep import find_max_rate, judge, parse_values
from reports.schema import CellConfig, CellResult, Goodput, Provenance
from server.errors import UserError
from tests.unit.reports import samples


def result(share: float, status: str = "ok") -> CellResult:
    metrics = samples.load_metrics(1, 2)
    metrics.goodput = [
        Goodput(slo="ttft:1s", requests_per_s=1.0, share=1.0, met=100, total=100),
        Goodput(slo="tpot:1s", requests_per_s=1.0, share=share, met=int(share * 100), total=100),
    ]
    return CellResult(
        cell_id="c",
        config=CellConfig(model="m", workload={}, arrival={}),
        config_digest="",
        status=status,  # type: ignore[arg-type]
        metrics=metrics,
        provenance=Provenance(started_at="", benchctl_version="", python="", platform=""),
    )


def edge_at(limit: float) -> Callable[[float], CellResult]:
    return lambda rate: result(1.0 if rate <= limit else 0.5)


@pytest.mark.parametrize(("limit", "start"), [(37.0, 1.0), (37.0, 1000.0), (0.3, 1.0), (1.0, 1.0), (5000.0, 64.0)])
def test_the_edge_is_found_to_five_percent_from_either_side(limit: float, start: float) -> None:
    found = find_max_rate(edge_at(limit), start)
    assert found.max_rate is not None
    assert limit / 1.05 <= found.max_rate <= limit
    assert len(found.probes) <= 24
    assert found.limited_by == "50.0% within tpot:1s"
    assert found.max_rate in [probe.rate for probe in found.probes if probe.met]


def test_no_rate_may_meet_it() -> None:
    found = find_max_rate(edge_at(0.0), 1.0)
    assert found.max_rate is None
    assert min(probe.rate for probe in found.probes) == 0.01


def test_a_server_without_an_edge_ends_the_search() -> None:
    found = find_max_rate(edge_at(1e18), 1.0)
    assert found.limited_by == "stopped after 24 loads"
    assert found.max_rate == 2.0**23


def test_an_interrupt_ends_the_search_with_what_it_has() -> None:
    seen: list[float] = []

    def run(rate: float) -> CellResult | None:
        seen.append(rate)
        return result(1.0) if len(seen) < 3 else None

    found = find_max_rate(run, 1.0)
    assert (found.max_rate, found.limited_by) == (2.0, "interrupted")


def test_a_server_that_does_not_start_ends_the_search() -> None:
    broken = result(1.0, "failed")
    broken.metrics, broken.reason = None, "no device"
    found = find_max_rate(lambda rate: broken, 1.0, over=lambda: True)
    assert (found.max_rate, found.limited_by, len(found.probes)) == (None, "no device", 1)


def test_a_server_that_dies_ends_the_search_with_what_it_has() -> None:
    gone = result(0.0, "failed")
    gone.reason = "takes no connections any more"
    seen: list[float] = []

    def run(rate: float) -> CellResult:
        seen.append(rate)
        return result(1.0) if len(seen) < 3 else gone

    found = find_max_rate(run, 1.0, over=lambda: len(seen) == 3)
    assert (found.max_rate, found.limited_by, len(found.probes)) == (2.0, "takes no connections any more", 3)
    assert found.sent_rate == pytest.approx(2 * 0.998), "that of the sample"


def test_a_run_that_cannot_be_trusted_does_not_pass() -> None:
    assert judge(result(0.99))[0]
    assert not judge(result(0.98))[0]
    assert judge(result(1.0, "invalid")) == (False, "invalid")


def test_values_parse() -> None:
    assert parse_values("1, 2,2,4.5,", "--x") == [1.0, 2.0, 4.5]
    for text in ("", "1,x", "0", "-1", "inf", "nan"):
        with pytest.raises(UserError, match="--x"):
            parse_values(text, "--x")
