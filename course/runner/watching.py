"""Where a check went wrong that compared what it got: runs it again and watches the file under test.

A person is sent to a line only where the run says which: to the function that the check had just called, never to what it only
read (a property, `check`), and to none where a workload called many in turn.
"""

from __future__ import annotations

import dis
import sys
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

from course.runner.checking import Check, Lab
from course.runner.declaration import ROOT

FEW = 12  # calls of a check that a person can follow; more are a workload, and its last call says nothing


@dataclass(slots=True)
class Seen:
    """ran: public functions of the file, by their last calls, each with the line it returned from. where: the line to look at,
    or "". empty: the function whose None was none of its answers, or ""."""

    ran: list[tuple[str, str]] = field(default_factory=list)
    where: str = ""
    empty: str = ""


def _classes(module: Any) -> list[type]:
    return [c for c in vars(module).values() if isinstance(c, type) and c.__module__ == module.__name__]


def _read_only(module: Any) -> set[CodeType]:
    """Code of what is only read: properties, and `check`, which asserts."""
    found: set[CodeType] = set()
    for cls in _classes(module):
        for name, thing in vars(cls).items():
            function = thing.fget if isinstance(thing, property) else thing.func if isinstance(thing, cached_property) else None
            function = thing if name == "check" else function
            if isinstance(function, FunctionType):
                found.add(function.__code__)
    return found


def _answers(module: Any) -> dict[CodeType, str]:
    """What each function says that it answers, where it says so."""
    functions = [f for c in (module, *_classes(module)) for f in vars(c).values() if isinstance(f, FunctionType)]
    return {f.__code__: str(f.__annotations__["return"]) for f in functions if "return" in f.__annotations__}


def _state(frame: FrameType) -> str:
    """Of the object whose method this is."""
    names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
    if names[:1] != ("self",):
        return ""
    try:
        return repr(vars(frame.f_locals["self"]))
    except Exception:  # a class with slots, an object that cannot be shown: then nothing is known to have changed
        return ""


def _returns(frame: FrameType) -> bool:
    """Whether a function ends by returning; one that an exception leaves has no answer, and is told in the same way."""
    return dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN")


class _Watch:
    def __init__(self, module: Any, path: Path):
        self.path, self.read_only, self.answers = path, _read_only(module), _answers(module)
        self.ran: dict[str, str] = {}
        self.calls = 0  # by the check, or by the engine around the file
        self.before: dict[int, str] = {}
        self.last, self.changed, self.read_after, self.empty = "", False, False, ""

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        if event not in ("call", "return") or code.co_filename != str(self.path) or code.co_name.startswith("<"):
            return
        caller = frame.f_back
        direct = caller is None or caller.f_code.co_filename != str(self.path)
        if code in self.read_only:
            self.read_after = self.read_after or direct
        elif event == "call":
            if direct and self.calls < FEW:
                self.before[id(frame)] = _state(frame)
        else:
            self._returned(frame, arg, direct)

    def _returned(self, frame: FrameType, arg: object, direct: bool) -> None:
        code = frame.f_code
        name, line = code.co_qualname.replace("<locals>.", ""), f"{self.path.relative_to(ROOT)}:{frame.f_lineno}"
        before = self.before.pop(id(frame), None)
        self.ran.pop(name, None)  # in the order of their last calls
        self.ran[name] = line
        if not direct or name.endswith("__init__"):
            return
        self.calls += 1
        self.last, self.read_after = line, False
        self.changed = before is not None and before != _state(frame)
        answers = self.answers.get(code, "None")
        if arg is None and _returns(frame) and "None" not in answers and answers not in ("NoReturn", "Any", "object"):
            self.empty = name


def watch(check: Check, lab: Lab, path: Path, called: bool) -> Seen:
    """Runs a check again. called: it failed over what a call of its own had just done, or had not."""
    seen = _Watch(lab.app, path)
    sys.setprofile(seen)
    try:
        check.function(lab)
    except Exception:
        pass
    finally:
        sys.setprofile(None)
    ran = [(n, line) for n, line in seen.ran.items() if not n.rpartition(".")[2].startswith("_")] or list(seen.ran.items())
    if len(ran) == 1:
        where = ran[0][1]
    elif called or (seen.calls <= FEW and (seen.changed or seen.read_after)):
        where = seen.last
    else:
        where = ""
    return Seen(ran, where, seen.empty)
