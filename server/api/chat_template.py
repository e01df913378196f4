"""Chat templates: messages to the prompt text that a model was trained on, in Jinja's sandbox."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import msgspec

from server.api.errors import invalid
from server.api.protocol import ChatMessage
from server.api.template_sandbox import TemplateEnvironment
from server.errors import UserError

# ChatML, without the system prompt that some checkpoints put in.
DEFAULT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # transformers' filter: Jinja's own escapes HTML characters and sorts keys.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class ChatTemplate:
    """A compiled template. Raises UserError when `source` (named `where`) does not compile."""

    def __init__(self, source: str, special_tokens: dict[str, str], where: str = "chat template") -> None:
        environment = TemplateEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = time.strftime
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise UserError(f"{where}: not a valid Jinja template ({error}); pass another --chat-template") from error
        self._special_tokens = special_tokens

    def render(
        self,
        messages: list[ChatMessage],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: dict[str, Any] | None = None,
    ) -> str:
        """The prompt. Raises ApiError 400 for messages that the template refuses or cannot handle."""
        if not messages:
            raise invalid("`messages` must not be empty.", "messages")
        conversation = [_plain(message, place) for place, message in enumerate(messages)]
        if continue_final_message and add_generation_prompt:
            raise invalid(
                "`continue_final_message` and `add_generation_prompt` cannot both be true.", "continue_final_message"
            )
        variables = {
            **self._special_tokens,
            **(kwargs or {}),
            "messages": conversation,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = self._template.render(variables)
        except jinja2.TemplateError as error:
            raise invalid(f"The chat template refused the messages: {error}", "messages") from error
        except Exception as error:
            # The template is foreign code over the client's values: whatever it trips over is about this request.
            raise invalid(f"The chat template failed: {type(error).__name__}: {error}", "messages") from error
        return _cut_after(text, conversation[-1]["content"]) if continue_final_message else text


def _plain(message: ChatMessage, place: int) -> dict[str, Any]:
    """The message as templates expect it: a dict whose content is text."""
    plain: dict[str, Any] = msgspec.to_builtins(message)
    content = message.content
    if isinstance(content, list):
        texts: list[str] = []
        for part in content:
            if part.type not in ("text", "input_text", "output_text") or part.text is None:
                raise invalid(
                    f"Content parts must be of type `text` for this model, got {part.type!r}.",
                    f"messages[{place}].content",
                )
            texts.append(part.text)
        plain["content"] = "\n".join(texts)
    elif content is None:
        plain["content"] = ""
    return plain


def _cut_after(text: str, content: str) -> str:
    """The rendered text up to and with the final message, without what the template puts behind it."""
    final = content.strip()
    place = text.rfind(final) if final else -1
    if place < 0:
        raise invalid("The chat template does not show the final message, which cannot be continued.", "messages")
    return text[: place + len(final)]


def load_chat_template(folder: Path | None, override: str | None) -> ChatTemplate:
    """The template of a checkpoint folder (None: a preset), `override` being a file that replaces it.

    Looked for in `chat_template.jinja`, then in `tokenizer_config.json` (a string, or a list of named ones, of which
    `default` is taken); ChatML when there is none. Raises UserError for a file that cannot be used.
    """
    config: dict[str, Any] = {}
    if folder is not None and (path := folder / "tokenizer_config.json").is_file():
        try:
            loaded = json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"{path}: not valid JSON ({error}); download the model again") from error
        if not isinstance(loaded, dict):
            raise UserError(f"{path}: holds a JSON {type(loaded).__name__}, not an object")
        config = loaded
    special = {key: text for key in _SPECIAL_TOKENS if (text := _token_text(config.get(key))) is not None}
    if override is not None:
        return ChatTemplate(_read(Path(override)), special, f"--chat-template {override}")
    if folder is not None and (path := folder / "chat_template.jinja").is_file():
        return ChatTemplate(_read(path), special, str(path))
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if isinstance(template, str):
        return ChatTemplate(template, special, f"{folder}/tokenizer_config.json")
    return ChatTemplate(DEFAULT_TEMPLATE, special)


_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def _token_text(value: Any) -> str | None:
    """A token in `tokenizer_config.json`: its text, or an object with it."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"chat template {path}: cannot be read ({error}); pass a readable file") from error
