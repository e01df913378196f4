from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from server.errors import UserError
from workloads import build_workload
from workloads.base import Workload
from workloads.text import TextGenerator
from workloads.tokenizer import HFTokenizer


def words(n: int, seed: int = 0) -> str:
    return " ".join(TextGenerator(np.random.default_rng(seed)).words(n))


def human(text: str) -> dict[str, str]:
    return {"from": "human", "value": text}


def gpt(text: str) -> dict[str, str]:
    return {"from": "gpt", "value": text}


def build(path: Path, tokenizer: HFTokenizer | None, seed: int = 0, **spec: Any) -> Workload:
    return build_workload({"name": "sharegpt", "path": str(path), **spec}, seed=seed, tokenizer=tokenizer)


def write(path: Path, rows: Any) -> Path:
    path.write_text(json.dumps(rows), encoding="utf-8")
    return path


def test_every_spelling_of_the_schema_gives_the_same_requests(tmp_path: Path, tokenizer: HFTokenizer) -> None:
    question, answer = words(20, 1), words(30, 2)
    spellings: list[Any] = [
        {"conversations": [human(question), gpt(answer)]},
        {"conversation": [human(question), gpt(answer)]},
        {"id": 1, "conversations": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]},
        {"conversations": [json.dumps(human(question)), json.dumps(gpt(answer))]},
        {"conversations": json.dumps([human(question), gpt(answer)])},
        {"messages": [{"from": "system", "value": "Be kind."}, {"from": "user", "value": question}, gpt(answer)]},
    ]
    array = build(write(tmp_path / "a.json", spellings), tokenizer, shuffle=False)
    assert {request.prompt for request in array.requests} == {question}
    assert {request.max_tokens for request in array.requests} == {tokenizer.count(answer)}
    assert {request.prompt_tokens for request in array.requests} == {tokenizer.count(question)}
    lines = tmp_path / "a.jsonl"
    lines.write_text("\n\n".join(json.dumps(row) for row in spellings) + "\n", encoding="utf-8-sig")
    assert build(lines, tokenizer, shuffle=False).digest == array.digest


def test_vllms_filter_counts_every_drop_by_reason(tmp_path: Path, tokenizer: HFTokenizer) -> None:
    long = words(1500)
    ids = tokenizer.encode(long)
    assert len(ids) > 1100
    ok = words(40)
    rows = [
        {"conversations": [human("a"), gpt(ok)]},
        {"conversations": [human(ok), gpt("a")]},
        {"conversations": [human(ok), gpt("")]},
        {"conversations": [human(long), gpt(ok)]},
        {"conversations": [human(words(500)), gpt(long)]},
        {"conversations": [human(ok)]},
        {"conversations": []},
        {"conversations": [gpt(ok), gpt(ok)]},
        {"conversations": [human(ok), gpt(ok)]},
    ]
    workload = build(write(tmp_path / "a.json", rows), tokenizer)
    assert len(workload.requests) == 1
    assert workload.dropped == {
        "prompt shorter than 4 tokens": 1,
        "output shorter than 4 tokens": 2,
        "prompt longer than 1024 tokens": 1,
        "prompt and output longer than 2048 tokens": 1,
        "no user turn with an answer": 3,
    }


@pytest.mark.parametrize(
    ("prompt_len", "output_len", "kept"), [(4, 4, 1), (1024, 1024, 1), (1024, 1025, 0), (1025, 4, 0)]
)
def test_the_filters_bounds_are_inclusive(
    tmp_path: Path, tokenizer: HFTokenizer, prompt_len: int, output_len: int, kept: int
) -> None:
    source = TextGenerator(np.random.default_rng(0))
    edge = [human(source.exact(prompt_len, tokenizer)), gpt(source.exact(output_len, tokenizer))]
    fine = [human(words(9)), gpt(words(9))]
    path = write(tmp_path / "a.json", [{"conversations": edge}, {"conversations": fine}])
    assert len(build(path, tokenizer).requests) == 1 + kept


def test_conversations_are_replayed_turn_by_turn(tmp_path: Path, tokenizer: HFTokenizer) -> None:
    texts = [words(10 + i, i) for i in range(6)]
    turns = [{"from": "system", "value": "Be kind to them."}]
    turns += [human(text) if i % 2 == 0 else gpt(text) for i, text in enumerate(texts)]
    path = write(tmp_path / "a.json", [{"conversations": turns}])
    workload = build(path, tokenizer, mode="conversation", think_time_s=2.0)
    requests = list(workload.requests)
    assert [request.turn for request in requests] == [0, 1, 2]
    assert {request.conversation for request in requests} == {0}
    assert all(request.append_reply for request in requests)
    assert [[m.role for m in request.messages or []] for request in requests] == [
        ["system", "user"],
        ["user"],
        ["user"],
    ]
    assert [(request.messages or [])[-1].content for request in requests] == texts[::2]
    assert [request.max_tokens for request in requests] == [tokenizer.count(text) for text in texts[1::2]]
    counts = [tokenizer.count(text) for text in ["Be kind to them.", *texts]]
    assert [request.prompt_tokens for request in requests] == [sum(counts[:2]), sum(counts[:4]), sum(counts[:6])]
    assert requests[0].think_time_s == 0
    assert all(request.think_time_s > 0 for request in requests[1:])
    fixed = build(path, tokenizer, mode="conversation", think_time_s=2.0, think_time="fixed")
    assert [request.think_time_s for request in fixed.requests] == [0, 2, 2]


def test_a_conversation_ends_where_the_filter_drops_a_turn(tmp_path: Path, tokenizer: HFTokenizer) -> None:
    turns = [human(words(10)), gpt(words(10)), human(words(10)), gpt("a"), human(words(10)), gpt(words(10))]
    path = write(tmp_path / "a.json", [{"conversations": turns}])
    workload = build(path, tokenizer, mode="conversation")
    assert len(workload.requests) == 1
    assert workload.dropped == {"output shorter than 4 tokens": 1, "after a dropped turn": 1}
    growing = [turn for _ in range(40) for turn in (human(words(30)), gpt(words(60)))]
    workload = build(write(tmp_path / "b.json", [{"conversations": growing}]), tokenizer, mode="conversation")
    last = workload.requests[-1]
    assert (last.prompt_tokens or 0) + last.max_tokens <= 2048
    assert workload.dropped["history, prompt and output longer than 2048 tokens"] == 1


def test_shuffle_is_seeded_and_num_requests_stops_early(tmp_path: Path, tokenizer: HFTokenizer) -> None:
    rows = [{"conversations": [human(words(10, i)), gpt(words(10))]} for i in range(50)]
    path = write(tmp_path / "a.json", rows)
    one, same, other = (build(path, tokenizer, seed=seed, num_requests=20) for seed in (1, 1, 2))
    assert one.digest == same.digest != other.digest
    assert len(one.requests) == 20
    in_order = build(path, tokenizer, shuffle=False, request_format="messages")
    assert [(r.messages or [])[0].content for r in in_order.requests] == [words(10, i) for i in range(50)]
    more = build(path, tokenizer, num_requests=60)
    assert any("gives 50 requests" in note for note in more.notes)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"[]", "holds no conversation"),
        (b"\x1f\x8b\x08\x00", "gzip; decompress"),
        (b'[\n{"conversations": [}\n]', r"line 2, column 20: broken JSON"),
        (b'[{"conversations": []}', r"line 1, column 23: broken JSON"),
        (b'{"conversations": []}\n{"conversations": ', r"line 2, column 19: broken JSON"),
        (b'[\n{"conversations": [{"from": "human", "value": "\xff"}]}]', "line 2, byte 48: not UTF-8"),
        (b'{"conversations": [{"from": "human", "value": "\xff"}]}', "line 1, byte 48: not UTF-8"),
        (b'[{"prompt": "x"}]', r"conversation 1: neither `conversations` .*keys \(prompt\)"),
        (b"[[1]]", "conversation 1: expected an object"),
        (b"[1]", "conversation 1: expected an object"),
        (b'[{"conversations": 5}]', "is int, not a list"),
        (b'[{"conversations": [5]}]', "conversation 1, turn 1: expected an object"),
        (b'[{"conversations": ["hello"]}]', "turn 1: a turn is text but not JSON"),
        (b'[{"conversations": [{"from": "human"}]}]', "turn 1: needs text"),
        (
            b'[{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}]',
            "were dropped .1 × prompt",
        ),
        (
            b'[{"conversations": [{"from": "human", "value": "\\ud800"}]}]',
            "line 1, column 49: half of a surrogate pair",
        ),
        (b'{"conversations": [{"from": "human", "value": "\\ud800"}]}', "line 1: holds half of a surrogate pair"),
        (b'[{"conversations": ["{\\"from\\": \\"gpt\\", \\"value\\": \\"\\\\ud800\\"}"]}]', "turn 1: holds half of a"),
        (b"[" * 100_000, "broken JSON"),
    ],
)
def test_bad_files_are_one_clear_line(tmp_path: Path, tokenizer: HFTokenizer, content: bytes, message: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        build(path, tokenizer)
    assert "\n" not in str(caught.value)
    assert "a.json" in str(caught.value)


def test_missing_file_folder_tokenizer_and_parameters(tmp_path: Path, tokenizer: HFTokenizer) -> None:
    with pytest.raises(UserError, match="No such file"):
        build(tmp_path / "none.json", tokenizer)
    with pytest.raises(UserError, match="is a folder"):
        build(tmp_path, tokenizer)
    with pytest.raises(UserError, match="give --tokenizer"):
        build(tmp_path, None)
    with pytest.raises(UserError, match="missing required field `path`"):
        build_workload({"name": "sharegpt"}, seed=0, tokenizer=tokenizer)
    with pytest.raises(UserError, match="num_requests 0"):
        build(tmp_path, tokenizer, num_requests=0)
    with pytest.raises(UserError, match="think_time_s"):
        build(tmp_path, tokenizer, think_time_s=-1)
    with pytest.raises(UserError, match="did you mean `max_prompt_len`"):
        build(tmp_path, tokenizer, max_promt_len=3)


def test_the_fit_has_the_published_means(tokenizer: HFTokenizer) -> None:
    workload = build_workload(
        {"name": "sharegpt-like", "num_requests": 20_000, "prompt_format": "ids"}, seed=0, tokenizer=None
    )
    prompts = np.array([request.prompt_tokens for request in workload.requests])
    outputs = np.array([request.max_tokens for request in workload.requests])
    assert abs(prompts.mean() - 217.4) < 6
    assert abs(outputs.mean() - 200.5) < 6
    assert prompts.min() >= 4
    assert prompts.max() <= 1024
    assert (prompts + outputs).max() <= 2048
    assert set(workload.dropped) <= {
        "prompt shorter than 4 tokens",
        "output shorter than 4 tokens",
        "prompt longer than 1024 tokens",
        "prompt and output longer than 2048 tokens",
    }


def test_sharegpt_like_text_is_exact_with_a_tokenizer_and_a_prefix_of_a_longer_one(tokenizer: HFTokenizer) -> None:
    def like(n: int, **spec: Any) -> Workload:
        spec = {"name": "sharegpt-like", "num_requests": n, **spec}
        return build_workload(spec, seed=3, tokenizer=tokenizer)

    short = like(20)
    assert all(tokenizer.count(r.prompt or "") == r.prompt_tokens for r in short.requests)
    assert list(like(30).requests)[:20] == list(short.requests)
    scaled = like(20, length_scale=0.25, prompt_format="ids")
    pairs = zip(scaled.requests, short.requests, strict=True)
    assert all(small.max_tokens == max(1, round(big.max_tokens * 0.25)) for small, big in pairs)
    with pytest.raises(UserError, match="next to everything"):
        like(5, max_prompt_len=3)
    with pytest.raises(UserError, match="length_scale"):
        like(5, length_scale=0)


def test_scaled_text_leaves_room_for_what_the_tokenizer_adds(any_tokenizer: HFTokenizer) -> None:
    spec = {"name": "sharegpt-like", "num_requests": 30, "length_scale": 0.01}
    workload = build_workload(spec, seed=0, tokenizer=any_tokenizer)
    assert all(any_tokenizer.count(request.prompt or "") == request.prompt_tokens for request in workload.requests)
    assert min(request.prompt_tokens or 0 for request in workload.requests) == 1 + any_tokenizer.count("")
