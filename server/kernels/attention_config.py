"""Launch parameters of the paged attention kernels, as tables: nothing is tuned while requests wait.

Keys are upper bounds, looked up in order. The entries for 16-bit elements and heads of 128 are the best of a sweep over
tile sizes, warps, stages and split targets on one H200 (`benchctl kernels --sweep` prints the candidates); the other
rows follow from them by size and have not been swept. All devices use the same table.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """How the split-KV decode kernel runs."""

    block_n: int
    """Tokens per tile."""
    num_warps: int
    num_stages: int
    target_programs: int
    """Splits are added until about this many programs run: sequences x key/value heads x splits. With a plan: so many
    programs beyond one for each sequence and head share what is longer than the others."""
    min_chunk: int
    """Tokens below which a sequence is not split further; a multiple of `block_n`."""
    planned: bool = False
    """Cut the batch as a whole (`server.kernels.decode_plan`) instead of each sequence into as many splits."""


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """How the unified variable-length kernel runs."""

    block_m: int
    """Rows per tile: queries x the query heads that share a key/value head."""
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None
    """Of a thread. Two programs of 8 warps share a multiprocessor at 128, at the price of a few spilled bytes."""


MAX_SPLITS = 64
"""More splits than this gain nothing: the merge grows while a chunk is already shorter than the latency of a read."""

# (padded head size, bytes per element) -> {upper bound of the number of sequences: config}. One warp to a program needs
# no barrier between the two products of a tile, and tiles of few tokens let many programs share a multiprocessor, so
# that some read while others begin or end: what large batches want. The look-up of a page takes two of the stages.
# Sequences of different lengths, which batches of real traffic have, want more and smaller pieces than equal ones.
DECODE_TABLE: dict[tuple[int, int], dict[int, DecodeConfig]] = {
    (64, 2): {
        4: DecodeConfig(64, 1, 5, 264, 64),
        16: DecodeConfig(32, 1, 5, 528, 256),
        64: DecodeConfig(64, 1, 5, 264, 256, planned=True),
        1 << 30: DecodeConfig(32, 1, 5, 2112, 256, planned=True),
    },
    (128, 2): {
        4: DecodeConfig(32, 1, 5, 264, 64),
        16: DecodeConfig(16, 1, 5, 528, 256),
        32: DecodeConfig(32, 1, 5, 264, 128, planned=True),
        64: DecodeConfig(64, 2, 7, 264, 256, planned=True),
        1 << 30: DecodeConfig(16, 1, 5, 2112, 256, planned=True),
    },
    (256, 2): {8: DecodeConfig(32, 4, 5, 264, 64), 1 << 30: DecodeConfig(32, 4, 5, 528, 256, planned=True)},
    (64, 4): {1 << 30: DecodeConfig(32, 4, 2, 528, 64, planned=True)},
    (128, 4): {1 << 30: DecodeConfig(32, 4, 2, 528, 64, planned=True)},
    (256, 4): {1 << 30: DecodeConfig(16, 4, 2, 528, 64, planned=True)},
}

# (padded head size, bytes per element) -> {upper bound of rows (longest query x group): config}
PREFILL_TABLE: dict[tuple[int, int], dict[int, PrefillConfig]] = {
    (64, 2): {16: PrefillConfig(16, 64, 4, 3), 1 << 30: PrefillConfig(64, 64, 4, 3)},
    (128, 2): {
        16: PrefillConfig(16, 64, 4, 3),
        128: PrefillConfig(64, 64, 4, 3),
        1 << 30: PrefillConfig(128, 64, 8, 2, max_registers=128),
    },
    (256, 2): {
        16: PrefillConfig(16, 32, 4, 2),
        64: PrefillConfig(64, 32, 4, 2),
        1 << 30: PrefillConfig(128, 64, 8, 2),
    },
    (64, 4): {16: PrefillConfig(16, 32, 4, 2), 1 << 30: PrefillConfig(32, 32, 4, 2)},
    (128, 4): {16: PrefillConfig(16, 32, 4, 2), 1 << 30: PrefillConfig(32, 32, 4, 2)},
    (256, 4): {16: PrefillConfig(16, 16, 4, 2), 1 << 30: PrefillConfig(32, 16, 4, 2)},
}

# Instead of the last entries above where a tile spans pages: the look-ups leave no room for fewer registers.
SMALL_PAGE_PREFILL: dict[tuple[int, int], PrefillConfig] = {(128, 2): PrefillConfig(64, 64, 4, 3)}


def padded_head_dim(head_dim: int) -> int:
    """Width of a tile: the power of two that holds a head, 64 at least."""
    return max(64, 1 << (head_dim - 1).bit_length())


def decode_config(padded_dim: int, element_size: int, num_seqs: int) -> DecodeConfig:
    table = DECODE_TABLE[padded_dim, element_size]
    return next(config for bound, config in table.items() if num_seqs <= bound)


def prefill_config(padded_dim: int, element_size: int, rows: int, page: int) -> PrefillConfig:
    key = padded_dim, element_size
    config = next(config for bound, config in PREFILL_TABLE[key].items() if rows <= bound)
    return SMALL_PAGE_PREFILL.get(key, config) if config.max_registers and page < config.block_n else config


def decode_splits(config: DecodeConfig, num_seqs: int, num_kv_heads: int, max_seq_len: int) -> int:
    """Third dimension of the decode grid: the most chunks any sequence of the batch is cut into."""
    wanted = -(-config.target_programs // (num_seqs * num_kv_heads))
    useful = -(-max_seq_len // config.min_chunk)
    return max(1, min(wanted, useful, MAX_SPLITS))
