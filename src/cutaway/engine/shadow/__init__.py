"""Shadow mode: somebody's part runs *beside* the engine's own on live traffic, until it decides something else.

The engine serves with its own part. Each call that it makes is made again on the shadow's: a class's methods on an instance
with a state of its own, a function's on copies of the arguments. Block ids are compared up to renaming (`followers.py`),
tensors by tolerance (`closeness.py`), all else exactly. The first call that differs, raises or takes over 10 s ends the shadow,
not the serving; what both answered is said once on standard error and kept for /health.

Invariants: what is served does not depend on a shadow: nothing that the engine holds is given to it, only copies, and nothing
of it comes back; its code runs on a thread of its own, so that one that hangs costs the serving 10 s, once.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import queue
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from cutaway.core.errors import CutawayError, shown
from cutaway.engine.config import EngineConfig
from cutaway.engine.parts import PARTS, Parts
from cutaway.engine.shadow import followers as f
from cutaway.engine.shadow.closeness import AttentionFollower
from cutaway.engine.shadow.followers import Call, Differs, Follower, need_equal

# What is followed of each part. 07's numbers are compared by tolerance, all others' decisions exactly.
FOLLOWERS: dict[str, dict[str, type[Follower]]] = {
    "blocks": {"BlockAllocator": f.AllocatorFollower, "BlockTable": f.TableFollower},
    "attention": {"write_kv": AttentionFollower, "paged_attention": AttentionFollower},
    "prefix_cache": {"PrefixCache": f.CacheFollower, "chain": f.ChainFollower},
    "scheduler": {"Scheduler": f.SchedulerFollower},
    "chunked": {"split": f.SplitFollower},
}
PATIENCE = 10.0  # seconds that one call of a shadow may take


@dataclass(slots=True)
class Outcome:
    """What a call answered, or raised."""

    value: Any = None
    error: BaseException | None = None

    @classmethod
    def of(cls, function: Callable[[], Any]) -> Outcome:
        try:
            return cls(function())
        except BaseException as error:  # of somebody's file: SystemExit, too
            return cls(error=error)

    @property
    def kind(self) -> str:
        """The contract names two errors; any other is as good as another."""
        if self.error is None:
            return "answers"
        names = [c.__name__ for c in type(self.error).__mro__]
        return next((n for n in names if n in ("OutOfBlocks", "DoesNotFit")), "raises")


class Hung(Exception):
    """A call has not come back. stack: where it is."""

    def __init__(self, seconds: float, stack: traceback.StackSummary):
        super().__init__(f"has not answered within {seconds:g} s")
        self.stack = stack


def _work(todo: queue.SimpleQueue[Callable[[], Any] | None], done: queue.SimpleQueue[Outcome]) -> None:
    while (function := todo.get()) is not None:
        done.put(Outcome.of(function))


class Worker:
    """A thread for code that may never come back."""

    def __init__(self, patience: float):
        self.patience = patience
        self._todo: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_work, args=(self._todo, self._done), name="cutaway-shadow", daemon=True)
        self._thread.start()
        weakref.finalize(self, self._todo.put, None)

    def run(self, function: Callable[[], Any]) -> Outcome:
        """Raises Hung after `patience` seconds, and asks the thread to end."""
        self._todo.put(function)
        try:
            return self._done.get(timeout=self.patience)
        except queue.Empty:
            ident = self._thread.ident or 0
            stack = traceback.extract_stack(sys._current_frames().get(ident))  # pyright: ignore[reportPrivateUsage]
            # a loop in Python ends by this; what sleeps or computes in C goes on, and is nobody's
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(SystemExit))
            raise Hung(self.patience, stack) from None


class Shadow:
    """One part's file beside the engine's own."""

    def __init__(self, name: str, source: str, patience: float = PATIENCE):
        """Raises CutawayError for a file that cannot play the part, or a part that cannot be compared."""
        if name not in FOLLOWERS:
            raise CutawayError(f"the part {name} cannot run as a shadow; those that can are {', '.join(FOLLOWERS)}")
        self.part = PARTS[name]
        self.source = source
        self.theirs: Any = Parts({name: source}).get(name)
        self.step: Callable[[], int] = lambda: 0
        self.calls = self.compared = 0
        self.difference: str | None = None
        self.context: dict[str, Any] = {}  # what the followers of one part share
        self._worker = Worker(patience)
        self._busy = False  # inside a call: what the part calls of itself is its own affair

    def report(self) -> dict[str, Any]:
        """For /health. compared: calls whose outcomes were compared; of attention's they are a sample."""
        return {"source": self.source, "calls": self.calls, "compared": self.compared, "difference": self.difference}

    def beside(self, module: ModuleType) -> ModuleType:
        """The engine's own module, with its functions and the methods of its classes followed by the shadow."""
        copy = ModuleType(module.__name__, module.__doc__)
        copy.__dict__.update(module.__dict__)
        for name, kind in FOLLOWERS[self.part.name].items():
            thing = getattr(module, name)
            if inspect.isclass(thing):
                setattr(copy, name, self._followed_class(thing, kind))
            else:
                follower = kind(self.theirs, thing, (), self.context)
                setattr(copy, name, self._followed(name, thing, lambda _, f=follower: f, bound=False))
        return copy

    def _followed_class(self, cls: type, kind: type[Follower]) -> type:
        shadow = self
        signature = inspect.signature(cls.__init__)

        def __init__(ours: Any, *args: Any, **kwargs: Any) -> None:
            cls.__init__(ours, *args, **kwargs)
            bound = signature.bind(ours, *args, **kwargs)
            bound.apply_defaults()
            if shadow.difference is None and not shadow._busy:
                made = shadow._attempt(lambda: kind(shadow.theirs, ours, bound.args[1:], shadow.context))
                if made.error is None:
                    ours.follower = made.value
                else:
                    shadow._stop(cls.__name__, shadow._told(made), "an instance")

        methods = {m: shadow._followed(f"{cls.__name__}.{m}", f, lambda ours: getattr(ours, "follower", None))
                   for m, f in inspect.getmembers(cls, inspect.isfunction) if not m.startswith("_")}  # fmt: skip
        return type(cls.__name__, (cls,), {"__init__": __init__, "__doc__": cls.__doc__, **methods})

    def _followed(
        self, label: str, function: Callable[..., Any], find: Callable[[Any], Follower | None], bound: bool = True
    ) -> Callable[..., Any]:
        signature = inspect.signature(function)

        def call(*args: Any, **kwargs: Any) -> Any:
            follower = find(args[0] if bound else None)
            if follower is None or self.difference is not None or self._busy:
                return function(*args, **kwargs)
            once = tuple(i - bound for i, a in enumerate(args) if isinstance(a, Iterator))
            args = tuple(list(a) if isinstance(a, Iterator) else a for a in args)  # both sides read it
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            call = Call(label.rpartition(".")[2], given.args[1:] if bound else given.args, given.kwargs, once)
            self._busy = True
            try:
                return self._follow(label, call, follower, lambda: function(*args, **kwargs))
            finally:
                self._busy = False

        call.__wrapped__ = function  # pyright: ignore[reportFunctionMemberAccess]
        return call

    def _follow(self, label: str, call: Call, follower: Follower, function: Callable[[], Any]) -> Any:
        self.calls += 1
        prepared = Outcome.of(lambda: follower.prepare(call))  # before the engine's own part changes what it is given
        try:
            expected = Outcome(function())
        except Exception as error:
            expected = Outcome(error=error)
        if prepared.error is not None:
            self._stop(label, self._told(prepared), self._told(expected))
        elif prepared.value is not None:
            self.compared += 1
            self._compare(label, call, follower, prepared.value, expected)
        if expected.error is not None:
            raise expected.error
        return expected.value

    def _compare(self, label: str, call: Call, follower: Follower, play: Callable[[], Any], expected: Outcome) -> None:
        got = self._attempt(lambda: (play(), follower.state(follower.theirs)))
        if got.kind != expected.kind:
            value = Outcome(got.value[0]) if got.error is None else got
            return self._stop(label, self._told(value), self._told(expected))
        if got.error is not None:
            return
        value, state = got.value
        try:
            follower.compare(call, expected.value, value)
            for name, ours in follower.state(follower.ours).items():
                need_equal(name, state[name], ours)
        except Differs as difference:
            self._stop(label, *difference.args)
        except Exception:  # what it answered is not of a kind that can be compared
            self._stop(label, self._told(Outcome(value)), self._told(expected))

    def _attempt(self, function: Callable[[], Any]) -> Outcome:
        try:
            return self._worker.run(function)
        except Hung as hung:
            return Outcome(error=hung)

    def _told(self, outcome: Outcome) -> str:
        """An outcome in one line; of an error the line of the shadow's file where it arose, or where it hangs."""
        error = outcome.error
        try:
            text = shown(outcome.value) if error is None else " ".join(str(error).split())
        except Exception:  # somebody's own __repr__ or __str__
            text = f"a {type(outcome.value).__name__}" if error is None else ""
        if error is None:
            return f"answers {text}"
        what = text if isinstance(error, Hung) else f"raises {type(error).__name__}{f': {text}' if text else ''}"
        file = str(Path(self.source).resolve())
        stack = error.stack if isinstance(error, Hung) else traceback.extract_tb(error.__traceback__)
        frames = [f for f in stack if f.filename == file]
        return f"{what} at {file}, line {frames[-1].lineno}, in {frames[-1].name}" if frames else what

    def _stop(self, label: str, yours: str, reference: str) -> None:
        self.difference = (
            f"the shadow of {self.part.name} (stage {self.part.stage}, {self.source}) stopped at step {self.step()}, "
            f"call {self.calls}, {label}: yours: {yours}; the reference: {reference}"
        )
        with contextlib.suppress(OSError):
            print(f"{self.difference}. Serving goes on with the reference.", file=sys.stderr, flush=True)


def parts_of(config: EngineConfig) -> Parts:
    """The parts of an engine process, or of `LLM`: with the shadows that the settings ask for."""
    shadows = {name: Shadow(name, source) for name, source in config.shadow.items()}
    parts = Parts(config.parts, shadows=shadows)
    for shadow in shadows.values():
        shadow.step = lambda: parts.step
    return parts
