"""What a check is, and what it says.

A check is one named claim: a function of a stage's checks.py whose docstring's first line is the claim (at most 40 characters).

    @check(gate="> 3.00", unit="x", probably="a length that is a multiple of 16 takes an extra, empty block")
    def sequences_that_fit(lab: Lab) -> None:
        \"\"\"sequences that fit, against rows\"\"\"
        ...
        lab.measure(fit / rows, baseline=1.0, detail="32 of 96 sequences hold one block more than they need")

It ends as passed, failed or *not measured* with a reason: no GPU, or a machine too busy for a verdict. `gate` is what its
number must be; the runner shows it on green. Files here import no tensor library until a check asks for one.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

Verdict = Literal["passed", "failed", "not measured"]
COMPARE: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "=": operator.eq,
}  # fmt: skip


class Failed(Exception):
    """The claim does not hold. `probably`: the mistake that most people make here; `detail`: what was seen; `called`: it is
    about the call that was made last."""

    def __init__(self, probably: str, detail: str = "", called: bool = False):
        super().__init__(probably)
        self.probably, self.detail, self.called = probably, detail, called


class NotMeasured(Exception):
    """No verdict. busy: asking again may give one."""

    def __init__(self, reason: str, busy: bool = False):
        super().__init__(reason)
        self.reason, self.busy = reason, busy


def passes(gate: str, value: float) -> bool:
    """Whether a number is on the right side of a gate such as "> 3.00", "<= 16" or "= 0"; "" holds for any."""
    if not gate:
        return True
    match = re.fullmatch(r"(<=|>=|<|>|=) ?(-?[\d.]+(?:e-?\d+)?)", gate)
    if match is None:
        raise ValueError(f"a gate is an operator and a number, got {gate!r}")
    return COMPARE[match[1]](value, float(match[2]))


@dataclass(slots=True)
class Measure:
    """One number of this run. baseline: the same of what it is compared with (an earlier stage, a formula), which `against`
    names."""

    name: str
    value: float
    unit: str = ""
    gate: str = ""
    baseline: float | None = None
    against: str = ""


@dataclass(slots=True)
class Check:
    """A claim and its function. needs "gpu": not measured without one. seconds: the longest it may take."""

    name: str
    claim: str
    function: Callable[[Lab], None]
    probably: str
    gate: str = ""
    unit: str = ""
    needs: Literal["", "gpu", "triton"] = ""
    seconds: float = 60.0


@dataclass(slots=True)
class Lab:
    """What a check gets: the module under test, and ways to say what was found."""

    stage: str  # "06"
    app: Any  # the module under test
    check: Check
    device: str = "cpu"  # or "cuda"
    measures: list[Measure] = field(default_factory=list)

    def measure(self, value: float, *, name: str = "", gate: str | None = None, unit: str | None = None,
                baseline: float | None = None, against: str = "", probably: str = "", detail: str = "") -> None:  # fmt: skip
        """Carries a number to the screen, and fails where it misses its gate. Without a name it is the check's own number,
        with the gate and unit of its decorator. against: what the baseline is of, such as "the contiguous cache"."""
        gate = (self.check.gate if not name else "") if gate is None else gate
        unit = (self.check.unit if not name else "") if unit is None else unit
        self.measures.append(Measure(name or self.check.claim, float(value), unit, gate, baseline, against))
        if not passes(gate, value):
            raise Failed(probably or self.check.probably, detail)

    def expect(self, holds: object, probably: str = "", detail: str = "") -> None:
        """Fails unless `holds`."""
        if not holds:
            raise Failed(probably or self.check.probably, detail)

    def equal(self, got: Any, want: Any, what: str, probably: str = "") -> None:
        """Fails unless they are equal, and shows both, cut to a line."""
        if got != want:
            raise Failed(probably or self.check.probably, f"{what}: yours {cut(got)}, expected {cut(want)}")

    def raises(
        self, kind: type[BaseException], call: Callable[[], object], probably: str = "", naming: Iterable[object] = ()
    ) -> None:
        """Fails unless `call` raises `kind` with a message that holds each of `naming`."""
        try:
            got = call()
        except kind as error:
            missing = [str(n) for n in naming if str(n) not in str(error)]
            self.expect(not missing, probably, f"{type(error).__name__}({error}) does not name {', '.join(missing)}")
        else:
            detail = f"{kind.__name__} was to be raised, and it answered {cut(got)}"
            raise Failed(probably or self.check.probably, detail, called=True)

    def not_measured(self, reason: str) -> NoReturn:
        raise NotMeasured(reason)

    def ratio(self, slow: Callable[[], object], fast: Callable[[], object], *, name: str = "", gate: str | None = None,
              unit: str | None = None, detail: str = "", probably: str = "", rounds: int = 8) -> float:  # fmt: skip
        """How many times as long `slow` takes as `fast`, by the protocol of `timing.ratio`, against the gate; the number is
        the median. Raises NotMeasured (busy) where its interval straddles the gate. Answers the ratio."""
        from course.runner import timing

        gate = (self.check.gate if not name else "") if gate is None else gate
        unit = "x" if unit is None else unit
        found = timing.ratio(slow, fast, lambda low, high: passes(gate, low) == passes(gate, high), self.device, rounds)
        if passes(gate, found.low) != passes(gate, found.high):
            between = f"{found.low:.2f} to {found.high:.2f} x" if found.low else f"{found.rounds} pairs in the time there was"
            reason = f"machine busy: {between} does not decide on the gate {gate}"
            self.measures.append(Measure(name or self.check.claim, found.median, unit, "", None))
            raise NotMeasured(reason, busy=True)
        self.measure(found.median, name=name, gate=gate, unit=unit, detail=detail or found.told, probably=probably)
        return found.median


def cut(value: object, most: int = 100) -> str:
    text = repr(value)
    return text if len(text) <= most else f"{text[: most - 1]}…"


def check(*, probably: str, gate: str = "", unit: str = "", needs: Literal["", "gpu", "triton"] = "",
          seconds: float = 60.0) -> Callable[[Callable[[Lab], None]], Check]:  # fmt: skip
    """Makes a function a check. `probably` names the mistake that its failure usually means."""

    def make(function: Callable[[Lab], None]) -> Check:
        claim = (function.__doc__ or "").strip().splitlines()[0].strip()
        if not claim or len(claim) > 40:
            raise ValueError(
                f"{function.__name__}: the docstring's first line is the claim, in at most 40 characters: {claim!r}"
            )
        return Check(function.__name__, claim, function, probably, gate, unit, needs, seconds)

    return make


def checks_of(module: Any) -> list[Check]:
    """The checks of a module, in the order of its file."""
    return [thing for thing in vars(module).values() if isinstance(thing, Check)]


@dataclass(slots=True)
class Result:
    """What came of a check. where: file and line of the module under test in which it went wrong; raised: an exception came
    from there that nobody asked for, and `reason` is what it says; ran: where the line is not known, the functions of that
    module which the check ran, each with the line it last returned from."""

    stage: str
    name: str
    claim: str
    verdict: Verdict
    measures: Sequence[Measure] = ()
    seconds: float = 0.0
    reason: str = ""  # of "not measured"; else what was seen
    probably: str = ""
    where: str = ""
    traceback: str = ""
    busy: bool = False
    ran: Sequence[tuple[str, str]] = ()
    raised: bool = False
