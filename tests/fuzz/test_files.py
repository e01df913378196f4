"""Files that strangers wrote: whatever is in them, they are read or refused in one line, soon and in little memory."""

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from benchctl.matrix.suite import load_suite
from reports.results import read_result
from server.api.chat_template import load_chat_template
from server.api.errors import ApiError
from server.api.tokenizer import load_tokenizer
from server.compilation.store import CacheEntryError, CompileCache
from server.config import ModelOptions
from server.errors import UserError
from server.models.config import ModelConfig, load_config
from server.models.decoder import build_model
from server.models.loading import load_weights
from server.models.registry import ResolvedModel, checkpoint_files, resolve_model
from tests.fuzz.budget import fuzz
from workloads import build_workload

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-3, 300)
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from(["", "a\nb", "\x1b[2J", "../../x", "\0", "NaN", "1e999", 10**400, 1e300])
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@contextlib.contextmanager
def read_or_refused() -> Iterator[None]:
    """No other exception than a UserError of one line."""
    refusal = ""
    try:
        yield
    except UserError as error:
        refusal = str(error)
    assert refusal.isprintable(), f"not one printable line: {refusal!r}"
    assert len(refusal) < 2000


def dump(value: Any) -> bytes:
    return json.dumps(value).encode("utf-8", "surrogatepass")


def objects(known: dict[str, st.SearchStrategy[Any]], valid: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """A valid object with some keys replaced, dropped or added."""

    def change(changes: dict[str, Any], dropped: set[str]) -> dict[str, Any]:
        return {key: value for key, value in {**valid, **changes}.items() if key not in dropped}

    changes = st.fixed_dictionaries({}, optional={key: JSON | special for key, special in known.items()})
    return st.builds(change, changes, st.sets(st.sampled_from(sorted(valid)), max_size=1))


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
}
CONFIG_KEYS = [
    *LLAMA,
    *("head_dim", "rope_theta", "rope_scaling", "rope_parameters", "eos_token_id", "bos_token_id", "sliding_window"),
    *("use_sliding_window", "tie_word_embeddings", "attention_bias", "hidden_act", "quantization_config", "dtype"),
]
ROPE = st.fixed_dictionaries(
    {"rope_type": st.sampled_from(["llama3", "linear", "yarn", "default", "dynamic"])},
    optional={"factor": SCALARS, "rope_theta": SCALARS, "low_freq_factor": SCALARS, "type": SCALARS},
)


@given(config=objects(dict.fromkeys(CONFIG_KEYS, st.integers(-1, 1 << 70) | ROPE), LLAMA) | JSON)
@fuzz(150)
def test_config_json(tmp_path_factory: pytest.TempPathFactory, config: Any) -> None:
    folder = tmp_path_factory.getbasetemp() / "config"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes(dump(config))
    with read_or_refused():
        load_config(folder)
        resolve_model(ModelOptions(model=str(folder), load_format="dummy"))


@given(content=st.binary(max_size=200), name=st.sampled_from(["config.json", "generation_config.json"]))
@fuzz(60)
def test_config_that_is_no_json(tmp_path_factory: pytest.TempPathFactory, content: bytes, name: str) -> None:
    folder = tmp_path_factory.getbasetemp() / "config-bytes"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes(dump(LLAMA))
    (folder / name).write_bytes(content)
    with read_or_refused():
        load_config(folder)


TOKENIZER = {"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}}
TOKENIZER_KEYS = ["model", "added_tokens", "normalizer", "pre_tokenizer", "post_processor", "decoder", "truncation"]


@given(tokenizer=objects(dict.fromkeys(TOKENIZER_KEYS, JSON), TOKENIZER) | JSON, config=JSON)
@fuzz(80)
def test_tokenizer_files(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any, config: Any) -> None:
    folder = tmp_path_factory.getbasetemp() / "tokenizer"
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_bytes(dump(tokenizer))
    (folder / "tokenizer_config.json").write_bytes(dump(config))
    with read_or_refused():
        load_chat_template(folder, None)
    with read_or_refused(), contextlib.suppress(ApiError):
        load_tokenizer(ResolvedModel("x", folder, MODEL, True, "dummy", 16)).encode("ab", add_special_tokens=True)


MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=11,
    hidden_size=8,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    intermediate_size=6,
    max_position_embeddings=16,
    tie_word_embeddings=True,
)
SHAPES = {
    "model.embed_tokens.weight": (11, 8),
    "model.norm.weight": (8,),
    "model.layers.0.input_layernorm.weight": (8,),
    "model.layers.0.post_attention_layernorm.weight": (8,),
    "model.layers.0.self_attn.q_proj.weight": (8, 8),
    "model.layers.0.self_attn.k_proj.weight": (4, 8),
    "model.layers.0.self_attn.v_proj.weight": (4, 8),
    "model.layers.0.self_attn.o_proj.weight": (8, 8),
    "model.layers.0.mlp.gate_proj.weight": (6, 8),
    "model.layers.0.mlp.up_proj.weight": (6, 8),
    "model.layers.0.mlp.down_proj.weight": (8, 6),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("checkpoint") / "model.safetensors"
    save_file({name: torch.ones(shape) for name, shape in SHAPES.items()}, path)
    data = path.read_bytes()
    model = build_model(MODEL, device=torch.device("cpu"), dtype=torch.float32, max_positions=16)
    assert load_weights(model, path.parent) > 0, "the unchanged file is a good one"
    return data


def load_bytes(folder: Path, data: bytes) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(data)
    model = build_model(MODEL, device=torch.device("cpu"), dtype=torch.float32, max_positions=16)
    with read_or_refused():
        load_weights(model, folder)


@given(edits=st.lists(st.tuples(st.integers(0, 1400), st.integers(0, 255)), min_size=1, max_size=4))
@fuzz(150)
def test_safetensors_with_changed_bytes(
    tmp_path_factory: pytest.TempPathFactory, checkpoint: bytes, edits: list[tuple[int, int]]
) -> None:
    data = bytearray(checkpoint)
    for place, byte in edits:
        data[place] = byte
    load_bytes(tmp_path_factory.getbasetemp() / "changed", bytes(data))


_ENTRY = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "F16", "BF16", "I64", "U8", "BOOL", "F8_E4M3", "F4", "?"]) | SCALARS,
        "shape": st.lists(st.integers(-1, 1 << 66), max_size=4) | SCALARS,
        "data_offsets": st.lists(st.integers(-1, 1 << 66), max_size=3) | SCALARS,
    },
)


@given(
    header=st.dictionaries(st.sampled_from([*SHAPES, "__metadata__", "a\nb", ""]), _ENTRY | JSON, max_size=4) | JSON,
    size=st.none() | st.integers(0, (1 << 64) - 1),
    tail=st.integers(0, 600),
)
@fuzz(150)
def test_safetensors_with_any_header(
    tmp_path_factory: pytest.TempPathFactory, header: Any, size: int | None, tail: int
) -> None:
    data = dump(header)
    head = struct.pack("<Q", len(data) if size is None else size)
    load_bytes(tmp_path_factory.getbasetemp() / "header", head + data + bytes(tail))


@given(index=st.fixed_dictionaries({"weight_map": st.dictionaries(st.text(max_size=5), SCALARS, max_size=3)}) | JSON)
@fuzz(80)
def test_shard_index(tmp_path_factory: pytest.TempPathFactory, index: Any) -> None:
    folder = tmp_path_factory.getbasetemp() / "index"
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors.index.json").write_bytes(dump(index))
    with read_or_refused():
        for file in checkpoint_files(folder):
            assert file.parent == folder, "a shard never lies outside the checkpoint"


ROWS = (
    objects({"prompt": SCALARS, "messages": JSON, "turns": JSON, "max_tokens": SCALARS, "extra_body": JSON},
            {"prompt": "x"})
    | objects({"timestamp": SCALARS, "input_length": SCALARS, "output_length": SCALARS, "hash_ids": JSON},
              {"timestamp": 1, "input_length": 5, "output_length": 2, "hash_ids": [1]})
    | objects({"id": SCALARS, "conversations": JSON},
              {"id": "x", "conversations": [{"from": "human", "value": "a b"}, {"from": "gpt", "value": "c d"}]})
    | JSON
)  # fmt: skip
CSV_HEADS = st.sampled_from(
    ["TIMESTAMP,ContextTokens,GeneratedTokens", "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"]
)
CSV_CELL = st.sampled_from(["1", "2023-11-16 18:15:46.680590", "-1", "x", "", '"', "1e400", "nan", "9" * 30]) | st.text(
    max_size=6
)


@st.composite
def datasets(draw: st.DrawFn) -> bytes:
    kind = draw(st.sampled_from(["jsonl", "json", "csv", "bytes"]))
    if kind == "bytes":
        return draw(st.binary(max_size=200))
    if kind == "csv":
        rows = draw(st.lists(st.lists(CSV_CELL, max_size=6), max_size=4))
        return "\n".join([draw(CSV_HEADS), *(",".join(row) for row in rows)]).encode("utf-8", "surrogatepass")
    rows = draw(st.lists(ROWS, max_size=4))
    return dump(rows) if kind == "json" else b"\n".join(dump(row) for row in rows)


class Words:
    """A tokenizer that needs no file."""

    name = "words"
    vocab_size = 256
    special_ids: frozenset[int] = frozenset()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [min(ord(character), 255) for character in text]

    def count(self, text: str, *, add_special_tokens: bool = True) -> int:
        return len(text)


@given(
    data=datasets(), name=st.sampled_from(["custom", "trace", "sharegpt"]), suffix=st.sampled_from([".jsonl", ".csv"])
)
@fuzz(120)
def test_datasets(tmp_path_factory: pytest.TempPathFactory, data: bytes, name: str, suffix: str) -> None:
    path = tmp_path_factory.getbasetemp() / f"data{suffix}"
    path.write_bytes(data)
    with read_or_refused():
        workload = build_workload({"name": name, "path": str(path)}, seed=0, tokenizer=Words())
        for request in list(workload.requests)[:20]:
            msgspec.json.encode(request)


SUITE = """
name = "x"
models = ["tiny"]
modes = ["eager"]
[server]
max_model_len = 64
[[loads]]
workload = { name = "synthetic", num_requests = 2 }
arrivals = [{ kind = "closed", concurrency = 1 }]
"""
TOML_VALUES = st.sampled_from(
    ["", "-1", "nan", "inf", "1e400", "9" * 40, '"a\\u0000b"', '"../../x"', "[]", "{}", "[[]]", "1979-05-27",
     "'\x1b'", "{a={b=1}}"]
) | st.text(max_size=10)  # fmt: skip
SUITE_KEYS = st.sampled_from(
    ["name", "seed", "engines", "models", "modes", "backends", "url", "server", "server.port", "server.model", "loads",
     "loads.0.workload", "loads.0.arrivals", "loads.0.workload.name", "starts", "start_repeats", "start_timeout_s",
     "only", "reference", "gate", "description", "gate.confidence", "loads.0.arrivals.0.concurrency", "loads.0.slo"]
)  # fmt: skip


@given(
    text=st.text(max_size=200)
    | st.builds(lambda a, b: SUITE[:a] + b + SUITE[a:], st.integers(0, 300), st.text(max_size=12))
)
@fuzz(120)
def test_suite_toml(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "suite.toml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with read_or_refused():
        load_suite(str(path))


@given(assignments=st.lists(st.builds(lambda key, value: f"{key}={value}", SUITE_KEYS, TOML_VALUES), max_size=3))
@fuzz(150)
def test_suite_values(tmp_path_factory: pytest.TempPathFactory, assignments: list[str]) -> None:
    path = tmp_path_factory.getbasetemp() / "good.toml"
    path.write_text(SUITE)
    with read_or_refused():
        load_suite(str(path), assignments)


@given(content=st.binary(max_size=100) | JSON.map(dump) | st.just(b"[" * 100_000))
@fuzz(60)
def test_result_files(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "result.json"
    path.write_bytes(content)
    with read_or_refused():
        read_result(path)


def cache_with_entry(folder: Path) -> CompileCache:
    os.makedirs(folder / "source" / "inductor", exist_ok=True)
    for name in ("plan.json", "piece-0.bin", "inductor/kernel.so"):
        (folder / "source" / name).write_bytes(name.encode() * 20)
    cache = CompileCache(folder / "compile")
    cache.publish("key", folder / "source", {"torch": "2"})
    return cache


@given(
    name=st.sampled_from(["manifest.json", "plan.json", "piece-0.bin", "inductor/kernel.so"]),
    content=st.binary(max_size=80) | JSON.map(dump) | st.just(b'{"files":{"../../evil":{"size":1,"sha256":"0"}}}'),
)
@fuzz(60)
def test_cache_entries(tmp_path_factory: pytest.TempPathFactory, name: str, content: bytes) -> None:
    """A changed entry is refused as a whole before anything of it could run; nothing is written outside."""
    folder = tmp_path_factory.mktemp("cache")
    cache = cache_with_entry(folder)
    (folder / "compile" / "key" / name).write_bytes(content)
    destination = folder / "copy"
    destination.mkdir()
    before = set(folder.iterdir())
    if name == "manifest.json":
        with contextlib.suppress(CacheEntryError):
            cache.fetch("key", destination)
    else:
        with pytest.raises(CacheEntryError):
            cache.fetch("key", destination)
    assert set(folder.iterdir()) == before
    assert cache.entries()[0].key == "key"


def test_the_examples_that_fuzzers_change_are_good_ones(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(dump(LLAMA))
    assert load_config(tmp_path).num_layers == 2
    (tmp_path / "suite.toml").write_text(SUITE)
    assert load_suite(str(tmp_path / "suite.toml"), ["seed=3"]).seed == 3
    (tmp_path / "tokenizer.json").write_bytes(dump(TOKENIZER))
    assert load_tokenizer(ResolvedModel("x", tmp_path, MODEL, True, "dummy", 16)).encode(
        "ab", add_special_tokens=False
    ) == [2]
    for name, rows in {
        "custom": b'{"prompt": "x"}',
        "trace": b'{"timestamp": 1, "input_length": 5, "output_length": 2, "hash_ids": [1]}',
    }.items():
        (tmp_path / "data.jsonl").write_bytes(rows)
        spec = {"name": name, "path": str(tmp_path / "data.jsonl")}
        assert len(list(build_workload(spec, seed=0, tokenizer=Words()).requests)) == 1  # type: ignore[arg-type]
