"""The openai client against the whole server: engine, worker and model are real."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import openai
import pytest

from tests.integration.serving import Server, start_server

PROMPT = list(b"the same prompt, long enough to fill a block or two of the cache")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    arguments = ("tiny", "--enforce-eager", "--device", "cpu", "--max-model-len", "256", "--block-size", "16")
    with start_server(tmp_path_factory.mktemp("server"), *arguments) as server:
        server.wait_ready()
        yield server


@pytest.fixture
async def client(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_completion_and_stream_agree(client: openai.AsyncOpenAI) -> None:
    options = {"model": "tiny", "prompt": "Hello", "max_tokens": 16, "temperature": 0}
    whole = await client.completions.create(**options, extra_body={"ignore_eos": True})  # type: ignore[call-overload]
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 16
    stream = await client.completions.create(  # type: ignore[call-overload]
        **options, stream=True, stream_options={"include_usage": True}, extra_body={"ignore_eos": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert chunks[-1].usage == whole.usage


async def test_logprobs_of_output_and_echoed_prompt(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=4, temperature=0, logprobs=3, echo=True, extra_body={"ignore_eos": True}
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(PROMPT) + 4
    assert logprobs.token_logprobs[0] is None
    assert all(value < 0 for value in logprobs.token_logprobs[1:])
    for own, top in zip(logprobs.token_logprobs[-4:], logprobs.top_logprobs[-4:], strict=True):
        assert own == pytest.approx(max(top.values())), "greedy: the sampled token is the likeliest"


async def test_echoed_logprobs_are_what_generation_said(client: openai.AsyncOpenAI) -> None:
    options = {"model": "tiny", "temperature": 0, "logprobs": 0}
    generated = await client.completions.create(  # type: ignore[call-overload]
        **options, prompt=PROMPT, max_tokens=6, extra_body={"ignore_eos": True, "return_token_ids": True}
    )
    choice = generated.choices[0]
    echoed = await client.completions.create(  # type: ignore[call-overload]
        **options, prompt=PROMPT + choice.token_ids, max_tokens=1, echo=True
    )
    assert echoed.choices[0].logprobs.token_logprobs[len(PROMPT) :][:6] == pytest.approx(
        choice.logprobs.token_logprobs, abs=1e-4
    )


async def test_seeded_choices_differ_and_come_again(client: openai.AsyncOpenAI) -> None:
    async def ask() -> list[str]:
        answer = await client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=12, temperature=1.0, seed=5, n=3, extra_body={"ignore_eos": True}
        )
        return [choice.text for choice in answer.choices]

    first = await ask()
    assert len(set(first)) == 3
    assert await ask() == first


async def test_chat_with_logprobs_and_a_prefix_found_again(client: openai.AsyncOpenAI) -> None:
    messages: list[openai.types.chat.ChatCompletionMessageParam] = [
        {"role": "system", "content": "You are a tiny model that has nothing to say."},
        {"role": "user", "content": "Say it."},
    ]

    async def ask() -> openai.types.chat.ChatCompletion:
        return await client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=5, temperature=0, logprobs=True, top_logprobs=2
        )

    first, second = await ask(), await ask()
    assert first.choices[0].message.content == second.choices[0].message.content
    assert first.choices[0].logprobs is not None
    assert first.choices[0].logprobs.content is not None
    assert all(len(entry.top_logprobs) == 2 for entry in first.choices[0].logprobs.content)
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert (second.usage.prompt_tokens_details.cached_tokens or 0) >= 16


async def test_a_stop_string_ends_the_request(client: openai.AsyncOpenAI) -> None:
    options = {"model": "tiny", "prompt": "Hello", "max_tokens": 60, "temperature": 0}
    whole = await client.completions.create(**options, extra_body={"ignore_eos": True})  # type: ignore[call-overload]
    text = whole.choices[0].text
    stop = text[20:23]
    cut = await client.completions.create(**options, stop=stop, extra_body={"ignore_eos": True})  # type: ignore[call-overload]
    assert cut.choices[0].finish_reason == "stop"
    assert cut.choices[0].text == text[: text.index(stop)]


async def test_errors_are_the_clients_own(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="256"):
        await client.completions.create(model="tiny", prompt=[1] * 300, max_tokens=1)
    with pytest.raises(openai.NotFoundError):
        await client.completions.create(model="another", prompt="x")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        await client.completions.create(model="tiny", prompt="x", temperature=-1)
    assert [model.id async for model in client.models.list()] == ["tiny"]
    answer = await client.completions.create(model="tiny", prompt=[1] * 200, extra_body={"ignore_eos": True})
    assert answer.usage is not None
    assert answer.usage.total_tokens <= 256
