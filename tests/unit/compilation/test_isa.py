"""What is known of the CPU's instructions is not tried out again."""

from __future__ import annotations

import pytest
from torch._inductor import cpu_vec_isa

from server.compilation import isa

TRIED: list[str] = []


@pytest.fixture(autouse=True)
def slow_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor chooses anew; programs are noted instead of run."""

    def check_build(candidate: cpu_vec_isa.VecISA, code: str) -> bool:
        TRIED.append(type(candidate).__name__)
        return True

    TRIED.clear()
    monkeypatch.setattr(isa, "_results", {})
    monkeypatch.setattr(cpu_vec_isa.VecISA, "check_build", check_build)


def _checks(candidate: cpu_vec_isa.VecISA) -> list[bool]:
    return [candidate.check_build(code) for code in ("first program", "second program")]


@pytest.mark.skipif(not cpu_vec_isa.supported_vec_isa_list, reason="no vector instructions on this CPU")
def test_results_are_recorded_and_replayed() -> None:
    candidate = cpu_vec_isa.supported_vec_isa_list[0]
    with isa.known_results({}) as results:
        assert _checks(candidate) == [True, True]
        assert _checks(candidate) == [True, True]
    assert len(TRIED) == len(results) == 2
    stored = dict(results) | dict.fromkeys(list(results)[:1], False)
    isa._results.clear()
    with isa.known_results(stored):
        assert _checks(candidate) == [False, True]
    assert len(TRIED) == 2
    assert _checks(candidate) == [True, True]  # outside of the block Inductor is as it was
    assert len(TRIED) == 4
