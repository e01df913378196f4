"""TRITON_ATTN: own Triton kernels over the paged cache."""

from __future__ import annotations

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, ClassVar

import torch

from server.attention.base import AttentionBackend, AttentionMetadata, AttentionSpec
from server.kernels.attention_config import DECODE_TABLE, DecodeConfig, decode_config, padded_head_dim

if TYPE_CHECKING:
    from server.kernels.paged_decode import DecodeScratch

SUPPORTED_BLOCK_SIZES = (16, 32, 64, 128, 256)
SUPPORTED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_HEAD_DIM = 256

FEW_DECODES = 8
LONG_DECODE = 2048
"""So many decodes at the front of a mixed batch, or any if a sequence is this long, go to the split-KV kernel (a second
launch). A kernel for prompts has one program per key/value head walk a decode's whole sequence alone, with nearly all
rows of its tile empty."""


def takes_decodes(metadata: AttentionMetadata) -> bool:
    """Whether the decodes at the front of a mixed batch are worth a launch of the split-KV kernel."""
    return metadata.num_decodes >= (1 if metadata.max_seq_len >= LONG_DECODE else FEW_DECODES)


class TritonAttentionBackend(AttentionBackend):
    """Decodes run the split-KV kernel, all else the unified variable-length kernel.

    Both read block tables, lengths and query offsets on the device, so any batch of the captured size can be replayed
    in a CUDA Graph.
    """

    name: ClassVar[str] = "TRITON_ATTN"
    preferred_block_size: ClassVar[int] = 64
    supports_full_cudagraph: ClassVar[bool] = True

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        # Imported late: `server.attention` must be importable where triton is not installed.
        from server.kernels import decode_plan, kv_write, paged_decode, paged_prefill

        self._write_kv = kv_write.write_kv
        self._decode = paged_decode.paged_decode
        self._make_plan = decode_plan.plan_decode
        self._prefill = paged_prefill.paged_prefill
        self._padded_head_dim = padded_head_dim(spec.head_dim)
        self._scratch: DecodeScratch = paged_decode.DecodeScratch(
            spec.device, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.max_num_seqs
        )

    @classmethod
    def why_unavailable(cls, spec: AttentionSpec) -> str | None:
        if spec.device.type != "cuda":
            return f"TRITON_ATTN needs a CUDA device, not {spec.device.type}"
        if importlib.util.find_spec("triton") is None:
            return "TRITON_ATTN needs the package triton: pip install 'benchctl[gpu]'"
        from server.kernels.launch import INTERPRETED

        if INTERPRETED:
            return "TRITON_ATTN does not serve from Triton's interpreter: unset TRITON_INTERPRET"
        return why_unsupported(spec)

    def write_kv(
        self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        self._write_kv(key, value, kv_cache, slot_mapping)

    def forward(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
        output: torch.Tensor,
    ) -> None:
        if metadata.max_query_len <= 1:
            self.decode(query, kv_cache, metadata, scale, output)
            zero_padding(output, metadata.seq_lens.shape[0])
            return
        first_seq = 0
        if takes_decodes(metadata):
            first_seq = metadata.num_decodes
            self.decode(query, kv_cache, metadata.split()[0], scale, output)
        self._prefill(
            query,
            kv_cache,
            metadata.block_table,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.max_query_len,
            query.shape[0],
            scale,
            output,
            first_seq=first_seq,
        )
        zero_padding(output, metadata.num_tokens)

    def decode(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
        output: torch.Tensor,
    ) -> None:
        """Attend a batch of decodes by split-KV: sequence b is row b. Rows past the sequences are left alone."""
        num_seqs = min(metadata.seq_lens.shape[0], query.shape[0])
        config = decode_config(self._padded_head_dim, query.element_size(), num_seqs)
        self._decode(
            query,
            kv_cache,
            metadata.block_table,
            metadata.seq_lens,
            metadata.max_seq_len,
            scale,
            output,
            self._scratch,
            config=config,
            plan=self._plan_of(metadata, num_seqs, config) if config.planned else None,
        )

    def _plan_of(self, metadata: AttentionMetadata, num_seqs: int, config: DecodeConfig) -> torch.Tensor:
        """The batch's plan, made by the first layer: a graph must make its own, so that it serves other lengths."""
        capturing = self.spec.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        made = metadata.decode_plan
        if made is None or made[0] != capturing:
            plan = self._make_plan(metadata.seq_lens[:num_seqs], self.spec.num_kv_heads, self.spec.max_num_seqs, config)
            made = metadata.decode_plan = (capturing, plan)
        return made[1]

    def warm_up(self, metadata_sizes: list[int]) -> None:
        """Compile the kernels for every row of their tables that a batch can select."""
        from server.attention.warm_up import SyntheticBatch, warm_up_batches
        from server.kernels.launch import WARM_UP_THREADS

        group = self.spec.num_heads // self.spec.num_kv_heads
        largest = max(metadata_sizes, default=1)
        table = DECODE_TABLE[self._padded_head_dim, self.spec.dtype.itemsize]
        sizes = sorted({min(bound, largest) for bound in table})
        query_lens = sorted({2, max(2, 64 // group), 128})

        def run(batch: SyntheticBatch) -> None:
            self.write_kv(batch.key, batch.value, batch.kv_cache, batch.metadata.slot_mapping)
            self.forward(batch.query, batch.kv_cache, batch.metadata, 1.0, batch.output)

        # Compiling holds the lock of the interpreter; the threads are for what waits, for builders and for the disk.
        with ThreadPoolExecutor(WARM_UP_THREADS, thread_name_prefix="attention") as pool:
            list(pool.map(run, warm_up_batches(self.spec, sizes, query_lens)))
        if self.spec.device.type == "cuda":
            torch.cuda.synchronize(self.spec.device)


def why_unsupported(spec: AttentionSpec) -> str | None:
    """One line if the kernels cannot run the shapes of `spec`."""
    if spec.block_size and spec.block_size not in SUPPORTED_BLOCK_SIZES:
        sizes = ", ".join(map(str, SUPPORTED_BLOCK_SIZES))
        return f"TRITON_ATTN needs --block-size {sizes}, not {spec.block_size}"
    if spec.head_dim > MAX_HEAD_DIM or spec.head_dim % 8:
        return f"TRITON_ATTN needs a head size that is a multiple of 8 up to {MAX_HEAD_DIM}, not {spec.head_dim}"
    if spec.dtype not in SUPPORTED_DTYPES:
        return f"TRITON_ATTN needs bfloat16, float16 or float32, not {spec.dtype}"
    return None


def zero_padding(output: torch.Tensor, num_rows: int) -> None:
    """Make the rows past `num_rows` finite: they are padding, but later layers compute with them."""
    if output.shape[0] > num_rows:
        output[num_rows:].zero_()
