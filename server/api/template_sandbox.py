"""One chat template in Jinja's sandbox: code that came with a checkpoint.

The sandbox keeps the template from Python's attributes. It bounds neither time nor memory: a single operation can take
all of both, already while Jinja compiles, since it folds constants. So this runs in processes that can be limited and
killed only (see `server.api.template_process`).
"""

from __future__ import annotations

import json
import time
import types
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from server.api.template_messages import TemplateFault


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


class _Environment(ImmutableSandboxedEnvironment):
    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        # `dict['x']` has the attributes of `dict`, but is no type to Jinja, which would keep those of a type to itself.
        return not isinstance(obj, types.GenericAlias) and super().is_safe_attribute(obj, attr, value)


class SandboxedTemplate:
    """A compiled template. Raises TemplateFault when it does not compile, MemoryError as Python does."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = time.strftime
        try:
            self._template = environment.from_string(source)
        except MemoryError:
            raise
        except Exception as error:  # Python's compiler has limits of its own: nesting, digits of a number
            raise TemplateFault(f"is not valid Jinja ({error})") from error
        self._special_tokens = special_tokens

    def render(self, variables: dict[str, Any], final: str | None = None) -> str:
        """The text; with `final` only up to and with the last place where that stands.

        Raises TemplateFault for what the template refuses or cannot handle, MemoryError as Python does.
        """
        try:
            text = self._template.render({**self._special_tokens, **variables})
        except MemoryError:
            raise
        except jinja2.TemplateError as error:
            raise TemplateFault(f"refused the messages: {error}") from error
        except Exception as error:
            # The template is foreign code over the client's values: whatever it trips over is about this request.
            raise TemplateFault(f"failed: {type(error).__name__}: {error}") from error
        return text if final is None else _cut_after(text, final)


def _cut_after(text: str, final: str) -> str:
    place = text.rfind(final) if final else -1
    if place < 0:
        raise TemplateFault("does not show the final message, which cannot be continued")
    return text[: place + len(final)]
