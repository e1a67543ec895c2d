"""A Jinja environment for templates from strangers: known operations only, and each pays for what it makes.

Filters, methods and functions that are not listed do not exist; the rest is metered by a `Budget`. So memory stays within
the budget whatever a template does, and time within its steps.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import BuiltinMethodType, MethodType
from typing import Any, NoReturn, cast

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Joiner, Namespace
from jinja2.visitor import NodeTransformer

from cutaway.text.budget import BUDGET, OBJECT, Budget, budget_of, size_of
from cutaway.text.filters import FILTERS, finalize, replaced

_MAX_SOURCE = 64 << 10  # characters; real templates have less than 20,000
_MAX_TOKENS = 8192  # compiling takes some 5 KiB a token; real templates have less than 5000

# read-only methods, of which none makes more than a few times what it is given
_METHODS: dict[type, frozenset[str]] = {
    str: frozenset(
        """capitalize casefold count endswith find format index isalnum isalpha isascii isdecimal isdigit islower isnumeric
        isspace istitle isupper join lower lstrip partition removeprefix removesuffix replace rfind rindex rpartition rsplit
        rstrip split splitlines startswith strip swapcase title upper""".split()  # noqa: SIM905
    ),
    dict: frozenset(("copy", "get", "items", "keys", "values")),
    list: frozenset(("copy", "count", "index")),
    tuple: frozenset(("count", "index")),
}


class Refused(jinja2.TemplateError):
    """What `raise_exception("...")` in a template raises: the model's makers refuse these messages."""


class _Meter(NodeTransformer):
    """Puts the budget into a parsed template: around loops, literals and blocks, and in place of `~`."""

    def _refuse(self, node: nodes.Node) -> NoReturn:
        raise jinja2.TemplateSyntaxError(f"{type(node).__name__.lower()} is not allowed", node.lineno)

    visit_Block = visit_Extends = visit_Include = visit_Import = visit_FromImport = _refuse
    visit_EvalContextModifier = visit_ScopedEvalContextModifier = _refuse  # escaping makes texts longer

    @staticmethod
    def _paid(node: nodes.Node, name: str = "cutaway_made") -> nodes.Filter:
        return nodes.Filter(cast(nodes.Expr, node), name, [], [], None, None, lineno=node.lineno)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        if node.recursive:
            raise jinja2.TemplateSyntaxError("recursive loops are not allowed", node.lineno)
        node.iter = self._paid(node.iter, "cutaway_counted")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._paid(nodes.List(node.nodes, lineno=node.lineno), "cutaway_concat")

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        return nodes.Const(node.data, lineno=node.lineno)  # plain data would be written without being counted

    def visit_List(self, node: nodes.List | nodes.Dict | nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        empty = not (node.items)
        return node if empty or getattr(node, "ctx", "load") != "load" else self._paid(node)

    visit_Dict = visit_Tuple = visit_List

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return self._paid(node) if isinstance(node.arg, nodes.Slice) else node

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:
        self.generic_visit(node)
        node.filter = nodes.Filter(node.filter, "cutaway_made", [], [], None, None, lineno=node.lineno)
        return node


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}`, which marks answers for training; here its body is the text as it stands."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Format:
    """A string's `format`, kept apart so that a call knows the string."""

    def __init__(self, owner: str, make: Callable[..., str]):
        self.owner, self.make = owner, make

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        return self.make(*args, **kwargs)

    def room(self, weight: int) -> int:
        """Bytes of the answer, at most, for arguments of that weight."""
        fields = self.owner.split("{")
        if any(sum(map(str.isdigit, field)) > 3 or (":" in field.partition("}")[0] and "}" not in field) for field in fields):
            raise SecurityError("it formats with a huge or computed width")
        return 4 * (len(self.owner) + (len(fields) - 1) * (1000 + weight))


class Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with what a template does metered."""

    intercepted_binops = frozenset({"+", "-", "*", "**", "%"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        if len(source) > _MAX_SOURCE:
            raise SecurityError(f"it has {len(source)} characters; at most {_MAX_SOURCE} are allowed")
        tokens = 0
        for _, kind, _ in self.lexer.tokeniter(source, name):
            tokens += kind != "whitespace"
            if tokens > _MAX_TOKENS:
                raise SecurityError(f"it has more than {_MAX_TOKENS} words and signs")
        return _Meter().visit(super()._parse(source, name, filename))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = budget_of(context)
        budget.spend()
        if operator == "**":
            raise SecurityError("it computes a power, which is not allowed")
        if operator == "%" and isinstance(left, str):
            raise SecurityError("it formats with %, which is not allowed")
        if operator == "+" and isinstance(left, str) and isinstance(right, str):
            return budget.concat([left, right], lambda: left + right)
        if operator == "+" and isinstance(left, list | tuple) and isinstance(right, list | tuple):
            budget.made(budget.weigh([left, right]))
        elif operator == "-" and not isinstance(left, int | float):
            budget.made(budget.weigh(left))  # a set of keys
        elif operator == "*":
            for side, times in ((left, right), (right, left)):
                if isinstance(side, int):
                    budget.fits(side.bit_length() << 16)  # numbers of some hundred bits
                elif isinstance(side, str) and isinstance(times, int):
                    budget.made(size_of(side) + len(side) * (1 if side.isascii() else 4) * max(0, times))
                elif isinstance(side, list | tuple) and isinstance(times, int):
                    budget.made(budget.weigh(side) * max(0, times))
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        made = super().wrap_str_format(value)
        return None if made is None or value.__name__ != "format" else _Format(value.__self__, made)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = budget_of(__context)
        budget.spend(1 + len(args))
        budget.made(OBJECT * (8 if __obj is Namespace else 1 + len(args)))
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(__obj, _Format):
            budget.fits(__obj.room(sum(budget.weigh(value) for value in (*args, *kwargs.values()))))
        elif isinstance(__obj, BuiltinMethodType) and name in _METHODS.get(type(owner), ()):
            if isinstance(owner, str) and name == "join" and len(args) == 1:
                return budget.join(owner, _texts(args[0]))
            budget.fits(_room(owner, name, args, kwargs))
        elif not _is_callable(__self, __obj, owner):
            raise SecurityError(f"it calls {(name or type(__obj).__name__)!r}, which is not allowed")
        result = super().call(__context, __obj, *args, **kwargs)
        if isinstance(result, str | list | tuple | dict):
            budget.made(budget.weigh(cast(Any, result)))
        return result


def _is_callable(environment: Environment, value: Any, owner: Any) -> bool:
    if isinstance(value, Macro | Undefined):  # an undefined name fails in its own words
        return True
    if isinstance(value, MethodType):
        return isinstance(owner, LoopContext | Cycler)
    return isinstance(value, Joiner) or any(value is known for known in environment.globals.values())


def _room(owner: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Bytes that a method of a string needs, at most."""
    if not isinstance(owner, str):
        return 0
    if name == "replace" and len(args) >= 2:
        return replaced(owner, *args[:3])
    if name in ("split", "rsplit", "splitlines"):
        most = kwargs.get("maxsplit", args[1] if len(args) > 1 else -1)
        pieces = owner.count(args[0]) if args and isinstance(args[0], str) and args[0] else len(owner)
        return size_of(owner) + OBJECT * (min(pieces, most) if isinstance(most, int) and most >= 0 else pieces)
    return 3 * size_of(owner)


def _texts(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        if not isinstance(item, str):
            raise TypeError(f"sequence item: expected str instance, {type(item).__name__} found")
        yield item


def _raise_exception(message: str) -> NoReturn:
    raise Refused(message)


def _strftime_now(form: str) -> str:
    if len(form) > 256:
        raise SecurityError("it formats a date by more than 256 characters")
    return datetime.datetime.now().strftime(form)


def compile_template(source: str) -> jinja2.Template:
    """The template; jinja2.TemplateSyntaxError or SecurityError if it is not valid or too long.
    For `render`, without which nothing in it works: its operations look for their budget.
    """
    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation], finalize=finalize)
    environment.filters = dict(FILTERS)
    variables = cast(dict[str, Any], environment.globals)
    del variables["lipsum"]
    variables.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment.from_string(source)


def render(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    """The text, within a budget that follows from the size of the variables."""
    budget = Budget(variables)
    pieces: list[str] = []
    for piece in template.generate({**variables, BUDGET: budget}):
        budget.spend()
        pieces.append(piece)
    return budget.concat(pieces, lambda: "".join(pieces))
