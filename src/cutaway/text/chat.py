"""`ChatTemplate`: messages -> the prompt text a model was trained on, by its own Jinja template in a sandbox.

A template comes with the weights, from a stranger. The sandbox keeps it from Python's insides; a budget of work (loop
steps, calls, characters joined) keeps it from running or growing without end.
"""

from __future__ import annotations

import datetime
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, cast

import jinja2
from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from cutaway.core.errors import BadRequest
from cutaway.core.text_assets import TextAssets

_WORK = 500_000  # units of a render: one a loop step or call, one a kilobyte joined; the longest chats take some 10^4
_SECONDS = 10.0
_MAX_TEXT = 16 << 20  # characters of a rendered prompt or of any string on the way
_BUDGET = "cutaway_budget"


class _Refused(jinja2.TemplateError):
    """What `raise_exception("...")` in a template raises: the model's makers refuse these messages."""


class _Budget:
    """Work left to one render, and the time by which it ends (filters such as `sort` cost far more than a unit)."""

    def __init__(self) -> None:
        self.left = _WORK
        self.until = time.monotonic() + _SECONDS

    def spend(self, units: int) -> None:
        self.left -= units
        if self.left < 0 or time.monotonic() > self.until:
            raise SecurityError("it does not come to an end")

    def joined(self, size: int) -> None:
        if size > _MAX_TEXT:
            raise SecurityError(f"it makes a text of more than {_MAX_TEXT} characters")
        self.spend(1 + size // 1024)


def _budget(context: Context) -> _Budget:
    found: Any = context.parent.get(_BUDGET)
    return found if isinstance(found, _Budget) else _Budget()


@pass_context
def _counted(context: Context, items: Iterable[Any]) -> Iterable[Any]:
    """The iterable of a `for`, which pays for each step. Sized ones stay sized, since templates ask for loop.length."""
    budget = _budget(context)
    if isinstance(items, Sequence | Mapping):
        budget.spend(len(items))
        return items

    def walk() -> Iterator[Any]:
        for item in items:
            budget.spend(1)
            yield item

    return walk()


@pass_context
def _concat(context: Context, parts: list[Any]) -> str:
    """`a ~ b`, within the budget."""
    texts = [str(part) for part in parts]
    _budget(context).joined(sum(map(len, texts)))
    return "".join(texts)


class _Meter(NodeTransformer):
    """Puts the budget's filters into a parsed template: around what a loop walks, and in place of `~`."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        if node.recursive:
            raise jinja2.TemplateSyntaxError("recursive loops are not allowed", node.lineno)
        node.iter = nodes.Filter(node.iter, "cutaway_counted", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        parts = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(parts, "cutaway_concat", [], [], None, None, lineno=node.lineno)


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}`, which marks answers for training; here its body is the text as it stands."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with arithmetic, loops and calls metered."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Meter().visit(super()._parse(source, name, filename))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = _budget(context)
        if operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            budget.joined(len(left) + len(right))
        elif operator == "*" and not (isinstance(left, int | float) and isinstance(right, int | float)):
            sizes = [len(side) if isinstance(side, str | list | tuple) else max(0, int(side)) for side in (left, right)]
            budget.joined(sizes[0] * sizes[1])
        elif operator == "**":
            raise SecurityError("it computes a power, which is not allowed")
        elif operator == "%" and isinstance(left, str):
            raise SecurityError("it formats with %, which is not allowed")
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        owner = getattr(value, "__self__", None)
        if isinstance(owner, str) and value.__name__.startswith("format") and re.search(r"\d{5,}|:[^{}]*\{", owner):
            raise SecurityError("it formats with a huge or computed width")
        return super().wrap_str_format(value)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _budget(__context)
        budget.spend(1)
        name, owner = getattr(__obj, "__name__", ""), getattr(__obj, "__self__", None)
        if isinstance(owner, str):  # methods whose answer can be far longer than what goes in
            if name in ("center", "ljust", "rjust", "zfill"):
                budget.joined(max([int(arg) for arg in args if isinstance(arg, int)], default=0))
            elif name == "expandtabs":
                budget.joined(len(owner) * max([8, *(int(arg) for arg in args if isinstance(arg, int))]))
            elif name == "replace" and len(args) >= 2:
                budget.joined(len(owner) + owner.count(str(args[0])) * len(str(args[1])))
        result = super().call(__context, __obj, *args, **kwargs)
        if isinstance(result, str):
            budget.joined(len(result))
        return result


def _raise_exception(message: str) -> NoReturn:
    raise _Refused(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """JSON as models were trained on it: not escaped for HTML, as Jinja's own filter would."""
    known = {key: option for key, option in options.items() if key in ("separators", "sort_keys")}
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **known)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _environment() -> _Environment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
    for name in (
        "center",
        "format",
        "wordwrap",
        "urlize",
        "pprint",
        "xmlattr",
    ):  # they grow text past the budget; no model uses them
        del environment.filters[name]
    filters, variables = cast(dict[str, Any], environment.filters), cast(dict[str, Any], environment.globals)
    filters.update(tojson=_tojson, cutaway_counted=_counted, cutaway_concat=_concat)
    variables.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment


class ChatTemplate:
    """A model's chat template, compiled at its first use.

    >>> template = ChatTemplate("{% for m in messages %}{{ m.role }}> {{ m.content }}{% endfor %}")
    >>> template.render([{"role": "user", "content": "Hi"}])
    'user> Hi'
    """

    def __init__(self, source: str | None, special_tokens: Mapping[str, str] | None = None):
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        self._template: jinja2.Template | None = None

    @classmethod
    def open(cls, assets: TextAssets) -> ChatTemplate:
        return cls(assets.chat_template, assets.special_tokens)

    def render(self, messages: list[dict[str, Any]], add_generation_prompt: bool = True, **kwargs: Any) -> str:
        """The prompt's text. Every failure of the template is a BadRequest that gives its own words, in one line.

        kwargs are more variables of the template (`tools`, `enable_thinking`, ...).
        """
        if self.source is None:
            raise BadRequest(
                "this model has no chat template; use /v1/completions, or a model made for chat",
                param="messages",
                code="no_chat_template",
            )
        try:
            if self._template is None:
                self._template = _environment().from_string(self.source)
            variables = {"tools": None, "documents": None} | self._special_tokens | kwargs | {"messages": messages}
            variables |= {"add_generation_prompt": add_generation_prompt, _BUDGET: _Budget()}
            return self._collect(self._template, variables)
        except _Refused as error:
            raise self._bad(f"the model's chat template refuses these messages: {_line(error)}") from error
        except SecurityError as error:
            raise self._bad(f"the model's chat template was stopped: {_line(error)}") from error
        except jinja2.TemplateSyntaxError as error:
            raise self._bad(f"the model's chat template is not valid (line {error.lineno}): {_line(error)}") from error
        except Exception as error:  # a template can make any operation of Python fail
            raise self._bad(f"the model's chat template cannot render these messages: {_line(error)}") from error

    @staticmethod
    def _collect(template: jinja2.Template, variables: dict[str, Any]) -> str:
        pieces: list[str] = []
        size = 0
        for piece in template.generate(variables):
            size += len(piece)
            if size > _MAX_TEXT:
                raise SecurityError(f"it makes a text of more than {_MAX_TEXT} characters")
            pieces.append(piece)
        return "".join(pieces)

    @staticmethod
    def _bad(message: str) -> BadRequest:
        return BadRequest(message, param="messages", code="chat_template_error")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
