"""Each verb runs through, says what it must and hands over a file; the figures of so short a run are not looked at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer

import tiny
from cutaway.bench import cpu, drive, front, invariance, memory, peers, report, start
from cutaway.bench.drive import Run
from cutaway.bench.report import Figure
from cutaway.core.errors import CutawayError
from cutaway.engine.config import EngineConfig
from cutaway.engine.parts import Parts

FAKE = ("--backend", "cutaway.backends.fake:create")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("CUTAWAY_FAKE_VOCABULARY", str(tiny.VOCABULARY))
    return str(tiny.write_folder(tmp_path / "model", "llama", max_position_embeddings=1024))


def figures(path: Path) -> dict[str, dict[str, Any]]:
    document = json.loads(path.read_text())
    assert document["quick"]
    assert document["machine"]["cores"] >= 1
    assert document["versions"]["cutaway"]
    return {figure["name"]: figure for figure in document["figures"]}


def test_invariance_finds_equal_ids(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    invariance.run(model, tmp_path / "out.json", quick=True, threads=1)
    assert "greedy ids are equal but for near-ties" in capsys.readouterr().out
    found = {v["name"]: v for v in json.loads((tmp_path / "out.json").read_text())["facts"]["variants"]}
    assert len(found) == 9
    assert not any(v["faults"] for v in found.values())
    assert found["prefix cache, warm"]["note"] == "144 prompt tokens from the cache"  # whole blocks, one token left to compute


def test_invariance_tells_faults_from_near_ties() -> None:
    base = [Run([1, 2, 3], [0.5, 0.5, 0.5]), Run([4, 5, 6], [0.5, 1e-4, 0.5]), Run([7], [1.0])]
    found = invariance.compare("x", base, [Run([1, 9, 9]), Run([4, 8, 8]), Run([7])])
    assert (found.tokens, found.differing, found.near_ties) == (7, 4, 1)
    assert found.faults == ["x: prompt 0 differs at token 1: 9, not 2 (margin 0.5000)"]
    assert invariance.compare("x", base, [base[0], base[1], Run([])]).faults == ["x: prompt 2 gave 0 tokens, not 1"]


def test_cpu(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = cpu.Settings(model=model, dtype="bf16", rounds=1, peer=False, peer_venv=None, threads=1, quick=True, serve=FAKE)
    cpu.run(settings, tmp_path / "out.json")
    out = capsys.readouterr().out
    assert "quoted, not measured here" in out
    assert "--peer" in out
    found = figures(tmp_path / "out.json")
    assert [f["what"] for f in found.values() if "what" in f] == [
        "prefill 512", "decode, 1 row", "decode, 8 rows", "decode, 16 rows", "16 clients over HTTP"
    ]  # fmt: skip
    assert all(f["median"] > 0 for f in found.values())


def test_front(model: str, tmp_path: Path) -> None:
    front.run(model, 1, tmp_path / "out.json", quick=True)
    assert figures(tmp_path / "out.json")["front, CPU time a token"]["gate"] == 1.0


def test_start(model: str, tmp_path: Path) -> None:
    start.run(model, 1, tmp_path / "out.json", quick=True, arguments=FAKE)
    found = figures(tmp_path / "out.json")
    assert 0 < found["ready, warm"]["median"] < found["first token, warm"]["median"]


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="no smaps_rollup on this system")
def test_memory(model: str, tmp_path: Path) -> None:
    memory.run(model, 640, tmp_path / "out.json", quick=True, arguments=FAKE)
    found = figures(tmp_path / "out.json")
    front_now, engine_now = found["PSS of the front at that time"], found["PSS of the engine at that time"]
    assert found["PSS of both, peak under load"]["median"] == pytest.approx(front_now["median"] + engine_now["median"])
    assert min(front_now["median"], engine_now["median"]) > 1


def test_a_server_that_cannot_start_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(CutawayError, match=r"ended with 2 before it was ready: .*no-such-model"):
        start.once(str(tmp_path / "no-such-model.gguf"), FAKE)


def test_one_backend_serves_engines_one_after_the_other(model: str) -> None:
    """The fake backend asserts that a slot is released before it is taken again."""
    parts = Parts()
    config = EngineConfig(model=model, backend=FAKE[1], kv_blocks=64)
    backend = drive.open_backend(config, parts)
    ids = [drive.drive(drive.engine(backend, parts, blocks=n), [drive.request(0, [5, 6, 7], 9)])[0].ids for n in (64, 3, 64)]
    assert ids[0] == ids[1] == ids[2]
    assert len(ids[0]) == 9


def test_figures_and_their_gates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    low, high = Figure("a", "ms", [3.0, 1.0, 2.0], "lower", gate=2.0), Figure("b", "t/s", [1.0], gate=2.0)
    assert (low.median, low.passed, high.passed, Figure("c", "", [1.0]).passed) == (2.0, True, False, None)
    report.finish("x", [low], json_path=tmp_path / "a.json", quick=False)
    with pytest.raises(typer.Exit) as missed:
        report.finish("x", [low, high], json_path=tmp_path / "b.json", quick=False)
    assert missed.value.exit_code == 1
    assert capsys.readouterr().out.splitlines()[-1].split() == ["b", "1", "1", "1", "1", "t/s", "≥", "2", "MISSED"]
    assert [report.number(x) for x in (0, 0.012345, 1.5, 23.46, 12345.6)] == ["0", "0.0123", "1.5", "23.5", "12,346"]


def test_quoted_rows_are_whole() -> None:
    assert {len(row) for row in peers.QUOTED} == {5}
    assert "not measured here" in peers.QUOTED_NOTE
