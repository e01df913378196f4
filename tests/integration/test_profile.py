"""`benchctl serve --profile`: one trace with every process in it."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import httpx

from tests.integration.serving import start_server


def test_profile_of_a_running_server(tmp_path: Path) -> None:
    folder = tmp_path / "profile"
    options = ["--enforce-eager", "--profile", str(folder), "--profile-skip", "2", "--profile-steps", "5"]
    with start_server(tmp_path, "tiny", *options) as server:
        server.wait_ready()
        body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 16, "ignore_eos": True}
        response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        assert response.json()["usage"]["completion_tokens"] == 16
        metrics = httpx.get(f"{server.url}/metrics").text
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
    assert 'phase="detokenize"' in metrics
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    names = {event["name"] for event in events}
    assert {"schedule", "send", "update", "detokenize"} <= names
    assert any(name.startswith("aten::") for name in names), "the worker's operators are in it"
    spans = [event for event in events if event.get("cat") == "benchctl"]
    assert {event["args"]["step"] for event in spans} <= set(range(3, 8))
    assert f"profile: {folder / 'trace.json'}" in server.log_text()


def test_a_profile_that_never_began_is_said(tmp_path: Path) -> None:
    with start_server(tmp_path, "tiny", "--enforce-eager", "--profile", str(tmp_path / "profile")) as server:
        server.wait_ready()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
    assert "no profile: the server ran fewer than 71 steps" in server.log_text()
