"""The persistent batch: every request that the worker holds, one row each, in numpy arrays.

A request keeps its row from its first step until it is dropped. A step touches rows by array operations: the only
Python loops are over what changed (new, dropped, grown requests) and one lookup of row numbers per scheduled request.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from server.ipc.engine_to_worker import NewRequest, ScheduleStep


@dataclass(slots=True)
class StepRows:
    """The rows of one step in batch order, B sequences and T tokens, and what each computes."""

    request_ids: list[str]
    rows: np.ndarray
    """int64 (B,)."""
    num_scheduled: np.ndarray
    """int32 (B,): tokens to compute, >= 1."""
    query_start_loc: np.ndarray
    """int32 (B + 1,)."""
    seq_lens: np.ndarray
    """int32 (B,): computed tokens with this step's."""
    samples: np.ndarray
    """bool (B,): the sequence samples a token in this step."""
    token_sequence: np.ndarray
    """int64 (T,): sequence of each token, 0 to B - 1."""
    positions: np.ndarray
    """int64 (T,): position of each token in its sequence."""


class InputBatch:
    """Rows of requests. All sizes are fixed at construction."""

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        self.max_num_seqs = max_num_seqs
        self.block_size = block_size
        self.max_blocks = -(-max_model_len // block_size)
        # np.zeros maps pages only when they are written, so a long context costs nothing until it is used.
        self.token_ids = np.zeros((max_num_seqs, max_model_len), dtype=np.int32)
        self.block_table = np.zeros((max_num_seqs, self.max_blocks), dtype=np.int32)
        self.num_blocks = np.zeros(max_num_seqs, dtype=np.int32)
        self.num_known = np.zeros(max_num_seqs, dtype=np.int32)
        """Tokens whose ids the host holds; later ones were sampled here and their ids are on the device."""
        self.num_tokens = np.zeros(max_num_seqs, dtype=np.int32)
        """All tokens, with those sampled by earlier steps, landed or not."""
        self.num_computed = np.zeros(max_num_seqs, dtype=np.int32)
        self.num_prompt = np.zeros(max_num_seqs, dtype=np.int32)
        self.table_version = 0
        """Changes whenever a block table does."""
        self._row_of: dict[str, int] = {}
        self._free = list(range(max_num_seqs - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._row_of)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._row_of

    def row_of(self, request_id: str) -> int:
        return self._row_of[request_id]

    def drop(self, request_id: str) -> int | None:
        """Forget a request; returns the row that it had, None if it was not here."""
        row = self._row_of.pop(request_id, None)
        if row is not None:
            self._free.append(row)
        return row

    def add(self, request: NewRequest) -> int:
        """Take a request in; returns its row."""
        if request.request_id in self._row_of:
            raise RuntimeError(f"request {request.request_id} is in the batch already")
        if not self._free:
            raise RuntimeError(f"request {request.request_id}: all {self.max_num_seqs} rows are taken")
        row = self._free.pop()
        self._row_of[request.request_id] = row
        known = len(request.token_ids)
        self.token_ids[row, :known] = request.token_ids
        self.num_known[row] = known
        self.num_tokens[row] = known
        self.num_prompt[row] = request.num_prompt_tokens
        self.num_computed[row] = request.num_computed_tokens
        self.num_blocks[row] = 0
        self.append_blocks(row, request.block_ids)
        return row

    def append_blocks(self, row: int, block_ids: list[int]) -> None:
        start = self.num_blocks[row]
        end = start + len(block_ids)
        if end > self.max_blocks:
            raise RuntimeError(f"row {row}: {end} blocks, but a sequence has at most {self.max_blocks}")
        self.block_table[row, start:end] = block_ids
        self.num_blocks[row] = end
        self.table_version += 1

    def step_rows(self, step: ScheduleStep) -> StepRows:
        """Work out `step.scheduled`; the step's other changes must have been applied."""
        scheduled = step.scheduled
        batch = len(scheduled)
        rows = np.fromiter(map(self._row_of.__getitem__, scheduled), dtype=np.int64, count=batch)
        counts = np.fromiter(scheduled.values(), dtype=np.int32, count=batch)
        starts = np.zeros(batch + 1, dtype=np.int32)
        np.cumsum(counts, out=starts[1:])
        computed = self.num_computed[rows]
        seq_lens = computed + counts
        if starts[-1] == batch:
            sequence = np.arange(batch)
            positions = computed.astype(np.int64)
        else:
            sequence = np.repeat(np.arange(batch), counts)
            positions = np.arange(starts[-1], dtype=np.int64) + (computed - starts[:-1])[sequence]
        samples = seq_lens == self.num_tokens[rows]
        return StepRows(list(scheduled), rows, counts, starts, seq_lens, samples, sequence, positions)

    def slots(self, step: StepRows) -> np.ndarray:
        """Cache slot of each token of the step, int64 (T,)."""
        block, offset = np.divmod(step.positions, self.block_size)
        return self.block_table[step.rows[step.token_sequence], block].astype(np.int64) * self.block_size + offset

    def advance(self, step: StepRows) -> None:
        """Account for the step as computed, and for the tokens that it samples."""
        self.num_computed[step.rows] = step.seq_lens
        self.num_tokens[step.rows] += step.samples

    def apply(self, step: ScheduleStep) -> tuple[list[int], list[int]]:
        """Apply drops, additions and new blocks; returns (rows freed, rows filled)."""
        freed = [row for row in map(self.drop, step.dropped_request_ids) if row is not None]
        filled = [self.add(request) for request in step.new_requests]
        for request_id, block_ids in step.new_block_ids.items():
            self.append_blocks(self._row_of[request_id], block_ids)
        return freed, filled
