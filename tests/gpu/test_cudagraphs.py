"""CUDA Graphs: replayed steps compute what unrecorded ones do, padding changes nothing, memory stays within bounds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from server.compilation.cudagraph import GraphRecorder, alias
from server.config import BackendName, CudaGraphMode
from server.sampling_params import SamplingParams
from server.worker.worker import Worker
from tests.gpu.in_process_worker import MAX_NUM_SEQS, forced_logprobs, forget, free, some_prompts, start_worker
from tests.unit.worker.harness import Driver

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

MODES: tuple[CudaGraphMode, ...] = ("none", "piecewise", "full", "full_and_piecewise")
LENGTHS = [3, 90, 17, 64, 5, 33, 120, 8, 50, 71, 26, 2, 44]
TOLERANCE = 0.05
"""Of log-probabilities in bfloat16, between kernels that round in other places."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cudagraphs")


@pytest.fixture(scope="module")
def recorded(cache: Path) -> Iterator[Worker]:
    worker = start_worker(cache)
    yield worker
    free(worker)


@pytest.fixture(scope="module")
def eager(cache: Path) -> Iterator[Worker]:
    worker = start_worker(cache, mode="eager")
    yield worker
    free(worker)


def assert_close(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("backend", ["TRITON_ATTN", "FLASH_ATTN", "TORCH_SDPA"])
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_computes_what_eager_does(
    mode: CudaGraphMode, backend: BackendName, cache: Path, eager: Worker
) -> None:
    if backend == "FLASH_ATTN":
        pytest.importorskip("flash_attn.cute")
    worker = start_worker(cache, cudagraph_mode=mode, backend=backend)
    try:
        prompts = some_prompts(LENGTHS)
        for chunk in (1, 29):
            assert_close(forced_logprobs(worker, prompts, chunk), forced_logprobs(eager, prompts, chunk))
        assert (worker.counters.num_compilations, worker.counters.num_jit_events) == (0, 0)
        kinds = {"full": worker.runner.dispatcher.sizes.full, "piecewise": worker.runner.dispatcher.sizes.piecewise}
        expected_full = mode in ("full", "full_and_piecewise") and backend != "TORCH_SDPA"
        assert bool(kinds["full"]) == expected_full
        assert bool(kinds["piecewise"]) == (mode in ("piecewise", "full_and_piecewise"))
    finally:
        free(worker)


@pytest.mark.parametrize("chunk", [1, 29])
def test_poisoned_padding_changes_nothing(recorded: Worker, chunk: int) -> None:
    """Keys and values that nobody wrote are NaN, table entries that nobody filled point nowhere."""
    prompts = some_prompts(LENGTHS, seed=1)
    runner = recorded.runner
    clean = forced_logprobs(recorded, prompts, chunk)
    for layer in runner.attention_layers.values():
        assert layer.kv_cache is not None
        layer.kv_cache.fill_(float("nan"))
    runner.buffers.block_table.fill_(2**30)
    runner.input_ids.fill_(7)
    runner.positions.fill_(1000)
    runner._tables = None
    poisoned = forced_logprobs(recorded, prompts, chunk)
    for layer in runner.attention_layers.values():
        assert layer.kv_cache is not None
        layer.kv_cache.zero_()
    for got, expected in zip(poisoned, clean, strict=True):
        assert bool(got.isfinite().all())
        torch.testing.assert_close(got, expected, atol=0, rtol=0)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(max_tokens=20, temperature=0.0),
        SamplingParams(max_tokens=20, temperature=0.9, top_p=0.8, seed=11),
        SamplingParams(max_tokens=20, temperature=0.0, repetition_penalty=1.3),
    ],
    ids=["greedy", "random", "penalised"],
)
def test_sampled_tokens_equal_unrecorded(sampling: SamplingParams, recorded: Worker, cache: Path) -> None:
    """Eight sequences: a recorded size, so that both run the same kernels on the same shapes."""
    plain = start_worker(cache, cudagraph_mode="none")
    try:
        tokens = []
        for worker in (recorded, plain):
            driver = Driver(worker.runner)
            for number, prompt in enumerate(some_prompts([9] * 8, seed=2)):
                driver.add(f"s{number}", prompt, sampling)
            driver.generate(20)
            tokens.append(dict(driver.tokens))
            forget(driver)
        assert tokens[0] == tokens[1]
    finally:
        free(plain)


def test_memory_of_graphs_is_foreseen(cache: Path) -> None:
    """The KV cache is sized before graphs exist; what they take must have been kept free for them."""
    utilization = 0.3
    worker = start_worker(cache, num_blocks=None, gpu_memory_utilization=utilization)
    try:
        spans = {span.name: span.attributes for span in worker.timeline.spans}
        foreseen, taken = spans["profile"]["cuda_graph_bytes"], spans["capture"]["bytes"]
        assert taken <= foreseen + (64 << 20)
        worker.runner.profile_run()
        forced_logprobs(worker, some_prompts([100] * MAX_NUM_SEQS), 8)
        free_bytes, total = torch.cuda.mem_get_info()
        assert total - free_bytes <= total * utilization + (256 << 20)
    finally:
        free(worker)


def _fail_after(_: torch.Tensor) -> None:
    raise ValueError("broken")


def test_recorder_survives_a_failed_recording() -> None:
    recorder = GraphRecorder(torch.device("cuda", 0))
    values = torch.arange(8, device="cuda", dtype=torch.float32)
    with recorder.session():
        with pytest.raises(ValueError, match="broken"), recorder.record():
            _fail_after(values.add(1))
        with recorder.record() as graph:
            doubled = values * 2
        result = alias(doubled)
        del doubled
    values.fill_(3.0)
    graph.replay()
    torch.cuda.synchronize()
    assert result.tolist() == [6.0] * 8


def test_alias_shares_memory_and_owns_none() -> None:
    base = torch.arange(24, device="cuda", dtype=torch.int64).view(4, 6)
    view = base[1:3, ::2]
    before = torch.cuda.memory_allocated()
    copy = alias(view)
    assert torch.cuda.memory_allocated() == before
    assert (copy.data_ptr(), copy.shape, copy.stride()) == (view.data_ptr(), view.shape, view.stride())
    base.add_(100)
    assert copy.tolist() == view.tolist()
