from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from server.errors import UserError
from workloads import build_workload
from workloads.base import Workload
from workloads.token_ids import request_timestamps
from workloads.tokenizer import HFTokenizer

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2224671,879,55
"""
BURST = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,Conversation log
118.5,GPT-4,417,276,693,"API, log"
"""


def build(path: Path, seed: int = 0, tokenizer: HFTokenizer | None = None, **spec: Any) -> Workload:
    return build_workload({"name": "trace", "path": str(path), **spec}, seed=seed, tokenizer=tokenizer)


def write(tmp_path: Path, text: str | bytes, name: str = "trace") -> Path:
    path = tmp_path / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def mooncake(tmp_path: Path, *rows: tuple[int, int, int, list[int]]) -> Path:
    keys = ("timestamp", "input_length", "output_length", "hash_ids")
    return write(tmp_path, "".join(json.dumps(dict(zip(keys, row, strict=True))) + "\n" for row in rows))


def lengths(workload: Workload) -> list[tuple[int | None, int]]:
    assert all(request.prompt_tokens == len(request.prompt_token_ids or []) for request in workload.requests)
    return [(request.prompt_tokens, request.max_tokens) for request in workload.requests]


def shared(one: list[int] | None, other: list[int] | None) -> int:
    pairs = zip(one or [], other or [], strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_azure_keeps_all_seven_decimals(tmp_path: Path, end: str) -> None:
    workload = build(write(tmp_path, "\ufeff" + AZURE.replace("\n", end)))
    assert lengths(workload) == [(374, 44), (396, 109), (879, 55)]
    assert request_timestamps(workload.requests) == pytest.approx([0, 4.314579, 4.5418771], abs=1e-12)
    assert workload.parameters["format"] == "azure"


def test_azure_with_time_zone_of_2024(tmp_path: Path) -> None:
    text = AZURE.replace(".6805900", ".680590+00:00").replace(".9951690", ".995169+00:00").replace(".2224671", "+00:00")
    workload = build(write(tmp_path, text))
    assert request_timestamps(workload.requests) == pytest.approx([0, 4.314579, 4.31941], abs=1e-9)


def test_burstgpt_drops_and_counts_failures(tmp_path: Path) -> None:
    workload = build(write(tmp_path, BURST))
    assert lengths(workload) == [(472, 18), (417, 276)]
    assert request_timestamps(workload.requests) == [0, 113.5]
    assert workload.dropped == {"no output tokens (failed request)": 1}


def test_rows_out_of_order_are_sorted_and_noted(tmp_path: Path) -> None:
    header, first, second, third = AZURE.splitlines()
    workload = build(write(tmp_path, "\n".join([header, third, first, second])))
    assert lengths(workload) == [(374, 44), (396, 109), (879, 55)]
    assert any("sorted" in note for note in workload.notes)


def test_mooncake_hash_ids_become_shared_prefixes(tmp_path: Path) -> None:
    path = mooncake(
        tmp_path,
        (0, 1300, 5, [7, 8, 9]),
        (1500, 1400, 6, [7, 8, 10]),
        (2000, 600, 7, [8, 7]),
        (2000, 1200, 7, [7, 8, 9]),
        (2500, 700, 7, []),
    )
    workload = build(path)
    assert lengths(workload) == [(1300, 5), (1400, 6), (600, 7), (1200, 7), (700, 7)]
    assert request_timestamps(workload.requests) == [0, 1.5, 2, 2, 2.5]
    a, b, c, d, e = (request.prompt_token_ids for request in workload.requests)
    assert shared(a, b) == 1024
    assert shared(a, d) == 1200
    assert shared(a, c) < 3
    assert (c or [])[:512] == (a or [])[512:1024]
    assert len({tuple((e or [])[i : i + 8]) for i in range(0, 696, 8)}) == 87
    assert build(path, seed=1).digest != workload.digest


def test_scaling_keeps_the_shared_share_and_clipping_keeps_prefixes(tmp_path: Path) -> None:
    path = mooncake(tmp_path, (0, 1024, 8, [1, 2]), (10, 1536, 80, [1, 3, 4]))
    scaled = build(path, length_scale=0.25)
    assert lengths(scaled) == [(256, 2), (384, 20)]
    assert shared(*(request.prompt_token_ids for request in scaled.requests)) == 128
    clipped = build(path, max_input_len=700, max_output_len=10)
    assert lengths(clipped) == [(700, 8), (700, 10)]
    assert shared(*(request.prompt_token_ids for request in clipped.requests)) == 512
    assert clipped.notes == [
        "input lengths clipped to 700 tokens in 2 of 2 rows",
        "output lengths clipped to 10 tokens in 1 of 2 rows",
    ]
    dropped = build(path, max_input_len=1100, too_long="drop")
    assert lengths(dropped) == [(1024, 8)]
    assert dropped.dropped == {"input longer than 1100 tokens": 1}


def test_nothing_is_told_of_rows_that_are_not_sent(tmp_path: Path) -> None:
    path = mooncake(tmp_path, *((at * 1000, 900 - at, 20, [at]) for at in range(8)))
    three = build(path, num_requests=3, max_input_len=898)
    assert three.notes == ["input lengths clipped to 898 tokens in 2 of 3 rows"]
    assert lengths(three) == [(898, 20), (898, 20), (898, 20)]
    kept = build(path, num_requests=3, max_input_len=897, too_long="drop")
    assert lengths(kept) == [(897, 20), (896, 20), (895, 20)]
    assert kept.dropped == {"input longer than 897 tokens": 3}
    assert kept.digest == build(path, max_input_len=897, too_long="drop", end_s=6.0).digest
    looped = build(path, num_requests=20, max_input_len=898, loop=3)
    assert len(looped.requests) == 20
    assert looped.notes[0] == "input lengths clipped to 898 tokens in 2 of 8 rows"


def test_slicing_time_scaling_and_looping(tmp_path: Path) -> None:
    path = mooncake(tmp_path, *((i * 1000, 512, 4, [i]) for i in range(10)))
    workload = build(path, start_s=2, end_s=5, speedup=2, loop=2)
    assert request_timestamps(workload.requests) == [0, 0.5, 1, 1.5, 2, 2.5]
    assert workload.dropped == {"outside start_s to end_s": 7}
    prompts = [tuple(request.prompt_token_ids or []) for request in workload.requests]
    assert len(set(prompts)) == 6
    assert [request.index for request in workload.requests] == list(range(6))
    assert len(build(path, loop=10**9, num_requests=25).requests) == 25
    one = build(mooncake(tmp_path, (5, 10, 1, [1])), loop=3)
    assert request_timestamps(one.requests) == [0, 1, 2]


def test_text_prompts_of_exact_length(tmp_path: Path, tokenizer: HFTokenizer) -> None:
    workload = build(write(tmp_path, AZURE), tokenizer=tokenizer, prompt_format="text")
    assert [tokenizer.count(request.prompt or "") for request in workload.requests] == [374, 396, 879]
    assert workload.requests[1].timestamp_s == pytest.approx(4.314579)
    with pytest.raises(UserError, match="give --tokenizer"):
        build(write(tmp_path, AZURE), prompt_format="text")
    with pytest.raises(UserError, match="share blocks"):
        build(mooncake(tmp_path, (0, 1, 1, [1])), prompt_format="text", tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (AZURE.replace("ContextTokens", "Context"), r"line 1: not a known trace \(columns TIMESTAMP, Context,"),
        ("", "is empty"),
        ("\n\n", "not a known trace"),
        (AZURE.splitlines()[0], "no usable row"),
        (AZURE.replace("396", "-396"), "line 3: ContextTokens is negative: -396"),
        (AZURE.replace("396", "many"), "line 3: ContextTokens is not a whole number: 'many'"),
        (AZURE.replace("396", "9" * 30), "line 3: ContextTokens is above"),
        (AZURE.replace("2023-11-16 18:15:50", "9999-11-16 18:15:50"), "line 3: TIMESTAMP is not a time"),
        (AZURE.replace("109", "1.5"), "line 3: GeneratedTokens is not a whole number"),
        (AZURE.replace("2023-11-16 18:15:50", "yesterday"), "line 3: TIMESTAMP is not a time"),
        (AZURE.replace("2023-11-16 18:15:50", "2023-13-16 18:15:50"), "line 3: TIMESTAMP is not a time"),
        (AZURE.replace(",396,109", ",396"), "line 3: 2 cells, too few for column GeneratedTokens"),
        (AZURE.replace("396", '"396'), "broken CSV"),
        (BURST.replace("45,", "nan,"), "line 3: Timestamp is not a time"),
        (BURST.replace(",18,", ",0,").replace(",276,", ",0,"), r"no usable row \(dropped: 3 × no output tokens"),
        ('{"a": 1}', r"line 1: not a known trace \(keys a\)"),
        ('{"timestamp": 0, "input_length": ', "line 1, column 34: broken JSON"),
        ('{"timestamp": 0, "input_length": 5}', "line 1: no key output_length"),
        ('{"timestamp": "x", "input_length": 5, "output_length": 1}', "timestamp is not milliseconds"),
        ('{"timestamp": NaN, "input_length": 5, "output_length": 1}', "line 1: broken JSON .NaN is not JSON"),
        ('{"timestamp": -1, "input_length": 5, "output_length": 1}', "timestamp is not milliseconds: '-1'"),
        ('{"timestamp": 0, "input_length": true, "output_length": 1}', "input_length is not a whole number"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": ["a"]}', "hash_ids is not a list"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1e30]}', "hash_ids is not a list"),
        (AZURE.encode() + b"2023-11-16 18:15:50.1,\xff,3\n", "line 5, byte 23: not UTF-8"),
        (b"\x1f\x8b\x08", "gzip"),
    ],
)
def test_bad_files_are_one_clear_line(tmp_path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        build(write(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_an_explicit_format_names_the_missing_columns(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no column Timestamp, Request tokens, Response tokens; found TIMESTAMP"):
        build(write(tmp_path, AZURE), format="burstgpt")
    with pytest.raises(UserError, match="line 1, column 1: broken JSON"):
        build(write(tmp_path, AZURE), format="mooncake")
    with pytest.raises(UserError, match="line 1, column 1: broken JSON"):
        build(write(tmp_path, AZURE), format="jsonl")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"speedup": 0}, "speedup must be a number above 0"),
        ({"length_scale": float("nan")}, "length_scale must be"),
        ({"loop": 0}, "loop must be at least 1"),
        ({"loop": 10**9}, "num_requests 3000000000 must be"),
        ({"num_requests": 0}, "num_requests 0 must be"),
        ({"start_s": 5, "end_s": 5}, "nothing lies between"),
        ({"start_s": -1}, "nothing lies between"),
        ({"start_s": 100}, "no row of .* is left .dropped: 3 × outside"),
        ({"max_input_len": 10, "too_long": "drop"}, "no row of .* is left"),
        ({"formatt": "azure"}, "did you mean `format`"),
        ({"format": "csv"}, "`format`: Invalid enum value"),
    ],
)
def test_bad_parameters_are_one_clear_line(tmp_path: Path, spec: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build(write(tmp_path, AZURE), **spec)
