"""The bounds that a burst's throughput and the TTFT of random arrivals are compared with."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest

from server.models.registry import PRESETS

SCRIPT = runpy.run_path(str(Path(__file__).resolve().parents[2] / "scripts" / "load_limit.py"))
BANDWIDTH, FLOPS = 4e12, 6e14
CARD = SCRIPT["Card"](PRESETS["llama-3.1-8b"], BANDWIDTH, FLOPS)
WEIGHTS = 8_030_261_248 - 128_256 * 4096  # the embedding is not read
INNER = WEIGHTS - 128_256 * 4096  # prompts sample once, which is left out
TOKEN = 131_072 / BANDWIDTH  # the keys and values of one token


def test_burst_adds_up_prompts_weights_and_caches() -> None:
    seconds, first = SCRIPT["burst_s"](CARD, np.array([100, 300]), np.array([1, 3]))
    assert first == pytest.approx(2 * 400 * INNER / FLOPS)
    # The first request ended with its prompt; the second runs two more steps over 301 and 302 tokens.
    assert seconds - first == pytest.approx(2 * 2 * WEIGHTS / BANDWIDTH + (301 + 302) * TOKEN)
    many, none = SCRIPT["burst_s"](CARD, np.zeros(5000), np.full(5000, 2))
    assert none == 0
    assert many == pytest.approx(2 * 5000 * WEIGHTS / FLOPS + 5000 * TOKEN), "products take longer"


def test_an_arrival_waits_for_the_step_that_runs() -> None:
    prompts, outputs, arrivals = np.array([1000, 10, 10]), np.array([3, 1, 1]), np.array([5.0, 5.001, 9.0])
    long, short, alone = SCRIPT["ttft_s"](CARD, prompts, outputs, arrivals)
    read = 2 * WEIGHTS / BANDWIDTH
    assert long == pytest.approx(2 * 1000 * INNER / FLOPS)
    assert short == pytest.approx(long - 0.001 + read + 1001 * TOKEN), "with one decode, bound by the weights"
    assert alone == pytest.approx(read)
