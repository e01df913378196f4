"""Randomness that is named, reproducible on every machine and the same in every process."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from server.errors import UserError

# Constants of splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014).
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_LAST_UINT64 = 0xFFFFFFFFFFFFFFFF


def check_seed(seed: int) -> None:
    """Raise UserError unless 0 <= seed < 2**64."""
    if not 0 <= seed <= _LAST_UINT64:
        raise UserError(f"seed {seed}: must be between 0 and 2**64 - 1")


def stream_key(seed: int, name: str) -> int:
    """A 64-bit key for the stream `name` of `seed` (SHA-256, so independent of PYTHONHASHSEED)."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little")


def generator(seed: int, name: str) -> np.random.Generator:
    """A PCG64 generator of its own for `name`, so that drawing more from one stream never shifts another."""
    check_seed(seed)
    return np.random.Generator(np.random.PCG64(stream_key(seed, name)))


def mix(keys: npt.NDArray[np.uint64], counters: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """splitmix64 output number `counters` of the streams started at `keys` (broadcast): random access, no state."""
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is the algorithm
        z = keys + (counters + np.uint64(1)) * _GAMMA
        z = (z ^ (z >> np.uint64(30))) * _MIX_1
        z = (z ^ (z >> np.uint64(27))) * _MIX_2
        return z ^ (z >> np.uint64(31))


def subkeys(key: int, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """A key for each of `numbers` below `key`; equal numbers get equal keys."""
    return mix(np.array(key, dtype=np.uint64), numbers.astype(np.uint64))
