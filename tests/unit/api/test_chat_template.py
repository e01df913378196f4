from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from server.api.bounded import BoundedExecutor
from server.api.chat_template import ChatTemplate, load_chat_template
from server.api.errors import ApiError
from server.api.protocol import ChatMessage, ContentPart
from server.errors import UserError

HI = [ChatMessage(role="user", content="hi")]


def template(source: str, **special: str) -> ChatTemplate:
    return ChatTemplate(source, special)


def test_default_is_chatml() -> None:
    prompt = load_chat_template(None, None).render([ChatMessage(role="system", content="Be kind."), *HI])
    assert prompt == ("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


def test_blocks_are_trimmed_and_special_tokens_known() -> None:
    source = "{{ bos_token }}\n  {% for m in messages %}\n{{ m.content }}|\n  {% endfor %}\n"
    assert template(source, bos_token="<s>").render(HI * 2) == "<s>\nhi|\nhi|\n"


def test_text_parts_are_joined() -> None:
    parts = [ContentPart(type="text", text="a"), ContentPart(type="text", text="b")]
    assert template("{{ messages[0].content }}").render([ChatMessage(role="user", content=parts)]) == "a\nb"


def test_helpers_of_transformers_exist() -> None:
    source = "{{ tools | tojson }} {{ messages | length }} {{ strftime_now('%Y') | length }}"
    assert template(source).render(HI, tools=[{"b": "<é>", "a": 1}]) == '[{"b": "<é>", "a": 1}] 1 4'


def test_loop_controls_and_kwargs() -> None:
    source = "{% for i in range(9) %}{% if i == last %}{% break %}{% endif %}{{ i }}{% endfor %}"
    assert template(source).render(HI, kwargs={"last": 3}) == "012"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('no systems, please') }}", "no systems, please"),
        ("{{ messages[7].content }}", "refused"),
        ("{{ messages[0].content + 1 }}", "failed: TypeError"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
        ("{{ range(1000000000) | list }}", "failed: OverflowError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "failed: RecursionError"),
    ],
)
def test_what_a_template_trips_over_is_a_bad_request(source: str, message: str) -> None:
    with pytest.raises(ApiError, match=message) as caught:
        template(source).render(HI)
    assert caught.value.status == 400
    assert caught.value.info.param == "messages"


@pytest.mark.parametrize(
    ("messages", "options", "param"),
    [
        ([], {}, "messages"),
        (
            [ChatMessage(role="user", content=[ContentPart(type="image_url")])],
            {},
            "messages[0].content",
        ),
        (HI, {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ],
)
def test_bad_messages(messages: list[ChatMessage], options: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        load_chat_template(None, None).render(messages, **options)
    assert (caught.value.status, caught.value.info.param) == (400, param)


def test_final_message_is_continued() -> None:
    messages = [*HI, ChatMessage(role="assistant", content="Well, ")]
    prompt = load_chat_template(None, None).render(messages, add_generation_prompt=False, continue_final_message=True)
    assert prompt.endswith("<|im_start|>assistant\nWell,")


async def test_endless_template_is_stopped() -> None:
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    endless = template(loop * 3)
    threads = BoundedExecutor(1, "test")
    with pytest.raises(TimeoutError):
        await threads.run(lambda: endless.render(HI), 0.05)
    assert await threads.run(lambda: template("fine").render(HI), 30) == "fine", "the thread serves again"


async def test_job_that_waited_too_long_never_starts() -> None:
    threads = BoundedExecutor(1, "test")
    release = threading.Event()
    first = asyncio.create_task(threads.run(release.wait, 30))
    await asyncio.sleep(0)
    started: list[int] = []
    second = asyncio.create_task(threads.run(lambda: started.append(1), 0.01))
    await asyncio.sleep(0.1)
    release.set()
    assert await first
    with pytest.raises(TimeoutError):
        await second
    assert not started


def write(folder: Path, **config: Any) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def test_template_of_the_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, chat_template="{{ eos_token }}own", eos_token={"content": "</s>", "lstrip": False})
    assert load_chat_template(tmp_path, None).render(HI) == "</s>own"
    write(tmp_path, chat_template=[{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}])
    assert load_chat_template(tmp_path, None).render(HI) == "d"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert load_chat_template(tmp_path, None).render(HI) == "file"
    override = tmp_path / "other.jinja"
    override.write_text("override")
    assert load_chat_template(tmp_path, str(override)).render(HI) == "override"


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"missing\.jinja: cannot be read"):
        load_chat_template(None, str(tmp_path / "missing.jinja"))
    write(tmp_path, chat_template="{% for %}")
    with pytest.raises(UserError, match=r"tokenizer_config\.json: not a valid Jinja template"):
        load_chat_template(tmp_path, None)
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(UserError, match="holds a JSON list"):
        load_chat_template(tmp_path, None)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        load_chat_template(tmp_path, None)
