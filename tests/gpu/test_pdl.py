"""Programmatic dependent launch: chains of kernels give the same bits with it and without, however often they run.

A kernel that reads what its predecessor has not yet written sees what was there before: the inputs change from replay
to replay, so that this shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch

from server.attention.base import AttentionSpec
from server.attention.warm_up import synthetic_batch
from server.compilation.cudagraph import GraphRecorder
from server.kernels import activation, embedding, gemv, kv_write, launch, norm, paged_decode, rotary, sampling

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

REPLAYS = 300
INPUTS = 3
MODULES = (activation, embedding, gemv, kv_write, norm, paged_decode, rotary, sampling)


@contextmanager
def pdl(used: bool, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels are bound anew, with dependent launches or without."""

    def forget() -> None:
        for module in MODULES:
            for value in vars(module).values():
                if hasattr(value, "cache_clear"):
                    value.cache_clear()

    with monkeypatch.context() as patch:
        patch.setattr(launch, "uses_pdl", lambda device: used)
        forget()
        yield
    forget()


@dataclass
class Layer:
    qkv: torch.Tensor
    o: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    norm_1: torch.Tensor
    norm_2: torch.Tensor
    q_norm: torch.Tensor
    k_norm: torch.Tensor


@dataclass(frozen=True)
class Shape:
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    layers: int
    length: int


SHAPES = {
    "tiny": Shape(256, 4, 2, 64, 512, 12, 40),
    "0.6B": Shape(1024, 16, 8, 128, 3072, 8, 700),
    "8B": Shape(4096, 32, 8, 128, 14336, 4, 1500),
}
VOCAB = 20_000


class Chain:
    """A decode step of `count` sequences, made of the kernels alone."""

    def __init__(self, shape: Shape, count: int, device: torch.device) -> None:
        self.shape, self.count = shape, count
        generator = torch.Generator(device=device).manual_seed(0)

        def normal(*size: int, scale: float = 1.0) -> torch.Tensor:
            tensor = torch.empty(size, dtype=torch.bfloat16, device=device)
            return tensor.normal_(std=scale, generator=generator)

        hidden, query = shape.hidden, shape.heads * shape.head_dim
        self.width = query + 2 * shape.kv_heads * shape.head_dim
        self.layers = [
            Layer(
                normal(self.width, hidden, scale=hidden**-0.5),
                normal(hidden, query, scale=query**-0.5),
                normal(2 * shape.intermediate, hidden, scale=hidden**-0.5),
                normal(hidden, shape.intermediate, scale=shape.intermediate**-0.5),
                normal(hidden),
                normal(hidden),
                normal(shape.head_dim),
                normal(shape.head_dim),
            )
            for _ in range(shape.layers)
        ]
        self.table = normal(VOCAB, hidden)
        self.head = normal(VOCAB, hidden, scale=hidden**-0.5)
        self.spec = AttentionSpec(
            device, torch.bfloat16, shape.heads, shape.kv_heads, shape.head_dim, 64, max_num_seqs=count
        )
        # One sequence is empty where there are several, as padding is, and one is short.
        lengths = [shape.length + 37 * row for row in range(count)]
        if count > 2:
            lengths[1], lengths[2] = 1, 0
        self.batch = synthetic_batch(self.spec, [min(1, length) for length in lengths], lengths)
        slots = torch.full((count,), -1, dtype=torch.int64, device=device)
        real = [row for row, length in enumerate(lengths) if length]
        slots[real] = self.batch.metadata.slot_mapping[: len(real)].to(torch.int64)
        self.slots = slots
        self.caches = [self.batch.kv_cache.clone() for _ in range(shape.layers)]
        self.positions = torch.tensor([max(0, length - 1) for length in lengths], device=device)
        angles = torch.rand(max(lengths), shape.head_dim // 2, device=device, generator=generator) * 6.28
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
        self.scratch = paged_decode.DecodeScratch(device, shape.heads, shape.kv_heads, shape.head_dim, count)
        self.ids = torch.zeros(count, dtype=torch.int64, device=device)
        self.choices = torch.randint(VOCAB, (INPUTS, count), device=device, generator=generator)

    def __call__(self) -> tuple[torch.Tensor, ...]:
        """Hidden states, logits and the tokens of the largest ones."""
        shape, metadata = self.shape, self.batch.metadata
        residual = embedding.embedding(self.ids, self.table)
        x = norm.rms_norm(residual, self.layers[0].norm_1, 1e-5)
        for number, layer in enumerate(self.layers):
            qkv = gemv.gemv(x, layer.qkv, None)
            rotary.rotary(
                qkv,
                self.positions,
                self.cos_sin,
                shape.heads,
                shape.kv_heads,
                shape.head_dim,
                norm_weights=(layer.q_norm, layer.k_norm) if number % 2 else None,
                eps=1e-6,
                kv_cache=self.caches[number],
                slot_mapping=self.slots,
            )
            query = qkv.as_strided((self.count, shape.heads, shape.head_dim), (self.width, shape.head_dim, 1))
            output = torch.empty(query.shape, dtype=qkv.dtype, device=qkv.device)
            paged_decode.paged_decode(
                query,
                self.caches[number],
                metadata.block_table,
                metadata.seq_lens,
                metadata.max_seq_len,
                shape.head_dim**-0.5,
                output,
                self.scratch,
            )
            x = gemv.gemv(output.flatten(1), layer.o, None)
            x, residual = norm.add_rms_norm(x, residual, layer.norm_2, 1e-5, in_place=number % 2 == 0)
            if gemv.config_for(self.count, *layer.gate_up.shape, gated=True) is not None:
                x = gemv.gated_gemv(x, layer.gate_up, None)
            else:
                x = activation.silu_and_mul(gemv.gemv(x, layer.gate_up, None))
            x = gemv.gemv(x, layer.down, None)
            following = self.layers[(number + 1) % shape.layers]
            x, residual = norm.add_rms_norm(x, residual, following.norm_1, 1e-5, in_place=number % 2 == 0)
        logits = gemv.gemv(x, self.head, None)
        return x, logits, sampling.argmax(logits)

    def expected(self) -> list[tuple[torch.Tensor, ...]]:
        """For each of the inputs, from kernels that run one after the other."""
        results = []
        for choice in self.choices:
            self.ids.copy_(choice)
            results.append(tuple(tensor.clone() for tensor in self()))
        return results

    def mismatches(self, run: Callable[[], tuple[torch.Tensor, ...]], wanted: list[tuple[torch.Tensor, ...]]) -> int:
        """Of many runs with changing inputs, those that differ in a bit."""
        wrong = torch.zeros((), dtype=torch.int64, device=self.ids.device)
        for number in range(REPLAYS):
            self.ids.copy_(self.choices[number % INPUTS])
            for got, expected in zip(run(), wanted[number % INPUTS], strict=True):
                wrong += (got != expected).any()
        return int(wrong)


@pytest.mark.parametrize("count", [1, 2, 8])
@pytest.mark.parametrize("name", SHAPES)
def test_a_chain_of_dependents_gives_the_same_bits(
    name: str, count: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.get_device_capability(device) < (9, 0):
        pytest.skip("needs compute capability 9.0")
    chain = Chain(SHAPES[name], count, device)
    with torch.inference_mode():
        with pdl(False, monkeypatch):
            wanted = chain.expected()
        assert not any(torch.equal(wanted[0][1], other[1]) for other in wanted[1:])
        assert not any(result[0].isnan().any() for result in wanted)
        with pdl(True, monkeypatch):
            assert chain.mismatches(chain, wanted) == 0
            recorder = GraphRecorder(device)
            with recorder.session():
                chain()
                with recorder.record() as graph:
                    outputs = chain()

            def replay() -> tuple[torch.Tensor, ...]:
                graph.replay()
                return outputs

            assert chain.mismatches(replay, wanted) == 0


def test_the_option_arrives_at_the_launcher(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.get_device_capability(device) < (9, 0):
        pytest.skip("needs compute capability 9.0")
    with pdl(True, monkeypatch):
        weight = torch.randn(64, 1024, device=device, dtype=torch.bfloat16)
        x = torch.randn(1, 1024, device=device, dtype=torch.bfloat16)
        gemv.gemv(x, weight, None)
        bound = gemv._bound(torch.bfloat16, 1024, 64, 1, False, gemv._best_config(1, 64, 1024))
        run, run_dependent, _, _, constants = bound._bound[device.index]
        assert constants[-1] is True
        assert run_dependent.launch_pdl
        assert not run.launch_pdl
