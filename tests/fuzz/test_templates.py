"""Chat templates are foreign code: they stay in their sandbox, and end in time."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.api.bounded import BoundedExecutor
from server.api.chat_template import ChatTemplate
from server.api.errors import ApiError
from server.api.protocol import ChatMessage
from server.errors import UserError
from tests.fuzz.budget import fuzz

MESSAGES = [ChatMessage(role="user", content="hello")]

ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__.__base__ }}",
    "{{ (messages|attr('__class__')).__name__ }}",
    "{{ messages|map(attribute='__class__')|list }}",
    "{{ '{0.__class__.__base__}'.format(messages) }}",
    "{{ '%s'|format(messages.__init__.__globals__) }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__self__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context.environment.__class__ }}",
    "{% for x in [].__class__.__base__.__subclasses__() %}{{ x }}{% endfor %}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'role': 'system'}) }}",
    "{{ messages.clear() }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os }}",
    "{% extends '/etc/passwd' %}",
    "{{ dict.__base__.__subclasses__() }}",
    "{{ range.__class__.__base__ }}",
    "{{ ''.format.__globals__ }}",
    "{{ tojson.__globals__ }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_no_way_out_of_the_sandbox(source: str) -> None:
    """Either refused, or an undefined value that renders to nothing of Python's."""
    try:
        text = ChatTemplate(source, {}).render(MESSAGES)
    except (ApiError, UserError):
        pass
    else:
        assert not any(word in text for word in ("<class", "function", "module", "root:", "uid=")), text
    assert [(message.role, message.content) for message in MESSAGES] == [("user", "hello")]


EXPRESSIONS = st.sampled_from(
    [
        *("messages", "messages[0]", "messages[0].content", "tools", "''", "[]", "{}", "1", "range(9)", "namespace()"),
        *("dict", "self", "loop", "cycler('a')", "lipsum", "raise_exception", "strftime_now", "bos_token", "none"),
    ]
)
NAMES = st.sampled_from(
    [
        "__class__",
        "__init__",
        "__globals__",
        "__subclasses__()",
        "__base__",
        "format",
        "x",
        "items()",
        "mro()",
        "gi_frame",
    ]
)
FILTERS = st.sampled_from(
    ["tojson", "attr('__class__')", "map(attribute='__class__')|list", "join", "length", "string", "first", "list",
     "format(1)", "indent", "trim", "xmlattr", "sum", "batch(2)|list", "groupby('role')", "pprint", "urlize", "random"]
)  # fmt: skip


@st.composite
def templates(draw: st.DrawFn) -> str:
    text = draw(EXPRESSIONS)
    for name in draw(st.lists(NAMES, max_size=3)):
        text += f".{name}"
    for name in draw(st.lists(FILTERS, max_size=2)):
        text += f"|{name}"
    return (
        draw(st.sampled_from(["{{%s}}", "{%% for x in %s %%}{{x}}{%% endfor %%}", "{%% if %s %%}a{%% endif %%}"]))
        % text
    )


@given(source=templates() | st.text(alphabet="{}%#|.()[]'\"_ aimx=+*-<>:,\n", max_size=60))
@fuzz(300)
def test_any_template_renders_or_is_refused(source: str) -> None:
    try:
        text = ChatTemplate(source, {"bos_token": "<s>"}).render(MESSAGES)
    except (ApiError, UserError):
        return
    assert "<class 'object'>" not in text


SLOW = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{{ a * b }}{% endfor %}{% endfor %}",
    "silent loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% set x = a %}{% endfor %}{% endfor %}",
    "recursion": "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "filler": "{{ lipsum(n=10 ** 7) }}",
}
LARGE = [
    "{{ range(10 ** 9)|list|length }}",
    "{{ 10 ** (10 ** 10) }}",
    "{{ messages|length ** -1 + 10 ** (10 ** 10) }}",
    "{{ 'x' * 10 ** 12 }}",
    "{{ 10 ** 12 * 'x' }}",
    "{{ messages * 10 ** 12 }}",
    "{% set x = 10 ** 9999 %}{{ x * x * x * x }}",
    "{{ '%1000000000000d' % 1 }}",
    "{{ '%*d' % (10 ** 12, 1) }}",
    "{{ '%1000000000000d'|format(1) }}",
    "{{ '{:>1000000000000}'.format(1) }}",
    "{{ 'x'|center(10 ** 12) }}",
    "{{ 'x\ny'|indent(width=10 ** 12) }}",
    "{{ 'x'.center(10 ** 12) }}",
    "{{ 'x'.zfill(10 ** 12) }}",
    "{{ '\t'.expandtabs(10 ** 12) }}",
]


@pytest.mark.parametrize("name", sorted(SLOW))
async def test_endless_templates_are_stopped(name: str) -> None:
    template = ChatTemplate(SLOW[name], {})
    executor = BoundedExecutor(1, "template")
    with pytest.raises((ApiError, TimeoutError)):
        await executor.run(lambda: template.render(MESSAGES), 0.5)


@pytest.mark.parametrize("source", LARGE)
def test_large_operations_are_refused_before_they_begin(source: str) -> None:
    """Also while compiling, when Jinja folds constants: no time limit could interrupt these."""
    tracemalloc.start()
    template = ChatTemplate(source, {})
    with pytest.raises(ApiError):
        template.render(MESSAGES)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20


def test_ordinary_arithmetic_and_padding_still_work() -> None:
    source = "{{ 2 ** 10 }} {{ '=' * 5 }} {{ 7 % 4 }} {{ '%05.1f' % 2.5 }} {{ 'x'|center(5) }}|{{ 'a\nb'|indent(2) }}"
    assert ChatTemplate(source, {}).render(MESSAGES) == "1024 ===== 3 002.5   x  |a\n  b"
