"""Rotary position embedding (Su et al. 2021) in the half-split layout of Hugging Face checkpoints."""

from __future__ import annotations

import math

import torch

from server.layers.kernel_layer import KernelLayer
from server.models.config import RopeConfig


def inverse_frequencies(config: RopeConfig, head_dim: int) -> torch.Tensor:
    """Radians per position of each of the `head_dim / 2` rotated pairs, float32 on the CPU."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device="cpu").float() / head_dim
    frequencies = 1.0 / (config.theta**exponents)
    if config.kind == "linear":
        return frequencies / config.factor
    if config.kind == "llama3":
        return _llama3(frequencies, config)
    return frequencies


def _llama3(frequencies: torch.Tensor, config: RopeConfig) -> torch.Tensor:
    """Llama 3.1's stretch: long waves are slowed by `factor`, short ones kept, the band between interpolated.

    From the reference code that Meta published with the model (`apply_scaling` in llama-models).
    """
    wavelengths = 2 * math.pi / frequencies
    context = config.original_max_position_embeddings
    long_wave, short_wave = context / config.low_freq_factor, context / config.high_freq_factor
    smooth = (context / wavelengths - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    between = (1 - smooth) * frequencies / config.factor + smooth * frequencies
    scaled = torch.where(wavelengths > long_wave, frequencies / config.factor, frequencies)
    return torch.where((wavelengths <= long_wave) & (wavelengths >= short_wave), between, scaled)


class RotaryEmbedding(KernelLayer):
    """Rotates q and k by their positions.

    `cos_sin_cache` is float32 `(max_positions, head_dim)`: cosines in the first half of a row, sines in the second.
    One instance serves all layers of a model.
    """

    kernel_name = "rotary"
    cos_sin_cache: torch.Tensor

    def __init__(self, config: RopeConfig, head_dim: int, max_positions: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        # Computed on the model's device (a 128k context has 8M cosines), from frequencies that are the same anywhere.
        frequencies = inverse_frequencies(config, head_dim).to(torch.get_default_device())
        angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * frequencies
        self.register_buffer("cos_sin_cache", torch.cat((angles.cos(), angles.sin()), dim=-1), persistent=False)

    def forward(self, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions (T,), q (T, H * head_dim), k (T, K * head_dim) -> rotated q and k, same shapes."""
        cos, sin = self.cos_sin_cache.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
        return self._rotate(q, cos, sin), self._rotate(k, cos, sin)

    def _rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        first, second = x.unflatten(-1, (-1, self.head_dim)).chunk(2, dim=-1)
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return rotated.to(x.dtype).flatten(-2)
