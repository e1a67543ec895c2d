"""The table of `./vc verify --full`."""

from __future__ import annotations

import json
import re
from pathlib import Path

from course.runner.checking import Measure, Result
from course.runner.declaration import stage
from course.runner.matrix import write
from course.runner.proving import Proof


def test_the_table_is_stages_then_checks_with_numbers_then_faults(tmp_path: Path) -> None:
    number = Measure("it fits", 3.4234, "x", "> 3.00", 1.0, "rows")
    results = [
        Result("06", "fits", "it fits", "passed", [Measure("blocks", 1, "blocks"), number], 0.5),
        Result("06", "fast", "fast | on a card", "not measured", reason="needs a GPU"),
        Result("06", "lost", "nothing is lost", "failed", [Measure("nothing is lost", float("nan"))], reason="it is"),
    ]
    caught = {"one | block more": ["fits", "lost"], "nobody sees it": []}
    proof = Proof(stage("06"), results, caught, ["fault 'nobody sees it' passes fits"], 5, 1, 2.0)
    data, readable = write([proof], "torch", False, tmp_path / "new")
    told = json.loads(data.read_text())["stages"][0]["checks"]
    assert told[0]["measures"][1] == {"name": "it fits", "value": 3.4234, "unit": "x", "gate": "> 3.00", "baseline": 1.0,
                                      "against": "rows"}  # fmt: skip
    assert told[2]["measures"][0]["value"] is None
    text = readable.read_text()
    lines = [line.strip("| ") for line in text.replace("\\|", "/").splitlines() if line.startswith("| ")]
    cells = [re.split(r" *\| *", line) for line in lines]
    assert cells[1] == ["06", "Blocks, block tables, free list", "3", "1", "1", "1", "2", "1", "2.0"]
    assert ["it fits", "`fits`", "passed", "3.42x", "> 3.00x", "1.00x of rows", "0.50", "1"] in cells
    assert ["&nbsp;&nbsp;blocks", "", "", "1 block"] in cells
    assert ["fast / on a card", "`fast`", "not measured: needs a GPU", "", "", "", "0.00", "0"] in cells
    assert cells[-2:] == [["one / block more", "2", "`fits`, `lost`"], ["nobody sees it", "0", "none"]]
    assert text.index("## What is wrong") < text.index("# Checks, numbers") < text.index("# Planted faults")
    assert "- stage 06: fault 'nobody sees it' passes fits" in text
