"""FLASH_ATTN: flash-attn-4 on Hopper and Blackwell, flash-attn 2.x on Ampere and Ada.

Decodes, also those at the front of a mixed batch, go to the split-KV Triton kernel unless `--flash-decode native`:
flash-attn-4 does not split a sequence's keys on Hopper, so few long sequences leave most of the card idle, and many do
not make up for it. On an H200 (32 query and 8 key/value heads of 128, pages of 64) 1 x 4096 tokens take 11 us against
55, 64 x 1024 68 against 84, 256 x 512 130 against 221.

Only Hopper (H200) has been measured. The other paths follow the packages' documented interfaces and are untested.
"""

from __future__ import annotations

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import torch

from server.attention import flash_attn_2, flash_attn_cute
from server.attention.base import AttentionBackend, AttentionMetadata, AttentionSpec
from server.attention.triton_attn import TritonAttentionBackend, takes_decodes, zero_padding

MAX_HEAD_DIM = 256


class FlashAttentionBackend(AttentionBackend):
    """The flash-attn packages over the paged cache."""

    name: ClassVar[str] = "FLASH_ATTN"
    preferred_block_size: ClassVar[int] = 64
    supports_full_cudagraph: ClassVar[bool] = True

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        self._cute: flash_attn_cute.CuteForward | None = None
        self._flash2: flash_attn_2.Flash2Forward | None = None
        if _needs_flash_attn_2(spec.device):
            self._flash2 = flash_attn_2.Flash2Forward()
        else:
            self._cute = flash_attn_cute.CuteForward(spec)
        self._split = _split_backend(spec)
        # One query row per sequence, padded ones included: flash-attn then writes zeros for a sequence of length 0.
        self._decode_start_loc = torch.arange(spec.max_num_seqs + 1, dtype=torch.int32, device=spec.device)
        self._views: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @classmethod
    def why_unavailable(cls, spec: AttentionSpec) -> str | None:
        if spec.device.type != "cuda":
            return f"FLASH_ATTN needs a CUDA device, not {spec.device.type}"
        major, minor = torch.cuda.get_device_capability(spec.device)
        if major < 8:
            return f"FLASH_ATTN needs compute capability 8.0 or newer, this GPU has {major}.{minor}"
        if major == 12:
            return "FLASH_ATTN has no paged attention for compute capability 12.x; use TRITON_ATTN"
        if spec.dtype not in (torch.bfloat16, torch.float16):
            return f"FLASH_ATTN needs bfloat16 or float16, not {spec.dtype}"
        if spec.head_dim > MAX_HEAD_DIM or spec.head_dim % 8:
            return f"FLASH_ATTN needs a head size that is a multiple of 8 up to {MAX_HEAD_DIM}, not {spec.head_dim}"
        if major >= 10 and 128 < spec.head_dim < 256:
            return f"FLASH_ATTN needs a head size up to 128 or of 256 on this GPU, not {spec.head_dim}"
        if major == 8:
            if spec.block_size == 0 or spec.block_size % flash_attn_2.PAGE_MULTIPLE:
                return (
                    f"FLASH_ATTN on this GPU (flash-attn 2.x) needs --block-size {flash_attn_2.PAGE_MULTIPLE} or a "
                    f"multiple of it, not {spec.block_size or 'the default'}"
                )
            return flash_attn_2.why_missing()
        return flash_attn_cute.why_missing()

    def write_kv(
        self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        from server.kernels.kv_write import write_kv

        write_kv(key, value, kv_cache, slot_mapping)

    def forward(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
        output: torch.Tensor,
    ) -> None:
        num_seqs = metadata.seq_lens.shape[0]
        is_decode = metadata.max_query_len <= 1
        if is_decode and self._split is not None:
            self._split.decode(query, kv_cache, metadata, scale, output)
            zero_padding(output, num_seqs)
            return
        if self._split is not None and takes_decodes(metadata):
            decodes, metadata = metadata.split()
            self._split.decode(query, kv_cache, decodes, scale, output)
        key_cache, value_cache = self._key_value_views(kv_cache)
        covered = metadata.num_tokens
        if is_decode and output.shape[0] >= num_seqs:
            query_start_loc, covered = self._decode_start_loc[: num_seqs + 1], num_seqs
        else:
            query_start_loc = metadata.query_start_loc
        if self._cute is not None:
            self._cute(
                query,
                key_cache,
                value_cache,
                query_start_loc,
                metadata.seq_lens,
                metadata.block_table,
                metadata.max_query_len,
                scale,
                output,
            )
        elif self._flash2 is not None and is_decode:
            rows = slice(0, num_seqs)
            self._flash2.decode(
                query[rows], key_cache, value_cache, metadata.seq_lens, metadata.block_table, scale, output[rows]
            )
        elif self._flash2 is not None:
            rows = slice(0, metadata.num_tokens)
            self._flash2.varlen(
                query[rows],
                key_cache,
                value_cache,
                query_start_loc,
                metadata.seq_lens,
                metadata.block_table,
                metadata.max_query_len,
                metadata.max_seq_len,
                scale,
                output[rows],
            )
        zero_padding(output, covered)

    def _key_value_views(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The two halves of a layer's cache; indexing costs 5 us, and there are only as many caches as layers."""
        pointer = kv_cache.data_ptr()
        views = self._views.get(pointer)
        if views is None or views[0].shape != kv_cache.shape[1:]:
            views = self._views[pointer] = (kv_cache[0], kv_cache[1])
        return views

    def warm_up(self, metadata_sizes: list[int]) -> None:
        """Compile or load what any batch can select, and the split-KV kernel if it is used."""
        from server.attention.warm_up import warm_up_batches

        with ThreadPoolExecutor(1, thread_name_prefix="split-decode") as pool:
            split = pool.submit(self._split.warm_up, metadata_sizes) if self._split is not None else None
            # Twice: the first call through flash-attn-4 finds the function that the second and all later ones call.
            built = self._cute is not None and self._cute.is_built()
            for batch in warm_up_batches(self.spec, [1], [2]) if built else ():
                self.forward(batch.query, batch.kv_cache, batch.metadata, 1.0, batch.output)
                self.write_kv(batch.key, batch.value, batch.kv_cache, batch.metadata.slot_mapping)
            if split is not None:
                split.result()
        torch.cuda.synchronize(self.spec.device)
        self._views.clear()


def _needs_flash_attn_2(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] == 8


def _split_backend(spec: AttentionSpec) -> TritonAttentionBackend | None:
    """The Triton backend whose decode kernel is borrowed, or None if it may not or cannot run."""
    if spec.flash_decode == "native" or importlib.util.find_spec("triton") is None:
        return None
    if TritonAttentionBackend.why_unavailable(spec) is not None:
        return None
    return TritonAttentionBackend(spec)
