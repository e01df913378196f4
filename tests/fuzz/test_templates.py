"""Chat templates are foreign code: they stay in their sandbox, and end in time."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.api.chat_template import ChatTemplate
from server.api.errors import ApiError
from server.api.protocol import ChatMessage
from server.api.template_messages import TemplateFault
from server.api.template_sandbox import SandboxedTemplate
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
    "{{ dict['x'].mro() }}",
    "{{ range.__class__.__base__ }}",
    "{{ ''.format.__globals__ }}",
    "{{ tojson.__globals__ }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_no_way_out_of_the_sandbox(source: str) -> None:
    """Either refused, or an undefined value that renders to nothing of Python's."""
    messages = [{"role": "user", "content": "hello"}]
    try:
        text = SandboxedTemplate(source, {}).render({"messages": messages})
    except TemplateFault:
        pass
    else:
        assert not any(word in text for word in ("<class", "function", "module", "root:", "uid=")), text
    assert messages == [{"role": "user", "content": "hello"}]


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
        text = SandboxedTemplate(source, {"bos_token": "<s>"}).render(
            {"messages": [{"role": "user", "content": "hello"}]}
        )
    except TemplateFault:
        return
    assert "<class 'object'>" not in text


SLOW = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{{ a * b }}{% endfor %}{% endfor %}",
    "silent loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% set x = a %}{% endfor %}{% endfor %}",
    "recursion": "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "filler": "{{ lipsum(n=10 ** 7) }}",
    "a power": "{{ 10 ** (10 ** 10) }}",
    "a power of a variable": "{{ messages|length ** -1 + 10 ** (10 ** 10) }}",
    "rounding": "{{ messages|length|round(-3 * 10 ** 9) }}",
    "rounding a constant": "{{ 1|round(-3000000000) }}",
    "sum": "{{ ([[1] * 100000] * 10000)|sum(start=[])|length }}",
    "slices": "{{ messages|slice(300000000)|list|length }}",
}
LARGE = [
    "{{ range(10 ** 9)|list|length }}",
    "{{ 'x' * 10 ** 12 }}",
    "{{ 10 ** 12 * 'x' }}",
    "{{ messages * 10 ** 12 }}",
    "{{ '%1000000000000d' % 1 }}",
    "{{ '%*d' % (10 ** 12, 1) }}",
    "{{ '%1000000000000d'|format(1) }}",
    "{{ '{:>1000000000000}'.format(1) }}",
    "{{ 'x'|center(10 ** 12) }}",
    "{{ 'x\ny'|indent(width=10 ** 12) }}",
    "{{ 'x'.center(10 ** 12) }}",
    "{{ 'x'.zfill(10 ** 12) }}",
    "{{ '\t'.expandtabs(10 ** 12) }}",
    "{{ ('a' * 100000)|replace('a', 'b' * 10000) }}",
    "{{ ('a' * 100000).replace('a', 'b' * 10000) }}",
    "{{ ('a' * 100000).translate({97: 'b' * 10000}) }}",
    "{{ ('x' * 10000).join(['a'] * 100000) }}",
    "{{ (['a'] * 100000)|join('x' * 10000) }}",
    "{{ ('https://example.com ' * 20000)|urlize(target='x' * 10000) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '{:.1000000000f}'.format(1.0) }}",
    "{{ '{a:1000000000}'.format_map({'a': 1}) }}",
    "{{ ('\t' * 100000).expandtabs(10000) }}",
    "{{ ('\n' * 100000)|indent('x' * 10000, blank=true) }}",
    "{{ ('%99999d' * 10000) % ((1,) * 10000) }}",
    "{{ [1]|tojson(indent=10 ** 9) }}",
    "{{ [1]|batch(3 * 10 ** 8, 'x')|list|length }}",
    "{% set n = namespace(x='x') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{{ raise_exception('x' * 10 ** 9) }}",
]


@pytest.mark.parametrize("name", sorted(SLOW))
async def test_endless_templates_are_stopped(name: str) -> None:
    await refused(SLOW[name], 0.5)


@pytest.mark.parametrize("source", LARGE)
async def test_large_operations_leave_the_server_alone(source: str) -> None:
    """Also while compiling, when Jinja folds constants."""
    tracemalloc.start()
    await refused(source, 1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20


async def refused(source: str, time_limit_s: float) -> None:
    template = ChatTemplate(source, {}, time_limit_s=time_limit_s)

    async def start_and_render() -> None:
        await template.start()
        await template.render(MESSAGES)

    with pytest.raises((ApiError, UserError)):
        await start_and_render()
    await template.close()


def test_ordinary_arithmetic_and_padding_work() -> None:
    source = "{{ 2 ** 10 }} {{ '=' * 5 }} {{ 7 % 4 }} {{ '%05.1f' % 2.5 }} {{ 'x'|center(5) }}|{{ 'a\nb'|indent(2) }}"
    assert SandboxedTemplate(source, {}).render({}) == "1024 ===== 3 002.5   x  |a\n  b"
