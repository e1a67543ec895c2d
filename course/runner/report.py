"""What a run of a stage's checks says to a person. `show(screen, run)` on green, on red, on what was not measured."""

from __future__ import annotations

import linecache
import re
from dataclasses import dataclass, field

from course.runner.checking import Measure, Result, passes
from course.runner.declaration import ROOT, Stage, Track
from course.runner.environment import card, lacks
from course.runner.progress import Progress, better
from course.runner.terminal import CLOSE_UNITS, WIDTH, Screen, figure, gate_of, must
from course.runner.worker import NO_TRITON, NOT_IMPORTED, NOT_WRITTEN

SHOWN = 6  # checks that a green run lists without -v
TOLD = 4  # failures that are told in full without -v
DETAIL = 4  # lines of what a failure saw, without -v
NUMBERS = 3  # further numbers of the stage's leading check that are told under the table
CLAIM, MEASURED, GATE, BEFORE = 4, 58, 69, 78  # columns: where the claim begins, where the others end


@dataclass
class Run:
    """A run of a stage's checks. before: the best of each number (check, name) ahead of this run."""

    stage: Stage
    track: Track
    origin: str  # "app" or "answers"
    results: list[Result] = field(default_factory=list)
    seconds: float = 0.0
    gpu: bool = False
    before: dict[tuple[str, str], float] = field(default_factory=dict)

    def of(self, verdict: str) -> list[Result]:
        return [r for r in self.results if r.verdict == verdict]

    @property
    def file(self) -> str:
        """The file under test, from the root."""
        path = self.stage.file(self.track) if self.origin == "app" else ROOT / self.stage.answers[self.track]
        return str(path.relative_to(ROOT))

    def number(self) -> tuple[Result, Measure] | None:
        """The stage's leading figure, if this run measured it."""
        for r in self.results:
            if r.name == self.stage.number and r.measures:
                return r, headline(r)
        return None

    def remember(self, progress: Progress) -> None:
        for r in self.results:
            for m in r.measures:
                if (best := progress.best(self.stage, self.track, r.name, m)) is not None:
                    self.before[r.name, m.name] = best


def headline(result: Result) -> Measure:
    """The number that stands beside a check's claim: its own, else the last one measured, which is where a failure stopped."""
    own = [m for m in result.measures if m.name == result.claim]
    return own[-1] if own else result.measures[-1]


def tested_as(run: Run) -> str:
    what = "answer, " if run.origin == "answers" else ""
    where = (card()[0] or "GPU") if run.gpu else "CPU: kernels run interpreted" if _kernels(run) else "CPU"
    return f"{what}{'shared' if run.stage.shared else run.track}, {where}"


def _kernels(run: Run) -> bool:
    return any(c.needs == "triton" for c in run.stage.claims(run.track))


def totals(results: list[Result]) -> str:
    count = {v: sum(r.verdict == v for r in results) for v in ("passed", "failed", "not measured")}
    return ", ".join(f"{many} {verdict}" for verdict, many in count.items())


def heading(screen: Screen, run: Run) -> None:
    title = f"{run.stage.id}  {run.stage.title}"
    if screen.length(title) + 2 + len(tested_as(run)) > WIDTH:  # a card of a long name
        screen.say(screen.bold(title))
        title = ""
    screen.ends(screen.bold(title), screen.dim(tested_as(run)))
    name, capability = card() if run.gpu else ("", None)
    if capability is not None and (told := lacks(name, capability)):
        screen.paragraph(told, "", "dim")
    screen.say()


def row(screen: Screen, run: Run, result: Result, measure: Measure | None, claim: str, mark: str) -> None:
    """One line of the table."""
    measured = figure(measure.value, measure.unit, measure.gate) if measure else ""
    gate = gate_of(measure.gate, measure.unit) if measure else ""
    if result.verdict == "not measured":
        claim_of = next(c for c in run.stage.claims(run.track) if c.name == result.name)
        measured, gate = "not measured", gate_of(claim_of.gate, claim_of.unit)
    best = run.before.get((result.name, measure.name)) if measure and measure.gate[:1] in ("<", ">") else None
    before = (
        figure(best, measure.unit if measure.unit in CLOSE_UNITS else "", measure.gate) if measure and best is not None else ""
    )
    left = f"  {mark}{claim}"
    if screen.length(left) + 2 + len(measured) > MEASURED and screen.length(left) + 2 + len(measured) + 2 + len(gate) > GATE:
        screen.say(left)
        left = ""
    line = screen.pad(left, max(MEASURED - len(measured), screen.length(left) + 2 * bool(measured)))
    line += screen.bold(measured) if measure else screen.dim(measured)
    gap = max(GATE - screen.length(line) - len(gate), 2)
    if gate or before:
        line += " " * gap + screen.dim(gate)
    if before and screen.length(line) + 2 + len(before) <= BEFORE:
        line += screen.dim(screen.pad(before, BEFORE - screen.length(line), right=True))
    screen.say(line)


def table(screen: Screen, run: Run, shown: list[Result], verbose: bool) -> None:
    if any(r.measures or r.verdict == "not measured" for r in shown):
        before = "before".rjust(BEFORE - GATE) if run.before else ""
        screen.say(screen.dim("measured".rjust(MEASURED) + "gate".rjust(GATE - MEASURED) + before))
    for r in shown:
        main = headline(r) if r.measures and r.verdict == "passed" else None
        row(screen, run, r, main, r.claim, screen.mark(r.verdict))
        for m in r.measures if verbose and main is not None else ():
            if m is not main and m.name != r.claim:
                row(screen, run, r, m, f"  {m.name}", " " * screen.mark_width)


def choose(run: Run) -> list[Result]:
    """What a run without failures lists: the stage's number, what was not measured, numbers, the rest; in file order."""
    first = [r for r in run.results if r.name == run.stage.number]
    rest = sorted((r for r in run.results if r not in first), key=lambda r: (r.verdict == "passed", not r.measures))
    return (first + rest)[: max(SHOWN, len(first) + len(run.of("not measured")))]


def show(screen: Screen, run: Run, verbose: bool = False, traceback: bool = False) -> None:
    heading(screen, run)
    failed = run.of("failed")
    if failed and not verbose:
        _failures(screen, run, failed, traceback, verbose)
    else:
        shown = run.results if verbose or len(run.results) <= SHOWN + 1 else choose(run)
        table(screen, run, [r for r in shown if r.verdict != "failed"], verbose)
        if left := len(run.results) - len(shown):
            text = f"{'…':<{screen.mark_width}}{left} more passed"
            screen.ends(f"  {text}", screen.dim(f"./vc test {_short(run)} -v shows them"))
        screen.say()
        if failed:
            _failures(screen, run, failed, traceback, verbose)
    screen.ends(totals(run.results), screen.dim(f"{run.seconds:.1f} s"))
    if not failed:
        _number(screen, run)
    _not_measured(screen, run)


def _short(run: Run) -> str:
    return run.stage.id.lstrip("0")


def _failures(screen: Screen, run: Run, failed: list[Result], traceback: bool, verbose: bool) -> None:
    unwritten = [r for r in failed if r.probably == NOT_WRITTEN]
    rest = [r for r in failed if r.probably != NOT_WRITTEN]
    if rest and all(r.probably == NOT_IMPORTED for r in rest):
        screen.say(f"{screen.mark('failed')}{screen.paint(f'{run.file} cannot be imported', 31)}")
        screen.paragraph(rest[0].reason)
        _source(screen, rest[0].where)
        if traceback:
            _traceback(screen, rest[0])
        screen.say()
        return
    raised = [r for r in rest if r.raised]
    groups = {(r.reason, r.where): [o for o in raised if (o.reason, o.where) == (r.reason, r.where)] for r in raised}
    for same in groups.values():
        _raised(screen, same, traceback)
    rest = [r for r in rest if not r.raised]
    for r in rest if verbose else rest[:TOLD]:
        _failure(screen, run, r, traceback, verbose)
    if not verbose and len(rest) > TOLD:
        screen.say(f"{screen.mark('failed')}and {len(rest) - TOLD} more")
        for r in rest[TOLD:]:
            screen.say(screen.dim(f"  {r.claim}"))
        screen.say()
    if unwritten:
        _unwritten(screen, run, unwritten)


def _unwritten(screen: Screen, run: Run, results: list[Result]) -> None:
    """One message for all checks that came to a body that is still to be written."""
    many = len(results)
    if many == len(run.results) and many > 1:
        screen.say(f"{screen.mark('failed')}Nothing of {run.file} is written yet: {many} checks wait for it.")
    else:
        screen.say(f"{screen.mark('failed')}{many} check{'s' * (many > 1)} came to what is not written yet:")
    lines: dict[str, int] = {}
    for r in results:
        lines[r.where] = lines.get(r.where, 0) + 1
    for where, count in sorted(lines.items(), key=lambda at: int(at[0].rpartition(":")[2] or 0)):
        if where:
            many_of = f"  ({count})" if len(lines) > 1 else ""
            screen.say(f"  {screen.pad(_enclosing(where), 44)}  {screen.dim(where + many_of)}")
    screen.say()


def _enclosing(where: str) -> str:
    """Class.function that holds a line."""
    name, _, line = where.rpartition(":")
    names: list[tuple[int, str]] = []
    for text in linecache.getlines(str(ROOT / name))[: int(line)]:
        if match := re.match(r"( *)(?:async )?(?:def|class) (\w+)", text):
            indent = len(match[1])
            names = [n for n in names if n[0] < indent] + [(indent, match[2])]
    return ".".join(n for _, n in names)


def _raised(screen: Screen, same: list[Result], traceback: bool) -> None:
    """One exception of the learner's file that nobody asked for, and every check that came to it."""
    r = same[0]
    screen.say(f"{screen.mark('failed')}{screen.paint(r.claim, 31)}")
    screen.paragraph(f"Your file raised {r.reason.rstrip('.')}.", most=DETAIL)
    screen.say(f"  At {r.where}, in {_enclosing(r.where) or 'the file itself'}:")
    _source(screen, r.where, quiet=True)
    if r.probably and len(same) == 1:
        screen.paragraph(f"Probably: {r.probably.rstrip('.')}.")
    if len(same) > 1:
        screen.say("  also in:")
        for other in same[1:]:
            screen.say(f"    {other.claim}")
    if traceback:
        _traceback(screen, r)
    screen.say()


def _failure(screen: Screen, run: Run, r: Result, traceback: bool, verbose: bool) -> None:
    screen.say(f"{screen.mark('failed')}{screen.paint(r.claim, 31)}")
    if r.measures and not passes((m := r.measures[-1]).gate, m.value):  # a number that misses its gate is the last one
        name = "" if m.name == r.claim else f"{m.name}: "
        screen.say(f"  {name}measured {screen.bold(figure(m.value, m.unit, m.gate))}, must be {must(m.gate, m.unit)}")
    screen.say()
    if r.probably:
        screen.paragraph(f"Probably: {r.probably.rstrip('.')}.")
    if where := place(r):
        screen.say(f"  Look at {where}, in {_enclosing(where) or 'the file itself'}:")
        _source(screen, where, quiet=True)
    elif names := [name for name, _ in r.ran if not name.endswith("__init__")]:
        screen.paragraph(f"It ran {', '.join(names)}.")
    if r.reason:
        if r.probably:
            screen.say()
        screen.paragraph(r.reason, most=0 if verbose else DETAIL)
    if traceback and r.traceback:
        _traceback(screen, r)
    screen.say()


def place(r: Result) -> str:
    """File and line of the learner's that a failure points to, "" where it points to none."""
    return r.where


def first_to_mend(failed: list[Result]) -> Result:
    """What raised, then the failure that points to the least code."""
    return min(failed, key=lambda r: 0 if r.raised else 1 if place(r) else len(r.ran) or 1000)


def _source(screen: Screen, where: str, quiet: bool = False) -> None:
    name, _, line = where.rpartition(":")
    if not name:
        return
    if not quiet:
        screen.say(f"  {where}")
    text = linecache.getline(str(ROOT / name), int(line)).strip()
    if text:
        screen.say(screen.dim(f"      {text[: WIDTH - 6]}"))


def _traceback(screen: Screen, r: Result) -> None:
    screen.say()
    for line in r.traceback.rstrip().splitlines():
        screen.say(f"  {line}")


def _number(screen: Screen, run: Run) -> None:
    """The stage's leading figure, against what it is compared with and against the learner's best."""
    if (found := run.number()) is None or found[0].verdict != "passed":
        return
    r, m = found
    said = f"{r.claim}: {figure(m.value, m.unit, m.gate)}"
    if m.baseline is not None:
        of = f" of {m.against}" if m.against else ""
        said += f", compared with {figure(m.baseline, m.unit, m.gate)}{of}"
    others = [o for o in r.measures if o is not m and o.name != r.claim][-NUMBERS:]
    said += "".join(f"; {o.name}: {figure(o.value, o.unit, o.gate)}" for o in others)
    screen.paragraph(said + ".", indent="")
    old = run.before.get((r.name, m.name))
    if old is not None and m.gate[:1] in ("<", ">"):
        change = figure(abs(m.value - old), m.unit, re.sub(r"^\S+ ", "> ", m.gate))
        if m.value == old:
            screen.say("As good as your best.")
        else:
            screen.say(f"{change} {'better than' if better(m, old) else 'short of'} your best.")


def _not_measured(screen: Screen, run: Run) -> None:
    groups: dict[str, int] = {}
    for r in run.of("not measured"):
        groups[r.reason] = groups.get(r.reason, 0) + 1
    for reason, many in groups.items():
        screen.paragraph(f"{many} of {len(run.results)} not measured: {reason}.", indent="")
    needs = {c.name: c.needs for c in run.stage.claims(run.track)}
    lacking = run.of("not measured")
    if lacking and not run.of("failed") and all(needs.get(r.name) for r in lacking) and run.origin == "app":
        when = "where triton is" if all(r.reason == NO_TRITON for r in lacking) else "when a GPU is there"
        told = f"Neither passed nor failed: ./vc submit banks this stage as provisional, and offers it again {when}."
        screen.paragraph(told, indent="", style="dim")
