"""Templates that try to take memory or time: stopped in one line, and the process stays small."""

# ruff: noqa: E501
from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cutaway.core.errors import BadRequest
from cutaway.text.chat import ChatTemplate

USER = [{"role": "user", "content": "x" * 50}]
X = "{% set x = messages[0].content %}"
WIDE = "{% set x = 'é' ~ '\U0001f600' %}"
GROWS = "{% set ns = namespace(x='ab', l=[]) %}{% for i in range(90000) %}{% set ns.x = "
CHAIN = "{% set ns = namespace(x=0) %}{% for i in range(90000) %}{% set ns.x = "
END = " %}{% endfor %}{{ ns.x | length }}"

HOSTILE = {
    "replace": X + "{% for i in range(9) %}{% set x = 1 %}{% endfor %}{{ (x * 1000) | replace('x', x * 1000) | length }}",
    "replace method": X + "{{ (x * 9999).replace('x', x * 9999) | length }}",
    "replace empty": X + "{{ (x * 99999).replace('', x) | length }}",
    "replace doubled": GROWS + "ns.x | replace('a', ns.x)" + END,
    "join": X + "{{ range(99999) | join(x * 99999) | length }}",
    "join method": X + "{{ (x * 99999).join(['a'] * 9999) | length }}",
    "join of letters": X + "{{ (x * 9999).join(x * 9999) | length }}",
    "indent": "{{ 'a\nb' | indent(10**8) }}",
    "indent number": "{{ 'a\nb' | indent(100000000) | length }}",
    "indent text": X + "{{ (('a\n' * 9999) | indent(x * 9999)) | length }}",
    "indent lines": X + "{{ ('\r' * 1999999) | indent(8) | length }}",
    "json indent": "{{ messages | tojson(indent=100000000) | length }}",
    "json indent text": X + "{{ messages | tojson(indent=x * 1000000) | length }}",
    "json separators": X + "{{ messages | tojson(separators=[x * 1000000, x]) | length }}",
    "json of nested lists": "{% set ns = namespace(x=[0]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
    "{{ ns.x | tojson | length }}",
    "text of nested lists": "{% set ns = namespace(x=[0]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "equal nested lists": "{% set ns = namespace(x=[0], y=[0]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}"
    "{% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ ns.x == ns.y }}",
    "nested by dict()": "{% set ns = namespace(x=[0]) %}{% for i in range(60) %}{% set ns.x = dict(a=ns.x, b=ns.x) %}{% endfor %}{{ ns.x }}",
    "nested namespaces": "{% set ns = namespace(x=0) %}{% for i in range(60) %}{% set ns.x = namespace(a=ns.x, b=ns.x) %}{% endfor %}{{ ns.x }}",
    "a namespace in itself": "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}",
    "list times": "{{ ([1] * 50000000) | length }}",
    "list of lists": "{% set l = [1] * 9000 %}{{ ([l] * 9000) | string | length }}",
    "list plus": "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x | length }}",
    "list filter": X + "{{ (x * 1999999) | list | length }}",
    "ranges": "{% set ns = namespace(x=[]) %}{% for i in range(900) %}{% set ns.x = ns.x + (range(99999) | list) %}{% endfor %}",
    "split": X + "{{ ('a ' * 1999999).split() | length }}",
    "split letters": "{{ ('a' * 1999999).split('a') | length }}",
    "splitlines": "{{ ('\n' * 1999999).splitlines() | length }}",
    "title": "{{ ('a-' * 1999999) | title | length }}",
    "upper": "{{ ('ß' * 1999999) | upper | length }}",
    "escape": "{{ ('<' * 1999999) | e | length }}",
    "format": "{{ '{:99999999d}'.format(3) | length }}",
    "format width of a width": "{{ '{:{w}}'.format(3, w=91999999) | length }}",
    "format repeated": X + "{{ ('{0}' * 9999).format(x * 9999) | length }}",
    "format of a list": "{{ ('{0}' * 9999).format([1] * 9999) | length }}",
    "format_map": "{{ '{a:999999999}'.format_map({'a': 1}) }}",
    "center": "{{ 'a'.center(991999999) }}",
    "ljust": "{{ 'a'.ljust(991999999) }}",
    "zfill": "{{ 'a'.zfill(991999999) }}",
    "expandtabs": "{{ ('\t' * 99).expandtabs(1999999) }}",
    "encode": X + "{{ (x * 99999).encode('utf-32') }}",
    "translate": "{{ 'a'.translate({97: 'b' * 999999}) }}",
    "to_bytes": "{{ (1).to_bytes(999999999, 'big') }}",
    "fromkeys": "{{ {}.fromkeys(range(99999)) }}",
    "batch": "{{ [1] | batch(99999999, 'x') | list | length }}",
    "slice": "{{ [1] | slice(91999999) | list | length }}",
    "center filter": "{{ 'a' | center(991999999) }}",
    "round": "{{ 1.5 | round(999999999, 'floor') }}",
    "lipsum": "{{ lipsum(n=100000) | length }}",
    "date": "{{ strftime_now('%999999999d') | length }}{{ strftime_now('%c' * 99999) | length }}",
    "numbers": "{% set ns = namespace(x=91999999) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "captured": GROWS.replace("{% set ns.x = ", "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}") + "{% endfor %}",
    "captured text": CHAIN.replace("{% set ns.x = ", "{% set y %}" + "a" * 9000 + "{{ i }}{% endset %}{% set ns.x = namespace(x=ns.x, y=y)") + " %}{% endfor %}",
    "captured in a filter": GROWS.replace("{% set ns.x = ", "{% set ns.x | upper %}{{ ns.x }}{{ ns.x }}{% endset %}") + "{% endfor %}",
    "filter block": "{% filter upper %}{% for i in range(90000) %}" + "a" * 9000 + "{% endfor %}{% endfilter %}",
    "macro of text": "{% macro f() %}{% for i in range(99999) %}" + "a" * 9000 + "{% endfor %}{% endmacro %}{{ f() | length }}",
    "output": X + "{% for i in range(90000) %}{{ x }}" + "a" * 9000 + "{% endfor %}",
    "wide output": X + WIDE + "{{ x }}{% for i in range(20000) %}" + "a" * 1000 + "{% endfor %}",
    "chain of namespaces": CHAIN + "namespace(x=ns.x)" + END,
    "chain of generators": CHAIN + "[1] | map('upper') | map('upper')" + END,
    "chain of slices": "{% set y = 'a' * 99999 %}" + CHAIN + "namespace(x=ns.x, y=y[i:])" + END,
    "chain of keys": "{% set y = dict(messages[0]) %}" + CHAIN + "namespace(x=ns.x, y=y.keys() - [1])" + END,
    "chain of reversed": "{% set y = 'a' * 99999 ~ 'b' %}" + CHAIN + "namespace(x=ns.x, y=y | reverse)" + END,
    "the budget itself": "{% set cutaway_budget = none %}{{ 'a' * 99999999 }}",
    "a block": "{% set cutaway_budget = none %}{% block a scoped %}{{ 'a' * 99999999 }}{% endblock %}",
    "escaping": "{% autoescape true %}{{ '<' * 9999999 }}{% endautoescape %}",
    "long source": "a" * 300_000,
    "long source of expressions": "{{ a + a + a + a + a }}" * 13_000,
    "dense source": "{{" + "a+" * 29_000 + "a}}",
    "a sum": "{{" + "a+" * 4000 + "a}}",
    "sums": "{{ a + a + a + a + a + a }}" * 600,
    "comparisons": "{{a>a>a>a>a>a>a}}" * 540,
    "lists": "{{[a,a,a,a,a,a,a,a]}}" * 420,
    "subscripts": "{{a[b]}}" * 1360,
    "attributes": "{{a.a.a.a.a.a.a.a.a.a}}" * 370,
    "calls": "{{a()}}" * 1600,
    "assignments": "{%set a=b%}" * 1300,
    "strings": "{{a~a~a~a~a~a~a~a}}" * 480,
    "nested brackets": "{{" + "(" * 4000 + "a" + ")" * 4000 + "}}",
    "nested lists": "{{" + "[" * 90 + "a" + "]" * 90 + "}}",
    "nested ifs": "{% if a %}" * 1000 + "{% endif %}" * 1000,
    "nested loops": "{% for a in b %}" * 900 + "{% endfor %}" * 900,
    "many macros": "{%macro a()%}{%endmacro%}" * 800,
}  # fmt: skip

_MEASURE = """
import json, sys, time
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cutaway.core.errors import BadRequest
from cutaway.text.chat import ChatTemplate
def peak():  # of this program alone; getrusage would begin with that of the process that started it
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))
user = [{"role": "user", "content": "x" * 50}]
ChatTemplate("{% for m in messages %}{{ m.content | trim }}{% endfor %}").render(user)
before = peak()
answers = {}
for name, source in json.load(sys.stdin).items():
    start = time.perf_counter()
    try:
        said = "rendered %d" % len(ChatTemplate(source).render(user))
    except BadRequest as error:
        said = str(error)
    grown = (peak() - before) >> 10
    answers[name] = (said, grown, time.perf_counter() - start)
print(json.dumps(answers))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_no_template_takes_64_mib() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE], input=json.dumps(HOSTILE), capture_output=True, text=True, timeout=240, check=True
    )
    answers: dict[str, tuple[str, int, float]] = json.loads(done.stdout)
    grown = 0
    for name, (said, after, seconds) in answers.items():
        assert after < 64, f"{name}: took {after - grown} MiB ({said})"
        assert "\n" not in said and seconds < 10, name
        assert said.startswith(("the model's chat template ", "rendered ")), name
        grown = after
    assert len(answers) == len(HOSTILE)


LONG = """{%- set ns = namespace(last=messages | length - 1, names=[]) %}
{%- for message in messages[::-1] %}
  {%- set index = (messages | length - 1) - loop.index0 %}
  {%- if message.role == "user" and not message.content.startswith('<tool>') %}{% set ns.last = index %}{% break %}{% endif %}
{%- endfor %}
{%- macro shown(value) %}{% if value is string %}{{ value | trim }}{% elif value is mapping %}{{ value | tojson }}
{%- else %}{% for part in value if part.type == 'text' %}{{ part['text'] }}{% endfor %}{% endif %}{% endmacro %}
{%- set captured %}{{ messages | length }}!{% endset %}{{ captured }}
{{ tools | map(attribute='name') | join(', ') }} {{ tools | selectattr('kind', 'equalto', 'b') | list | length }}
{%- for tool in tools | sort(attribute='name', reverse=true) %}{{ tool | tojson(indent=4) }}{{ '\\n' ~ loop.index }}{% endfor %}
{%- for message in messages %}
  {%- set content = message.content %}
  {%- if content is string and '</think>' in content %}
    {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
  {%- endif %}
  {{- '<|' + message['role'] + '|>\\n' + shown(content) + ('' if loop.last else '<|end|>') ~ loop.index }}
  {%- for key, value in message.items() if key not in ['role', 'content'] %}{{ key | upper }}={{ value | string | replace('a', 'b') }};
  {%- endfor %}
  {%- set ns.names = ns.names + [message.role | capitalize] %}
{%- endfor %}
{{ ns.names | unique | list }} {{ ns.last }} {{ (1, 2.5, none, true, nothing | default('no')) }} {{ {'a': [1, {'b': 'c'}]} }}
{{ 'a-b c' | title }} {{ '%s' }} {{ '{:>6.2f}|{}'.format(2.5, 'x') }} {{ 'one\\ntwo' | indent(2, true) }} {{ 3 * '=' }} {{ 7 % 4 }}
{{ range(3) | list }} {{ messages | first | length }} {{ 'abc'[1:] }} {{ 'abc' | reverse }} {{ dict(a=1) | dictsort }} {{ '5' | int + 1 }}
"""  # fmt: skip


def plain(source: str, **variables: Any) -> str:
    """The same by Jinja's own sandbox."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])

    def tojson(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment.filters["tojson"] = tojson  # pyright: ignore[reportArgumentType]
    return environment.from_string(source).render(**variables)


def test_what_is_allowed_means_what_it_means_in_jinja() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Sé brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi "}, {"type": "image"}, {"type": "text", "text": "you"}]},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nhello", "tool_calls": [{"name": "a", "n": 1.5}]},
        {"role": "user", "content": "  bye\U0001f600 "},
    ]
    messages[1]["content"] = "plain"
    tools = [{"name": "f", "kind": "a"}, {"name": "g", "kind": "b", "what": {"deep": [1, None, True, "é"]}}]
    expected = plain(LONG, messages=messages, tools=tools, add_generation_prompt=True)
    assert ChatTemplate(LONG).render(messages, tools=tools) == expected
    assert "hello<|end|>3TOOL_CALLS=[{'nbme': 'b', 'n': 1.5}];" in expected


def test_long_messages_have_room_in_proportion() -> None:
    """Four million characters, of which each is worked on a few times, in little time."""
    source = (
        "{% for m in messages %}{% set c = m.content | trim %}{% set c = c.split('</think>')[-1] %}"
        "{{ '<|' + m.role + '|>' + c + '<|end|>' }}{% endfor %}{{ messages | tojson | length }}"
    )
    for text in ("a" * 200_000, "é" * 200_000, "\U0001f600" * 200_000):
        messages = [{"role": "user", "content": f" {text}{index}"} for index in range(20)]
        start = time.perf_counter()
        assert len(ChatTemplate(source).render(messages)) > 4_000_000
        assert time.perf_counter() - start < 5


def test_a_model_with_a_template_that_cannot_be_used_says_so() -> None:
    with pytest.raises(BadRequest) as caught:
        ChatTemplate("a" * 70_000).render(USER)
    expected = "the model's chat template was stopped: it has 70000 characters; at most 65536 are allowed"
    assert str(caught.value) == expected and caught.value.code == "chat_template_error"
