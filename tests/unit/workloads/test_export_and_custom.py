from __future__ import annotations

import io
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.errors import UserError
from workloads import build_workload
from workloads.base import Message, Workload, WorkloadRequest
from workloads.export import export_workload
from workloads.token_ids import request_timestamps
from workloads.tokenizer import HFTokenizer


def exported(workload: Workload) -> bytes:
    buffer = io.BytesIO()
    assert export_workload(workload, buffer).num_requests == len(workload.requests)
    return buffer.getvalue()


def replay(path: Path, **spec: Any) -> Workload:
    return build_workload({"name": "trace", "path": str(path), **spec}, seed=9, tokenizer=None)


def _texts() -> st.SearchStrategy[str]:
    return st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30)


@st.composite
def _workloads(draw: st.DrawFn) -> Workload:
    requests = []
    timed = draw(st.booleans())
    for index in range(draw(st.integers(1, 6))):
        body: dict[str, Any] = draw(
            st.one_of(
                st.fixed_dictionaries({"prompt": _texts()}),
                st.fixed_dictionaries({"prompt_token_ids": st.lists(st.integers(0, 2**31), min_size=1, max_size=20)}),
                st.fixed_dictionaries(
                    {
                        "messages": st.lists(
                            st.builds(Message, role=_texts(), content=_texts()), min_size=1, max_size=3
                        ),
                        "append_reply": st.booleans(),
                        "conversation": st.integers(0, 3),
                        "turn": st.integers(0, 3),
                        "think_time_s": st.floats(0, 10),
                    }
                ),
            )
        )
        requests.append(
            WorkloadRequest(
                index=index,
                max_tokens=draw(st.integers(1, 999)),
                ignore_eos=draw(st.booleans()),
                timestamp_s=float(index) if timed else None,
                extra_body=draw(st.dictionaries(_texts(), st.floats(0, 2), max_size=2)),
                **body,
            )
        )
    return Workload(name="custom", parameters={"a": 1}, seed=draw(st.integers(0, 9)), requests=requests)


@settings(max_examples=50, deadline=None)
@given(workload=_workloads())
def test_what_is_exported_is_replayed_with_the_same_digest(
    workload: Workload, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("export") / "w.jsonl"
    path.write_bytes(exported(workload))
    again = replay(path)
    assert again.digest == workload.digest
    assert list(again.requests) == list(workload.requests)
    assert list(pickle.loads(pickle.dumps(again.requests))) == list(workload.requests)
    assert request_timestamps(again.requests) == [request.timestamp_s for request in workload.requests]


@pytest.mark.parametrize("name", ["synthetic", "sharegpt-like"])
def test_builders_survive_the_round_trip(name: str, tmp_path: Path, tokenizer: HFTokenizer) -> None:
    workload = build_workload({"name": name, "num_requests": 8}, seed=4, tokenizer=tokenizer)
    path = tmp_path / "w.jsonl"
    path.write_bytes(exported(workload))
    header = json.loads(path.read_bytes().splitlines()[0])
    assert header["benchctl_workload"] == 1
    assert header["digest"] == workload.digest
    assert (header["name"], header["seed"], header["parameters"]) == (name, 4, workload.parameters)
    again = replay(path)
    assert again.digest == workload.digest
    assert again.tokenizer == "bpe"
    assert exported(again).splitlines()[1:] == path.read_bytes().splitlines()[1:]


def _timed(tmp_path: Path) -> Path:
    requests = [WorkloadRequest(index=i, prompt="x", max_tokens=1, timestamp_s=float(i)) for i in range(6)]
    path = tmp_path / "w.jsonl"
    path.write_bytes(exported(Workload(name="custom", parameters={}, seed=0, requests=requests)))
    return path


def test_exports_can_be_sliced_and_sped_up(tmp_path: Path) -> None:
    workload = replay(_timed(tmp_path), start_s=1, end_s=5, speedup=2, num_requests=3)
    assert [(r.index, r.timestamp_s) for r in workload.requests] == [(0, 0), (1, 0.5), (2, 1)]
    assert workload.dropped == {"outside start_s to end_s": 2}
    with pytest.raises(UserError, match="no request is left between"):
        replay(_timed(tmp_path), start_s=50)
    with pytest.raises(UserError, match="length_scale does not apply"):
        replay(_timed(tmp_path), length_scale=2)


def test_an_edited_export_says_so_and_a_broken_one_names_the_line(tmp_path: Path) -> None:
    path = _timed(tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)

    def with_second(line: bytes) -> Path:
        path.write_bytes(b"".join([lines[0], lines[1], line, *lines[3:]]))
        return path

    assert any("changed after its export" in note for note in replay(with_second(b"")).notes)
    for line, message in [
        (b'{"index":0,"max_tokens":1}\n', "line 3: needs exactly one of"),
        (b'{"index":0,"max_tokens":1,"prompt":"x","prompt_token_ids":[1]}\n', "line 3: needs exactly one of"),
        (b'{"index":0,"max_tokens":0,"prompt":"x"}\n', "line 3: max_tokens 0 is below 1"),
        (b'{"index":0,"max_tokens":1,"prompt":""}\n', "line 3: its prompt is empty"),
        (b'{"index":0,"max_tokens":1,"prompt_token_ids":[-1]}\n', "line 3: a token id is negative"),
        (b'{"index":0,"max_tokens":1,"prompt":"x","timestamp_s":-2}\n', "line 3: timestamp_s -2.0 is negative"),
        (b'{"index":0,"max_tokens":"1","prompt":"x"}\n', r"line 3: Expected `int`.*max_tokens"),
        (b'{"index":0,\n', "line 3, column 12: broken JSON"),
        (b'{"index":0,"max_tokens":1,"prompt":"\xff"}\n', "line 3, byte 37: not UTF-8"),
    ]:
        with pytest.raises(UserError, match=message):
            replay(with_second(line))
    path.write_bytes(lines[0].replace(b'"benchctl_workload":1', b'"benchctl_workload":7'))
    with pytest.raises(UserError, match="format version 7; this program reads 1"):
        replay(path)
    path.write_bytes(lines[0])
    with pytest.raises(UserError, match="no request is left"):
        replay(path)
    untimed = tmp_path / "untimed.jsonl"
    untimed.write_bytes(exported(build_workload({"name": "synthetic"}, seed=0, tokenizer=None)))
    with pytest.raises(UserError, match="line 2: no timestamp_s"):
        replay(untimed, speedup=2)


def test_an_export_that_vanishes_during_the_replay_is_an_error(tmp_path: Path) -> None:
    path = _timed(tmp_path)
    workload = replay(path)
    path.unlink()
    with pytest.raises(UserError, match="changed while it was replayed"):
        list(workload.requests)


def custom(tmp_path: Path, text: str, tokenizer: HFTokenizer | None = None, **spec: Any) -> Workload:
    path = tmp_path / "c.jsonl"
    path.write_text(text, encoding="utf-8")
    return build_workload({"name": "custom", "path": str(path), **spec}, seed=0, tokenizer=tokenizer)


def test_custom_rows_of_every_kind(tmp_path: Path, tokenizer: HFTokenizer) -> None:
    text = """
        {"prompt": "the river", "max_tokens": 7, "id": 3}
        {"messages": [{"role": "user", "content": "hi"}], "ignore_eos": true, "extra_body": {"temperature": 0.5}}
        {"prompt_token_ids": [5, 6, 7], "timestamp_s": 1.5}
        {"turns": ["one", "two"], "category": "x"}
    """
    workload = custom(tmp_path, text, tokenizer, max_tokens=20, think_time_s=3)
    plain, chat, ids, first, second = workload.requests
    assert (plain.prompt, plain.max_tokens, plain.ignore_eos) == ("the river", 7, False)
    assert plain.prompt_tokens == tokenizer.count("the river")
    assert chat.ignore_eos is True
    assert chat.extra_body == {"temperature": 0.5}
    assert chat.max_tokens == 20
    assert (ids.prompt_tokens, ids.timestamp_s) == (3, 1.5)
    assert (first.turn, second.turn, second.think_time_s, second.append_reply) == (0, 1, 3, True)
    assert first.conversation == second.conversation is not None
    assert [request.index for request in workload.requests] == [0, 1, 2, 3, 4]
    assert (chat.prompt_tokens, first.prompt_tokens) == (tokenizer.count("hi"), tokenizer.count("one"))
    assert second.prompt_tokens is None, "it holds the answer to the first"
    assert workload.notes == [
        "prompt_tokens counts message contents without the chat template; of later turns it is not known",
        "keys not used: category (1 rows), id (1 rows)",
    ]
    assert len(custom(tmp_path, text, num_requests=4).requests) == 4
    assert custom(tmp_path, text, shuffle=True).digest == custom(tmp_path, text, shuffle=True).digest


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n", "holds no row"),
        ('{"promt": "x"}', r"line 1: holds none of .*did you mean `prompt`"),
        ("{}", "line 1: holds none of"),
        ('\n{"prompt": "x", "turns": ["y"]}', "line 2: holds prompt and turns"),
        ('{"prompt": ""}', "line 1: prompt is empty"),
        ('{"turns": []}', "line 1: turns is empty"),
        ('{"prompt": 5}', r"line 1: Expected `str \| null`, got `int` - at `\$.prompt`"),
        ('{"prompt": "x", "max_tokens": -2}', "line 1: max_tokens -2 is below 1"),
        ('{"prompt_token_ids": [-3]}', "line 1: a token id is negative"),
        ('{"prompt": "x", "timestamp_s": -3}', "line 1: timestamp_s -3.0 must be"),
        ('{"prompt": "x", "timestamp_s": 1e999}', "line 1: timestamp_s inf must be"),
        ('{"prompt": "x"', "line 1, column 15: broken JSON"),
        ('["x"]', "line 1: expected a JSON object, got list"),
    ],
)
def test_bad_custom_rows_are_one_clear_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        custom(tmp_path, text)


def test_bad_custom_parameters(tmp_path: Path) -> None:
    for spec in ({"max_tokens": 0}, {"num_requests": 0}, {"think_time_s": -1}):
        with pytest.raises(UserError, match=next(iter(spec))):
            custom(tmp_path, '{"prompt": "x"}', **spec)
