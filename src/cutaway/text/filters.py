"""The filters of chat templates: Jinja's, as far as models use them, each paying its `Budget` for what it walks and makes.

Where a result can be far larger than what goes in (`replace`, `join`, `tojson`, ...) its size is reckoned first. Filters that
pad, wrap or cut into groups are left out: no model uses them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import markupsafe
from jinja2 import filters, pass_context
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context

from cutaway.text.budget import OBJECT, budget_of, size_of


@pass_context
def _counted(context: Context, items: Iterable[Any]) -> Iterable[Any]:
    """The iterable of a `for`, which pays for each step. Sized ones stay sized, since templates ask for loop.length."""
    budget = budget_of(context)
    if isinstance(items, Sequence | Mapping):
        budget.spend(len(items))
        return items
    return budget.walk(items)


@pass_context
def _concat(context: Context, parts: list[Any]) -> str:
    """`a ~ b`, within the budget."""
    budget = budget_of(context)
    texts = [budget.text(part) for part in parts]
    return budget.concat(texts, lambda: "".join(texts))


@pass_context
def _made(context: Context, value: Any) -> Any:
    """A list, dictionary, slice or captured block, paid for."""
    budget = budget_of(context)
    budget.made(budget.weigh(value))
    return value


@pass_context
def finalize(context: Context, value: Any) -> Any:
    """What `{{ value }}` writes, paid for; the text between the braces comes this way as well."""
    budget = budget_of(context)
    budget.made(budget.weigh(value))
    return value


def replaced(text: str, old: Any, new: Any, count: Any = -1) -> int:
    """Bytes of text.replace(old, new, count), at most."""
    if not isinstance(old, str) or not isinstance(new, str):
        return 0  # it fails by itself
    times = text.count(old)
    if isinstance(count, int) and count >= 0:
        times = min(times, count)
    width = 1 if text.isascii() and new.isascii() else 4
    return OBJECT + width * (len(text) + times * len(new))


def _filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """One of Jinja's filters, metered: what it walks, and what it makes."""
    passed = str(getattr(getattr(function, "jinja_pass_arg", None), "name", ""))

    @pass_context
    def metered(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = budget_of(context)
        budget.spend()
        budget.made(4 * OBJECT)
        if name in _ON_TEXT:
            value = budget.text(value)
        if isinstance(value, str):
            budget.fits(size_of(value) * _ON_TEXT.get(name, 2))
        if name in _WALKS:
            value = _counted(context, value)
        first = {"context": context, "eval_context": context.eval_ctx, "environment": context.environment}.get(passed)
        result = function(value, *args, **kwargs) if first is None else function(first, value, *args, **kwargs)
        if isinstance(result, str | list | tuple | dict) and name not in _PASSES_ON and result is not value:
            budget.made(budget.weigh(cast(Any, result)))
        return result

    return metered


# filter -> bytes at work for a byte of text: a character in upper case may be three, a title is cut into words
_ON_TEXT = {"trim": 2, "lower": 3, "upper": 3, "capitalize": 3, "title": 64, "string": 1, "safe": 1, "escape": 8, "e": 8}
_WALKS = frozenset(["list", "map", "select", "reject", "selectattr", "rejectattr", "sort", "unique", "first", "min", "max"])
_PASSES_ON = frozenset(["default", "d", "first", "last", "min", "max"])  # what they answer was there before
_NAMES = [*_ON_TEXT, *_WALKS, *_PASSES_ON, "length", "count", "int", "float", "abs", "reverse", "items", "dictsort"]


@pass_context
def _replace(context: Context, text: Any, old: str, new: str, count: int | None = None) -> str:
    budget = budget_of(context)
    text = budget.text(text)
    budget.fits(replaced(text, old, new, count))
    result = text.replace(old, new, -1 if count is None else count)
    budget.made(size_of(result))
    return result


@pass_context
def _join(context: Context, items: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    get = None if attribute is None else filters.make_attrgetter(context.environment, attribute)
    return budget_of(context).join(str(d), items if get is None else map(get, items))


def _width(value: Any) -> Any:
    """An indentation, as a number or as text."""
    if isinstance(value, int | str) and (len(value) if isinstance(value, str) else value) > 8:
        raise SecurityError("it indents by more than 8")
    return value


@pass_context
def _indent(context: Context, text: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    budget = budget_of(context)
    text = budget.text(text)
    breaks = sum(text.count(mark) for mark in "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029")  # where splitlines cuts
    budget.fits(3 * size_of(text) + 2 * OBJECT * breaks)
    result = filters.do_indent(text, _width(width), first, blank)
    budget.made(size_of(result))
    return result


@pass_context
def _tojson(context: Context, value: Any, ensure_ascii: bool = False, indent: Any = None, **options: Any) -> str:
    """JSON as models were trained on it: not escaped for HTML, as Jinja's own filter would."""
    budget = budget_of(context)
    known = {key: option for key, option in options.items() if key in ("separators", "sort_keys")}
    if any(len(separator) > 8 for separator in known.get("separators") or ()):
        raise SecurityError("it separates JSON by more than 8 characters")
    budget.fits(6 * budget.weigh(value, indent=8 if _width(indent) else 0))  # a control character is written as six
    result = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **known)
    budget.made(size_of(result))
    return result


def _plain_text(value: Any) -> str:
    """`safe` and `escape` answer plain text: no template of a model is escaped, and marked text would escape what is added."""
    return str(value)


def _escape(value: Any) -> str:
    return str(markupsafe.escape(value))


def _all() -> dict[str, Callable[..., Any]]:
    given = cast(dict[str, Callable[..., Any]], filters.FILTERS)
    given |= {"safe": _plain_text, "escape": _escape, "e": _escape}
    answer = {name: _filter(name, given[name]) for name in _NAMES}
    answer |= {"replace": _replace, "join": _join, "indent": _indent, "tojson": _tojson}
    return answer | {"cutaway_counted": _counted, "cutaway_concat": _concat, "cutaway_made": _made}


FILTERS: Mapping[str, Callable[..., Any]] = _all()
