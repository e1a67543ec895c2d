"""`./vc submit` banks a stage that is green; `./vc resume` finds in the commits what was banked before."""

from __future__ import annotations

from course.runner import guide, repository
from course.runner.arguments import Parser, stage_here
from course.runner.checking import Result
from course.runner.declaration import Stage, Track, ladder
from course.runner.problems import Refused
from course.runner.progress import Progress, changing, load, sha256
from course.runner.report import Run, show
from course.runner.terminal import Screen
from course.runner.testing import counting, keep, must_have_file, run_checks
from course.runner.worker import NO_TRITON

QUIET = "close what else is running, plug the machine in, and try again; ./vc test asks as often as you like"


def main(verb: str, arguments: list[str]) -> int:
    return submit(arguments) if verb == "submit" else resume(arguments)


# --- what a run allows --------------------------------------------------------------------------------------------------


def verdict(run: Run) -> tuple[str, str]:
    """("banked" | "provisional" | "refused", why). A check counts as GPU-only, or as one for a library that this system lacks,
    by its `needs`; anything else that was not measured is missing."""
    declared = run.stage.claims(run.track)
    needs = {c.name: c.needs for c in declared}
    if sorted(r.name for r in run.results) != sorted(needs):
        return "refused", f"{len(run.results)} of {len(declared)} checks were run"
    if failed := run.of("failed"):
        return "refused", f"{len(failed)} of {len(declared)} checks failed"
    missing = run.of("not measured")
    if busy := [r for r in missing if r.busy]:
        return "refused", f"the machine was too busy for a verdict on {_claims(busy)}: {QUIET}"
    if required := [r for r in missing if not needs[r.name]]:
        return "refused", f"not measured: {_claims(required)} ({required[0].reason})"
    if not run.of("passed") and any(r.reason != NO_TRITON for r in missing):
        return "refused", "nothing was measured"
    return ("provisional", _claims(missing)) if missing else ("banked", "")


def _claims(results: list[Result]) -> str:
    return "; ".join(r.claim for r in results)


# --- submit -------------------------------------------------------------------------------------------------------------


def submit(arguments: list[str]) -> int:
    parser = Parser("submit", "Runs the checks of the stage you are at, or of stage n; all green: banks it and commits app/.")
    parser.add_argument("stage", nargs="?", metavar="n")
    given = parser.parse_args(arguments)
    progress = load()
    track = progress.track
    stage = stage_here(given.stage, track, progress)
    must_have_file(stage, track)
    screen = Screen()
    checked = sha256(stage.file(track))
    run = run_checks(stage, track, "app", [c.name for c in stage.claims(track)], counting(screen))
    predicted = keep(run, True)
    show(screen, run)
    if predicted:
        screen.say(predicted)
    outcome, why = verdict(run)
    if sha256(stage.file(track)) != checked:
        outcome, why = "refused", f"app/{stage.file(track).name} changed while it was checked"
    if outcome == "refused":
        screen.say()
        screen.paragraph(f"Not banked: {why}.", "")
        screen.next(f"./vc test {stage.id.lstrip('0')}")
        return 1
    with changing() as progress:
        in_order = progress.current(track) == stage
        progress.bank(stage, track, outcome == "provisional")
    screen.say()
    screen.say(
        f"Banked: {stage.id}, {stage.title}." if outcome == "banked" else f"Banked as provisional: {stage.id}, {stage.title}."
    )
    if outcome == "provisional":
        there = "where triton is" if all(r.reason == NO_TRITON for r in run.of("not measured")) else "when there is a GPU"
        screen.paragraph(f"The rest is offered again {there}.", "", "dim")
    _commit(screen, stage, track)
    if stage.part and track == "torch":
        screen.paragraph(f"app/{stage.file(track).name} now plays as {stage.part} in ./vc serve, chat and generate.", "")
    _after(screen, progress, stage, track, in_order)
    return 0


def _after(screen: Screen, progress: Progress, stage: Stage, track: Track, in_order: bool) -> None:
    """What comes next: the guide of the following stage; one line where the stage was banked out of order."""
    open_ = [s for s in ladder()[1] if s.is_here(track) and progress.banked(s, track) is None]
    if not open_:
        screen.say()
        screen.say("That was the last stage of this version.")
        screen.next("./vc serve", "   your own files in the running engine")
        return
    following = next((s for s in open_ if s.id > stage.id), open_[0])
    if not in_order:
        screen.next(f"./vc guide {following.id.lstrip('0')}", f"   {following.title}")
        return
    screen.say()
    guide.show(screen, following, track)


def _commit(screen: Screen, stage: Stage, track: Track) -> None:
    """Commits app/ and notes the commit; a line says why where there is none."""
    subject = f"Stage {stage.id}: {stage.title}"
    try:
        made, new = repository.commit(subject, f"{stage.id} {track}")
    except repository.NoCommit as no:
        first, *more = str(no).split("\n")
        screen.say(f"Not committed: {first}")
        for line in more:
            screen.say(line)
        screen.say(screen.dim(f"./vc submit {stage.id.lstrip('0')} commits it, once that is mended."))
        return
    with changing() as progress:
        if (entry := progress.banked(stage, track)) is not None:
            entry["commit"] = made
    screen.say(screen.dim(f"Committed {made[:9]}: {subject}" if new else f"Committed before, and unchanged: {made[:9]}"))
    if repository.git("symbolic-ref", "--quiet", "HEAD").returncode:
        screen.paragraph("HEAD is detached, so no branch holds that commit: git switch -c NAME gives it one.", "")


# --- resume -------------------------------------------------------------------------------------------------------------


def resume(arguments: list[str]) -> int:
    Parser("resume", "Rebuilds progress in a fresh clone from your commits, and runs the checks again.").parse_args(arguments)
    screen = Screen()
    try:
        told = repository.banked()
    except repository.NoCommit as no:
        raise Refused(str(no)) from None
    stages = {s.id: s for s in ladder()[1]}
    open_ = [(stages[b.stage], b) for b in sorted(told, key=lambda b: (b.stage, b.track)) if b.stage in stages]
    if not open_:
        shallow = "; this clone is shallow: git fetch --unshallow brings the rest" if repository.is_shallow() else ""
        screen.say(f"No commit of this branch says that a stage was banked{shallow}.")
        return 0
    bad = 0
    seen: set[tuple[str, bool]] = set()
    for stage, b in open_:
        track: Track = "jax" if b.track == "jax" else "torch"
        if (stage.id, stage.shared) in seen and stage.shared:
            continue
        seen.add((stage.id, stage.shared))
        bad += not _again(screen, stage, track, b)
    screen.next("./vc")
    return int(bad > 0)


def _again(screen: Screen, stage: Stage, track: Track, b: repository.Banked) -> bool:
    """Runs a stage's checks and banks it where they allow; answers whether they did."""
    label = f"{stage.id}  {stage.title}"
    if not stage.is_here(track):
        screen.say(f"  {screen.mark('not measured')}{label}: not in this version, {track} track")
        return False
    if not stage.file(track).is_file():
        screen.say(f"  {screen.mark('failed')}{label}: app/{stage.file(track).name} is not there")
        return False
    run = run_checks(stage, track, "app", [c.name for c in stage.claims(track)])
    keep(run, True)
    outcome, why = verdict(run)
    if outcome == "refused":
        screen.say(f"  {screen.mark('failed')}{label}: {why}; ./vc test {stage.id.lstrip('0')}")
        return False
    with changing() as progress:
        progress.bank(stage, track, outcome == "provisional", b.commit, b.at)
    screen.ends(
        f"  {screen.mark('passed')}{label}", screen.dim(f"{outcome}, {len(run.of('passed'))} passed  {run.seconds:.1f} s")
    )
    return True
