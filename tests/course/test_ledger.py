"""`./vc ledger`: its counts on a tiny workload, factors and product, whose files ran, the drawing, what is kept."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as xml
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from course.runner import ledger, ledger_rows, ledger_values, ledger_workload  # noqa: E402
from course.runner.ledger_picture import svg  # noqa: E402
from course.runner.problems import Problem  # noqa: E402

PROMPTS = [[*range(40, 72), *range(n, n + own)] for n, own in ((100, 5), (200, 9), (300, 2), (400, 7))]
ANSWERS = [4, 9, 2, 3]
IDS = sum(ANSWERS)
TINY = ledger_workload.Workload(PROMPTS, ANSWERS, shared=32, window=64, memory=128, budget=64, slices=24)
FIELDS = {
    "id", "stage", "name", "source", "yours", "tokens_per_second", "seconds", "passes", "positions", "bytes_per_token",
    "factor", "rows_mean", "rows_most", "slots_held", "slots_written", "prefill_tokens", "worst_gap_ms", "differ", "rounds",
}  # fmt: skip


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    threads = torch.get_num_threads()
    monkeypatch.setattr(ledger_values, "ROOT", tmp_path)
    monkeypatch.setattr(ledger_workload, "of_random_ids", lambda _: TINY)
    monkeypatch.setattr(ledger, "banked_files", dict)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ledger_workload, "of_random_ids", lambda _: TINY)
        return ledger.document({}, quick=True, threads=1)


def test_factors_multiply_to_the_product(found: dict[str, Any]) -> None:
    rows = found["rows"]
    assert [r["id"] for r in rows] == ["naive", "cache", "static", "continuous", "paged", "prefix", "chunked", "engine"]
    assert math.prod(r["factor"] for r in rows) == pytest.approx(found["product"])
    assert rows[0]["factor"] == 1
    for before, row in pairwise(rows):
        assert row["factor"] == pytest.approx(row["tokens_per_second"] / before["tokens_per_second"])
    assert all(r["tokens_per_second"] == pytest.approx(IDS / r["seconds"]) for r in rows)


def test_what_is_counted(found: dict[str, Any]) -> None:
    rows = {r["id"]: r for r in found["rows"]}
    prompts = sum(map(len, PROMPTS))
    assert rows["naive"]["passes"] == rows["cache"]["passes"] == IDS
    assert rows["naive"]["positions"] == sum(len(p) * g + g * (g - 1) // 2 for p, g in zip(PROMPTS, ANSWERS, strict=True))
    assert rows["cache"]["positions"] == rows["continuous"]["positions"] == rows["paged"]["positions"] == prompts + IDS - 4
    assert rows["static"]["passes"] == 9 + 3  # two batches of two reserved places
    assert rows["static"]["positions"] == 2 * (41 + 8) + 2 * (39 + 2)  # padding and ended rows included
    assert rows["cache"]["prefill_tokens"] == rows["paged"]["prefill_tokens"] == prompts
    assert rows["prefix"]["prefill_tokens"] < prompts
    assert (rows["continuous"]["rows_most"], rows["continuous"]["slots_held"]) == (2, 128)
    assert rows["paged"]["rows_most"] == 2  # 128 slots in blocks of 16 hold two of these, too
    assert rows["prefix"]["rows_most"] == 4
    for r in found["rows"]:
        assert r["slots_written"] <= r["slots_held"] <= 128 or r["id"] == "naive"
        assert (r["differ"], r["source"], r["yours"]) == (0, "reference", [])


def test_bytes_are_weights_a_pass_and_keys_looked_at(found: dict[str, Any]) -> None:
    from course.given.torch_model import load

    model = load()
    kv = 2 * 4 * 2 * 64 * 4  # keys and values, layers, heads, dim, fp32
    contexts = sum(len(p) + n for p, g in zip(PROMPTS, ANSWERS, strict=True) for n in range(g))
    rows = {r["id"]: r for r in found["rows"]}
    assert rows["cache"]["bytes_per_token"] == round((IDS * model.weight_bytes + contexts * kv) / IDS)
    assert rows["continuous"]["bytes_per_token"] < rows["cache"]["bytes_per_token"]


def test_json_has_what_guides_ask_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, found: dict[str, Any]
) -> None:
    monkeypatch.setattr(ledger, "document", lambda *_: found)
    assert ledger.main(["--quick", "--json", "--threads", "1"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {"machine", "date", "commit", "workload", "model", "product", "rows"} <= told.keys()
    assert all(row.keys() == FIELDS for row in told["rows"])
    assert not ledger_values.own_path().exists()  # a quick run is nobody's ledger
    rows = {row["id"]: row for row in told["rows"]}
    text, any_ = ledger_values.fill("{{static.passes:,}} passes, {{engine.factor:.2f}}x", rows)
    assert any_ and "?" not in text and text.startswith("12 passes")
    assert ledger.main(["--json"]) == 0
    capsys.readouterr()
    assert json.loads(ledger_values.own_path().read_text())["rows"] == told["rows"]


def test_table_and_drawing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert ledger.main(["--quick", "--reference", "--threads", "1", "--svg", str(tmp_path / "ledger.svg")]) == 0
    out = capsys.readouterr().out
    assert all(len(line) <= 78 for line in out.splitlines())
    assert "05  continuous batching" in out and "in all" in out and "None of your files ran" in out
    root = xml.parse(tmp_path / "ledger.svg").getroot()
    bars = [float(each.get("width", 0)) for each in root.iter("{http://www.w3.org/2000/svg}rect") if each.get("class") == "bar"]
    assert len(bars) == 8 and min(bars) > 0 and max(bars) == 352
    assert "prefers-color-scheme:dark" in (tmp_path / "ledger.svg").read_text()


def test_names_in_a_drawing_are_escaped(found: dict[str, Any]) -> None:
    xml.fromstring(svg(found | {"machine": 'A <"CPU"> & more'}))


def test_a_learners_files_are_said(tmp_path: Path) -> None:
    mine, broken = tmp_path / "s05.py", tmp_path / "s07.py"
    mine.write_text((ledger_rows.answer_path({s.id: s for s in ledger_rows.ladder()[1]}["05"])).read_text())
    cache = tmp_path / "s09.py"
    cache.write_text((ledger_rows.answer_path({s.id: s for s in ledger_rows.ladder()[1]}["09"])).read_text())
    broken.write_text("def write_kv(*args):\n    pass\n\ndef paged_attention(*args, scale):\n    raise ValueError('not yet')\n")
    told = ledger.document({"05": mine, "07": broken, "09": cache}, quick=True, threads=1)
    rows = {r["id"]: r for r in told["rows"]}
    assert (rows["continuous"]["source"], rows["continuous"]["yours"]) == ("yours", ["05"])
    for id in ("paged", "prefix", "chunked"):
        assert (rows[id]["source"], rows[id]["yours"]) == ("reference", [])
        assert rows[id]["error"] == "ValueError: not yet, s07.py:5"
        assert rows[id]["differ"] == 0
    assert "error" not in rows["engine"] and "error" not in rows["continuous"]
    told = ledger.document({"09": cache}, quick=True, threads=1)
    assert {r["id"]: r["yours"] for r in told["rows"] if r["yours"]} == {id: ["09"] for id in ("prefix", "chunked")}


def test_refusals_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(Problem, match="--threads must be at least 1"):
        ledger.main(["--threads", "0"])
    with pytest.raises(Problem, match="this machine has"):
        ledger.main(["--threads", "100000"])
    with pytest.raises(Problem, match="there is no folder"):
        ledger.main(["--quick", "--svg", str(tmp_path / "nowhere" / "ledger.svg")])
    (tmp_path / "file").write_text("")
    with pytest.raises(Problem, match="cannot be written"):
        ledger.put(tmp_path / "file" / "ledger.json", "{}")
