"""The bound that a burst's throughput is compared with."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest

from server.models.registry import PRESETS

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "burst_limit.py"


def test_limit_adds_up_prompts_weights_and_caches() -> None:
    limit = runpy.run_path(str(SCRIPT))["limit"]
    config = PRESETS["llama-3.1-8b"]
    bandwidth, flops = 4e12, 6e14
    weights = 8_030_261_248 - 128_256 * 4096  # the embedding is not read
    inner = weights - 128_256 * 4096  # prompts sample once, which is left out
    seconds, first = limit(config, np.array([100, 300]), np.array([1, 3]), bandwidth, flops)
    assert first == pytest.approx(2 * 400 * inner / flops)
    # The first request ended with its prompt; the second runs two more steps over 301 and 302 tokens of 128 KiB.
    assert seconds - first == pytest.approx(2 * 2 * weights / bandwidth + (301 + 302) * 131072 / bandwidth)
    many, none = limit(config, np.zeros(5000), np.full(5000, 2), bandwidth, flops)
    assert none == 0
    assert many == pytest.approx(2 * 5000 * weights / flops + 5000 * 131072 / bandwidth), "products take longer"
