"""The model's and the attention backend's inputs: fixed device tensors that each step fills from the host."""

from __future__ import annotations

import numpy as np
import torch

from server.attention.base import AttentionMetadata
from server.worker.buffers import StagingTurns


class InputBuffers:
    """Inputs of one step. Sizes are those of the largest step; a step uses the front of each.

    Between `begin` and `end` a step fills what it needs; every fill queues one copy to the device.
    """

    def __init__(self, max_num_tokens: int, max_num_seqs: int, device: torch.device) -> None:
        self._device = device
        self._max_num_seqs = max_num_seqs
        self._turns = turns = StagingTurns(device)
        self.input_ids = turns.add(max_num_tokens, torch.int64)
        self.positions = turns.add(max_num_tokens, torch.int64)
        self.slot_mapping = turns.add(max_num_tokens, torch.int64)
        self.query_start_loc = turns.add(max_num_seqs + 1, torch.int32)
        self.seq_lens = turns.add(max_num_seqs, torch.int32)
        self._feed = turns.add(2 * max_num_seqs, torch.int64)
        self._samples = turns.add(3 * (max_num_seqs + 1), torch.int64)

    def make_block_table(self, max_blocks: int) -> None:
        """Size the block table, once the context length is known."""
        self.block_table = torch.zeros((self._max_num_seqs, max_blocks), dtype=torch.int32, device=self._device)
        """int32 (max_num_seqs, max_blocks); columns past those that a step fills keep older numbers."""
        self._table_staging = self._turns.add(self._max_num_seqs * max_blocks, torch.int32)

    def begin(self) -> None:
        self._turns.begin()

    def end(self) -> None:
        self._turns.end()

    def fill_tokens(self, ids: np.ndarray, positions: np.ndarray, slots: np.ndarray, padded: int) -> None:
        """Token ids, positions and cache slots (T,), padded with id 0, position 0 and slot -1."""
        count = len(ids)
        for buffer, values, padding in (
            (self.input_ids, ids, 0),
            (self.positions, positions, 0),
            (self.slot_mapping, slots, -1),
        ):
            buffer.array[:count] = values
            buffer.array[count:padded] = padding
            buffer.upload(padded)

    def fill_sequences(self, query_start_loc: np.ndarray, seq_lens: np.ndarray, padded: int) -> None:
        """Query starts (B + 1,) and lengths (B,), padded with sequences of no tokens."""
        count = len(seq_lens)
        self.query_start_loc.array[: count + 1] = query_start_loc
        self.query_start_loc.array[count + 1 : padded + 1] = query_start_loc[-1]
        self.query_start_loc.upload(padded + 1)
        self.seq_lens.array[:count] = seq_lens
        self.seq_lens.array[count:padded] = 0
        self.seq_lens.upload(padded)

    def fill_block_table(self, blocks: np.ndarray) -> None:
        """The first columns of the sequences' block tables, (B, columns)."""
        count, columns = blocks.shape
        self._table_staging.array[: blocks.size] = blocks.reshape(-1)
        staged = self._table_staging.host[: blocks.size].view(count, columns)
        self.block_table[:count, :columns].copy_(staged, non_blocking=True)

    def feed_sampled(self, tokens: np.ndarray, rows: np.ndarray, last_sampled: torch.Tensor, num_tokens: int) -> None:
        """Set the input ids of `tokens` (of the step's `num_tokens`) to the tokens last sampled by batch `rows`."""
        count = len(tokens)
        if not count:
            return
        self._feed.array[:count] = rows
        if count == num_tokens:
            torch.index_select(last_sampled, 0, self._feed.upload(count), out=self.input_ids.device_tensor[:count])
            return
        self._feed.array[count : 2 * count] = tokens
        device_rows, device_tokens = self._feed.upload(2 * count).view(2, count)
        self.input_ids.device_tensor.index_copy_(0, device_tokens, last_sampled.index_select(0, device_rows))

    def upload_samples(
        self, last_tokens: np.ndarray, positions: np.ndarray, rows: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Device copies, int64 (S,) each, of the sampling sequences' last token, position and row of the batch."""
        count = len(rows)
        width = count + count % 2  # kernels are compiled for addresses that are multiples of 16 bytes
        for i, values in enumerate((last_tokens, positions, rows)):
            self._samples.array[i * width : i * width + count] = values
        device_last, device_positions, device_rows = self._samples.upload(3 * width).view(3, width)[:, :count]
        return device_last, device_positions, device_rows

    def metadata(
        self,
        *,
        num_tokens: int,
        num_seqs: int,
        padded_tokens: int,
        padded_seqs: int,
        max_query_len: int,
        max_seq_len: int,
        num_decodes: int = 0,
    ) -> AttentionMetadata:
        """Metadata over the buffers' fronts of the padded sizes."""
        return AttentionMetadata(
            num_tokens=num_tokens,
            num_seqs=num_seqs,
            query_start_loc=self.query_start_loc.device_tensor[: padded_seqs + 1],
            seq_lens=self.seq_lens.device_tensor[:padded_seqs],
            block_table=self.block_table[:padded_seqs],
            slot_mapping=self.slot_mapping.device_tensor[:padded_tokens],
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            query_start_loc_cpu=self.query_start_loc.host[: padded_seqs + 1],
            seq_lens_cpu=self.seq_lens.host[:padded_seqs],
            num_decodes=num_decodes,
        )

    def dummy_metadata(self, num_tokens: int, num_seqs: int, max_seq_len: int | None = None) -> AttentionMetadata:
        """`num_seqs` sequences that share `num_tokens` new tokens evenly, attend to those only and write nowhere."""
        starts = np.arange(num_seqs + 1, dtype=np.int64) * num_tokens // num_seqs
        lengths = np.diff(starts)
        self.begin()
        zeros = np.zeros(num_tokens, dtype=np.int64)
        self.fill_tokens(zeros, zeros, zeros - 1, num_tokens)
        self.fill_sequences(starts, lengths, num_seqs)
        self.block_table[:num_seqs].zero_()
        self.end()
        longest = int(lengths.max())
        return self.metadata(
            num_tokens=num_tokens,
            num_seqs=num_seqs,
            padded_tokens=num_tokens,
            padded_seqs=num_seqs,
            max_query_len=longest,
            max_seq_len=max_seq_len or longest,
        )
