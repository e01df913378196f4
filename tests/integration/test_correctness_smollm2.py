"""A real checkpoint through the whole server: its greedy tokens are transformers' own, whatever the server does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from server.errors import UserError
from tests.integration.serving import Server, start_server
from tests.integration.traffic import body, complete_all, metrics, settled

pytestmark = pytest.mark.model

MODEL = "smollm2-135m"
SERVE = (MODEL, "--device", "cpu", "--block-size", "16")
TOKENS = 8

QUESTIONS = [
    "What is the capital of France?",
    "Write a haiku about rain.",
    "Explain why the sky is blue to a child of six.",
    "Translate 'good morning' into Spanish, Italian and German.",
    "List three uses of a paper clip.",
    "Who wrote The Old Man and the Sea?",
    "What is 17 times 23? Show your work.",
    "Summarise the water cycle in two sentences.",
    "Give me a recipe for pancakes with four ingredients.",
    "Is a tomato a fruit or a vegetable?",
]
TEXTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a small village by the sea, there lived",
    "The three laws of motion are: 1.",
    "import numpy as np\n\nmatrix = np.",
    "To be, or not to be, that is",
    "Zutaten: 200 g Mehl, 2 Eier, 1 Prise Salz. Zubereitung:",
    "El perro corre por el parque y",
    "| city | country |\n|---|---|\n| Paris |",
    "It was the best of times, it was the worst of times. " * 8,
]


@pytest.fixture(scope="module")
def folder() -> Path:
    from server.models.pull import pull

    try:
        return pull(MODEL)
    except UserError as error:
        pytest.skip(f"{MODEL} is not here and cannot be pulled: {error}")


@pytest.fixture(scope="module")
def prompts(folder: Path) -> list[list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    chats = [f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in QUESTIONS]
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in chats + TEXTS]


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with start_server(tmp_path_factory.mktemp("server"), *SERVE, "--enforce-eager") as server:
        server.wait_ready()
        yield server


@pytest.fixture(scope="module")
def reference(folder: Path, prompts: list[list[int]], server: Server) -> list[list[int]]:
    """Greedy tokens, from the server one request at a time and seen to be those of transformers.

    The whole of prompt and output goes through the reference model at once: the first token that is not its choice
    would show at its position.
    """
    import torch
    import transformers

    torch.set_num_threads(1)
    requests = [body(MODEL, prompt, TOKENS) for prompt in prompts]
    outputs = asyncio.run(complete_all(server.url, requests, concurrency=1))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for prompt, output in zip(prompts, outputs, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + output])).logits[0]
        assert output == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
    return outputs


def run_together(server: Server, prompts: list[list[int]]) -> list[list[int]]:
    return asyncio.run(complete_all(server.url, [body(MODEL, prompt, TOKENS) for prompt in prompts], len(prompts)))


def test_all_at_once_and_from_the_prefix_cache(
    server: Server, prompts: list[list[int]], reference: list[list[int]]
) -> None:
    before = metrics(server.url)
    assert run_together(server, prompts) == reference
    after = asyncio.run(settled(server.url))
    assert after["prefix_cache_hits_total"] > before["prefix_cache_hits_total"]


@pytest.mark.parametrize(
    ("arguments", "preempted"),
    [
        pytest.param(
            ("--enforce-eager", "--no-enable-prefix-caching", "--num-gpu-blocks-override", "32"),
            True,
            id="tiny pool, no prefix cache",
        ),
        pytest.param(
            ("--mode", "compile", "--max-num-batched-tokens", "16"), False, id="compiled, chunks of 16 tokens"
        ),
    ],
)
def test_in_another_configuration(
    tmp_path: Path, prompts: list[list[int]], reference: list[list[int]], arguments: tuple[str, ...], preempted: bool
) -> None:
    with start_server(tmp_path, *SERVE, *arguments) as server:
        server.wait_ready()
        assert run_together(server, prompts) == reference
        after = asyncio.run(settled(server.url))
        assert bool(after["num_preemptions_total"]) == preempted
        assert after["kv_cache_usage_perc"] == 0
        assert after["num_compilations_total"] == 0, "nothing compiles once the port is open"


async def test_chat_through_the_openai_client(server: Server) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        question: list[openai.types.chat.ChatCompletionMessageParam] = [
            {"role": "user", "content": "What is the capital of France?"}
        ]
        answer = await client.chat.completions.create(model=MODEL, messages=question, temperature=0, max_tokens=12)
        assert answer.choices[0].message.content is not None
        assert "Paris" in answer.choices[0].message.content
        stream = await client.chat.completions.create(
            model=MODEL, messages=question, temperature=0, max_tokens=12, stream=True
        )
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
        assert "".join(pieces) == answer.choices[0].message.content
