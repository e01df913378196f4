"""Compiled mode on CUDA: equal to eager for every family, nothing compiled after readiness, warm starts load."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from server.sampling_params import SamplingParams
from tests.gpu.in_process_worker import (
    FAMILIES,
    MAX_NUM_SEQS,
    TOKEN_BUDGET,
    forced_logprobs,
    forget,
    free,
    model_folder,
    some_prompts,
    start_worker,
)
from tests.unit.worker.harness import Driver

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

TOLERANCE = 0.05
"""Of log-probabilities in bfloat16, between kernels that round in other places."""


@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_equals_eager(family: str, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", family)
    prompts = some_prompts([1, 30, 7, 64, 2, 90])
    eager = start_worker(tmp_path, folder, mode="eager")
    expected = {chunk: forced_logprobs(eager, prompts, chunk) for chunk in (1, 26)}
    free(eager)
    compiled = start_worker(tmp_path, folder)
    try:
        for chunk, rows in expected.items():
            for got, wanted in zip(forced_logprobs(compiled, prompts, chunk), rows, strict=True):
                torch.testing.assert_close(got, wanted, atol=TOLERANCE, rtol=0)
    finally:
        free(compiled)


@pytest.mark.parametrize("custom_ops", ["on", "off"])
def test_custom_ops_compute_the_same(custom_ops: str, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", "qwen3")
    prompts = some_prompts([1, 30, 7, 64])
    expected = {}
    for mode in ("eager", "compile"):
        worker = start_worker(tmp_path, folder, mode=mode, custom_ops=custom_ops)  # type: ignore[arg-type]
        for chunk in (1, 26):
            rows = forced_logprobs(worker, prompts, chunk)
            for got, wanted in zip(rows, expected.setdefault(chunk, rows), strict=True):
                torch.testing.assert_close(got, wanted, atol=TOLERANCE, rtol=0)
        free(worker)


def test_no_batch_compiles_after_readiness(tmp_path: Path) -> None:
    """Every number of tokens up to the budget, and every number of decoding sequences, in random order."""
    worker = start_worker(tmp_path)
    try:
        shapes = [("prefill", count) for count in range(1, TOKEN_BUDGET + 1)]
        shapes += [("decode", count) for count in range(1, MAX_NUM_SEQS + 1)]
        random.Random(3).shuffle(shapes)
        greedy = SamplingParams(max_tokens=4, temperature=0.0)
        random_top = SamplingParams(max_tokens=4, temperature=1.0, top_k=5, top_p=0.9, seed=1)
        for number, (kind, count) in enumerate(shapes):
            driver = Driver(worker.runner)
            sampling = random_top if number % 3 == 0 else greedy
            lengths = [count] if kind == "prefill" else [2] * count
            names = [f"q{index}" for index in range(len(lengths))]
            for name, length in zip(names, lengths, strict=True):
                driver.add(name, list(range(length)), sampling)
            driver.step(dict(zip(names, lengths, strict=True)))
            driver.step(dict.fromkeys(names, 1))
            forget(driver)
        assert (worker.counters.num_compilations, worker.counters.num_jit_events) == (0, 0)
    finally:
        free(worker)


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What a cold and then a warm start did, each in a process of its own."""
    directory = tmp_path_factory.mktemp("starts")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("TRITON", "TORCHINDUCTOR"))}
    environment["BENCHCTL_CACHE_DIR"] = str(directory / "caches")
    command = [sys.executable, "-m", "tests.gpu.warm_start", str(directory)]
    results = []
    for _ in range(2):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        results.append(json.loads(done.stdout.splitlines()[-1]))
    print(json.dumps(results, indent=1))
    return results


def test_cold_start_compiles_three_pieces(starts: list[dict[str, Any]]) -> None:
    cold, _ = starts
    assert cold["cache"][0] == "miss"
    assert cold["compilations"] == 3


def test_warm_start_compiles_and_benchmarks_nothing(starts: list[dict[str, Any]]) -> None:
    cold, warm = starts
    assert warm["cache"] == ["hit"]
    assert (warm["compilations"], warm["frames"], warm["benchmarks"]) == (0, 0, 0)
    assert warm["checksum"] == pytest.approx(cold["checksum"], rel=1e-3)
