"""Runs one scheduled step: batch update, forward pass, sampling."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from server.attention.base import AttentionBackend, AttentionMetadata
from server.compilation.dispatch import BatchDescriptor, CaptureSizes, Dispatcher
from server.config import Mode, ServerConfig
from server.forward_context import ForwardContext, set_forward_context
from server.ipc.engine_to_worker import ScheduleStep
from server.models.decoder import CausalLM
from server.worker.input_batch import InputBatch, StepRows
from server.worker.input_buffers import InputBuffers
from server.worker.logprobs import LogprobTensors, gather_logprobs
from server.worker.prompt_logprobs import PromptLogprobs, PromptPart
from server.worker.sampler import sample
from server.worker.sampling_state import SamplingState
from server.worker.sampling_warm_up import random_rows

if TYPE_CHECKING:
    from server.compilation.cudagraph import CudaGraphForward

logger = logging.getLogger(__name__)

ModelForward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(slots=True)
class StepOutput:
    """Results of a step, still on the device."""

    step_id: int
    request_ids: list[str]
    """Requests that sampled, in batch order."""
    token_ids: torch.Tensor
    """int64 (S,)."""
    logprobs: LogprobTensors | None
    """Of the rows in `logprob_rows`."""
    logprob_rows: list[int]
    """Indices into `request_ids`."""
    num_top: list[int]
    """Likeliest tokens wanted by each of `logprob_rows`."""
    prompt_parts: list[PromptPart]
    seconds: dict[str, float]
    """Host seconds per phase; on CUDA these are the times to launch."""


@dataclass(slots=True)
class _Prepared:
    """A step whose inputs are on their way to the device."""

    rows: StepRows
    shape: BatchDescriptor
    metadata: AttentionMetadata
    sampling_sequences: np.ndarray
    """int64 (S,): the sequences, of B, that sample."""
    last_tokens: torch.Tensor
    """int64 (S,): their last tokens, of T."""
    positions: torch.Tensor
    """int64 (S,): positions that the sampled tokens will take."""
    batch_rows: torch.Tensor
    """int64 (S,): their rows in the batch."""


class ModelRunner:
    """One model on one device. Call `bind_cache` once before the first `execute`."""

    def __init__(
        self,
        config: ServerConfig,
        model: CausalLM,
        device: torch.device,
        dtype: torch.dtype,
        max_num_tokens: int,
        compiled_forward: ModelForward | None = None,
    ) -> None:
        """`compiled_forward` takes the place of the decoder's own forward pass in compiled mode."""
        self.config = config
        self.model = model
        self.device = device
        self.dtype = dtype
        self.max_num_tokens = max_num_tokens
        self.max_num_seqs = config.scheduler.max_num_seqs
        self.attention_layers = model.attention_layers()
        self.buffers = InputBuffers(max_num_tokens, self.max_num_seqs, device)
        self.input_ids = self.buffers.input_ids.device_tensor
        """int64 (max_num_tokens,), at a fixed address."""
        self.positions = self.buffers.positions.device_tensor
        """int64 (max_num_tokens,), at a fixed address."""
        self.last_sampled = torch.zeros(self.max_num_seqs, dtype=torch.int64, device=device)
        """Latest sampled token of each row of the batch."""
        self.sampling = SamplingState(self.max_num_seqs, model.config.vocab_size, device, config.model.seed)
        self.prompt_logprobs = PromptLogprobs()
        self._tables: tuple[int, bytes] | None = None
        self.mode: Mode = "eager" if compiled_forward is None else "compile"
        self.model_forward: ModelForward = compiled_forward or self.model.model
        """Computes hidden states (T, hidden) from input ids and positions (T,)."""
        self.graphs: CudaGraphForward | None = None
        """CUDA Graphs of `model_forward`, while and after they are captured."""
        self.dispatcher = Dispatcher(CaptureSizes())

    def bind_cache(self, backend: AttentionBackend, max_model_len: int) -> None:
        """Make the batch, once the cache is allocated and the context length is known."""
        self.backend = backend
        self.max_model_len = max_model_len
        self.batch = InputBatch(self.max_num_seqs, max_model_len, backend.spec.block_size)
        self.buffers.make_block_table(self.batch.max_blocks)

    def describe_batch(self, num_tokens: int, num_seqs: int, max_query_len: int) -> BatchDescriptor:
        """The shape that a batch of these sizes runs under."""
        return self.dispatcher.dispatch(num_tokens, num_seqs, max_query_len)

    @torch.inference_mode()
    def execute(self, step: ScheduleStep) -> StepOutput:
        """Run a step; returns as soon as everything is queued on the device."""
        started = time.perf_counter()
        freed, filled = self.batch.apply(step)
        for row in freed:
            self.sampling.drop(row)
            self.prompt_logprobs.drop(row)
        for row, request in zip(filled, step.new_requests, strict=True):
            self.sampling.add(row, request)
            self.prompt_logprobs.add(row, request)
        if not step.scheduled:
            return _no_samples(step.step_id)
        prepared = self._prepare(self.batch.step_rows(step))
        prepared_at = time.perf_counter()
        hidden = self.forward(prepared.shape, prepared.metadata)
        forwarded_at = time.perf_counter()
        output = self._sample(step.step_id, prepared, hidden)
        output.prompt_parts = self.prompt_logprobs.compute(self.batch, prepared.rows, hidden, self.model.compute_logits)
        self.batch.advance(prepared.rows)
        logits_s = output.seconds.get("logits", 0.0)
        output.seconds = {
            "prepare": prepared_at - started,
            "forward": forwarded_at - prepared_at,
            "logits": logits_s,
            "sample": time.perf_counter() - forwarded_at - logits_s,
        }
        return output

    def forward(self, shape: BatchDescriptor, metadata: AttentionMetadata | None) -> torch.Tensor:
        """Hidden states (shape.num_tokens, hidden) of what the input buffers hold."""
        context = ForwardContext(
            attention_metadata=metadata,
            layers=self.attention_layers,
            cudagraph_mode=shape.cudagraph_mode,
            num_tokens_padded=shape.num_tokens,
            positions=self.positions[: shape.num_tokens],
        )
        forward = self.model_forward if self.graphs is None else self.graphs
        with set_forward_context(context):
            return forward(self.input_ids[: shape.num_tokens], self.positions[: shape.num_tokens])

    def _prepare(self, rows: StepRows) -> _Prepared:
        """Fill the input buffers, padded to the shape that the batch runs under, and queue their copies."""
        batch, buffers = self.batch, self.buffers
        num_tokens, num_seqs = len(rows.positions), len(rows.rows)
        max_query_len, max_seq_len = int(rows.num_scheduled.max()), int(rows.seq_lens.max())
        shape = self.describe_batch(num_tokens, num_seqs, max_query_len)
        token_rows = rows.rows[rows.token_sequence]
        buffers.begin()
        buffers.fill_tokens(
            batch.token_ids[token_rows, rows.positions], rows.positions, batch.slots(rows), shape.num_tokens
        )
        in_flight = np.flatnonzero(rows.positions >= batch.num_known[token_rows])
        buffers.feed_sampled(in_flight, token_rows[in_flight], self.last_sampled, num_tokens)
        buffers.fill_sequences(rows.query_start_loc, rows.seq_lens, shape.num_seqs)
        tables = (batch.table_version, rows.rows.tobytes())
        if tables != self._tables:
            # Blocks that a request holds beyond this step are uploaded with it, so that later steps need not.
            columns = int(batch.num_blocks[rows.rows].max())
            buffers.fill_block_table(batch.block_table[rows.rows, :columns])
            self._tables = tables
        sampling = np.flatnonzero(rows.samples)
        last_tokens, positions, batch_rows = buffers.upload_samples(
            rows.query_start_loc[sampling + 1] - 1, rows.seq_lens[sampling], rows.rows[sampling]
        )
        buffers.end()
        metadata = buffers.metadata(
            num_tokens=num_tokens,
            num_seqs=num_seqs,
            padded_tokens=shape.num_tokens,
            padded_seqs=shape.num_seqs,
            max_query_len=max_query_len,
            max_seq_len=self.max_model_len if shape.cudagraph_mode == "full" else max_seq_len,
            num_decodes=int((rows.num_scheduled != 1).argmax()) if max_query_len > 1 else num_seqs,
        )
        return _Prepared(rows, shape, metadata, sampling, last_tokens, positions, batch_rows)

    def _sample(self, step_id: int, prepared: _Prepared, hidden: torch.Tensor) -> StepOutput:
        rows, sampling = prepared.rows, prepared.sampling_sequences
        if not sampling.size:
            return _no_samples(step_id)
        batch_rows = rows.rows[sampling]
        wanted = self.sampling.num_logprobs(batch_rows)
        asking = np.flatnonzero(wanted >= 0)
        generated = self.batch.num_tokens[batch_rows] - self.batch.num_prompt[batch_rows]
        metadata = self.sampling.metadata(batch_rows, generated)
        graph = None
        if self.graphs is not None and prepared.shape.cudagraph_mode == "full":
            graph = self.graphs.full[prepared.shape.num_tokens]
        logprobs = None
        seconds = {}
        if graph is not None and metadata.is_greedy and not asking.size:
            # A copy: the next step overwrites the graph's memory, maybe before these ids have reached the host.
            token_ids = graph.token_ids.index_select(0, prepared.last_tokens)
        else:
            if graph is not None:
                logits = graph.logits.index_select(0, prepared.last_tokens)
            else:
                # Part of the model, though only the rows that sample go through it: counted apart from the sampler.
                before = time.perf_counter()
                logits = self.model.compute_logits(hidden.index_select(0, prepared.last_tokens))
                seconds["logits"] = time.perf_counter() - before
            asking_index = torch.from_numpy(asking).to(self.device) if asking.size else None
            # The sampler may overwrite the logits, and log-probabilities are those of the raw ones.
            raw = logits.index_select(0, asking_index) if asking_index is not None else None
            token_ids = sample(logits, metadata, prepared.positions)
            if raw is not None and asking_index is not None:
                logprobs = gather_logprobs(raw, token_ids.index_select(0, asking_index), int(wanted.max()))
        self.last_sampled.index_copy_(0, prepared.batch_rows, token_ids)
        request_ids = rows.request_ids
        if sampling.size != len(request_ids):
            request_ids = [request_ids[i] for i in sampling.tolist()]
        tops = wanted[asking].tolist()
        return StepOutput(step_id, request_ids, token_ids, logprobs, asking.tolist(), tops, [], seconds)

    @torch.inference_mode()
    def dummy_run(self, num_tokens: int, *, num_seqs: int | None = None, attention: bool = False) -> torch.Tensor:
        """Run the model over `num_tokens` zeros, for profiling, warm-up and capture; returns hidden states.

        Without `attention` the attention op writes zeros, and no KV cache is needed. With it, `num_seqs` sequences
        (default: one per token, a decode batch) share the tokens evenly, read no cache beyond their own dummy block
        and write nowhere.
        """
        metadata = None
        if attention:
            num_seqs = num_tokens if num_seqs is None else num_seqs
            metadata = self.buffers.dummy_metadata(num_tokens, num_seqs)
            self._tables = None
        self.input_ids[:num_tokens].zero_()
        self.positions[:num_tokens].zero_()
        return self.forward(BatchDescriptor(num_tokens, num_seqs or 0), metadata)

    @torch.inference_mode()
    def record_graph(self, shape: BatchDescriptor) -> None:
        """Record the CUDA Graph that serves `shape`, over the input buffers. Within the recorder's session."""
        if self.graphs is None:
            raise RuntimeError("no CUDA Graphs are set up")
        metadata = None
        if shape.cudagraph_mode == "full":
            metadata = self.buffers.dummy_metadata(shape.num_tokens, shape.num_seqs, self.max_model_len)
            self._tables = None
        record = self.graphs.record_full if shape.cudagraph_mode == "full" else self.graphs.record_piecewise
        positions = self.positions[: shape.num_tokens]
        with set_forward_context(ForwardContext(metadata, self.attention_layers, positions=positions)):
            record(self.input_ids[: shape.num_tokens], positions)

    @torch.inference_mode()
    def profile_run(self) -> None:
        """The largest step there can be: a full token budget, log-probabilities of a full batch, and a full batch that
        samples from a part of the vocabulary, which takes the most memory."""
        hidden = self.dummy_run(self.max_num_tokens)
        logits = self.model.compute_logits(hidden[: self.max_num_seqs])
        logits.float().log_softmax(dim=-1)
        sample(logits, *random_rows(len(logits), self.model.config.vocab_size, self.device, limited=True))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _no_samples(step_id: int) -> StepOutput:
    return StepOutput(step_id, [], torch.empty(0, dtype=torch.int64), None, [], [], [], {})
