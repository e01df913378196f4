"""When a server is started again, and after which pause."""

from __future__ import annotations

import signal
import threading

import pytest

from server.restart import LONGEST_PAUSE_S, STEADY_S, Outcome, pause_for, run_with_restarts


def play(*outcomes: Outcome, interrupt_at: int | None = None) -> tuple[int, list[float]]:
    """Exit code and announced pauses of a server whose runs end like this."""
    runs = iter(outcomes)
    pauses: list[float] = []
    code = run_with_restarts(
        lambda: next(runs),
        pauses.append,
        lambda _: 143 if interrupt_at is not None and len(pauses) > interrupt_at else None,
    )
    assert next(runs, None) is None, "every run was started"
    return code, pauses


def test_pauses_double_up_to_a_minute() -> None:
    code, pauses = play(*[Outcome(1, 5.0)] * 9, Outcome(0, 5.0))
    assert (code, pauses) == (0, [1, 2, 4, 8, 16, 32, LONGEST_PAUSE_S, LONGEST_PAUSE_S, LONGEST_PAUSE_S])


def test_a_steady_run_resets_the_pause() -> None:
    assert play(*[Outcome(1, 5.0)] * 3, Outcome(1, STEADY_S), Outcome(0, 1.0))[1] == [1, 2, 4, 1]


@pytest.mark.parametrize("code", [0, 130, 143])
def test_only_a_failure_is_repeated(code: int) -> None:
    assert play(Outcome(code, 5.0)) == (code, [])


def test_what_never_worked_is_not_repeated_and_what_once_did_is() -> None:
    assert play(Outcome(1, None)) == (1, [])
    assert play(Outcome(2, None)) == (2, [])
    assert play(Outcome(1, 1.0), Outcome(1, None), Outcome(2, None), Outcome(0, 1.0)) == (0, [1, 2, 4])


def test_a_signal_ends_the_pause_and_the_server() -> None:
    assert play(Outcome(1, 1.0), Outcome(1, 1.0), interrupt_at=1) == (143, [1, 2])


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_real_signals_end_a_real_pause(number: signal.Signals, code: int) -> None:
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(0.1, signal.pthread_kill, (main, number))
    # Were it not blocked yet when it comes, the handler would end the test run.
    signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        timer.start()
        assert pause_for(30.0) == code
    finally:
        timer.join()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    assert pause_for(0.01) is None
