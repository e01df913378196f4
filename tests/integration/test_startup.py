"""`benchctl startup`, `benchctl cache` and the start-up report of a real server, on the smallest model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.integration.serving import Server, start_server

SMALL = ("--max-model-len", "256", "--max-num-batched-tokens", "64", "--num-gpu-blocks-override", "32")


def benchctl(*arguments: str, cache: Path, code: int = 0) -> str:
    """Run a command; its output."""
    done = subprocess.run(
        [sys.executable, "-m", "benchctl", *arguments],
        env={**os.environ, "BENCHCTL_CACHE_DIR": str(cache), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == 0 else done.stderr


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def compiled(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server in compiled mode; its start fills the cache."""
    directory = tmp_path_factory.mktemp("serve")
    files = ("--startup-json", str(directory / "startup.json"), "--startup-trace", str(directory / "trace.json"))
    with start_server(directory, "tiny", *SMALL, *files, env={"BENCHCTL_CACHE_DIR": str(cache)}) as server:
        server.wait_ready()
        yield server


def test_the_start_is_accounted_for(compiled: Server) -> None:
    report = httpx.get(f"{compiled.url}/v1/startup").raise_for_status().json()
    total = report["healthy_ns"] - report["exec_ns"]
    assert 0 <= report["unaccounted_ns"] < 0.05 * total
    names = {(span["process"], span["name"]) for span in report["spans"]}
    for phase in ("spawn", "imports", "weights", "compile/dynamo", "compile/inductor/piece-2", "kv-cache", "warm-up"):
        assert ("worker-0", phase) in names
    assert all(report["exec_ns"] <= s["start_ns"] <= s["end_ns"] <= report["healthy_ns"] for s in report["spans"])
    folder = compiled.log.parent
    assert json.loads((folder / "startup.json").read_text())["exec_ns"] == report["exec_ns"]
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert {"compile/dynamo", "weights"} <= {event["name"] for event in events if event["ph"] == "X"}


def test_nothing_compiles_while_serving(compiled: Server) -> None:
    with httpx.Client(base_url=compiled.url, timeout=60) as client:
        for length in (1, 2, 63, 7, 64, 33):
            body = {"model": "tiny", "prompt": list(range(length)), "max_tokens": 3, "temperature": 0.0}
            client.post("/v1/completions", json=body).raise_for_status()
        lines = client.get("/metrics").text.splitlines()
    for name in ("num_compilations", "num_jit_events"):
        values = [line.split()[-1] for line in lines if line.startswith(f"benchctl:{name}")]
        assert values
        assert {float(value) for value in values} == {0.0}


@pytest.mark.usefixtures("compiled")
def test_the_cache_is_listed_and_explained(cache: Path) -> None:
    document = json.loads(benchctl("cache", "ls", "--json", cache=cache))
    (entry,) = document["entries"]
    assert entry["factors"]["token_budget"] == "64"
    assert entry["key"][:12] in benchctl("cache", "ls", cache=cache)
    assert benchctl("serve", "tiny", *SMALL, "--explain-cache", cache=cache).startswith("hit: ")
    changed = ("--max-model-len", "256", "--max-num-batched-tokens", "32")
    explained = benchctl("serve", "tiny", *changed, "--explain-cache", cache=cache).splitlines()
    assert explained[0].startswith("miss: ")
    assert explained[1:] == ["  token_budget: 64 -> 32"]
    assert (
        benchctl("serve", "tiny", "--enforce-eager", "--explain-cache", cache=cache) == "eager mode compiles nothing\n"
    )


@pytest.mark.usefixtures("compiled")
def test_a_warm_server_loads_what_the_first_one_stored(cache: Path, tmp_path: Path) -> None:
    with start_server(tmp_path, "tiny", *SMALL, env={"BENCHCTL_CACHE_DIR": str(cache)}) as server:
        server.wait_ready()
        spans = httpx.get(f"{server.url}/v1/startup").raise_for_status().json()["spans"]
    names = {span["name"]: span.get("attributes", {}) for span in spans}
    assert names["compile/fetch"] == {"cache": "hit"}
    assert "compile/dynamo" not in names
    removed = benchctl("cache", "clear", cache=cache)
    assert removed.startswith("removed 1 compiled graph (")
    assert json.loads(benchctl("cache", "ls", "--json", cache=cache))["entries"] == []


def test_startup_reports_cold_and_warm(tmp_path: Path) -> None:
    """In eager mode, which is quick; the kinds differ in nothing that this machine shows."""
    output = tmp_path / "results"
    arguments = ("startup", "tiny", "--mode", "eager", "-n", "1", "--format", "json", "-o", str(output), "--", *SMALL)
    document = json.loads(benchctl(*arguments, cache=tmp_path / "cache"))
    assert [start["kind"] for start in document["result"]["startup"]] == ["cold", "warm"]
    summary = document["summary"]
    for kind in ("cold", "warm"):
        phases = sum(row["seconds"][kind]["median"] for row in summary["phases"] if kind in row["seconds"])
        assert phases == pytest.approx(summary["to_first_token"][kind]["median"], rel=1e-6)
        assert summary["unaccounted"][kind]["median"] < summary["to_healthy"][kind]["median"]
    assert {path.name for path in (output / "logs").iterdir()} == {"cold-1.log", "warm-1.log"}
    assert {"report.html", "report.md", "report.csv"} <= {path.name for path in output.iterdir()}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tiny", "--format", "xml"), "--format xml: give one of table, json, md, csv"),
        (("tiny", "--", "stray"), "'stray': belongs to no option"),
        (("tiny", "-n", "1", "--", "--max-model-len", "999999"), "--max-model-len 999999"),
    ],
)
def test_startup_says_in_one_line_what_is_wrong(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    error = benchctl("startup", *arguments, cache=tmp_path, code=2)
    assert message in error
    assert "Traceback" not in error
