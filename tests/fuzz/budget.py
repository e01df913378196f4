"""How long fuzzers run: a short, repeatable form by default, a long and random one on demand."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

EXAMPLES = int(os.environ.get("BENCHCTL_FUZZ_EXAMPLES", "0"))
"""Examples per fuzzer, with a new seed in every run; 0: each fuzzer's own small number, always the same."""


def fuzz(examples: int = 100) -> settings:
    """Settings of a fuzzer whose short form tries `examples` inputs."""
    return settings(
        max_examples=EXAMPLES or examples,
        derandomize=not EXAMPLES,
        database=None,
        deadline=5000,  # a single input that takes longer is a finding
        suppress_health_check=list(HealthCheck),
    )
