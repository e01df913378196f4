"""Gap statistics are numpy's, at the records' resolution."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchctl.loadgen.histogram import GapHistogram
from reports.schema import PERCENTILES

GAPS = st.lists(st.integers(0, 20_000_000), min_size=1, max_size=60)


@settings(deadline=None)
@given(GAPS, st.integers(1, 4))
def test_statistics_are_those_of_numpy(gaps: list[int], parts: int) -> None:
    histogram = GapHistogram()
    for part in np.array_split(np.array(gaps, np.int64), parts):
        histogram.add(part)
    found = histogram.distribution("none")
    values = np.array(gaps) / 1e6
    assert found.n == len(gaps)
    assert (found.min, found.max) == (values.min(), values.max())
    assert found.mean == pytest.approx(values.mean())
    assert found.std == pytest.approx(values.std(), abs=1e-9)
    expected = np.percentile(values, PERCENTILES)
    assert list(found.percentiles.values()) == pytest.approx(expected.tolist())


def test_weights_repeat_a_gap() -> None:
    histogram = GapHistogram()
    histogram.add(np.array([1000, 10_000_000]), np.array([3, 2]))
    found = histogram.distribution("none")
    assert found.n == 5
    assert found.percentiles["p50"] == 0.001
    assert found.percentiles["p75"] == 10.0


def test_nothing_is_null_with_its_reason() -> None:
    found = GapHistogram().distribution("no gaps")
    assert (found.n, found.mean, found.percentiles, found.reason) == (0, None, {}, "no gaps")
