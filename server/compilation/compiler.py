"""Compiled form of a model's forward pass: from the disk cache, or captured, split and compiled now.

    compiler = ModelCompiler(model, factors, cache, work_dir, timeline, device=..., token_budget=...)
    forward = compiler.build().bind()   # (input_ids, positions) -> hidden states
    ...first runs, at full size, which settle what is benchmarked at a first run...
    compiler.publish()

A warm start imports Inductor to load its artifacts but runs neither it nor Dynamo. A cold start holds the entry's lock
until `publish`, so that a second server waits and then loads.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import torch
from torch import nn

from server.compilation import factors as factors_module
from server.compilation.executor import AttentionCall, PlanExecutor
from server.compilation.pieces import CompiledPiece, compile_piece, compile_processes, inductor_dir, load_piece
from server.compilation.plan import Plan
from server.compilation.store import CacheEntryError, CompileCache
from server.errors import UserError
from server.timeline import Timeline

logger = logging.getLogger(__name__)

LOCK_TIMEOUT_S = 180.0
"""How long to wait for another server that compiles the same graph, before compiling it again."""

_PLAN = "plan.json"
_INDUCTOR = "inductor"
_ISA = "isa.json"


class CompiledModel:
    """A plan and its compiled pieces; `bind` makes it callable."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        pieces: list[CompiledPiece],
        *,
        key: str,
        cache_hit: bool,
        directory: Path,
    ) -> None:
        self.model = model
        self.plan = plan
        self.pieces = pieces
        self.key = key
        self.cache_hit = cache_hit
        self.directory = directory
        """Private copy of the entry; Inductor's caches are below it."""

    def bind(self, attention: AttentionCall | None = None) -> PlanExecutor:
        """The forward pass on the model's weights; `attention` defaults to the custom op."""
        weights = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        return PlanExecutor(self.plan, self.pieces, weights, attention or torch.ops.benchserve.attention.default)


class ModelCompiler:
    """One model's way into compiled form: `build`, first runs, `publish`."""

    def __init__(
        self,
        model: nn.Module,
        factors: Mapping[str, str],
        cache: CompileCache,
        work_dir: Path,
        timeline: Timeline,
        *,
        device: torch.device,
        token_budget: int,
    ) -> None:
        """`model` takes `(input_ids, positions)`, int64 (T,) each, T up to `token_budget`; its weights need not be
        loaded yet. `work_dir` must be private to this process."""
        self.model = model
        self.factors = dict(factors)
        self.key = factors_module.cache_key(factors)
        self.cache = cache
        self.directory = work_dir / self.key
        self.timeline = timeline
        self.device = device
        self.token_budget = token_budget
        self._lock = contextlib.ExitStack()
        self._compiled: CompiledModel | None = None

    @property
    def compiled(self) -> CompiledModel:
        """What `build` made."""
        if self._compiled is None:
            raise RuntimeError("build() has not run")
        return self._compiled

    def build(self) -> CompiledModel:
        """Load the compiled model, or compile it.

        Raises UserError when it must be compiled and cannot be: no C++ compiler on CPU, no space to work in.
        """
        if self.device.type == "cpu" and factors_module.cpp_compiler() is None:
            raise UserError(
                "--mode compile: no C++ compiler is found ($CXX or g++); install one or pass --enforce-eager"
            )
        try:
            self._compiled = self._load() or self._load_or_compile()
        except OSError as error:
            self._lock.close()
            raise UserError(
                f"--mode compile: cannot work in {self.directory}: {error.strerror}; free space there, point TMPDIR "
                "elsewhere, or pass --enforce-eager"
            ) from error
        except BaseException:
            self._lock.close()
            raise
        return self._compiled

    def _load_or_compile(self) -> CompiledModel:
        """Wait for the entry's lock, then look again: another server may have stored the entry meanwhile."""
        with self.timeline.span("compile/lock"):
            holds_lock = self._lock.enter_context(self.cache.lock(self.key, LOCK_TIMEOUT_S))
        if holds_lock:
            compiled = self._load()
            if compiled is not None:
                self._lock.close()
                return compiled
        return self._compile()

    def publish(self) -> None:
        """Store what was compiled, after the first full-size run has settled it, and release the entry's lock. A
        cache that cannot be written to is worth a warning, no more."""
        if self.compiled.cache_hit:
            return
        try:
            with self.timeline.span("compile/store"):
                self.cache.publish(self.key, self.directory, self.factors)
        except (OSError, CacheEntryError) as error:
            logger.warning("compiled graph is not cached, the next start compiles again: %s", error)
        finally:
            self._lock.close()

    def _load(self) -> CompiledModel | None:
        self._fresh_directory()
        try:
            with self.timeline.span("compile/fetch") as attributes:
                found = self.cache.fetch(self.key, self.directory)
                attributes["cache"] = "hit" if found else "miss"
            if not found:
                return None
            plan = msgspec.json.decode((self.directory / _PLAN).read_bytes(), type=Plan)
            plan.check()
            self._check_weights(plan)
            pieces = []
            with inductor_dir(self.directory / _INDUCTOR), contextlib.ExitStack() as stack:
                with self.timeline.span("compile/import-inductor"):
                    importlib.import_module("torch._inductor.compile_fx")
                    if self.device.type == "cpu":
                        from server.compilation.isa import known_results

                        known = msgspec.json.decode((self.directory / _ISA).read_bytes(), type=dict[str, bool])
                        stack.enter_context(known_results(known))
                for number in range(plan.num_pieces):
                    with self.timeline.span(f"compile/inductor/piece-{number}", cache="hit"):
                        pieces.append(load_piece(self._artifact(number)))
            return CompiledModel(self.model, plan, pieces, key=self.key, cache_hit=True, directory=self.directory)
        except Exception as error:  # torch checks its artifacts with bare asserts and unpickling errors of all kinds
            logger.warning(
                "compile cache: entry %s cannot be used and is compiled again: %s: %s",
                self.key,
                type(error).__name__,
                error,
            )
            return None

    def _compile(self) -> CompiledModel:
        self._fresh_directory()
        with inductor_dir(self.directory / _INDUCTOR), contextlib.ExitStack() as stack:
            with self.timeline.span("compile/import-inductor"):
                wait_for_isa = self._import_inductor(stack)
                from server.compilation.capture import capture
                from server.compilation.repeat import repeat_layers, shortened
                from server.compilation.split import split

            with compile_processes(self.device):
                with self.timeline.span("compile/dynamo"):
                    short, num_layers = shortened(self.model)
                    captured = capture(short, _tuning_size(self.token_budget), self.device)
                with self.timeline.span("compile/split"):
                    graph = split(captured)
                    plan = graph.plan if short is self.model else repeat_layers(graph.plan, num_layers)
                with self.timeline.span("compile/isa-probe"):
                    wait_for_isa()
                pieces = []
                for number, piece in enumerate(graph.pieces):
                    with self.timeline.span(f"compile/inductor/piece-{number}", cache="miss"):
                        pieces.append(compile_piece(piece, self._artifact(number)))
        (self.directory / _PLAN).write_bytes(msgspec.json.encode(plan))
        return CompiledModel(self.model, plan, pieces, key=self.key, cache_hit=False, directory=self.directory)

    def _check_weights(self, plan: Plan) -> None:
        names = {name for name, _ in (*self.model.named_parameters(), *self.model.named_buffers())}
        missing = plan.weights() - names
        if missing:
            raise CacheEntryError(f"{_PLAN} names the weight {min(missing)}, which the model does not have")

    def _import_inductor(self, stack: contextlib.ExitStack) -> Callable[[], None]:
        """Import Inductor. On CPU it also has to find out which vector instructions work, by compiling and running
        small programs: they run beside the import and whatever follows until the returned function is called, which
        writes down what was found. What must last as long as Inductor is used goes on `stack`."""
        importlib.import_module("torch._inductor.codecache")
        wait = _nothing
        if self.device.type == "cpu":
            from torch._inductor.cpu_vec_isa import pick_vec_isa

            # What the probe would import. Setuptools comes with it, which for a moment has one finder more in
            # sys.meta_path: a thread that is looking for a module then may pass over the finder that would find it.
            importlib.import_module("torch.utils.cpp_extension")

            from server.compilation.isa import known_results

            results = stack.enter_context(known_results({}))
            probe = threading.Thread(target=pick_vec_isa, name="isa-probe")
            probe.start()

            def wait() -> None:
                probe.join()
                (self.directory / _ISA).write_bytes(msgspec.json.encode(results))

        importlib.import_module("torch._inductor.compile_fx")
        return wait

    def _artifact(self, number: int) -> Path:
        return self.directory / f"piece-{number}.bin"

    def _fresh_directory(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.mkdir(parents=True, mode=0o700)


def _nothing() -> None:
    pass


def _tuning_size(token_budget: int) -> int:
    """Number of tokens that kernels are tuned for: the largest batch, made odd so that no property of a round number
    (divisible by 16, equal to a size of the model) is mistaken for one of all batches."""
    return max(3, token_budget - 1 if token_budget % 2 == 0 else token_budget)
