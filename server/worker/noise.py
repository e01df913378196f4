"""Counter-based noise: a pure function of (seed, position, token id).

A request draws the same noise whatever else is in its batch, on whatever row and at whatever batch size, and again
after a preemption. All arithmetic is on 32-bit words held in int64 and never overflows, so that torch, numpy and a
kernel in uint32 give the same words.

The mixer is a two-round xorshift-multiply permutation of 32 bits with the constants 0x2c1b3c6d and 0x297a2d39 (from
C. Wellons' hash-prospector search for low-bias mixers).
"""

from __future__ import annotations

import torch

_WORD = 0xFFFFFFFF
_GOLDEN = 0x1E3779B9  # odd and below 2**31, so that products stay within int64


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Permute 32-bit words, in place; returns `x`."""
    shifted = x >> 15
    x.bitwise_xor_(shifted)
    x.mul_(0x2C1B3C6D).bitwise_and_(_WORD)
    torch.bitwise_right_shift(x, 12, out=shifted)
    x.bitwise_xor_(shifted)
    x.mul_(0x297A2D39).bitwise_and_(_WORD)
    torch.bitwise_right_shift(x, 15, out=shifted)
    return x.bitwise_xor_(shifted)


def random_words(seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """32-bit words, int64 (S, N), for seeds int64 (S,), positions (S,) and token ids (N,) or (S, N).

    Seed and position make two keys per row: an offset and an odd stride of 31 bits. A word is the mixed
    `token id * stride + offset`, so that two rows walk the mixer's domain with different strides.
    """
    key = _mix((seeds & _WORD) ^ 0x5BD1E995)
    key = _mix(key ^ ((seeds >> 32) & _WORD))
    offset = _mix((key + positions.long() * _GOLDEN) & _WORD)
    stride = (_mix(offset ^ 0x3C6EF372) >> 1) | 1
    return _mix((token_ids.long() * stride[:, None]).add_(offset[:, None]).bitwise_and_(_WORD))


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float32, shaped as `random_words`: `argmax(logits + noise)` samples the softmax.

    The uniform `u = (word + 0.5) / 2**32` goes through `-log(-log1p(-u))`: large noise, which picks the winner, comes
    from small u, where float32 is finest.
    """
    uniform = random_words(seeds, positions, token_ids).float().add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()
