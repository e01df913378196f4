"""A tokenizer that knows more tokens than the model: none of those reaches the engine, by whatever way it comes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from server.api.tokenizer import byte_tokenizer
from server.config import ModelOptions, ServerConfig
from tests.integration.api_harness import Server

VOCAB = 512
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 1,
    "num_hidden_layers": 1,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    tokenizer = json.loads(byte_tokenizer(VOCAB).to_str())
    tokenizer["model"]["vocab"]["z"] = 100000
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = ServerConfig(model=ModelOptions(model=str(folder), load_format="dummy"))
    running = Server(tmp_path_factory.mktemp("run"), config)
    yield running
    running.close()


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "zaz"}),
        ("/v1/completions", {"prompt": ["a", "az"]}),
        ("/v1/completions", {"prompt": "x" * 2000 + "z"}),
        ("/v1/completions", {"prompt": "z", "echo": True, "logprobs": 1, "max_tokens": 0}),
        ("/v1/completions", {"prompt": "z", "stream": True}),
        ("/v1/completions", {"prompt": [100000]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "zaz"}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 1000 + "z"}], "stream": True}),
    ],
    ids=lambda value: str(value)[:40],
)
def test_tokens_that_the_model_lacks_are_400(server: Server, path: str, fields: dict[str, Any]) -> None:
    before = len(server.engine.requests)
    with server.client() as client:
        answer = client.post(path, json=fields)
        assert answer.status_code == 400, answer.text
        assert f"{VOCAB - 1}." in answer.json()["error"]["message"]
        assert len(server.engine.requests) == before
        good = client.post("/v1/completions", json={"prompt": "x", "stop": "z", "max_tokens": 2})
        assert good.json()["choices"][0]["text"] == "he"
