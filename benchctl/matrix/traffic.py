"""What the cells send: workloads and schedules, built once each before any server starts."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchctl.loadgen.endpoint import as_messages
from benchctl.loadgen.stream import MOST_TOKENS
from benchctl.matrix.models import comes_from_elsewhere
from benchctl.matrix.plan import Cell
from benchctl.metrics import Lengths
from reports.schema import CellConfig, WorkloadInfo
from server.config import ModelOptions
from server.errors import UserError
from server.models.registry import PRESETS, models_dir, resolve_model
from workloads import build_workload
from workloads.arrivals import Schedule, build_schedule
from workloads.base import OnRead, RequestDigest, Workload, read_requests
from workloads.files import open_data
from workloads.token_ids import request_timestamps
from workloads.tokenizer import TokenizerLike, load_tokenizer
from workloads.trace import is_export

_WITH_TOKEN_IDS = ("synthetic", "sharegpt-like", "trace")
"""Workloads that can send token ids and take `vocab_size`."""
_FROM_FILES = ("sharegpt", "custom")


@dataclass(frozen=True, slots=True)
class Traffic:
    workload: Workload
    schedule: Schedule
    info: WorkloadInfo
    forced_lengths: Lengths
    """Output tokens that each request is forced to; 0: the model may end its answer."""


class TrafficFactory:
    """Builds each distinct workload and schedule of a matrix once; `on_read` follows the reading of each workload."""

    def __init__(self, on_read: OnRead | None = None) -> None:
        self._on_read = on_read
        self._local: dict[str, bool] = {}
        self._tokenizers: dict[str, TokenizerLike | None] = {}
        self._vocab_sizes: dict[str, int | None] = {}
        self._workloads: dict[bytes, tuple[Workload, WorkloadInfo, Lengths]] = {}
        self._replayed: set[bytes] = set()

    def prepare(self, cells: Sequence[Cell]) -> dict[str, Traffic]:
        """Traffic by cell id. Raises UserError, naming the cell, for a specification that cannot be met."""
        for cell in cells:
            self._note_local(cell.config)
        traffic: dict[str, Traffic] = {}
        for cell in cells:
            try:
                traffic[cell.id] = self.build(cell.config)
            except UserError as error:
                raise UserError(f"cell {cell.id}: {error}") from error
        return traffic

    def check(self, cells: Sequence[Cell]) -> None:
        """What `prepare` would refuse, found without fetching a model. Raises UserError, naming the cell."""
        checked: set[bytes] = set()
        for cell in cells:
            config = cell.config
            same = (config.engine == "url", config.model, config.workload, config.arrival, config.endpoint, config.seed)
            key = msgspec.json.encode(same, order="deterministic")
            if key in checked:
                continue
            checked.add(key)
            self._note_local(config)
            try:
                given = "tokenizer" in config.client or config.engine == "url"
                if not given and comes_from_elsewhere(config.model):
                    check_traffic(config)
                else:
                    check_traffic(config, self._tokenizer(config), tokenizer_known=True)
            except UserError as error:
                raise UserError(f"cell {cell.id}: {error}") from error

    def build(self, config: CellConfig) -> Traffic:
        """Traffic of the next cell; notes when it repeats prompts of one before. Raises UserError."""
        self._note_local(config)
        tokenizer = self._tokenizer(config)
        spec = self._within_vocabulary(config)
        key = msgspec.json.encode((spec, config.seed, tokenizer.name if tokenizer else None), order="deterministic")
        if key not in self._workloads:
            built = build_workload(spec, seed=config.seed, tokenizer=tokenizer)
            self._workloads[key] = built, *describe(built, self._on_read)
        workload, described, forced_lengths = self._workloads[key]
        _check_endpoint(config, workload)
        schedule = build_schedule(
            config.arrival,
            len(workload.requests),
            config.seed,
            timestamps_s=request_timestamps(workload.requests) if config.arrival.get("name") == "trace" else None,
        )
        info = msgspec.structs.replace(
            described, schedule_digest=schedule.digest, notes=list(described.notes), dropped=dict(described.dropped)
        )
        replayed = _server_and_file(config)
        if replayed in self._replayed:
            info.notes.append("an earlier cell sent these prompts to the same server: its prefix cache may hold them")
        elif replayed is not None:
            self._replayed.add(replayed)
        return Traffic(workload, schedule, info, forced_lengths)

    def _note_local(self, config: CellConfig) -> None:
        """Find out whether the model may be looked up here: an endpoint's own name must not start a download."""
        name = config.model
        here = config.engine != "url" or name in PRESETS or (models_dir() / name).is_dir() or Path(name).is_dir()
        self._local[name] = self._local.get(name, False) or (bool(name) and here)

    def _tokenizer(self, config: CellConfig) -> TokenizerLike | None:
        """The one that the client was given, else the model's own; None for a preset, or for a name that means
        something to an endpoint only.
        """
        if given := config.client.get("tokenizer"):
            return load_tokenizer(str(given))
        model = config.model
        if not self._local[model]:
            return None
        if model not in self._tokenizers:
            self._tokenizers[model] = None
            with contextlib.suppress(UserError):
                self._tokenizers[model] = load_tokenizer(model)
        return self._tokenizers[model]

    def _within_vocabulary(self, config: CellConfig) -> dict[str, Any]:
        """The workload with the model's `vocab_size`, unless it says one or takes none."""
        spec, model = config.workload, config.model
        if spec.get("name") not in _WITH_TOKEN_IDS or "vocab_size" in spec or not self._local[model]:
            return spec
        if _sends_an_export(spec):
            return spec  # its prompts are made already
        if model not in self._vocab_sizes:
            self._vocab_sizes[model] = None
            with contextlib.suppress(UserError):  # another engine may know an architecture that ours does not
                resolved = resolve_model(ModelOptions(model=model, load_format="dummy"))
                self._vocab_sizes[model] = resolved.config.vocab_size
        size = self._vocab_sizes[model]
        return spec if size is None else {**spec, "vocab_size": size}


def check_traffic(config: CellConfig, tokenizer: TokenizerLike | None = None, *, tokenizer_known: bool = False) -> None:
    """Find what is wrong with a workload and its arrivals, as early as it can be. Raises UserError.

    Before `tokenizer_known` is true, what only the model's tokenizer can tell is left to `TrafficFactory.build`: token
    ids stand for text, which is costly to make besides, and of ShareGPT data only the file is opened.
    """
    build_schedule(config.arrival, 1, config.seed, timestamps_s=[0.0])
    spec = config.workload
    by_ids = not tokenizer_known and _makes_text(spec)
    if by_ids:
        spec = {**spec, "prompt_format": "ids"}
    if spec.get("name") == "sharegpt" and not tokenizer_known:
        if isinstance(path := spec.get("path"), str):
            open_data(path, where="workload sharegpt")
        return
    workload = build_workload(spec, seed=config.seed, tokenizer=tokenizer)
    if not by_ids:
        _check_endpoint(config, workload)
    build_schedule(
        config.arrival,
        len(workload.requests),
        config.seed,
        timestamps_s=request_timestamps(workload.requests) if config.arrival.get("name") == "trace" else None,
    )


def _check_endpoint(config: CellConfig, workload: Workload) -> None:
    if config.endpoint == "chat" and len(workload.requests):
        as_messages(workload.requests[0])


def _makes_text(spec: dict[str, Any]) -> bool:
    """Whether a workload that could as well send token ids is to make up texts."""
    default = "text" if spec.get("name") == "sharegpt-like" else "ids"
    able = spec.get("name") in _WITH_TOKEN_IDS and not _sends_an_export(spec)
    return able and spec.get("prompt_format", default) == "text"


def _sends_an_export(spec: dict[str, Any]) -> bool:
    return spec.get("name") == "trace" and is_export(spec)


def _server_and_file(config: CellConfig) -> bytes | None:
    """Key of a server and of the file whose prompts it gets; None for prompts that are made up from the seed."""
    if config.workload.get("name") not in _FROM_FILES and not _sends_an_export(config.workload):
        return None
    server = (config.engine, config.model, config.mode, config.attention_backend, config.url)
    return msgspec.json.encode((server, config.workload), order="deterministic")


def describe(workload: Workload, on_read: OnRead | None = None) -> tuple[WorkloadInfo, Lengths]:
    """The part of a result that says what was sent, but when, and the forced lengths; every request is read once."""
    digest = RequestDigest()
    prompt_tokens: int | None = 0
    output_tokens = 0
    forced = True
    forced_lengths = np.zeros(len(workload.requests), np.int32)
    for position, request in enumerate(read_requests(workload.requests, on_read)):
        digest.add(request)
        output_tokens += request.max_tokens
        forced &= request.ignore_eos
        if request.ignore_eos:
            forced_lengths[position] = min(request.max_tokens, MOST_TOKENS)
        if prompt_tokens is not None:
            prompt_tokens = None if request.prompt_tokens is None else prompt_tokens + request.prompt_tokens
    info = WorkloadInfo(
        name=workload.name,
        digest=digest.hexdigest(),
        requests=len(workload.requests),
        forced_lengths=forced,
        prompt_tokens_total=prompt_tokens,
        output_tokens_requested=output_tokens,
        dropped=workload.dropped,
        notes=workload.notes,
    )
    return info, forced_lengths
