"""What the cells send: workloads and schedules, built once each before any server starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from benchctl.matrix.plan import Cell
from reports.schema import CellConfig, WorkloadInfo
from server.errors import UserError
from workloads import build_workload
from workloads.arrivals import Schedule, build_schedule
from workloads.base import Workload
from workloads.tokenizer import TokenizerLike, load_tokenizer


@dataclass(frozen=True, slots=True)
class Traffic:
    workload: Workload
    schedule: Schedule
    info: WorkloadInfo


class TrafficFactory:
    """Builds each distinct workload and schedule of a matrix once."""

    def __init__(self) -> None:
        self._tokenizers: dict[str, TokenizerLike | None] = {}
        self._workloads: dict[bytes, Workload] = {}

    def prepare(self, cells: Sequence[Cell]) -> dict[str, Traffic]:
        """Traffic by cell id. Raises UserError, naming the cell, for a specification that cannot be met."""
        traffic = {}
        for cell in cells:
            try:
                traffic[cell.id] = self.build(cell.config)
            except UserError as error:
                raise UserError(f"cell {cell.id}: {error}") from error
        return traffic

    def build(self, config: CellConfig) -> Traffic:
        tokenizer = self._tokenizer(config)
        key = msgspec.json.encode(
            (config.workload, config.seed, tokenizer.name if tokenizer else None), order="deterministic"
        )
        if key not in self._workloads:
            self._workloads[key] = build_workload(config.workload, seed=config.seed, tokenizer=tokenizer)
        workload = self._workloads[key]
        schedule = build_schedule(
            config.arrival,
            len(workload.requests),
            config.seed,
            timestamps_s=[request.timestamp_s for request in workload.requests]
            if config.arrival.get("name") == "trace"
            else None,
        )
        return Traffic(workload, schedule, describe(workload, schedule))

    def _tokenizer(self, config: CellConfig) -> TokenizerLike | None:
        """The model's own tokenizer; None for a preset, a hub name that is only known to the endpoint, or a URL."""
        if config.model not in self._tokenizers:
            try:
                self._tokenizers[config.model] = load_tokenizer(config.model)
            except UserError:
                self._tokenizers[config.model] = None
        return self._tokenizers[config.model]


def describe(workload: Workload, schedule: Schedule) -> WorkloadInfo:
    """The part of a result that says what was sent."""
    prompt_tokens = [request.prompt_tokens for request in workload.requests]
    known = [tokens for tokens in prompt_tokens if tokens is not None]
    return WorkloadInfo(
        name=workload.name,
        digest=workload.digest,
        schedule_digest=schedule.digest,
        requests=len(workload.requests),
        forced_lengths=all(request.ignore_eos for request in workload.requests),
        prompt_tokens_total=sum(known) if len(known) == len(prompt_tokens) else None,
        output_tokens_requested=sum(request.max_tokens for request in workload.requests),
        dropped=workload.dropped,
        notes=workload.notes,
    )
