"""Whose fault it was: parts that somebody else wrote raise, answer what nobody can use, never come back, or end the process.

The line is found on a stack: of the exception, or of the thread that has been in one step for too long (`Watch`). Where the
stack names nobody's file, the error arose in ours on what a part had answered; who can have been asked there is known. Only a
process that ends without a word leaves no stack: then the parts that are not the engine's own are named, and that is all.
`Faults` counts, and says when a part's place is to be taken by the engine's own.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import FrameType

from cutaway.core.errors import CutawayError
from cutaway.engine.parts import PARTS, PartFault, Parts

SECONDS = float(os.environ.get("CUTAWAY_PART_SECONDS", "10"))  # that a step may take with a part on the stack
SAMPLES = 20  # looks at the stack in that time
FAULTS = 3  # of one part, before the engine's own takes its place

# The end of a file of ours -> the parts whose answers it works on.
ASKED = {
    "core/scheduler.py": ("prefix_cache", "blocks", "chunked"),
    "core/prefix_cache.py": ("blocks",),
    "engine/engine.py": ("scheduler", "prefix_cache", "blocks"),
    "engine/swap.py": ("scheduler", "blocks"),
    "engine/front.py": ("detokenizer",),
}
OURS = str(Path(__file__).resolve().parents[1])


def one_line(error: BaseException) -> str:
    """What a person is told of an error: its message if it is one of ours, else its type as well."""
    text = " ".join(str(error).split())
    if isinstance(error, CutawayError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def named(name: str, sources: Mapping[str, str]) -> str:
    """A part that is not the engine's own, as a person knows it."""
    return f"{Path(sources[name]).name} (part {name}, stage {PARTS[name].stage})"


def find(parts: Parts, error: BaseException) -> PartFault | None:
    """The fault of a part, if `error` is one. None where all parts are the engine's own, and for what a person has to mend."""
    if isinstance(error, PartFault):
        return error
    files = parts.files()
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        if part := files.get(frame.filename):
            where = f"{frame.filename}, line {frame.lineno}, in {frame.name} (part {part.name}, stage {part.stage})"
            return PartFault(f"{where}: {one_line(error)}", [part.name])
    if not files or isinstance(error, (CutawayError, MemoryError, OSError)):
        return None
    theirs = [name for name, source in parts.overrides.items() if (name, source) in parts.loaded]  # in this process
    if not theirs:
        return None
    ours = [f for f in frames if f.filename.startswith(OURS)]
    last = ours[-1] if ours else frames[-1] if frames else None
    asked = next((names for end, names in ASKED.items() if last and last.filename.endswith(end)), ())
    suspects = [name for name in theirs if name in asked] or theirs
    where = f", in {last.filename}, line {last.lineno}" if last else ""
    whose = " or ".join(named(name, parts.overrides) for name in suspects)
    return PartFault(f"{one_line(error)}{where}, on what {whose} answered", suspects)


class Watch:
    """Looks at the stack of a thread while it is busy. A part that is on it in most looks of `seconds` of one step is told of;
    a step that takes as long elsewhere, or in an import that a part asks for, is nobody's fault.

    It is made and begun in the thread to watch. `tell` is called in a thread of its own; it ends the process, since nothing
    can end a loop in another thread.
    """

    def __init__(self, parts: Parts, tell: Callable[[PartFault], None], seconds: float | None = None):
        self._parts = parts
        self._tell = tell
        self._seconds = SECONDS if seconds is None else seconds
        self._thread = threading.get_ident()
        self._turn = 0
        self._busy = True
        self._stopped = threading.Event()
        if parts.overrides:
            threading.Thread(target=self._run, name="cutaway-parts", daemon=True).start()

    def begin(self) -> None:
        """A step begins."""
        self._thread = threading.get_ident()
        self._turn += 1
        self._busy = True

    def idle(self) -> None:
        """Nothing runs until the next `begin`."""
        self._busy = False

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        turn, looks = -1, deque[tuple[str, str] | None](maxlen=SAMPLES)
        while not self._stopped.wait(self._seconds / SAMPLES):
            if not self._busy or self._turn != turn:
                turn = self._turn
                looks.clear()
                continue
            looks.append(self._look())
            seen = Counter(look[0] for look in looks if look)
            name, times = seen.most_common(1)[0] if seen else ("", 0)
            if len(looks) == SAMPLES and times > SAMPLES / 2:
                where = next(look[1] for look in reversed(looks) if look and look[0] == name)
                return self._tell(PartFault(f"{where}: has not come back for {self._seconds:g} s", [name], hung=True))

    def _look(self) -> tuple[str, str] | None:
        """The innermost frame of a part: its name and where it is."""
        files = self._parts.files()
        frame: FrameType | None = sys._current_frames().get(self._thread)  # pyright: ignore[reportPrivateUsage]
        while frame is not None:
            code = frame.f_code
            if code.co_filename.startswith("<frozen importlib"):
                while frame is not None and frame.f_code.co_filename.startswith("<frozen importlib"):
                    frame = frame.f_back
                if frame is not None and frame.f_code.co_filename in files:
                    return None  # it waits for a library
                continue
            if part := files.get(code.co_filename):
                where = f"{code.co_filename}, line {frame.f_lineno}, in {code.co_name}"
                return part.name, f"{where} (part {part.name}, stage {part.stage})"
            frame = frame.f_back
        return None


class Faults:
    """Faults so far, by the parts that can have been it; `dropped`: the line for which each lost its place."""

    def __init__(self, sources: Mapping[str, str]):
        self.dropped: dict[str, str] = {}
        self._sources = sources
        self._counts: Counter[tuple[str, ...]] = Counter()

    @property
    def kept(self) -> dict[str, str]:
        """The parts that still play."""
        return {name: source for name, source in self._sources.items() if name not in self.dropped}

    @property
    def suspects(self) -> list[str]:
        """Of a process that ended without a word."""
        return [name for name in self.kept if PARTS[name].process == "engine"]

    def without_a_word(self, line: str) -> str:
        """What can be said of such an end."""
        match [named(name, self._sources) for name in self.suspects]:
            case []:
                return line
            case [one]:
                return f"{line}; {one} is the only part that is not the engine's own"
            case several:
                return f"{line}; parts that are not the engine's own: {', '.join(several)}"

    def note(self, parts: Iterable[str], line: str, hung: bool = False) -> list[str]:
        """Counts a fault; answers the parts that are dropped for it."""
        names = tuple(name for name in parts if name in self.kept)
        if not names:
            return []
        self._counts[names] += 1
        if self._counts[names] < FAULTS and not hung:
            return []
        times = self._counts[names]
        for name in names:
            self.dropped[name] = line if times == 1 else f"{times} faults, the last: {line}"
        return list(names)
