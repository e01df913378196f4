"""Time candidate launch parameters, to fill the tables of `server.kernels` for a new GPU."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchctl.kernelbench.attention_cases import LLAMA_8B, Layout
from benchctl.kernelbench.case import Case, Instance, relative_error
from benchctl.kernelbench.linear_cases import MATRICES, SHORT_MATRICES
from benchctl.kernelbench.measure import time_case
from server.attention.warm_up import synthetic_batch


@dataclass(frozen=True, slots=True)
class Trial:
    case: Case
    config: str
    binary: tuple[Any, ...]
    """Trials of the same binary differ in the grid only and are compiled once."""


DECODE_SHAPES = [
    *(("", [length] * seqs) for seqs, length in ((1, 640), (1, 4096), (8, 1024), (64, 1024), (256, 257), (256, 512))),
    # As under real traffic: log-spaced, the longest 16 times the shortest.
    *(("ragged ", [round(96 * 16 ** (i / (seqs - 1))) for i in range(seqs)]) for seqs in (12, 24, 48, 96, 192, 384)),
]
"""(label, lengths of the sequences)."""
_DECODE_BOUND = 4096
"""What a captured graph would state as the longest sequence."""

PREFILL_SHAPES = [([2048] * 4, [2048] * 4), ([*([1] * 32), 512], [*([1024] * 32), 1024])]


@dataclass(frozen=True, slots=True)
class Candidate:
    kernel: str
    shape: str
    config: str
    time_us: float
    """NaN: this candidate does not compile or does not fit the device."""
    error: float


def sweep(kind: str, device: torch.device, dtype: torch.dtype, page: int, head_dim: int) -> Iterator[Candidate]:
    """Candidates of `kind` (decode, prefill, gemv), in the order of the shapes and then of their times."""
    trials = {"decode": _decode_trials, "prefill": _prefill_trials, "gemv": _gemv_trials}[kind](
        device, dtype, page, head_dim
    )
    with ThreadPoolExecutor(8) as pool:
        # Compiling takes seconds a candidate, and much of it outside Python's lock.
        list(pool.map(_error, {trial.binary: trial.case for trial in trials}.values()))
    for trial in trials:
        error = _error(trial.case)
        seconds = time_case(trial.case) if error == error else float("nan")
        yield Candidate(trial.case.kernel, trial.case.shape, trial.config, seconds * 1e6, error)


def _error(case: Case) -> float:
    """Relative distance of a candidate from the kernel's own choice; NaN if it cannot run (shared memory, say)."""
    try:
        instance = case.build(1)
        return relative_error(instance.run(), instance.expected())
    except Exception as error:  # Triton has no common base class for "does not fit this device".
        print(f"{case.kernel} {case.shape}: {type(error).__name__}: {str(error).splitlines()[0][:100]}")
        return float("nan")


def _decode_trials(device: torch.device, dtype: torch.dtype, page: int, head_dim: int) -> list[Trial]:
    from server.kernels.attention_config import DecodeConfig
    from server.kernels.decode_plan import plan_decode
    from server.kernels.paged_decode import DecodeScratch, paged_decode

    layout = Layout(*LLAMA_8B[:2], head_dim, page)
    spec = layout.spec(device, dtype, 512)
    scratch = DecodeScratch(device, *LLAMA_8B[:2], head_dim, 512)
    tiles = [
        (16, 1, 5), (32, 1, 4), (32, 1, 5), (32, 2, 4), (32, 2, 5), (32, 2, 7), (32, 4, 5), (64, 2, 3), (64, 2, 4),
        (64, 2, 5), (64, 2, 7), (64, 4, 4), (64, 4, 5), (128, 2, 3), (128, 4, 3), (128, 4, 5),
    ]  # fmt: skip
    trials = []
    most = max(len(lengths) for _, lengths in DECODE_SHAPES)
    for label, lengths in DECODE_SHAPES:
        seqs = len(lengths)
        cuts = [(264, False), (528, False)] if seqs <= 16 else [(264, True), (1056, True), (2112, True), (1056, False)]
        for (block_n, warps, stages), (target, planned) in itertools.product(tiles, cuts):
            config = DecodeConfig(block_n, warps, stages, target, 256 if seqs > 4 else 64, planned)

            def build(seed: int, lens: list[int] = lengths, config: DecodeConfig = config) -> Instance:
                batch = synthetic_batch(spec, [1] * len(lens), lens, seed=seed)
                meta = batch.metadata
                plan = plan_decode(meta.seq_lens, LLAMA_8B[1], most, config)

                def run(config: DecodeConfig | None = config) -> tuple[torch.Tensor, ...]:
                    paged_decode(
                        batch.query, batch.kv_cache, meta.block_table, meta.seq_lens, _DECODE_BOUND,
                        head_dim**-0.5, batch.output, scratch, config=config,
                        plan=plan if config and config.planned else None,
                    )  # fmt: skip
                    return (batch.output,)

                return Instance(run, lambda: (run(None)[0].float(),))

            total = sum(lengths)
            moved = 2 * dtype.itemsize * layout.num_kv_heads * head_dim * total
            case = Case("decode", f"{label}{seqs} x {total // seqs} ({layout})", dtype, moved, 0, build)
            trials.append(Trial(case, _text(config), (block_n, warps, stages, planned, config.min_chunk)))
    return trials


def _prefill_trials(device: torch.device, dtype: torch.dtype, page: int, head_dim: int) -> list[Trial]:
    from server.kernels.attention_config import PrefillConfig
    from server.kernels.paged_prefill import paged_prefill

    layout = Layout(*LLAMA_8B[:2], head_dim, page)
    spec = layout.spec(device, dtype, 256)
    tiles = [
        (128, 128, 8, 2), (128, 128, 8, 3), (128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 8, 5), (128, 64, 4, 3),
        (128, 32, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 4, 5), (64, 128, 4, 3), (256, 64, 8, 3),
    ]  # fmt: skip
    trials = []
    for query_lens, seq_lens in PREFILL_SHAPES:
        for tile in tiles:
            config = PrefillConfig(*tile)

            def build(
                seed: int, lens: tuple[list[int], list[int]] = (query_lens, seq_lens), config: PrefillConfig = config
            ) -> Instance:
                batch = synthetic_batch(spec, *lens, seed=seed)
                meta = batch.metadata

                def run(config: PrefillConfig | None = config) -> tuple[torch.Tensor, ...]:
                    paged_prefill(
                        batch.query, batch.kv_cache, meta.block_table, meta.query_start_loc, meta.seq_lens,
                        meta.max_query_len, meta.num_tokens, head_dim**-0.5, batch.output, config=config,
                    )  # fmt: skip
                    return (batch.output,)

                return Instance(run, lambda: (run(None)[0].float(),))

            label = "4 x 2048" if len(seq_lens) == 4 else "32 decodes + 512"
            case = Case("prefill", f"{label} ({layout})", dtype, 64 << 20, 0, build)
            trials.append(Trial(case, _text(config), tile))
    return trials


def _gemv_trials(device: torch.device, dtype: torch.dtype, page: int, head_dim: int) -> list[Trial]:
    from server.kernels.activation import silu_and_mul
    from server.kernels.gemv import GemvConfig, gated_gemv, gemv

    few = [
        (1, 512, 4), (1, 1024, 4), (1, 1024, 4, 1, 8), (1, 1024, 8), (2, 512, 2), (2, 1024, 4), (2, 1024, 8),
        (4, 256, 4, 1, 8), (4, 1024, 4), (8, 256, 4, 1, 8),
    ]  # fmt: skip
    several = [
        (8, 256, 1, 5), (16, 128, 2, 4), (16, 128, 2, 6), (16, 128, 2, 8), (16, 256, 4, 4), (16, 512, 4, 3),
        (32, 128, 2, 5), (32, 128, 4, 5), (32, 256, 8, 3),
    ]  # fmt: skip
    gated = [(1, 512, 2), (1, 512, 4), (1, 1024, 4), (1, 1024, 8), (2, 512, 2), (4, 256, 4, 1, 8)]
    matrices = {**MATRICES, **{f"short {label}": size for label, size in SHORT_MATRICES.items()}}
    plain = [label for label in matrices if "gate_up" not in label and "lm_head" not in label]
    candidates: list[tuple[str, int, Sequence[tuple[int, ...]], bool]] = [
        *((label, rows, few, False) for label in plain for rows in (1, 2, 4)),
        *((label, 8, several, False) for label in plain),
        *((label, rows, gated, True) for label in ("gate_up", "short gate_up") for rows in (1, 2, 4)),
    ]
    trials = []
    for label, rows, tiles, silu in candidates:
        n, k = matrices[label]
        for tile in (*tiles, None):
            config = GemvConfig(*tile) if tile else None

            def build(
                seed: int,
                size: tuple[int, int, int] = (rows, n, k),
                config: GemvConfig | None = config,
                silu: bool = silu,
            ) -> Instance:
                generator = torch.Generator(device=device).manual_seed(seed)
                m, n, k = size
                x = torch.empty(m, k, dtype=dtype, device=device).normal_(generator=generator)
                weight = torch.empty(n, k, dtype=dtype, device=device).normal_(std=k**-0.5, generator=generator)

                def run() -> tuple[torch.Tensor, ...]:
                    if config is None:
                        product = x @ weight.T
                        return (silu_and_mul(product) if silu else product,)
                    return ((gated_gemv if silu else gemv)(x, weight, None, config=config),)

                def expected() -> tuple[torch.Tensor, ...]:
                    product = x.float() @ weight.float().T
                    return (silu_and_mul(product) if silu else product,)

                return Instance(run, expected)

            kernel = "gated gemv" if silu else "gemv"
            case = Case(kernel, f"{label} {rows} x {n} x {k}", dtype, dtype.itemsize * n * k, 0, build)
            trials.append(Trial(case, _text(config) if config else "cuBLAS", (kernel, label, rows, tile)))
    return trials


def _text(config: Any) -> str:
    return " ".join(f"{name}={value}" for name, value in asdict(config).items())
