"""Start of a worker: device, model, weights, KV cache; then the loop over steps."""

from __future__ import annotations

import gc
import logging
import os
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NoReturn

import torch
import zmq

from server.attention import select_backend
from server.attention.base import AttentionBackend, AttentionSpec
from server.attention.warm_up import warm_up_rotation
from server.child import Child, FailedMessage
from server.compilation.counters import CompileCounters
from server.errors import UserError, exhausted
from server.ipc import engine_to_worker, worker_to_engine
from server.ipc.worker_to_engine import WorkerReady
from server.kernels import builders
from server.models.decoder import CausalLM, build_model
from server.models.loading import fill_dummy_weights, load_weights
from server.models.registry import ResolvedModel, resolve_model
from server.worker import kv_cache
from server.worker.device import GIB, init_device, memory_for, resolve_device, resolve_dtype, token_budget
from server.worker.kernel_cache import choose_kernel_cache, hash_triton
from server.worker.model_runner import ModelRunner
from server.worker.results import ResultSender
from server.worker.sampler import greedy
from server.worker.sampling_warm_up import warm_up_sampling

if TYPE_CHECKING:
    # Imported where they are needed: eager mode pays for neither Dynamo nor Inductor.
    from server.compilation.compiler import ModelCompiler
    from server.compilation.executor import PlanExecutor
    from server.compilation.graph_capture import GraphCapture

logger = logging.getLogger(__name__)


def settle() -> None:
    """Collect garbage, and never look again at what is left: weights, modules and what was imported live as long as the
    process. Otherwise each of the collections around the recording of CUDA Graphs goes through a million objects of
    torch and Inductor, 0.2 s. Collecting by itself begins here: see `server.worker.__main__`."""
    gc.collect()
    gc.freeze()
    gc.enable()


class Worker:
    """One rank: owns a device and everything on it."""

    def __init__(self, child: Child) -> None:
        self.child = child
        self.config = child.config
        self.timeline = child.timeline
        self.counters = CompileCounters()

    def start(self) -> WorkerReady:
        """Everything up to readiness. Raises UserError for what the user can mend."""
        config = self.config
        with self.timeline.span("config"):
            resolved = resolve_model(config.model)
        with self.timeline.span("device"):
            self.device = resolve_device(config.device)
            with memory_for("a CUDA context", "free memory that other processes hold on the GPU", self.device):
                init_device(self.device)
            if self.device.type == "cuda":
                choose_kernel_cache(config)
            self.dtype = resolve_dtype(config.model.dtype, resolved.config, self.device)
        budget = token_budget(config.scheduler, self.device)
        with self.timeline.span("attention-backend") as attributes:
            backend, reasons = select_backend(config.attention.backend, self._attention_spec(resolved))
            attributes.update(backend=backend.name, passed_over=reasons)
        self.child.flush_spans()
        model, compiler = self._load(resolved, budget, backend)
        with self.timeline.span("settle"):
            settle()
        forward = compiler.compiled.bind() if compiler is not None else None
        self.runner = ModelRunner(config, model, self.device, self.dtype, budget, forward)
        graphs = self._graph_capture(backend, forward)
        # A graph compiled now has kernels whose configurations are benchmarked at the first run.
        settled = compiler is None or compiler.compiled.cache_hit
        num_blocks = self._make_cache(resolved, backend, graphs, settled)
        if graphs is not None:
            with self._memory_for_graphs():
                graphs.capture()
        with self.timeline.span("warm-up"):
            self._warm_up()
        if compiler is not None:
            # Only now: the first runs have settled what Inductor benchmarks at a first run.
            compiler.publish()
        self.counters.mark_ready()
        return WorkerReady(
            num_blocks=num_blocks,
            block_size=backend.spec.block_size,
            max_model_len=self.runner.max_model_len,
            max_num_batched_tokens=budget,
            vocab_size=resolved.config.vocab_size,
            attention_backend=backend.name,
            device=str(self.device),
            dtype=str(self.dtype).removeprefix("torch."),
            mode=self.runner.mode,
            num_parameters=resolved.config.num_parameters,
        )

    def _attention_spec(self, resolved: ResolvedModel) -> AttentionSpec:
        return AttentionSpec(
            device=self.device,
            dtype=self.dtype,
            num_heads=resolved.config.num_heads,
            num_kv_heads=resolved.config.num_kv_heads,
            head_dim=resolved.config.head_dim,
            block_size=self.config.cache.block_size or 0,
            max_num_seqs=self.config.scheduler.max_num_seqs,
            max_model_len=resolved.max_model_len,
            flash_decode=self.config.attention.flash_decode,
        )

    def _load(
        self, resolved: ResolvedModel, budget: int, backend: AttentionBackend
    ) -> tuple[CausalLM, ModelCompiler | None]:
        """The model with its weights, and in compiled mode the compiler that has its compiled form. Threads read the
        weights and have our own kernels compiled while the main one compiles or loads the graph."""
        options = self.config.compilation
        with self.timeline.span("model"):
            with self._memory_for_weights():
                model = build_model(
                    resolved.config, device=self.device, dtype=self.dtype, max_positions=resolved.max_model_len
                )
            if self.device.type == "cuda":
                self._install_kernels(model)
            elif options.custom_ops == "on":
                raise UserError(f"--custom-ops on: the kernels need a CUDA device, this is {self.device.type}")
        compiler = None
        with ThreadPoolExecutor(2, thread_name_prefix="load") as pool:
            loading = pool.submit(self._load_weights, model, resolved)
            warming = pool.submit(self._warm_up_kernels, model, backend)
            if options.mode == "compile":
                from server.compilation.setup import make_compiler

                compiler = make_compiler(
                    self.config,
                    model,
                    device=self.device,
                    dtype=self.dtype,
                    max_positions=resolved.max_model_len,
                    token_budget=budget,
                    timeline=self.timeline,
                )
                compiler.build()
            with self.timeline.span("wait-for-kernels"):
                warming.result()
                builders.stop()
            with self.timeline.span("wait-for-weights"):
                loading.result()
        self.child.flush_spans()
        return model, compiler

    def _install_kernels(self, model: CausalLM) -> None:
        """Put our Triton kernels in the place of the layers' plain torch."""
        from server.kernels.install import install_compiled_kernels, install_eager_kernels

        wanted = self.config.compilation.custom_ops
        if wanted == "off":
            return
        if self.config.compilation.mode == "compile":
            install_compiled_kernels(model, norms=wanted == "on")
        else:
            install_eager_kernels(model)

    def _load_weights(self, model: CausalLM, resolved: ResolvedModel) -> None:
        with self.timeline.span("weights", format=resolved.load_format, thread="weights") as attributes:
            with self._memory_for_weights():
                if resolved.path is not None and resolved.load_format == "safetensors":
                    attributes["bytes"] = load_weights(model, resolved.path, self._weights_progress)
                else:
                    attributes["bytes"] = fill_dummy_weights(model, self.config.model.seed)
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)

    def _memory_for_weights(self) -> AbstractContextManager[None]:
        cure = "serve a smaller model, or free memory that other processes hold"
        return memory_for(f"the weights of {self.config.model.model}", cure, self.device)

    def _memory_for_graphs(self) -> AbstractContextManager[None]:
        cure = "lower --gpu-memory-utilization or give fewer --cudagraph-capture-sizes"
        return memory_for("CUDA Graphs", cure, self.device)

    def _warm_up_kernels(self, model: CausalLM, backend: AttentionBackend) -> None:
        """Compile or load our own kernels in all forms that steps can ask for, different kinds at once."""
        kinds: dict[str, Callable[[], object]] = {
            "attention": lambda: backend.warm_up(sorted({1, self.config.scheduler.max_num_seqs}))
        }
        if self.device.type == "cuda":
            from server.kernels.install import warm_up_layers

            with self.timeline.span("kernels/triton-key", thread="kernels"):
                hash_triton()
            options = self.config.compilation
            norms = options.mode == "eager" or options.custom_ops == "on"
            kinds["layers"] = lambda: warm_up_layers(model, norms=norms)
            kinds["rotary"] = lambda: warm_up_rotation(next(iter(model.attention_layers().values())), backend.spec)
            kinds["sampling"] = lambda: warm_up_sampling(model.config.vocab_size, self.dtype, self.device)

        def run(kind: str) -> None:
            with self.timeline.span(f"kernels/{kind}", thread=f"kernels-{kind}"):
                kinds[kind]()

        with ThreadPoolExecutor(len(kinds), thread_name_prefix="kernels") as pool:
            list(pool.map(run, kinds))

    def _graph_capture(self, backend: AttentionBackend, forward: PlanExecutor | None) -> GraphCapture | None:
        """What captures CUDA Graphs; None where there are none."""
        if forward is None or self.device.type != "cuda" or self.config.compilation.cudagraph_mode == "none":
            return None
        from server.compilation.graph_capture import GraphCapture

        return GraphCapture(self.config, self.runner, forward, backend, self.timeline, self.child.progress)

    def _weights_progress(self, done: int, total: int) -> None:
        self.child.progress("weights", done, total, "B")

    def _make_cache(
        self, resolved: ResolvedModel, backend: AttentionBackend, graphs: GraphCapture | None, settled: bool
    ) -> int:
        """Size and allocate the KV cache; returns its number of blocks. `settled`: the first run needs no memory
        that later ones do not."""
        options = self.config.cache
        block_bytes = kv_cache.bytes_per_block(backend, resolved.config.num_layers)
        if self.device.type == "cuda":
            with self.timeline.span("profile") as attributes:
                cure = "lower --max-num-batched-tokens or --max-num-seqs"
                with memory_for("the activations of the largest step", cure, self.device):
                    if not settled:
                        with self.timeline.span("profile/first-run"):
                            self.runner.profile_run()
                    with self.timeline.span("profile/activations"):
                        peak = self._activation_peak()
                attributes["activation_bytes"] = peak
                with self.timeline.span("profile/cuda-graphs"), self._memory_for_graphs():
                    graph_bytes = graphs.estimate_bytes(resolved.max_model_len) if graphs is not None else 0
                attributes["cuda_graph_bytes"] = graph_bytes
            available = kv_cache.cuda_available_bytes(self.device, options.gpu_memory_utilization, peak, graph_bytes)
        else:
            available = int(options.cpu_kv_cache_gib * GIB)
        num_blocks = kv_cache.num_blocks_for(options, block_bytes, available)
        explicit = self.config.model.max_model_len is not None
        max_model_len = kv_cache.fit_context(resolved.max_model_len, explicit, num_blocks, backend.spec.block_size)
        if max_model_len < resolved.max_model_len:
            logger.warning("the KV cache holds %d tokens: the context is cut to that", max_model_len)
        cache_bytes = num_blocks * block_bytes
        what = f"the KV cache of {cache_bytes / GIB:.2f} GiB"
        cure = f"lower {kv_cache.size_option(options, self.device)}"
        with (
            self.timeline.span("kv-cache", blocks=num_blocks, bytes=cache_bytes),
            memory_for(what, cure, self.device),
        ):
            kv_cache.allocate(self.runner.attention_layers, backend, num_blocks)
            self.runner.bind_cache(backend, max_model_len)
        self.child.flush_spans()
        return num_blocks

    def _activation_peak(self) -> int:
        """Bytes that the largest step allocates on top of the weights."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        self.runner.profile_run()
        return torch.cuda.max_memory_allocated(self.device) - before

    def _warm_up(self) -> None:
        """First calls pay for thread pools, primitives and kernels: make them before readiness."""
        runner = self.runner
        for num_tokens in (min(2, runner.max_num_tokens), 1):
            # One sequence, but logits of as many as there are tokens: projections of one row have their own kernel.
            hidden = runner.dummy_run(num_tokens, num_seqs=1, attention=True)
            greedy(runner.model.compute_logits(hidden)).tolist()
        warm_up_sampling(runner.model.config.vocab_size, self.dtype, self.device)
        settle()

    def serve(self) -> NoReturn:
        """Connect to the engine, say ready, run steps until the supervisor ends this process."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        receiver = engine_to_worker.receiver(context, self.config.runtime_dir)
        sender = worker_to_engine.sender(context, self.config.runtime_dir)
        ready = self.start()
        sender.send(ready)
        self.child.ready(num_blocks=ready.num_blocks, attention_backend=ready.attention_backend, mode=ready.mode)
        results = ResultSender(sender, self.device, self._die, self.counters)
        profiler = None
        if self.config.profile.directory is not None:
            from server.worker.profiler import StepProfiler

            profiler = StepProfiler(self.child.process, self.config.profile, self.device)
        while True:
            step = receiver.receive()
            if profiler is not None:
                profiler.before_step(step.step_id)
            results.submit(self.runner.execute(step))

    def _die(self, error: BaseException) -> None:
        """The results thread failed: without it no request could ever finish."""
        lacking = exhausted(error)
        if lacking is None:
            traceback.print_exception(error)
        self.child.send(FailedMessage(str(lacking or f"{type(error).__name__}: {error}")))
        os._exit(1)
