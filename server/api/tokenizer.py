"""The tokenizer of the served model: a checkpoint's `tokenizer.json`, or a byte-level one for models without."""

from __future__ import annotations

import asyncio
import json
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as HfTokenizer

from server.api.detokenizer import (
    BYTE_ALPHABET,
    ByteDetokenizer,
    Detokenizer,
    StreamDetokenizer,
    TokenBytes,
    byte_level_bytes,
    is_tokenizer_error,
)
from server.api.errors import ApiError, invalid
from server.config import ModelOptions
from server.errors import UserError, printable
from server.models.files import MAX_TOKENIZER_BYTES, read_bounded
from server.models.registry import ResolvedModel, resolve_model

logger = logging.getLogger(__name__)

# Up to this many characters are tokenized in the event loop: about 0.2 ms, less than handing them to a thread costs.
_INLINE_CHARACTERS = 512
_THREADS = 2


class Tokenizer:
    """Text to token ids and back. Safe to use from several threads."""

    def __init__(self, tokenizer: HfTokenizer, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        self._byte_level = _decoder_type(tokenizer) == "ByteLevel"
        self._bytes_of = TokenBytes(tokenizer, frozenset())
        self._bytes_of_skipped = TokenBytes(tokenizer, self._special)
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self._longest_token = max(map(len, vocabulary), default=0) or 1
        self.num_beyond = sum(token_id >= vocab_size for token_id in vocabulary.values())
        """Tokens whose ids the model has no embedding for."""
        self._executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="tokenize")
        self._aside = ThreadPoolExecutor(1, thread_name_prefix="tokenize-aside")

    def min_tokens(self, text: str) -> int:
        """A lower bound on the number of tokens of `text`, without tokenizing it.

        A normaliser can shorten the text first; composing characters (NFC) makes one of at most four.
        """
        return len(text) // (4 * self._longest_token)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`, all of which the model has.

        Raises ApiError 400 for a text that the tokenizer cannot encode, or that has tokens which the model lacks: ones
        that were added to the tokenizer alone, or whatever a broken `tokenizer.json` says.
        """
        try:
            token_ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        except BaseException as error:
            if not is_tokenizer_error(error):
                raise
            raise invalid(f"The model's tokenizer cannot encode the text: {printable(str(error))}") from error
        if token_ids and max(token_ids) >= self.vocab_size:
            raise self._beyond(token_ids)
        return token_ids

    def _beyond(self, token_ids: list[int]) -> ApiError:
        first = next(token_id for token_id in token_ids if token_id >= self.vocab_size)
        return invalid(
            f"The text holds the token {self.token_string(first) or ''!r} (id {first}), which the tokenizer knows but "
            f"the model does not: its token ids end at {self.vocab_size - 1}."
        )

    async def encode_all(self, texts: list[str], *, add_special_tokens: bool, aside: bool = False) -> list[list[int]]:
        """Token ids of each text, as `encode` makes them. Long ones are tokenized in a thread: the event loop stays
        with other requests.

        `aside`: in one of its own, for texts that no context bounds: megabytes take seconds.
        """

        def encode() -> list[list[int]]:
            return [self.encode(text, add_special_tokens=add_special_tokens) for text in texts]

        if sum(map(len, texts)) <= _INLINE_CHARACTERS:
            return encode()
        return await asyncio.get_running_loop().run_in_executor(self._aside if aside else self._executor, encode)

    async def decode_async(self, token_ids: list[int], *, skip_special_tokens: bool, aside: bool = False) -> str:
        """As `decode`, long ones in a thread; `aside` as for `encode_all`."""
        if len(token_ids) <= _INLINE_CHARACTERS:
            return self.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return await asyncio.get_running_loop().run_in_executor(
            self._aside if aside else self._executor,
            lambda: self.decode(token_ids, skip_special_tokens=skip_special_tokens),
        )

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """Raises ApiError 400 for tokens that the tokenizer cannot decode."""
        try:
            return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        except BaseException as error:
            if not is_tokenizer_error(error):
                raise
            raise invalid(f"The model's tokenizer cannot decode the tokens: {printable(str(error))}") from error

    def detokenizer(self, prompt_token_ids: list[int], *, skip_special_tokens: bool) -> Detokenizer:
        """A fresh incremental detokenizer for what follows `prompt_token_ids`."""
        if self._byte_level:
            return ByteDetokenizer(self._bytes_of_skipped if skip_special_tokens else self._bytes_of)
        return StreamDetokenizer(self._tokenizer, prompt_token_ids, skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for, special tokens included."""
        if self._byte_level:
            return self._bytes_of[token_id]
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        return token.replace("▁", " ").encode("utf-8", "replace")

    def token_string(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it; None for an id that it lacks."""
        return self._tokenizer.id_to_token(token_id)


def _decoder_type(tokenizer: HfTokenizer) -> str | None:
    """Kind of the decoder; None without one. The binding tells it only through its serialised state."""
    if tokenizer.decoder is None:
        return None
    state = json.loads(tokenizer.decoder.__getstate__())
    kind = state.get("type")
    return str(kind) if kind is not None else None


def load_tokenizer(model: ResolvedModel | ModelOptions | Path | str) -> Tokenizer:
    """The tokenizer of a resolved model, of options to resolve, or of a folder or preset name.

    A preset, and a folder without `tokenizer.json` (which only dummy weights make sense for), gets the byte-level one.
    Raises UserError when `tokenizer.json` cannot be read.
    """
    if isinstance(model, Path | str):
        model = ModelOptions(model=str(model), load_format="auto")
    resolved = resolve_model(model) if isinstance(model, ModelOptions) else model
    vocab_size = resolved.config.vocab_size
    if resolved.path is None or not resolved.has_tokenizer:
        return Tokenizer(byte_tokenizer(vocab_size, resolved.config.eos_token_ids), vocab_size)
    path = resolved.path / "tokenizer.json"
    data = read_bounded(path, MAX_TOKENIZER_BYTES)
    try:
        tokenizer = HfTokenizer.from_buffer(data)
    except BaseException as error:
        if not is_tokenizer_error(error):
            raise
        raise UserError(f"{path}: not a tokenizer that can be read ({error}); download the model again") from error
    # A file may ask for truncation or padding of training batches; a prompt is neither cut nor filled.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    loaded = Tokenizer(tokenizer, vocab_size)
    if loaded.num_beyond:
        logger.warning(
            "%s: %d of its tokens have ids beyond the model's vocabulary of %d; requests with them in a text get a 400",
            path,
            loaded.num_beyond,
            vocab_size,
        )
    return loaded


def byte_tokenizer(vocab_size: int, special_token_ids: tuple[int, ...] = ()) -> HfTokenizer:
    """A tokenizer for models with dummy weights: one token per byte, so any text can be encoded.

    Ids 0-255 are the bytes. The others are never encoded, but a model with random weights samples them: each decodes
    to a word of its own. `special_token_ids` (end tokens) are special; one below 256 stays a byte.
    Raises UserError when `vocab_size` has no room for the bytes.
    """
    if vocab_size < 256:
        raise UserError(f"a vocabulary of {vocab_size} tokens has no room for the 256 bytes; add a tokenizer.json")
    special = {token_id: f"<|special_{token_id}|>" for token_id in special_token_ids if 256 <= token_id < vocab_size}
    vocabulary = dict(BYTE_ALPHABET)
    space = next(character for character, byte in BYTE_ALPHABET.items() if byte == 0x20)
    vocabulary.update({special.get(token_id, f"{space}t{token_id}"): token_id for token_id in range(256, vocab_size)})
    tokenizer = HfTokenizer(models.BPE(vocab=vocabulary, merges=[]))
    # One pre-token per line keeps the merge queue short; the expression keeps every character.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special.values()])
    return tokenizer


__all__ = ["Tokenizer", "byte_level_bytes", "byte_tokenizer", "load_tokenizer"]
