"""The little that workloads need of a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer

from server.errors import UserError

HOW_TO_GIVE = "give --tokenizer MODEL_OR_PATH (in a suite: client.tokenizer)"
"""For messages about a tokenizer that is missing."""


class TokenizerLike(Protocol):
    """A tokenizer as workloads use it."""

    @property
    def name(self) -> str:
        """How results refer to it."""

    @property
    def vocab_size(self) -> int:
        """Largest id + 1."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Special and added tokens: never part of generated prompts."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids; with special tokens as a server adds them to a plain prompt."""

    def count(self, text: str, *, add_special_tokens: bool = True) -> int:
        """`len(encode(...))`."""


class HFTokenizer:
    """`tokenizers.Tokenizer` behind `TokenizerLike`."""

    def __init__(self, tokenizer: Tokenizer, name: str) -> None:
        self._tokenizer = tokenizer
        self.name = name
        self.vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.special_ids = frozenset(tokenizer.get_added_tokens_decoder())

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def count(self, text: str, *, add_special_tokens: bool = True) -> int:
        return len(self.encode(text, add_special_tokens=add_special_tokens))


def load_tokenizer(path_or_model: str) -> TokenizerLike:
    """Load `tokenizer.json` from a file, a folder, or the folder of a model that `benchctl models` knows.

    Raises:
        UserError: no such model, or no usable `tokenizer.json`.
    """
    path = Path(path_or_model).expanduser()
    if not path.exists():
        path = _model_folder(path_or_model)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"tokenizer {path_or_model}: {file} does not exist; name a model, folder or tokenizer.json")
    try:
        text = file.read_text(encoding="utf-8")
        json.loads(text)
        tokenizer = Tokenizer.from_str(text)
    except OSError as error:
        raise UserError(f"tokenizer {file}: {error.strerror}") from None
    except Exception as error:  # the library raises bare Exception for a file it cannot use
        raise UserError(f"tokenizer {file}: not a usable tokenizer.json ({str(error).splitlines()[0]})") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return HFTokenizer(tokenizer, path_or_model)


def _model_folder(name: str) -> Path:
    # Not at the top: building a workload without a tokenizer must not need the server's packages.
    from server.config import ModelOptions
    from server.models.registry import resolve_model

    folder = resolve_model(ModelOptions(model=name, load_format="dummy")).path
    if folder is None:
        raise UserError(f"tokenizer {name}: this preset has no tokenizer; leave it out and set vocab_size instead")
    return folder
