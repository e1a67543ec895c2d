"""The ladder's own proof, part of `./vc verify`: the answers through every check, the planted faults against those that must
catch them. `--full`: each fault against all checks of its stage, and the table of it all in benchmarks/results/.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

from course.runner.arguments import Parser, stage_named
from course.runner.checking import Result
from course.runner.declaration import ROOT, Stage, Track, ladder
from course.runner.environment import has_gpu
from course.runner.faults import Fault, faults_of
from course.runner.problems import Problem
from course.runner.session import Job, results
from course.runner.terminal import Screen

# Checks of each stage. The number that are run must be this one: a check that is lost does not make the ladder greener.
DECLARED: dict[Track, dict[str, int]] = {
    "torch": {"01": 4, "02": 7, "03": 6, "04": 5, "05": 7, "06": 13, "07": 19, "08": 23, "09": 14, "10": 11, "11": 8},
    "jax": {},
}
SIDE_BY_SIDE = 2  # stages at once


@dataclass
class Proof:
    """What came of one stage: its answer's results, and of each fault the checks that failed."""

    stage: Stage
    answers: list[Result] = field(default_factory=list)
    caught: dict[str, list[str]] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)
    passed: int = 0
    skipped: int = 0
    seconds: float = 0.0

    def judge(self, holds: bool, complaint: str) -> None:
        if holds:
            self.passed += 1
        else:
            self.complaints.append(complaint)


def prove(stage: Stage, track: Track, full: bool) -> Proof:
    """Runs a stage's answer and its faults."""
    began = monotonic()
    proof = Proof(stage)
    names = [c.name for c in stage.claims(track)]
    faults = faults_of(stage, track)
    jobs = [Job(names)]
    for fault in faults:
        wanted = names if full else [n for n in fault.caught_by[:1] if n in names]
        jobs.append(Job(wanted, fault.name))
        proof.caught[fault.name] = []
    not_measured: dict[str, set[str]] = {}
    for job, result in results(stage, track, "answers", jobs):
        if not job.fault:
            proof.answers.append(result)
        elif result.verdict == "failed":
            proof.caught[job.fault].append(result.name)
        elif result.verdict == "not measured":
            not_measured.setdefault(job.fault, set()).add(result.name)
    _judge_answers(proof, track, names)
    for fault in faults:
        _judge_fault(proof, fault, set(names), not_measured.get(fault.name, set()), full)
    if full:
        idle = [n for n in names if not any(n in caught for caught in proof.caught.values()) and n not in _unmeasured(proof)]
        proof.judge(not idle, f"no planted fault is caught by {', '.join(idle)}")
    proof.seconds = monotonic() - began
    return proof


def _unmeasured(proof: Proof) -> set[str]:
    return {r.name for r in proof.answers if r.verdict == "not measured"}


def _judge_answers(proof: Proof, track: Track, names: list[str]) -> None:
    declared = DECLARED[track].get(proof.stage.id)
    ran = [r.name for r in proof.answers]
    proof.judge(sorted(ran) == sorted(names) and len(ran) == declared, f"{len(ran)} checks were run, {declared} are declared")
    proof.judge(proof.stage.number in names, f"its number, {proof.stage.number}, is none of its checks")
    for r in proof.answers:
        if r.verdict == "not measured":
            proof.skipped += 1
        else:
            proof.judge(
                r.verdict == "passed", f"the answer fails {r.name}: {' '.join(f'{r.probably} {r.reason} {r.where}'.split())}"
            )


def _judge_fault(proof: Proof, fault: Fault, names: set[str], not_measured: set[str], full: bool) -> None:
    caught, expected = set(proof.caught[fault.name]), set(fault.caught_by)
    if unknown := expected - names:
        proof.complaints.append(f"fault {fault.name!r} names {', '.join(unknown)}, which is no check")
    elif not expected:
        proof.complaints.append(f"fault {fault.name!r} names no check that catches it")
    elif not full and fault.caught_by[0] in not_measured:
        proof.skipped += 1
    elif full and not caught and expected <= not_measured:
        proof.skipped += 1  # what would catch it could not be measured here: neither caught nor missed
    elif not full:
        proof.judge(fault.caught_by[0] in caught, f"fault {fault.name!r} passes {fault.caught_by[0]}")
    else:
        silent, loud = expected - caught - not_measured, caught - expected
        told = [f"passes {', '.join(sorted(silent))}"] * bool(silent) + [
            f"is caught by {', '.join(sorted(loud))} as well"
        ] * bool(loud)
        proof.judge(not told, f"fault {fault.name!r} {' and '.join(told)}")


def prove_all(stages: list[Stage], track: Track, full: bool) -> Iterator[Proof]:
    """Proofs as they come, a few stages at a time."""
    stop = threading.Event()

    def one(stage: Stage) -> Proof:
        if stop.is_set():
            return Proof(stage)
        try:
            return prove(stage, track, full)
        except (Problem, ValueError) as error:
            return Proof(stage, complaints=[f"cannot be proved: {error}"])

    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        try:
            yield from pool.map(one, stages)
        finally:
            stop.set()


def show(screen: Screen, proof: Proof) -> None:
    verdict = "failed" if proof.complaints else "passed"
    told = f"{len(proof.answers)} checks, {len(proof.caught)} faults" + f", {proof.skipped} not measured" * bool(proof.skipped)
    screen.ends(f"  {screen.mark(verdict)}{proof.stage.id}  {proof.stage.title}", f"{told} {proof.seconds:5.1f} s")
    for complaint in proof.complaints:
        screen.paragraph(complaint, "      ")


def main(arguments: list[str]) -> int:
    parser = Parser("verify", "The answers through every check, the planted faults against what must catch them.")
    parser.add_argument("stage", nargs="*", metavar="n")
    parser.add_argument("--full", action="store_true", help="every fault against all checks; writes the table")
    parser.add_argument("--into", type=Path, metavar="FOLDER", help="with --full: where the table goes, of some stages too")
    parser.add_argument("--counts", type=Path, metavar="FILE", help="where passed, failed and not measured are written")
    given = parser.parse_args(arguments)
    track: Track = "torch"
    stages = [stage_named(n) for n in given.stage] or [s for s in ladder()[1] if s.is_here(track)]
    screen = Screen()
    proofs: list[Proof] = []
    for proof in prove_all(stages, track, given.full):
        show(screen, proof)
        proofs.append(proof)
    passed, failed = sum(p.passed for p in proofs), sum(len(p.complaints) for p in proofs)
    if not given.stage:
        missing = [s for s in DECLARED[track] if s not in {p.stage.id for p in proofs}]
        if missing:
            screen.say(f"  {screen.mark('failed')}not here: stages {', '.join(missing)}")
            failed += len(missing)
    if given.full and (given.into or not given.stage):
        from course.runner.matrix import RESULTS, write

        for path in write(proofs, track, has_gpu(), given.into or RESULTS):
            screen.say(screen.dim(f"  written: {path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}"))
    if given.counts is not None:
        given.counts.write_text(f"{passed} {failed} {sum(p.skipped for p in proofs)}\n")
    else:
        screen.say(f"\n{passed} passed, {failed} failed")
    return int(failed > 0)
