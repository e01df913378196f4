"""What a start does before readiness, so that neither it nor the first request does it twice."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from server.attention.base import AttentionSpec
from server.attention.warm_up import warm_up_rotation
from server.config import ServerConfig
from server.kernels import install
from server.layers.attention import Attention
from server.models.config import ModelConfig
from server.models.decoder import build_model
from server.timeline import Timeline
from server.worker import kernel_cache, sampling_warm_up
from server.worker import worker as worker_module

CPU = torch.device("cpu")


@pytest.mark.parametrize("home", ["triton.runtime.cache", "triton.compiler.compiler", None])
def test_tritons_key_is_computed_wherever_it_is(home: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def find(name: str) -> ModuleType:
        if name != home:
            raise ImportError(name)
        module = ModuleType(name)
        module.triton_key = lambda: calls.append(name)  # type: ignore[attr-defined]
        return module

    monkeypatch.setattr(importlib, "import_module", find)
    kernel_cache.hash_triton()
    assert calls == ([home] if home else [])


def test_the_installed_triton_has_a_key() -> None:
    cache = pytest.importorskip("triton.runtime.cache")
    cache.triton_key.cache_clear()
    kernel_cache.hash_triton()
    assert cache.triton_key.cache_info().currsize == 1


@pytest.fixture
def collector() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.enable()


@pytest.mark.usefixtures("collector")
def test_settled_objects_are_not_searched_again() -> None:
    gc.disable()
    worker_module.settle()
    assert gc.isenabled()
    assert gc.get_freeze_count() > 1000


def test_kernels_are_compiled_in_threads_after_tritons_key(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(worker_module, "hash_triton", lambda: done.append("key"))
    monkeypatch.setattr(worker_module, "warm_up_rotation", lambda layer, spec: done.append(f"rotary of {layer}"))
    monkeypatch.setattr(worker_module, "warm_up_sampling", lambda vocab, dtype, device: done.append("sampling"))
    monkeypatch.setattr(install, "warm_up_layers", lambda model, norms: done.append(f"layers, norms: {norms}"))
    worker = worker_module.Worker(SimpleNamespace(config=ServerConfig(), timeline=Timeline("worker-0")))  # type: ignore[arg-type]
    worker.device, worker.dtype = torch.device("cuda"), torch.bfloat16
    model: Any = SimpleNamespace(
        config=SimpleNamespace(vocab_size=9), attention_layers=lambda: {"a": "first", "b": "second"}
    )
    backend: Any = SimpleNamespace(warm_up=lambda sizes: done.append("attention"), spec=None)
    worker._warm_up_kernels(model, backend)
    assert done[0] == "key"
    assert sorted(done[1:]) == ["attention", "layers, norms: False", "rotary of first", "sampling"]
    assert all(span.attributes["thread"].startswith("kernels") for span in worker.timeline.spans)


def test_sampling_meets_both_precisions_and_all_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[tuple[torch.dtype, bool]] = []

    def sample(logits: torch.Tensor, metadata: Any, positions: torch.Tensor) -> torch.Tensor:
        met.append((logits.dtype, metadata.random.top_k is not None))
        return positions

    monkeypatch.setattr(sampling_warm_up, "sample", sample)
    sampling_warm_up.warm_up_sampling(50, torch.bfloat16, CPU)
    assert len(met) == 4
    assert set(met) == {(dtype, limited) for dtype in (torch.bfloat16, torch.float32) for limited in (False, True)}


def test_rotation_is_warmed_up_on_rows_of_the_merged_projection(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[torch.Tensor, torch.Tensor]] = []

    def rotary(rows: torch.Tensor, positions: torch.Tensor, *_: Any, kv_cache: torch.Tensor, **__: Any) -> None:
        calls.append((rows, kv_cache))

    monkeypatch.setattr(install, "rotary", rotary)
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=97,
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        intermediate_size=96,
        max_position_embeddings=128,
    )
    model = build_model(config, device=CPU, dtype=torch.bfloat16, max_positions=128)
    install.install_compiled_kernels(model)
    spec = AttentionSpec(CPU, torch.bfloat16, 4, 2, 32, 16, max_num_seqs=4)
    warm_up_rotation(next(iter(model.attention_layers().values())), spec)
    assert [tuple(rows.shape) for rows, _ in calls] == [(1, 4, 32), (2, 4, 32)]
    assert {rows.stride(0) for rows, _ in calls} == {8 * 32}
    assert all(cache.shape[2:] == (16, 2, 32) for _, cache in calls)


def test_without_a_kernel_there_is_nothing_to_warm_up() -> None:
    warm_up_rotation(Attention("layer", 4, 2, 32, 1.0), AttentionSpec(CPU, torch.bfloat16, 4, 2, 32, 16))
