"""Text of our own making: English-like sentences from a small grammar, cut to an exact number of tokens."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from server.errors import UserError
from workloads.tokenizer import TokenizerLike

# Common words: nearly all are one token (with the space before) in the byte-pair vocabularies in use, so that the
# number of words is close to the number of tokens before any correction. One class a line; the first letter names it.
_WORDS = """
D the this that every another each some our their one
A small large new old quiet early simple common different strong warm clear long short open local public recent
A careful bright heavy ready useful certain modern
N river city teacher garden computer story question market window machine village letter student system doctor engine
N forest kitchen program station problem language morning picture answer winter paper bridge company family
V finds builds follows explains changes carries opens reaches needs supports describes keeps watches improves moves
V remembers shows covers starts joins
P in near under with after before behind without during across
R often slowly quickly always never rarely soon usually today again
"""
_CLASSES: dict[str, list[str]] = {}
for _line in _WORDS.strip().splitlines():
    _CLASSES.setdefault(_line[0], []).extend(_line[1:].split())

# Sentence shapes: a word of each class in turn.
_SHAPES = ("DNVDN", "DANVDN", "DNVDANPDN", "DNRVDN", "DANVDNPDAN", "DNVDNPDN")
TOKENS_PER_WORD = 1.14
"""Rough tokens per generated word (full stops included) when no tokenizer is at hand (1.137 with SmolLM2's)."""

# What can be put at the end to gain exactly one token, tried in a random order; the short ones suit character
# vocabularies.
_FILLERS = (" the", " and", " of", " a", ".", "!", ",", "\n", " I", "a", "x", "1", " ")
_MOST_FILLERS = 12
_ATTEMPTS = 64


class TextGenerator:
    """An endless run of words drawn from `rng`; each call to `words` goes on where the last one stopped."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._pending: list[str] = []

    def words(self, n: int) -> list[str]:
        """The next `n` words, punctuation attached."""
        while len(self._pending) < n:
            self._pending.extend(self._sentence())
        taken, self._pending = self._pending[:n], self._pending[n:]
        return taken

    def _sentence(self) -> list[str]:
        shape = _SHAPES[int(self._rng.integers(len(_SHAPES)))]
        picks = self._rng.random(len(shape))
        words = [_CLASSES[kind][int(pick * len(_CLASSES[kind]))] for kind, pick in zip(shape, picks, strict=True)]
        words[0] = words[0].capitalize()
        words[-1] += "."
        return words

    def about(self, n_tokens: int) -> str:
        """Text of about `n_tokens` tokens by the rule of thumb `TOKENS_PER_WORD`."""
        return " ".join(self.words(max(1, round(n_tokens / TOKENS_PER_WORD))))

    def exact(self, n_tokens: int, tokenizer: TokenizerLike, *, prefix: str = "") -> str:
        """Text that starts with `prefix` and that `tokenizer` encodes to exactly `n_tokens` tokens (special ones too).

        Words are added or taken until the count is right or a few fillers away from it; every step encodes the
        whole text again, since a piece's count alone says nothing about the count of the whole.

        Raises:
            UserError: `prefix` (or what the tokenizer adds to every text) takes all of `n_tokens`, or no text of
                that length was found.
        """

        count = tokenizer.count
        overhead = count(prefix)
        if n_tokens <= overhead:
            raise UserError(
                f"a text of {n_tokens} tokens is impossible: tokenizer {tokenizer.name} makes {overhead} of what must "
                "come before it"
            )
        words = self.words(max(1, round((n_tokens - overhead) / TOKENS_PER_WORD)))
        fillers = [_FILLERS[position] for position in self._rng.permutation(len(_FILLERS))]
        for _ in range(_ATTEMPTS):
            text = prefix + " ".join(words)
            counted = count(text)
            missing = n_tokens - counted
            if missing == 0:
                return text
            if 0 < missing <= _MOST_FILLERS and (filled := _fill(text, n_tokens, missing, count, fillers)) is not None:
                return filled
            tokens_per_word = max(1.0, (counted - overhead) / max(1, len(words)))
            if missing > 0:
                words += self.words(max(1, int(missing / tokens_per_word)))
            else:
                del words[-max(1, int(-missing / tokens_per_word)) :]
        raise UserError(f"no text of exactly {n_tokens} tokens found for tokenizer {tokenizer.name}; use token ids")


def _fill(text: str, n_tokens: int, missing: int, count: Callable[[str], int], fillers: list[str]) -> str | None:
    """`text` and fillers worth `missing` tokens, or None when no filler gains exactly one token."""
    for wanted in range(n_tokens - missing + 1, n_tokens + 1):
        longer = next((text + filler for filler in fillers if count(text + filler) == wanted), None)
        if longer is None:
            return None
        text = longer
    return text
