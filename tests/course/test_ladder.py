"""The ladder as it is declared: stages, checks, stubs and planted faults of this checkout. Whether the answers pass and the
faults are caught is what `./vc verify` runs beside these tests (`course/runner/proving.py`).
"""

from __future__ import annotations

import ast
import io
import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
sys.path.append(str(ROOT))

from course.runner.checking import passes  # noqa: E402
from course.runner.declaration import Stage, ladder  # noqa: E402
from course.runner.faults import answer_path, faults_of  # noqa: E402
from course.runner.guide import public_names, show  # noqa: E402
from course.runner.proving import DECLARED  # noqa: E402
from course.runner.terminal import Screen  # noqa: E402

HERE = [s for s in ladder()[1] if s.id in DECLARED["torch"]]
MEASURED = 0.6  # of a stage's checks carry a number of the run
PART_FILES = {
    "blocks",
    "prefix_cache",
    "scheduler",
    "chunked",
    "attention",
    "sampler",
    "detokenizer",
    "async_engine",
    "metrics",
}
each_stage = pytest.mark.parametrize("stage", HERE, ids=lambda s: s.id)


def test_the_ladder_has_twenty_stages_in_seven_arcs() -> None:
    arcs, stages = ladder()
    assert [s.id for s in stages] == [f"{n:02}" for n in range(1, 21)]
    assert [s.arc for s in stages] == sorted(s.arc for s in stages)
    assert {s.arc for s in stages} == {a.id for a in arcs}
    assert all(1 <= s.stars <= 5 for s in stages)
    assert {s.id for s in stages if s.shared} == {"06", "09", "10", "11", "14", "15", "16", "17", "19"}
    assert {s.part for s in stages} - {""} == PART_FILES
    assert [s.id for s in stages if s.is_here("torch")] == list(DECLARED["torch"])


@each_stage
def test_a_stage_is_whole(stage: Stage) -> None:
    claims = stage.claims("torch")
    assert len(claims) == DECLARED["torch"][stage.id]
    assert len({c.claim for c in claims}) == len(claims)
    assert all(0 < len(c.claim) <= 40 for c in claims), claims
    assert stage.number in {c.name for c in claims}
    assert next(c for c in claims if c.name == stage.number).gate or stage.number
    assert stage.why and stage.deliver and stage.measure
    assert stage.file("torch").is_file()
    assert answer_path(stage).is_file()
    for c in claims:
        passes(c.gate, 0.0)  # is a gate


@each_stage
def test_most_checks_carry_a_number(stage: Stage) -> None:
    """Counted in the source: calls of `measure` and `ratio`, also through helpers of the stage."""
    tree = ast.parse(stage.checks_file("torch").read_text(encoding="utf-8"))
    helpers = [stage.folder / "helpers.py"] if (stage.folder / "helpers.py").is_file() else []
    functions = {
        n.name: n
        for t in (tree, *(ast.parse(h.read_text()) for h in helpers))
        for n in t.body
        if isinstance(n, ast.FunctionDef)
    }

    def measures(name: str, seen: frozenset[str] = frozenset()) -> bool:
        for node in ast.walk(functions[name]):
            if isinstance(node, ast.Attribute) and node.attr in ("measure", "ratio"):
                return True
            known = isinstance(node, ast.Name) and node.id in functions and node.id not in seen | {name}
            if known and measures(node.id, seen | {name}):
                return True
        return False

    names = [c.name for c in stage.claims("torch")]
    assert sum(measures(n) for n in names) >= MEASURED * len(names)


@each_stage
def test_planted_faults_fit_the_answer_and_name_its_checks(stage: Stage) -> None:
    faults = faults_of(stage)
    names = {c.name for c in stage.claims("torch")}
    assert len(faults) >= 4
    assert len({f.name for f in faults}) == len(faults)
    for fault in faults:
        assert fault.caught_by, fault.name
        assert set(fault.caught_by) <= names, fault.name
        edited = ROOT / fault.file if fault.file else answer_path(stage)
        compile(fault.apply(edited.read_text(encoding="utf-8")), fault.name, "exec")
    lost = names - {n for f in faults for n in f.caught_by} - {c.name for c in stage.claims("torch") if c.needs == "gpu"}
    assert not lost, f"no planted fault is caught by {lost}"


def is_stub(stage: Stage) -> bool:
    """A file that a learner has written is none of ours."""
    return "raise NotImplementedError" in stage.file("torch").read_text(encoding="utf-8")


@cache
def on_the_stub(id: str) -> list[dict[str, Any]]:
    """The checks' verdicts on app/, as somebody sees them who has written nothing; progress is left alone."""
    code = (
        "import json, sys; from course.runner.declaration import stage; from course.runner.session import Job, results;"
        f"s = stage({id!r}); job = Job([c.name for c in s.claims('torch')]);"
        "print(json.dumps([[r.name, r.verdict, r.where] for _, r in results(s, 'torch', 'app', [job])]))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=ROOT, timeout=300, check=True
    )
    return [{"name": n, "verdict": v, "where": w} for n, v, w in json.loads(done.stdout)]


@pytest.mark.slow
@each_stage
def test_every_check_fails_on_the_stub(stage: Stage) -> None:
    if not is_stub(stage):
        pytest.skip(f"app/{stage.file('torch').name} is somebody's work")
    found = on_the_stub(stage.id)
    assert len(found) == DECLARED["torch"][stage.id]
    unmeasured = {c.name for c in stage.claims("torch") if c.needs}
    assert [
        r for r in found if r["verdict"] != "failed" and not (r["verdict"] == "not measured" and r["name"] in unmeasured)
    ] == []


@each_stage
def test_a_stub_offers_what_the_answer_offers(stage: Stage) -> None:
    if not is_stub(stage):
        pytest.skip(f"app/{stage.file('torch').name} is somebody's work")
    assert public_names(stage.file("torch"))
    tree = ast.parse(stage.file("torch").read_text(encoding="utf-8"))
    assert len((ast.get_docstring(tree) or "").splitlines()) >= 10, "the docstring is the specification"
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom | ast.Import):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else node.names[0].name
            allowed = (*sys.stdlib_module_names, "numpy", "torch", "triton", "course")
            assert module.split(".")[0] in allowed or module in ("cutaway.core.request", "cutaway.core.plan"), module


@each_stage
def test_a_guide_has_its_three_sections(stage: Stage) -> None:
    text = (stage.folder / "guide.md").read_text(encoding="utf-8")
    first = "Where this begins" if stage.id == "01" else f"How stage {int(stage.id) - 1:02} broke"
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == [first, "What to build", "What you can predict now"]
    fenced = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    lines = io.StringIO()
    show(Screen(lines), stage, "torch")
    assert max(map(len, lines.getvalue().splitlines())) <= 80
    assert "#" not in re.sub(r"^## .+$", "", fenced, flags=re.MULTILINE)
