"""Jinja's sandbox with bounds on what one expression can allocate.

Jinja folds constants while it compiles, and a single operation in C cannot be interrupted: neither is bounded by the
time limit of a rendering. So what multiplies (`*`, `**`, widths of padding) is bounded by size.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_LENGTH = 1_000_000
"""Characters or elements that one operation may make."""
_MAX_BITS = 65_536
_WIDTH = re.compile(r"%[^a-zA-Z%]*?(\*|\d{6,})")


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Raises SecurityError, a TemplateError, for an operation beyond the bounds."""

    intercepted_binops = frozenset(["*", "**", "%"])

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name in ("center", "indent", "format", "wordwrap", "truncate"):
            self.filters[name] = _bounded(self.filters[name])

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            _check_product(left, right)
        elif operator == "**":
            _check_power(left, right)
        elif isinstance(left, str):
            _check_format(left)
        return super().call_binop(context, operator, left, right)

    def call(self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(getattr(__obj, "__self__", None), str | bytes):
            _check_arguments(args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)


def _refuse() -> None:
    raise SecurityError(f"an operation would make more than {MAX_LENGTH} characters, elements or so many digits")


def _check_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > _MAX_BITS:
            _refuse()
        return
    for sequence, count in ((left, right), (right, left)):
        is_repetition = isinstance(count, int) and isinstance(sequence, str | bytes | list | tuple)
        if is_repetition and len(sequence) * count > MAX_LENGTH:
            _refuse()


def _check_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > _MAX_BITS:
        _refuse()


def _check_format(text: str) -> None:
    if _WIDTH.search(text):
        _refuse()


def _check_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if any(isinstance(value, int) and value > MAX_LENGTH for value in (*args, *kwargs.values())):
        _refuse()


def _bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose integer arguments, and whose format, are bounded."""

    def bounded(*args: Any, **kwargs: Any) -> Any:
        _check_arguments(args, kwargs)
        if function.__name__ == "do_format" and args:
            _check_format(str(args[0]))
        return function(*args, **kwargs)

    # Jinja marks the filters that want its environment or context first with attributes of the function.
    bounded.__dict__.update(function.__dict__)
    return bounded
