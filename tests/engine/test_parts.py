"""The composition root: whose file plays a part, and what is said of one that cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from cutaway.backends.fake import FakeBackend
from cutaway.core.errors import CutawayError
from cutaway.engine.engine import Engine
from cutaway.engine.faults import find
from cutaway.engine.parts import Parts
from looping import LIMITS, a_request


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        ("x = 1\ndef split(:\n", ", line 2", "SyntaxError"),
        ("x = 1\n\nraise ValueError('no\\nway')\n", ", line 3", "ValueError: no way"),
        ("import nothing_of_this_name\n", ", line 1", "ModuleNotFoundError"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_named_with_part_stage_and_line(
    tmp_path: Path, text: str, where: str, what: str
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(text)
    with pytest.raises(CutawayError) as error:
        Parts({"chunked": str(file)}).get("chunked")
    line = str(error.value)
    assert line.startswith(f"{file}{where}: cannot be the part chunked (stage 11)")
    assert what in line
    assert "\n" not in line


def test_a_file_for_two_parts_is_checked_for_each(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def split(pending, budget, chunk):\n    return list(pending)\n")
    parts = Parts({"chunked": str(file), "scheduler": str(file)})
    assert parts.get("chunked").split([3], 9, 9) == [3]
    with pytest.raises(CutawayError, match="cannot be the part scheduler: it does not define Scheduler"):
        parts.get("scheduler")


def test_a_class_without_a_method_of_its_part_is_refused_before_it_is_needed(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("from cutaway.core.scheduler import Scheduler as S\nclass Scheduler(S):\n    abort = None\n")
    with pytest.raises(CutawayError, match=r"it does not define Scheduler\.abort$"):
        Parts({"scheduler": str(file)}).get("scheduler")


def test_a_feature_that_a_file_lacks_is_the_references_and_said(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("SUPPORTS = {'top_k'}\npenalize = keep = noise = sample = print\n")
    parts = Parts({"sampler": str(file)})
    assert parts.get("sampler").sample is print
    assert parts.get("sampler", {"top_k"}).sample is print
    assert parts.get("sampler", {"top_k", "min_p"}).__name__ == "cutaway.backends.torch.sampler"
    assert parts.report()["sampler"]["reference_served"] == ["min_p"]
    assert parts.report()["sampler"]["source"] == str(file)


def test_calls_of_a_part_can_be_observed() -> None:
    seen: list[tuple[str, object]] = []
    parts = Parts(observe={"blocks": lambda name, args, kwargs, result: seen.append((name, result))})
    allocator = parts.get("blocks").BlockAllocator(4)
    ids = allocator.allocate(2)
    allocator.free(ids)
    assert seen == [("BlockAllocator.allocate", [1, 2]), ("BlockAllocator.free", None)]


def test_unknown_parts_are_refused() -> None:
    with pytest.raises(CutawayError, match="no part called nose; the parts are blocks, attention"):
        Parts({"nose": "x.py"})


def test_a_fault_in_somebodys_part_is_said_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from cutaway.core.scheduler import Scheduler as S\n"
        "class Scheduler(S):\n    def schedule(self):\n        return self.nothing\n"
    )
    parts = Parts({"scheduler": str(file)})
    engine = Engine(FakeBackend(20, 4), parts, LIMITS)
    engine.add(a_request())
    with pytest.raises(AttributeError) as error:
        engine.step()
    fault = find(parts, error.value)
    assert fault is not None
    assert (fault.parts, fault.hung) == (["scheduler"], False)
    assert str(fault).startswith(f"{file}, line 4, in schedule (part scheduler, stage 10): AttributeError: ")
    assert find(Parts(), error.value) is None
