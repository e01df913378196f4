"""fp32 references in plain torch."""

from __future__ import annotations

import torch

from server.attention.base import AttentionMetadata


def attention(query: torch.Tensor, kv_cache: torch.Tensor, metadata: AttentionMetadata, scale: float) -> torch.Tensor:
    """Causal attention over the paged cache in fp32: query (T, H, D) -> (T, H, D); rows of no sequence are zero."""
    num_heads, head_dim = query.shape[1:]
    page, kv_heads = kv_cache.shape[2:4]
    output = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
    starts, lengths = metadata.query_start_loc_cpu.tolist(), metadata.seq_lens_cpu.tolist()
    for seq, length in enumerate(lengths):
        first, last = starts[seq], starts[seq + 1]
        if first == last:
            continue
        pages = metadata.block_table[seq, : -(-length // page)].long()
        key, value = kv_cache[:, pages].reshape(2, -1, kv_heads, head_dim)[:, :length].float()
        # (K, G * queries, D) against (K, length, D)
        rows = query[first:last].float().unflatten(1, (kv_heads, num_heads // kv_heads))
        scores = torch.einsum("qkgd,nkd->kgqn", rows, key) * scale
        positions = torch.arange(length, device=query.device)
        hidden = positions[None, :] > (positions[length - (last - first) :])[:, None]
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        output[first:last] = torch.einsum("kgqn,nkd->qkgd", weights, value).flatten(1, 2)
    return output


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.float()


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def rotate(x: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """x (T, heads, D) in the half-split layout."""
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def kept_tokens(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    """Boolean mask of the tokens of one row (V,) that top-k and then top-p leave; ties with the last one stay."""
    scaled = logits.float() / temperature
    kept = torch.ones_like(scaled, dtype=torch.bool)
    if 0 < top_k < scaled.numel():
        kept = scaled >= scaled.topk(top_k).values[-1]
    if top_p < 1.0:
        probabilities = scaled.masked_fill(~kept, float("-inf")).softmax(-1)
        ordered = probabilities.sort(descending=True).values
        last = int((ordered.cumsum(0) < top_p).sum().clamp(max=ordered.numel() - 1))
        kept &= probabilities >= ordered[last]
    return kept
