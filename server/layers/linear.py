"""Linear projections and the token embedding."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import nn

from server.layers.kernel_layer import KernelLayer


class Linear(KernelLayer):
    """`x @ weight.T + bias`, possibly several projections of the same input merged into one matrix.

    `parts` maps the checkpoint's name of each merged projection to its number of output rows, in order; weight
    loading fills the rows from those tensors. None: the layer stands for itself.
    """

    kernel_name = "linear"

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool = False, parts: Mapping[str, int] | None = None
    ) -> None:
        super().__init__()
        if parts is not None and sum(parts.values()) != out_features:
            raise ValueError(f"parts {dict(parts)} do not add up to {out_features} rows")
        self.in_features = in_features
        self.out_features = out_features
        self.parts = dict(parts) if parts is not None else None
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (T, in_features) -> (T, out_features)."""
        return F.linear(x, self.weight, self.bias)


class Embedding(KernelLayer):
    """Rows of `weight (vocab, hidden)` by token id."""

    kernel_name = "embedding"

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size), requires_grad=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids (T,) -> (T, hidden)."""
        return F.embedding(input_ids, self.weight)
