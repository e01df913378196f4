"""Cases of the kernels for eager mode: norms, activation, rotary with the cache write, embedding, KV write."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchctl.kernelbench import reference
from benchctl.kernelbench.case import Case, Instance, Tensors


def layer_cases(device: torch.device, dtype: torch.dtype, token_counts: list[int], *, small: bool) -> Iterator[Case]:
    """The shapes of an 8B model, or narrow ones if `small`."""
    hidden, intermediate = (576, 1536) if small else (4096, 14336)
    layouts = [(8, 2, 64), (3, 3, 80)] if small else [(32, 8, 128)]
    for tokens in token_counts:
        yield _rms_norm(device, dtype, tokens, hidden)
        yield _add_rms_norm(device, dtype, tokens, hidden)
        yield _silu_and_mul(device, dtype, tokens, intermediate)
        yield _embedding(device, dtype, tokens, hidden)
        for heads, kv_heads, dim in layouts:
            yield _write_kv(device, dtype, tokens, kv_heads, dim)
            for norm in (False, True):
                yield _rotary(device, dtype, tokens, heads, kv_heads, dim, norm=norm)


class _Random:
    """Normal tensors on a device, all from one seed."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator(device=device).manual_seed(seed)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device).normal_(generator=self.generator)

    def permutation(self, size: int) -> torch.Tensor:
        return torch.randperm(size, generator=self.generator, device=self.device)


def _rms_norm(device: torch.device, dtype: torch.dtype, tokens: int, hidden: int) -> Case:
    def build(seed: int) -> Instance:
        from server.kernels.norm import rms_norm

        random = _Random(device, dtype, seed)
        x, weight = random.normal(tokens, hidden), random.normal(hidden)
        return Instance(lambda: (rms_norm(x, weight, 1e-5),), lambda: (reference.rms_norm(x, weight, 1e-5),))

    size = dtype.itemsize * hidden * (2 * tokens + 1)
    return Case("rms_norm", f"{tokens} x {hidden}", dtype, size, 4 * tokens * hidden, build)


def _add_rms_norm(device: torch.device, dtype: torch.dtype, tokens: int, hidden: int) -> Case:
    def build(seed: int) -> Instance:
        from server.kernels.norm import add_rms_norm

        random = _Random(device, dtype, seed)
        x, residual, weight = random.normal(tokens, hidden), random.normal(tokens, hidden), random.normal(hidden)

        def expected() -> Tensors:
            total = x.float() + residual.float()
            return reference.rms_norm(total.to(dtype), weight, 1e-5), total

        return Instance(lambda: add_rms_norm(x, residual, weight, 1e-5), expected)

    size = dtype.itemsize * hidden * (4 * tokens + 1)
    return Case("add_rms_norm", f"{tokens} x {hidden}", dtype, size, 5 * tokens * hidden, build)


def _silu_and_mul(device: torch.device, dtype: torch.dtype, tokens: int, intermediate: int) -> Case:
    def build(seed: int) -> Instance:
        from server.kernels.activation import silu_and_mul

        gate_up = _Random(device, dtype, seed).normal(tokens, 2 * intermediate)
        return Instance(lambda: (silu_and_mul(gate_up),), lambda: (reference.silu_and_mul(gate_up),))

    size = dtype.itemsize * tokens * 3 * intermediate
    return Case("silu_and_mul", f"{tokens} x {intermediate}", dtype, size, 5 * tokens * intermediate, build)


def _embedding(device: torch.device, dtype: torch.dtype, tokens: int, hidden: int) -> Case:
    vocab = 2 * tokens + 17

    def build(seed: int) -> Instance:
        from server.kernels.embedding import embedding

        random = _Random(device, dtype, seed)
        weight, ids = random.normal(vocab, hidden), random.permutation(vocab)[:tokens]
        return Instance(lambda: (embedding(ids, weight),), lambda: (weight[ids].float(),))

    return Case("embedding", f"{tokens} x {hidden}", dtype, dtype.itemsize * tokens * 2 * hidden, 0, build)


def _slots(random: _Random, tokens: int, page: int) -> tuple[torch.Tensor, int]:
    """Slots in random order over pages with room to spare, every seventh token padding; and the number of pages."""
    pages = -(-2 * tokens // page) + 1
    slots = random.permutation(pages * page)[:tokens]
    slots[6::7] = -1
    return slots, pages


def _write_kv(device: torch.device, dtype: torch.dtype, tokens: int, kv_heads: int, dim: int) -> Case:
    page = 16

    def build(seed: int) -> Instance:
        from server.kernels.kv_write import write_kv

        random = _Random(device, dtype, seed)
        key, value = random.normal(tokens, kv_heads, dim), random.normal(tokens, kv_heads, dim)
        slots, pages = _slots(random, tokens, page)
        cache = random.normal(2, pages, page, kv_heads, dim)

        def expected() -> Tensors:
            wanted = cache.float()
            real = slots >= 0
            flat = wanted.flatten(1, 2)
            flat[0, slots[real]], flat[1, slots[real]] = key[real].float(), value[real].float()
            return (wanted,)

        def run() -> Tensors:
            write_kv(key, value, cache, slots)
            return (cache,)

        return Instance(run, expected)

    return Case(
        "write_kv", f"{tokens} x {kv_heads} x {dim}", dtype, dtype.itemsize * tokens * 4 * kv_heads * dim, 0, build
    )


def _rotary(
    device: torch.device, dtype: torch.dtype, tokens: int, heads: int, kv_heads: int, dim: int, *, norm: bool
) -> Case:
    """Rotary with the cache write: outputs are the rotated queries and the whole cache."""
    page, positions_known = 16, 4096

    def build(seed: int) -> Instance:
        from server.kernels.rotary import rotary

        random = _Random(device, dtype, seed)
        qkv = random.normal(tokens, (heads + 2 * kv_heads) * dim)
        weights = (random.normal(dim), random.normal(dim))
        angles = torch.rand(positions_known, dim // 2, device=device, generator=random.generator) * 6.28
        cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
        positions = torch.arange(tokens, device=device) % positions_known
        slots, pages = _slots(random, tokens, page)
        cache = random.normal(2, pages, page, kv_heads, dim)

        def expected() -> Tensors:
            q, k, v = qkv.unflatten(1, (-1, dim)).split((heads, kv_heads, kv_heads), dim=1)
            if norm:
                q = reference.rms_norm(q, weights[0], 1e-6).to(dtype)
                k = reference.rms_norm(k, weights[1], 1e-6).to(dtype)
            wanted = cache.float()
            real = slots >= 0
            flat = wanted.flatten(1, 2)
            flat[0, slots[real]] = reference.rotate(k, cos_sin, positions)[real]
            flat[1, slots[real]] = v[real].float()
            return reference.rotate(q, cos_sin, positions), wanted

        def run() -> Tensors:
            rotary(
                qkv,
                positions,
                cos_sin,
                heads,
                kv_heads,
                dim,
                norm_weights=weights if norm else None,
                eps=1e-6,
                kv_cache=cache,
                slot_mapping=slots,
            )
            return qkv.unflatten(1, (-1, dim))[:, :heads], cache

        return Instance(run, expected)

    moved = tokens * dim * (dtype.itemsize * (2 * heads + 4 * kv_heads) + 4)
    name = "rotary_kv_norm" if norm else "rotary_kv"
    return Case(name, f"{tokens} x {heads}/{kv_heads} x {dim}", dtype, moved, 6 * tokens * dim * heads, build)
