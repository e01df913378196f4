"""The builders on real public files, where these lie beside the repository."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

from workloads import build_workload
from workloads.token_ids import request_timestamps
from workloads.tokenizer import HFTokenizer


def test_azure_conversation_trace(shared_data: Path) -> None:
    path = shared_data / "AzureLLMInferenceTrace_conv.csv"
    workload = build_workload({"name": "trace", "path": str(path)}, seed=0, tokenizer=None)
    assert len(workload.requests) == 19366
    assert workload.dropped == {}
    times = request_timestamps(workload.requests)
    assert times[0] == 0
    assert abs((times[-1] or 0) - 3501.721937) < 1e-6
    assert (workload.requests[0].prompt_tokens, workload.requests[0].max_tokens) == (374, 44)
    assert (workload.requests[-1].prompt_tokens, workload.requests[-1].max_tokens) == (197, 183)


def test_mooncake_trace_shares_what_its_hashes_share(shared_data: Path) -> None:
    path = shared_data / "mooncake_synthetic_trace.jsonl"
    workload = build_workload({"name": "trace", "path": str(path)}, seed=0, tokenizer=None)
    assert len(workload.requests) == 3993
    rows = [json.loads(line) for line in path.read_text().splitlines()[:300]]
    block_of: dict[int, tuple[int, ...]] = {}
    seen = 0
    for row, request in zip(rows, workload.requests, strict=False):
        ids = request.prompt_token_ids or []
        assert len(ids) == request.prompt_tokens == row["input_length"]
        for position, hash_id in enumerate(row["hash_ids"][: len(ids) // 512]):
            block = tuple(ids[position * 512 : position * 512 + 512])
            assert block_of.setdefault(hash_id, block) == block
            seen += 1
    assert len(set(block_of.values())) == len(block_of) < seen


def test_fastchat_conversations(shared_data: Path, tokenizer: HFTokenizer) -> None:
    path = shared_data / "fastchat_dummy_conversation.json"
    single = build_workload({"name": "sharegpt", "path": str(path)}, seed=0, tokenizer=tokenizer)
    assert len(single.requests) + sum(single.dropped.values()) == 500
    spec = {"name": "sharegpt", "path": str(path), "mode": "conversation"}
    whole = build_workload(spec, seed=0, tokenizer=tokenizer)
    assert len(whole.requests) + sum(whole.dropped.values()) == 1000
    for _, turns in itertools.groupby(whole.requests, key=lambda request: request.conversation):
        numbers = [request.turn for request in turns]
        assert numbers == list(range(len(numbers)))


def test_mt_bench_questions(shared_data: Path) -> None:
    path = shared_data / "fastchat_mt_bench_question.jsonl"
    workload = build_workload({"name": "custom", "path": str(path)}, seed=0, tokenizer=None)
    assert len(workload.requests) == 160
    assert {request.turn for request in workload.requests} == {0, 1}
