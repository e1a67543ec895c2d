"""`Budget`: what one render of a chat template may do, in steps, time and bytes of text and containers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.utils import Namespace

_STEPS = 500_000  # of a render: one a loop step, call, filter or element; the longest chats take some 10^4
_SECONDS = 10.0
_BYTES = 24 << 20  # made in a render, beside what follows from the messages' own size
_COPIES = 16  # how often a template may copy its messages
OBJECT = 128  # bytes of a small object of Python and its place in a list
BUDGET = "cutaway_budget"  # the variable that holds it


def size_of(text: str) -> int:
    """Memory of a string, at most: one character beyond ASCII may take four bytes, and make all others take four."""
    return OBJECT // 2 + len(text) * (1 if text.isascii() else 4)


class Budget:
    """What is left to one render: steps, bytes that it may make, and time (some steps cost far more than others).

    given: the template's variables, which set how much it may make.
    """

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.steps = self.left = 1 << 62
        self.until = time.monotonic() + _SECONDS
        self.left = _BYTES + _COPIES * self.weigh(given)
        self.steps = _STEPS

    def spend(self, steps: int = 1) -> None:
        self.steps -= steps
        if self.steps < 0 or time.monotonic() > self.until:
            raise SecurityError("it does not come to an end")

    def fits(self, size: int) -> None:
        """Fails if `size` bytes that are about to be made are more than what is left."""
        if size > self.left:
            raise SecurityError("it makes too much text")

    def made(self, size: int) -> None:
        self.fits(size)
        self.left -= size

    def weigh(self, value: Any, indent: int = 0) -> int:
        """Bytes of the value as text or as a copy, all that it holds included; each element is a step.

        A list that holds another one twice counts it twice, as its text would. indent: characters a level, for JSON.
        """
        total, pending = 0, [(value, 1)]
        while pending:
            item, depth = pending.pop()
            total += OBJECT + depth * indent
            if isinstance(item, str):
                total += size_of(item)
            elif isinstance(item, int):
                total += item.bit_length()
            elif isinstance(item, Mapping):
                self.spend(len(cast(Mapping[Any, Any], item)))
                for pair in cast(Mapping[Any, Any], item).items():
                    pending += [(part, depth + 1) for part in pair]
            elif isinstance(item, list | tuple | set | frozenset | type({}.items()) | type({}.keys()) | type({}.values())):
                self.spend(len(cast(list[Any], item)))
                pending += [(part, depth + 1) for part in cast(list[Any], item)]
            elif isinstance(item, Namespace):  # it may hold itself
                raise SecurityError("it takes a namespace for a value")
            self.fits(total)
        return total

    def text(self, value: Any) -> str:
        """str(value), paid for."""
        if not isinstance(value, str):
            self.made(self.weigh(value) * 2)
        return str(value)

    def join(self, between: str, items: Iterable[Any]) -> str:
        """between.join(texts of items), whose size is known before it is made."""
        texts = [self.text(item) for item in self.walk(items)]
        return self.concat([between] * bool(texts) + texts, lambda: between.join(texts), len(between) * len(texts))

    def concat(self, texts: list[str], make: Callable[[], str], more: int = 0) -> str:
        width = 1 if all(text.isascii() for text in texts) else 4
        self.made(OBJECT + (sum(map(len, texts)) + more) * width)
        return make()

    def walk(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.spend()
            yield item


def budget_of(context: Context) -> Budget:
    found: Any = context.parent.get(BUDGET)
    if not isinstance(found, Budget):
        raise SecurityError("it hides its budget")
    return found
