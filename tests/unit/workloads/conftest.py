"""Small real tokenizers, trained on the spot, and a place for input files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from workloads.text import TextGenerator
from workloads.tokenizer import HFTokenizer

SHARED_DATA = Path(__file__).resolve().parents[4] / "shared" / "data"


def _corpus() -> list[str]:
    return [" ".join(TextGenerator(np.random.default_rng(1)).words(4000))]


def byte_level_bpe(vocab_size: int = 500, *, bos: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def _characters() -> Tokenizer:
    vocabulary = {"<unk>": 0, **{chr(code): code - 31 for code in range(32, 127)}, "\n": 96}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return tokenizer


TOKENIZERS = {
    "bpe": lambda: byte_level_bpe(),
    "bpe-bytes-only": lambda: byte_level_bpe(258),
    "bpe-bos": lambda: byte_level_bpe(bos=True),
    "characters": _characters,
}


@pytest.fixture(scope="session", params=list(TOKENIZERS))
def any_tokenizer(request: pytest.FixtureRequest) -> HFTokenizer:
    return HFTokenizer(TOKENIZERS[request.param](), request.param)


@pytest.fixture(scope="session")
def tokenizer() -> HFTokenizer:
    return HFTokenizer(byte_level_bpe(), "bpe")


@pytest.fixture
def shared_data() -> Path:
    if not SHARED_DATA.is_dir():
        pytest.skip("the public data sets are not here")
    return SHARED_DATA
