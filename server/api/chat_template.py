"""Chat templates: messages to the prompt text that a model was trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from server.api.errors import invalid
from server.api.protocol import ChatMessage
from server.api.template_messages import RenderRequest, TemplateFault, TemplateSource
from server.api.template_renderer import TIME_LIMIT_S, TemplateRenderer
from server.errors import UserError
from server.models.config import read_json_object
from server.models.files import is_there, read_bounded

# ChatML, without the system prompt that some checkpoints put in.
DEFAULT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class ChatTemplate:
    """A template, rendered by processes of its own. `where`: what to call it when it does not compile.

    Raises UserError for a template or special tokens that no UTF-8 can hold.
    """

    def __init__(
        self,
        source: str,
        special_tokens: dict[str, str],
        where: str = "chat template",
        time_limit_s: float = TIME_LIMIT_S,
    ) -> None:
        for text in (source, *special_tokens.values()):
            try:
                text.encode()
            except UnicodeEncodeError as error:  # JSON can write it
                raise UserError(f"{where}: holds half of a surrogate pair; download the model again") from error
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
    if folder is not None and is_there(path := folder / "tokenizer_config.json"):
        config = read_json_object(path)
    special = {key: text for key in _SPECIAL_TOKENS if (text := _token_text(config.get(key))) is not None}
    if override is not None:
        return ChatTemplate(_read(Path(override)), special, f"--chat-template {override}")
    if folder is not None and is_there(path := folder / "chat_template.jinja"):
        return ChatTemplate(_read(path), special, str(path))
    template = config.get("chat_template")
    if isinstance(template, list):
        entries = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = entries[-1].get("template") if entries else None
    if isinstance(template, str):
        return ChatTemplate(template, special, f"{folder}/tokenizer_config.json")
    return ChatTemplate(DEFAULT_TEMPLATE, special)


_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def _token_text(value: Any) -> str | None:
    """A token in `tokenizer_config.json`: its text, or an object with it."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _read(path: Path) -> str:
    data = read_bounded(path)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: a chat template must be UTF-8 text ({error})") from None
