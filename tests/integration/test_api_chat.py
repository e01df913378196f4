"""The `openai` client against the API process."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.integration.api_harness import Server

HI: list[dict[str, str]] = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(tmp_path_factory.mktemp("run"))
    yield running
    running.close()


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


def test_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="x", max_tokens=5, logprobs=1)
    assert answer.choices[0].text == "hello"
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.tokens == list("hello")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5


def test_completion_stream(client: openai.OpenAI) -> None:
    chunks = list(client.completions.create(model="tiny", prompt="x", max_tokens=5, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "hello"
    assert chunks[-1].choices[0].finish_reason == "length"


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=HI, max_completion_tokens=5, n=2)  # type: ignore[call-overload]
    assert [choice.message.content for choice in answer.choices] == ["hello", "hello"]
    assert answer.choices[0].message.role == "assistant"
    assert answer.object == "chat.completion"
    assert answer.usage.prompt_tokens_details.cached_tokens == 16


def test_chat_gets_the_rest_of_the_context(client: openai.OpenAI, server: Server) -> None:
    answer = client.chat.completions.create(model="tiny", messages=HI, stop=", h")  # type: ignore[call-overload]
    assert answer.choices[0].message.content == "hello world"
    sent = server.engine.requests[-1]
    assert sent.sampling.max_tokens == 4096 - len(sent.prompt_token_ids)
    assert bytes(sent.prompt_token_ids).decode() == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_chat_stream(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(  # type: ignore[call-overload]
            model="tiny", messages=HI, max_tokens=5, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:-1])
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "hello"
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 5


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs(client: openai.OpenAI, stream: bool) -> None:
    answer = client.chat.completions.create(  # type: ignore[call-overload]
        model="tiny", messages=HI, max_tokens=3, logprobs=True, top_logprobs=2, stream=stream
    )
    choices = [chunk.choices[0] for chunk in answer][1:] if stream else answer.choices
    content = [entry for choice in choices for entry in choice.logprobs.content]
    assert [entry.token for entry in content] == ["h", "e", "l"]
    assert content[0].bytes == [104]
    assert [(top.token, top.logprob) for top in content[0].top_logprobs] == [("i", -1.0), ("j", -2.0)]


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-17", prompt="x")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="tiny", prompt="x", temperature=-1)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="tiny", prompt="x", max_tokens=5000)
    assert long.value.code == "context_length_exceeded"


async def test_async_client_with_many_streams(server: Server) -> None:
    import asyncio

    async def one(client: openai.AsyncOpenAI, length: int) -> str:
        stream = await client.chat.completions.create(  # type: ignore[call-overload]
            model="tiny", messages=HI, max_tokens=length, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        texts = await asyncio.gather(*(one(client, 20 + place) for place in range(48)))
    endless = "hello world, " * 9
    assert texts == [endless[: 20 + place] for place in range(48)]
