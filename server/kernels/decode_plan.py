"""Which program of the split-KV decode kernel does what, for batches of many sequences.

Cutting every sequence into the same number of splits serves few sequences well. With hundreds of them nearly all of
those splits would be empty or a few tokens long, and each would still wait for room on the GPU. So the batch is cut as
a whole: into chunks of an equal length, chosen such that sequences and further chunks together fill a grid whose size
depends on the number of sequences alone. The list of chunks is made on the device, once a step (FlashInfer plans on
the host: https://arxiv.org/abs/2501.01005, section 3.3), and therefore inside the CUDA Graph of a step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from server.kernels.attention_config import MAX_SPLITS, DecodeConfig
from server.kernels.launch import Prebound, cached, next_power_of_2

FIELDS = 8
"""int32 per item: sequence (-1: none), first token, end, split, splits of the sequence, 3 unused."""


@triton.jit(do_not_specialize=["num_seqs", "num_items", "further", "min_chunk"])
def _plan_kernel(
    seq_lens_ptr,
    items_ptr,
    num_seqs,
    num_items,
    further,
    min_chunk,
    BLOCK_B: tl.constexpr,
    BLOCK_ITEMS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    FIELDS: tl.constexpr,
):
    """One program. Chunks of at least total / further tokens are num_seqs + further in number at most."""
    seqs = tl.arange(0, BLOCK_B)
    present = seqs < num_seqs
    lens = tl.load(seq_lens_ptr + seqs, mask=present, other=0)
    chunk = tl.maximum(tl.cdiv(tl.sum(lens, 0), further), tl.cdiv(tl.max(lens, 0), MAX_SPLITS))
    chunk = tl.maximum(chunk, min_chunk)
    # Equal parts of whole tiles; rounding up may make one part fewer. A sequence of length 0 keeps one, which is empty.
    parts = tl.maximum(tl.cdiv(lens, chunk), 1)
    size = tl.maximum(tl.cdiv(tl.cdiv(lens, parts), BLOCK_N), 1) * BLOCK_N
    parts = tl.where(present, tl.maximum(tl.cdiv(lens, size), 1), 0)
    first = tl.cumsum(parts, 0) - parts
    for split in tl.range(0, tl.max(parts, 0)):
        mine = split < parts
        item = items_ptr + (first + split) * FIELDS
        tl.store(item, seqs, mask=mine)
        tl.store(item + 1, split * size, mask=mine)
        tl.store(item + 2, tl.minimum((split + 1) * size, lens), mask=mine)
        tl.store(item + 3, tl.zeros_like(seqs) + split, mask=mine)
        tl.store(item + 4, parts, mask=mine)
    offs = tl.arange(0, BLOCK_ITEMS)
    unused = (offs >= tl.sum(parts, 0)) & (offs < num_items)
    tl.store(items_ptr + offs * FIELDS, tl.full((BLOCK_ITEMS,), -1, dtype=tl.int32), mask=unused)


@cached
def _bound(num_seqs_bound: int, num_items_bound: int, block_n: int) -> Prebound:
    constants = (num_seqs_bound, num_items_bound, block_n, MAX_SPLITS, FIELDS)
    return Prebound(_plan_kernel, constants, num_warps=4, num_stages=1)


def num_items(config: DecodeConfig, num_seqs: int, num_kv_heads: int) -> int:
    """Items of a plan, used and unused: one per sequence, and enough more to reach the program target alone."""
    return num_seqs + -(-config.target_programs // num_kv_heads)


def plan_decode(seq_lens: torch.Tensor, num_kv_heads: int, max_num_seqs: int, config: DecodeConfig) -> torch.Tensor:
    """The items (num_items, FIELDS) int32 of a batch, for `paged_decode` with the same arguments.

    `max_num_seqs` is the most that any batch of this server has: it selects the binary, so that there is one for all
    batches.
    """
    num_seqs = seq_lens.shape[0]
    count = num_items(config, num_seqs, num_kv_heads)
    items = torch.empty((count, FIELDS), dtype=torch.int32, device=seq_lens.device)
    bounds = next_power_of_2(max_num_seqs), next_power_of_2(num_items(config, max_num_seqs, num_kv_heads))
    kernel = _bound(*bounds, config.block_n)
    kernel((1, 1, 1), (seq_lens, items), (num_seqs, count, count - num_seqs, config.min_chunk))
    return items
