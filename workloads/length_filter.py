"""The filter that vLLM's benchmarks apply to ShareGPT, with every drop counted."""

from __future__ import annotations

import msgspec


class LengthFilter(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Bounds in tokens; the defaults are vLLM's (`is_valid_sequence` in its benchmark datasets)."""

    min_prompt_len: int = 4
    min_output_len: int = 4
    max_prompt_len: int = 1024
    max_total_len: int = 2048

    def reason_to_drop(self, prompt_len: int, output_len: int) -> str | None:
        """Why a pair of lengths is dropped, or None when it stays. The first reason found counts."""
        if prompt_len < self.min_prompt_len:
            return f"prompt shorter than {self.min_prompt_len} tokens"
        if output_len < self.min_output_len:
            return f"output shorter than {self.min_output_len} tokens"
        if prompt_len > self.max_prompt_len:
            return f"prompt longer than {self.max_prompt_len} tokens"
        if prompt_len + output_len > self.max_total_len:
            return f"prompt and output longer than {self.max_total_len} tokens"
        return None
