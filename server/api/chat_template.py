"""Chat templates: messages to the prompt text that a model was trained on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from server.api.errors import invalid
from server.api.protocol import ChatMessage
from server.api.template_messages import RenderRequest, TemplateFault, TemplateSource
from server.api.template_renderer import TIME_LIMIT_S, TemplateRenderer
from server.errors import UserError

# ChatML, without the system prompt that some checkpoints put in.
DEFAULT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class ChatTemplate:
    """A template, rendered by processes of its own. `where`: what to call it when it does not compile."""

    def __init__(
        self,
        source: str,
        special_tokens: dict[str, str],
        where: str = "chat template",
        time_limit_s: float = TIME_LIMIT_S,
    ) -> None:
        self._renderer = TemplateRenderer(TemplateSource(source, special_tokens), time_limit_s)
        self._where = where

    async def start(self) -> None:
        """Have it compiled, within the limits of a rendering. Raises UserError."""
        try:
            await self._renderer.start()
        except TemplateFault as fault:
            raise UserError(f"{self._where}: the chat template {fault}; pass another --chat-template") from fault
        except OSError as error:
            raise UserError(
                f"no process for chat templates: {error}; raise the limits of processes and files"
            ) from error

    async def close(self) -> None:
        await self._renderer.close()

    async def render(
        self,
        messages: list[ChatMessage],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: dict[str, Any] | None = None,
    ) -> str:
        """The prompt. Raises ApiError 400 for messages that the template refuses or cannot handle, 429."""
        if not messages:
            raise invalid("`messages` must not be empty.", "messages")
        conversation = [_plain(message, place) for place, message in enumerate(messages)]
        if continue_final_message and add_generation_prompt:
            raise invalid(
                "`continue_final_message` and `add_generation_prompt` cannot both be true.", "continue_final_message"
            )
        variables = {
            **(kwargs or {}),
            "messages": conversation,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        final = conversation[-1]["content"].strip() if continue_final_message else None
        try:
            return await self._renderer.render(RenderRequest(variables, final))
        except TemplateFault as fault:
            raise invalid(f"The chat template {fault}", "messages") from fault


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


def load_chat_template(folder: Path | None, override: str | None) -> ChatTemplate:
    """The template of a checkpoint folder (None: a preset), `override` being a file that replaces it.

    Looked for in `chat_template.jinja`, then in `tokenizer_config.json` (a string, or a list of named ones, of which
    `default` is taken); ChatML when there is none. Raises UserError for a file that cannot be read; what it holds is
    compiled at the template's start.
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
