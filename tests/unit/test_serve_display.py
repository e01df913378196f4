"""What `benchctl serve` writes while it starts."""

from __future__ import annotations

import pytest

from benchctl.serve_display import ConsoleObserver
from server.child import SpanMessage
from server.timeline import Span


def test_a_log_tells_of_long_parts_of_phases(capsys: pytest.CaptureFixture[str]) -> None:
    observer = ConsoleObserver()
    for name, milliseconds in [("imports", 20), ("compile/split", 20), ("compile/isa-probe", 9_800), ("model", 1)]:
        observer.on_status("worker-0", SpanMessage(Span("worker-0", name, 0, milliseconds * 1_000_000)))
    assert capsys.readouterr().err == "worker-0   imports: 0.02 s\nworker-0   compile/isa-probe: 9.80 s\n"
