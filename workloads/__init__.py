"""Workloads: seeded, pure functions from a specification to a list of requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from server.errors import UserError
from workloads.base import Workload
from workloads.custom import build_custom
from workloads.parameters import near_matches
from workloads.rng import check_seed
from workloads.sharegpt import build_sharegpt
from workloads.sharegpt_like import build_sharegpt_like
from workloads.synthetic import build_synthetic
from workloads.tokenizer import TokenizerLike
from workloads.trace import build_trace

Builder = Callable[..., Workload]

_BUILDERS: dict[str, tuple[Builder, str]] = {
    "synthetic": (build_synthetic, "stated length distributions, exact token ids or text, shared prefixes"),
    "sharegpt-like": (build_sharegpt_like, "ShareGPT's lengths from a fit, text of our own; needs no file"),
    "sharegpt": (build_sharegpt, "conversations from a ShareGPT file, vLLM's filter, single or turn by turn"),
    "trace": (build_trace, "Azure, Mooncake, BurstGPT or exported traces: lengths, times and shared prefixes"),
    "custom": (build_custom, "prompts, messages or turns from a JSONL file"),
}


def list_workloads() -> dict[str, str]:
    """Name -> one line about it."""
    return {name: about for name, (_, about) in _BUILDERS.items()}


def build_workload(spec: dict[str, Any], *, seed: int, tokenizer: TokenizerLike | None) -> Workload:
    """Build the workload that `spec["name"]` names from the other keys.

    A pure function of its arguments and of the files that the specification names.

    Raises:
        UserError: unknown name or key, bad value, or an input file that is missing, broken or empty.
    """
    name = spec.get("name")
    if not isinstance(name, str) or name not in _BUILDERS:
        raise UserError(f"workload {name!r} is unknown; {near_matches(str(name), _BUILDERS)}")
    check_seed(seed)
    build, _ = _BUILDERS[name]
    return build({key: value for key, value in spec.items() if key != "name"}, seed=seed, tokenizer=tokenizer)
