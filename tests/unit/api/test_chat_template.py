from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from server.api.chat_template import ChatTemplate, load_chat_template
from server.api.errors import ApiError
from server.api.protocol import ChatMessage, ContentPart
from server.errors import UserError

HI = [ChatMessage(role="user", content="hi")]


@asynccontextmanager
async def started(template: ChatTemplate) -> AsyncIterator[ChatTemplate]:
    try:
        await template.start()
        yield template
    finally:
        await template.close()


async def render(
    source: str, messages: list[ChatMessage] = HI, special: dict[str, str] | None = None, **options: Any
) -> str:
    async with started(ChatTemplate(source, special or {})) as template:
        return await template.render(messages, **options)


async def render_loaded(folder: Path | None, override: str | None, messages: list[ChatMessage], **options: Any) -> str:
    async with started(load_chat_template(folder, override)) as template:
        return await template.render(messages, **options)


async def test_default_is_chatml() -> None:
    prompt = await render_loaded(None, None, [ChatMessage(role="system", content="Be kind."), *HI])
    assert prompt == ("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


async def test_blocks_are_trimmed_and_special_tokens_known() -> None:
    source = "{{ bos_token }}\n  {% for m in messages %}\n{{ m.content }}|\n  {% endfor %}\n"
    assert await render(source, HI * 2, {"bos_token": "<s>"}) == "<s>\nhi|\nhi|\n"


async def test_text_parts_are_joined() -> None:
    parts = [ContentPart(type="text", text="a"), ContentPart(type="text", text="b")]
    assert await render("{{ messages[0].content }}", [ChatMessage(role="user", content=parts)]) == "a\nb"


async def test_helpers_of_transformers_exist() -> None:
    source = "{{ tools | tojson }} {{ messages | length }} {{ strftime_now('%Y') | length }}"
    assert await render(source, tools=[{"b": "<é>", "a": 1}]) == '[{"b": "<é>", "a": 1}] 1 4'


async def test_integers_of_any_size_reach_the_template() -> None:
    assert await render("{{ n }}", kwargs={"n": 10**30}) == str(10**30)


async def test_loop_controls_and_kwargs() -> None:
    source = "{% for i in range(9) %}{% if i == last %}{% break %}{% endif %}{{ i }}{% endfor %}"
    assert await render(source, kwargs={"last": 3}) == "012"


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
        ("{{ '\\ud800' }}", "halves of surrogate pairs"),
        ("{{ 'x' * 4 * 10 ** 7 }}", "made a prompt of more than 32 MiB"),
        (r"{{ raise_exception('\ud800') }}", r"refused the messages: \\ud800"),
    ],
)
async def test_what_a_template_trips_over_is_a_bad_request(source: str, message: str) -> None:
    with pytest.raises(ApiError, match=message) as caught:
        await render(source)
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
async def test_bad_messages(messages: list[ChatMessage], options: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        await load_chat_template(None, None).render(messages, **options)
    assert (caught.value.status, caught.value.info.param) == (400, param)


async def test_final_message_is_continued() -> None:
    messages = [*HI, ChatMessage(role="assistant", content="Well, ")]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert (await render_loaded(None, None, messages, **options)).endswith("<|im_start|>assistant\nWell,")
    with pytest.raises(ApiError, match="does not show the final message"):
        await render("{{ messages[0].content }}", messages, **options)


async def test_a_long_reason_is_cut() -> None:
    with pytest.raises(ApiError) as caught:
        await render("{{ raise_exception('x' * 10 ** 6) }}")
    assert len(caught.value.info.message) < 2000


async def test_values_nested_too_deep_are_a_bad_request() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ApiError, match="so deeply nested"):
        await render("", kwargs={"deep": deep})


HANGS = "{% if messages[0].content == 'hang' %}{{ messages|length|round(-3*10**9) }}{% endif %}fine"
"""One call into C, which nothing can interrupt."""


async def test_a_call_into_c_that_never_returns_is_stopped_and_the_next_request_served() -> None:
    async with started(ChatTemplate(HANGS, {}, time_limit_s=1)) as template:
        hanging = asyncio.create_task(template.render([ChatMessage(role="user", content="hang")]))
        assert await template.render(HI) == "fine", "the second process serves meanwhile"
        with pytest.raises(ApiError, match="took longer than 1 s"):
            await hanging
        assert [await template.render(HI) for _ in range(3)] == ["fine"] * 3


async def test_requests_that_find_all_processes_busy_for_long_are_told_to_come_back() -> None:
    async with started(ChatTemplate(HANGS, {}, time_limit_s=1)) as template:
        hang = [ChatMessage(role="user", content="hang")]
        answers = await asyncio.gather(*(template.render(hang) for _ in range(8)), return_exceptions=True)
        assert {error.status for error in answers if isinstance(error, ApiError)} == {400, 429}
        assert await template.render(HI) == "fine"


async def test_memory_is_limited_and_the_next_request_served() -> None:
    source = "{% if messages[0].content == 'grow' %}{% set x = 'x' * 2 * 10 ** 9 %}{% endif %}fine"
    async with started(ChatTemplate(source, {}, time_limit_s=30)) as template:
        with pytest.raises(ApiError, match="needs more than 1024 MiB of memory"):
            await template.render([ChatMessage(role="user", content="grow")])
        assert await template.render(HI) == "fine"


async def test_a_request_that_is_cancelled_leaves_no_answer_to_the_next() -> None:
    async with started(ChatTemplate("{{ messages[0].content }}", {})) as template:
        cancelled = asyncio.create_task(template.render([ChatMessage(role="user", content="mine")]))
        await asyncio.sleep(0)
        cancelled.cancel()
        assert await template.render(HI) == "hi"


def children() -> set[int]:
    """Pids of the processes that this one's main thread started."""
    return set(map(int, Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()))


def kill(pid: int) -> None:
    """Returns when it is dead; it is not reaped."""
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


async def test_a_process_that_somebody_killed_is_replaced() -> None:
    before = children()
    async with started(ChatTemplate("fine", {})) as template:
        (pid,) = children() - before
        os.kill(pid, signal.SIGINT)  # the terminal's Ctrl-C
        assert await template.render(HI) == "fine"
        assert children() - before == {pid}
        kill(pid)
        await asyncio.sleep(0.01)  # a turn of the loop, to read the end of the stream
        assert await template.render(HI) == "fine"
    assert children() == before


PARENT = """
import asyncio, sys
from server.api.chat_template import ChatTemplate
from server.api.protocol import ChatMessage

async def main():
    template = ChatTemplate(sys.argv[1], {}, time_limit_s=60)
    await template.start()
    print(open(f"/proc/{__import__('os').getpid()}/task/{__import__('os').getpid()}/children").read(), flush=True)
    await template.render([ChatMessage(role="user", content="hang")])

asyncio.run(main())
"""


@pytest.mark.parametrize("source", [HANGS, "fine"])
def test_the_process_ends_with_a_parent_that_is_killed(source: str) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, source], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists() and "State:\tZ" not in Path(f"/proc/{pid}/status").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def write(folder: Path, **config: Any) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


async def test_template_of_the_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, chat_template="{{ eos_token }}own", eos_token={"content": "</s>", "lstrip": False})
    assert await render_loaded(tmp_path, None, HI) == "</s>own"
    write(tmp_path, chat_template=[{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}])
    assert await render_loaded(tmp_path, None, HI) == "d"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert await render_loaded(tmp_path, None, HI) == "file"
    override = tmp_path / "other.jinja"
    override.write_text("override")
    assert await render_loaded(tmp_path, str(override), HI) == "override"


async def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"missing\.jinja: no such file"):
        load_chat_template(None, str(tmp_path / "missing.jinja"))
    write(tmp_path, chat_template="{% for %}")
    with pytest.raises(UserError, match=r"tokenizer_config\.json: the chat template is not valid Jinja"):
        await render_loaded(tmp_path, None, HI)
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(UserError, match="holds a JSON list"):
        load_chat_template(tmp_path, None)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        load_chat_template(tmp_path, None)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"chat_template\.jinja: a chat template must be UTF-8 text"):
        load_chat_template(tmp_path, None)


@pytest.mark.parametrize("fields", [{"chat_template": "\ud800"}, {"bos_token": "\ud800"}], ids=str)
def test_halves_of_surrogate_pairs_are_named(tmp_path: Path, fields: dict[str, str]) -> None:
    write(tmp_path, **{"chat_template": "x", **fields})
    with pytest.raises(UserError, match=r"tokenizer_config\.json: holds half of a surrogate pair"):
        load_chat_template(tmp_path, None)


async def test_named_templates_may_have_any_names(tmp_path: Path) -> None:
    write(tmp_path, chat_template=[{"name": [], "template": "x"}, {"name": "default", "template": "d"}, {"name": {}}])
    assert await render_loaded(tmp_path, None, HI) == "d"


@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.jinja", "--chat-template"])
def test_pipes_devices_and_endless_files_are_not_read(tmp_path: Path, name: str) -> None:
    """In a process of its own: one that opened the pipe would wait for ever."""
    code = (
        "import sys; from pathlib import Path; from server.api.chat_template import load_chat_template\n"
        "from server.errors import UserError\n"
        "try: load_chat_template(Path(sys.argv[1]), sys.argv[2] or None)\n"
        "except UserError as error: print(error)"
    )
    path = tmp_path / name
    override = str(path) if name == "--chat-template" else ""
    for make, message in (
        (os.mkfifo, "a named pipe, not a regular file; put the file itself there"),
        (lambda path: path.symlink_to("/dev/zero"), "a device, not a regular file; put the file itself there"),
        (lambda path: path.write_bytes(b" " * (1 << 25)), "longer than 16 MiB, which no such file needs; put the "),
    ):
        make(path)
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path), override], capture_output=True, text=True, timeout=60
        )
        path.unlink()
        assert done.stdout.startswith(f"{path}: {message}"), done.stdout + done.stderr


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ 1|round(-3000000000) }}", "took longer than 1 s"),
        ("{{ ('a' * 100000)|replace('a', 'b' * 10000) }}", "(needs more than 1024 MiB of memory|took longer than 1 s)"),
        ("{{ " + "1" * 5000 + " }}", "is not valid Jinja"),
        ("{{ " + "(" * 5000 + ")" * 5000 + " }}", "is not valid Jinja"),
    ],
)
async def test_limits_hold_while_a_template_is_compiled(source: str, message: str) -> None:
    """Jinja computes constants then."""
    template = ChatTemplate(source, {}, "x.jinja", time_limit_s=1)
    with pytest.raises(UserError, match=rf"x\.jinja: the chat template {message}"):
        await template.start()
    await template.close()
