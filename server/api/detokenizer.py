"""Incremental detokenization: text of a growing list of token ids, right for characters split across tokens."""

from __future__ import annotations

import codecs
from typing import Protocol

import msgspec
from tokenizers import Tokenizer as HfTokenizer
from tokenizers.decoders import DecodeStream

# Tokens of the prompt that a decoder may need to see to decode the first generated one (leading spaces).
_CONTEXT_TOKENS = 6


def is_tokenizer_error(error: BaseException) -> bool:
    """Whether the binding raises this: a bare Exception, or where its Rust code panics what is not even one."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


class Detokenizer(Protocol):
    """Turns tokens into text as they come. The texts of all calls, joined, are the decoded whole."""

    def push(self, token_ids: list[int]) -> str:
        """Text that `token_ids` complete; what may still change (an incomplete character) is held back."""

    def json(self, token_id: int) -> bytes | None:
        """`push([token_id])` as a JSON string, where that is known and changes nothing; else None: push it."""

    def finish(self) -> str:
        """The text held back, incomplete characters as U+FFFD. Call once, at the end."""


class ByteDetokenizer:
    """For byte-level vocabularies, where every token is a fixed sequence of bytes: table look-up and UTF-8 decoding.

    Constant work per token, whatever the bytes; an invalid sequence becomes U+FFFD as in Rust's `from_utf8_lossy`.
    """

    __slots__ = ("_bytes_of", "_json_of", "_pending")

    def __init__(self, bytes_of: TokenBytes) -> None:
        self._bytes_of = bytes_of
        self._json_of = bytes_of.json_of
        self._pending = b""

    def push(self, token_ids: list[int]) -> str:
        bytes_of = self._bytes_of
        data = bytes_of[token_ids[0]] if len(token_ids) == 1 else b"".join([bytes_of[token] for token in token_ids])
        if self._pending:
            data = self._pending + data
        text, consumed = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[consumed:] if consumed != len(data) else b""
        return text

    def json(self, token_id: int) -> bytes | None:
        return None if self._pending else self._json_of[token_id]

    def finish(self) -> str:
        text = self._pending.decode("utf-8", "replace")
        self._pending = b""
        return text


class TokenBytes(dict[int, bytes]):
    """Token id -> bytes of a byte-level vocabulary, filled as tokens are seen."""

    def __init__(self, tokenizer: HfTokenizer, skipped: frozenset[int]) -> None:
        super().__init__((token, b"") for token in skipped)
        self._tokenizer = tokenizer
        self.json_of = _TokenJson(self)

    def __missing__(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        data = b"" if token is None else byte_level_bytes(token)
        self[token_id] = data
        return data


class _TokenJson(dict[int, bytes | None]):
    """Token id -> its text as a JSON string; None where the text depends on what follows. Filled as tokens are seen."""

    def __init__(self, bytes_of: TokenBytes) -> None:
        super().__init__()
        self._bytes_of = bytes_of

    def __missing__(self, token_id: int) -> bytes | None:
        data = self._bytes_of[token_id]
        text, consumed = codecs.utf_8_decode(data, "replace", False)
        json = msgspec.json.encode(text) if consumed == len(data) else None
        self[token_id] = json
        return json


class StreamDetokenizer:
    """For every other vocabulary (SentencePiece-like ones): the tokenizer's own decoder over a sliding window."""

    __slots__ = ("_emitted", "_ids", "_skip_special_tokens", "_stream", "_tokenizer")

    def __init__(self, tokenizer: HfTokenizer, prompt_token_ids: list[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._restart(prompt_token_ids[-_CONTEXT_TOKENS:])

    def _restart(self, context: list[int]) -> None:
        self._ids = list(context)
        self._emitted = len(self._decode())
        self._stream = DecodeStream(ids=context, skip_special_tokens=self._skip_special_tokens)

    def _decode(self) -> str:
        """Text of the window; none where the decoder fails on it."""
        if not self._ids:
            return ""
        try:
            return self._tokenizer.decode(self._ids, skip_special_tokens=self._skip_special_tokens)
        except BaseException as error:
            if not is_tokenizer_error(error):
                raise
            return ""

    def _step(self, token: int) -> str | None:
        """Text that `token` adds, None when it has none yet. Raises ValueError where the decoder fails."""
        try:
            return self._stream.step(self._tokenizer, token)
        except BaseException as error:
            if not is_tokenizer_error(error):
                raise
            raise ValueError(str(error)) from error

    def push(self, token_ids: list[int]) -> str:
        pieces: list[str] = []
        for token in token_ids:
            self._ids.append(token)
            try:
                piece = self._step(token)
            except ValueError:  # a byte token turns emitted text invalid
                self._ids.pop()
                pieces.append(self.finish())
                self._restart([])
                self._ids.append(token)
                try:
                    piece = self._step(token)
                except ValueError:  # the decoder that came with the model cannot take this token at all
                    self._restart([])
                    pieces.append("\N{REPLACEMENT CHARACTER}")
                    continue
            if piece:
                self._emitted += len(piece)
                pieces.append(piece)
        return "".join(pieces)

    def json(self, token_id: int) -> bytes | None:
        return None  # the text of a token depends on those before it

    def finish(self) -> str:
        text = self._decode()[self._emitted :]
        self._emitted += len(text)
        return text


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in of every byte -> the byte (`bytes_to_unicode` of its encoder)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update({chr(256 + place): byte for place, byte in enumerate(others)})
    return alphabet


BYTE_ALPHABET = _byte_alphabet()


def byte_level_bytes(token: str) -> bytes:
    """Bytes of a byte-level token; an added token outside the alphabet stands for its own UTF-8."""
    try:
        return bytes([BYTE_ALPHABET[character] for character in token])
    except KeyError:
        return token.encode("utf-8", "replace")
