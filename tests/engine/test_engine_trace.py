"""The trace: what is written, its schema, and what two traces differ in."""

from __future__ import annotations

import io
import json
from importlib import resources
from pathlib import Path

import jsonschema
import pytest

from cutaway.backends.fake import FakeBackend
from cutaway.core.errors import CutawayError
from cutaway.core.plan import Limits
from cutaway.core.request import Request, SamplingParams
from cutaway.engine.engine import Engine
from cutaway.engine.parts import Parts
from cutaway.engine.trace import TraceWriter, diff_traces, read_trace

LIMITS = Limits(rows=3, budget=16, chunk=8, window=200, block_size=4)


def traced(times: bool = False, num_blocks: int = 12, depth: int = 0, offset: int = 0, abort: bool = True) -> list[dict]:
    """A small trace with chunks, hits, preemptions, an abort of a running request; `offset` renames the requests."""
    file = io.StringIO()
    engine = Engine(FakeBackend(num_blocks, 4), Parts(), LIMITS, depth=depth, trace=TraceWriter(file, times))
    params = SamplingParams(temperature=0, max_tokens=14)
    for id in range(4):
        engine.add(Request(offset + id, list(range(10 + id)), params))
    step = 0
    while engine.has_work:
        engine.step()
        step += 1
        if abort and step == 9:
            engine.abort([engine.scheduler.running[0].id])
    return [json.loads(line) for line in file.getvalue().splitlines()]


def schema() -> dict:
    return json.loads(resources.files("cutaway.server").joinpath("trace.schema.json").read_text())


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("times", [False, True])
def test_every_line_is_valid(depth: int, times: bool) -> None:
    jsonschema.Draft202012Validator.check_schema(schema())
    validator = jsonschema.Draft202012Validator(schema())
    records = traced(times=times, depth=depth)
    for record in records:
        validator.validate(record)
        assert ("times" in record) == times
    assert [record["step"] for record in records] == list(range(len(records)))
    assert sum(len(record["preempted"]) for record in records) > 0
    assert sorted(id for record in records for id in record["finished"]) == [0, 1, 2, 3]


def test_the_schema_refuses_what_is_not_in_the_format() -> None:
    validator = jsonschema.Draft202012Validator(schema())
    record = traced()[0]
    for wrong in ({**record, "extra": 1}, {**record, "free": -1}, {k: v for k, v in record.items() if k != "hits"}):
        assert not validator.is_valid(wrong)
    wrong_row = {**record["rows"][0], "slot": 3}
    assert not validator.is_valid({**record, "rows": [wrong_row]})


def test_the_first_lines_say_what_was_decided() -> None:
    first, second = traced(num_blocks=40)[:2]
    assert first == {
        "step": 0,
        "budget": 16,
        "rows": [
            {"id": 0, "start": 0, "n": 8, "drafts": 0, "accepted": 0, "blocks": [1, 2, 3]},
            {"id": 1, "start": 0, "n": 8, "drafts": 0, "accepted": 0, "blocks": [4, 5, 6]},
        ],
        "waiting": [2, 3],
        "preempted": [],
        "admitted": [0, 1],
        "finished": [],
        "copies": [],
        # both computed the same two blocks: the second's own went back when they were published
        "free": 40 - 1 - 4,
        "cached": 0,
        "used": 5,
        "hits": 0,
    }
    assert second["rows"] == [
        {"id": 0, "start": 8, "n": 2, "drafts": 0, "accepted": 0, "blocks": [1, 2, 3]},
        {"id": 1, "start": 8, "n": 3, "drafts": 0, "accepted": 0, "blocks": [1, 2, 6]},
        {"id": 2, "start": 8, "n": 4, "drafts": 0, "accepted": 0, "blocks": [1, 2, 4, 5]},
    ]
    assert second["hits"] == 8 and second["admitted"] == [2] and second["waiting"] == [3]


def test_ids_are_numbered_in_order_of_appearance() -> None:
    assert traced(offset=700) == traced()


def test_equal_traces_have_no_difference_whatever_the_names_and_times() -> None:
    records = traced(times=True)
    renamed = [
        {
            **record,
            "rows": [{**row, "id": row["id"] + 5, "blocks": [100 - b for b in row["blocks"]]} for row in record["rows"]],
            **{name: [id + 5 for id in record[name]] for name in ("waiting", "preempted", "admitted", "finished")},
            "times": {"submitted": 0, "collected": 0},
        }
        for record in records
    ]
    assert diff_traces(records, renamed) is None
    assert diff_traces(records, records) is None
    assert diff_traces([], []) is None


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("free", 99, "step 3: free is 0 in the first, 99 in the second"),
        ("hits", 4, "step 3: hits is 0 in the first, 4 in the second"),
        ("waiting", [2, 3], None),
    ],
)
def test_the_first_difference_names_step_field_and_values(field: str, value: object, said: str | None) -> None:
    records = traced()
    other = [dict(record) for record in records]
    said = said or f"step 3: {field} is {records[3][field]} in the first, {value} in the second"
    said = said.replace("free is 0", f"free is {records[3]['free']}")
    other[3][field] = value
    other[5]["budget"] = 1
    assert diff_traces(records, other) == said


def test_a_difference_in_a_row_is_named() -> None:
    records = traced()
    other = json.loads(json.dumps(records))
    other[1]["rows"][1]["n"] += 1
    n = records[1]["rows"][1]["n"]
    assert diff_traces(records, other) == f"step 1: row of request 1: n is {n} in the first, {n + 1} in the second"
    del other[0]["rows"][1]
    assert diff_traces(records, other) == "step 0: requests in rows is [0, 1] in the first, [0] in the second"


def test_a_trace_that_ends_early_differs() -> None:
    records = traced()
    assert diff_traces(records, records[:4]) == "step 4: the second trace has ended, the other goes on"
    assert diff_traces(records[:2], records) == "step 2: the first trace has ended, the other goes on"


def test_a_swapped_block_is_seen() -> None:
    records = traced()
    other = json.loads(json.dumps(records))
    other[2]["rows"][0]["blocks"][0] = other[2]["rows"][0]["blocks"][1]
    assert "step 2: row of request 0: blocks is" in diff_traces(records, other)


def test_reading_back_and_what_is_not_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    records = traced()
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert list(read_trace(path)) == records
    path.write_text(json.dumps(records[0]) + "\nnot json\n")
    with pytest.raises(CutawayError, match=r"a\.jsonl, line 2: not a step of a trace"):
        list(read_trace(path))
    for line in ("[]", "3", '{"step": 1}', '{"rows": 3}'):
        path.write_text(line)
        with pytest.raises(CutawayError, match="line 1: not a step of a trace"):
            list(read_trace(path))
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CutawayError, match="cannot read the trace"):
        list(read_trace(path))
    with pytest.raises(CutawayError, match=r"cannot read the trace .*No such file"):
        list(read_trace(tmp_path / "none"))


def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(CutawayError, match=r"cannot write the trace to .*No such file"):
        TraceWriter(tmp_path / "none" / "a.jsonl")


def test_the_file_holds_each_finished_step(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    writer = TraceWriter(path)
    engine = Engine(FakeBackend(12, 4), Parts(), LIMITS, trace=writer)
    engine.add(Request(3, [1, 2, 3], SamplingParams(temperature=0, max_tokens=3)))
    engine.step()
    assert len(list(read_trace(path))) == 1  # a crash now would leave it
    while engine.has_work:
        engine.step()
    writer.close()
    assert [record["finished"] for record in read_trace(path)] == [[], [], [0]]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("depth", [0, 1])
def test_a_full_disk_ends_the_trace_and_not_the_serving(depth: int, capfd: pytest.CaptureFixture[str]) -> None:
    engine = Engine(FakeBackend(12, 4), Parts(), LIMITS, depth=depth, trace=TraceWriter("/dev/full"))
    for id in range(2):
        engine.add(Request(id, [1], SamplingParams(temperature=0, max_tokens=4)))
    outputs = [output for _ in range(20) if engine.has_work for output in engine.step()]
    assert sum(len(output.token_ids) for output in outputs) == 8
    assert all(output.error is None for output in outputs) and not engine.has_work
    said = "cannot write the trace to /dev/full: No space left on device; later steps are not traced\n"
    assert capfd.readouterr() == ("", said)


class Keeping(dict[int, int]):
    """Names that are never dropped."""

    def pop(self, *_: object) -> None: ...


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_names_of_requests_that_have_ended_are_dropped_and_no_line_differs(depth: int) -> None:
    written: list[str] = []
    for names in (dict[int, int](), Keeping()):
        file = io.StringIO()
        writer = TraceWriter(file)
        writer._names.requests = names
        engine = Engine(FakeBackend(12, 4), Parts(), LIMITS, depth=depth, trace=writer)
        for id in range(100, 150):
            engine.add(Request(id, [id, 1], SamplingParams(temperature=0, max_tokens=2 + id % 3)))
            engine.step()
            if id % 10 == 0:
                engine.abort([id])
        while engine.has_work:
            engine.step()
        written.append(file.getvalue())
        assert writer._names.num_requests == 50
        assert len(names) == 50 if isinstance(names, Keeping) else len(names) <= LIMITS.rows * (1 + depth)
    assert written[0] == written[1]
    ended = [id for line in written[0].splitlines() for id in json.loads(line)["finished"]]
    assert sorted(ended) == list(range(50))
