"""Where a failure points: to the function that the check had just called, to none where the run does not say which."""

from __future__ import annotations

import time
import types

import pytest
from conftest import ROOT
from course.runner.checking import Check, Lab, Result
from course.runner.worker import load, run_check

SOURCE = '''"""Counts."""


class Pool:
    def __init__(self):
        self.held = [1, 2, 3]

    @property
    def num_free(self) -> int:
        return 8 - len(self.held)

    def take(self, n: int) -> list[int]:
        ids = list(range(n))
        self.held.extend(ids)
        return ids

    def look(self, n: int) -> list[int]:
        return self.held[:n]

    def back(self, ids: list[int]) -> None:
        for i in ids:
            self.held.remove(i)

    def nothing(self) -> list[int]:
        ...

    def check(self) -> None:
        assert 0 not in self.held, "0 is held"

    def wrong(self, n: int) -> int:
        return n // 0

    def refuses(self) -> None:
        raise ValueError("no")
'''
PATH = ROOT / "app" / "s00_pool.py"  # never written: its lines are only named


@pytest.fixture
def app() -> types.ModuleType:
    return load(PATH, "app_s00_pool", SOURCE)


def run(app: types.ModuleType, function: object) -> Result:
    return run_check(Check("c", "a claim", function, "the usual mistake"), "06", app, "cpu", PATH, lambda _: None)  # type: ignore[arg-type]


def line_of(text: str) -> str:
    return f"app/s00_pool.py:{SOURCE.splitlines().index(text) + 1}"


def fails_after(*calls: str, raises: bool = False) -> object:
    def check(lab: Lab) -> None:
        pool = lab.app.Pool()
        for call in calls:
            if raises and call is calls[-1]:
                lab.raises(IndexError, lambda: eval(f"pool.{call}", {"pool": pool}))  # noqa: B023
            else:
                eval(f"pool.{call}", {"pool": pool})
        lab.expect(False)

    return check


@pytest.mark.parametrize(
    ("calls", "raises", "line"),
    [
        (("take(2)", "num_free"), False, "        return ids"),  # a property is only read
        (("take(2)", "back([0])", "num_free", "check()"), False, "        for i in ids:"),  # so is check
        (("back([1])", "look(1)", "num_free"), False, "        return self.held[:n]"),  # asked, and the state is not right
        (("take(2)", "look(-1)"), True, "        return self.held[:n]"),  # an error that was to be raised, and is not
        (("take(2)", "look(1)"), False, ""),  # two answers, and nothing says which is wrong
        (("look(1)",), False, "        return self.held[:n]"),  # one alone
        (("take(1)", "back([0])") * 20, False, ""),  # a workload
    ],
)
def test_a_failure_points_to_what_was_called_last_and_never_to_what_was_only_read(
    app: types.ModuleType, calls: tuple[str, ...], raises: bool, line: str
) -> None:
    result = run(app, fails_after(*calls, raises=raises))
    assert (result.verdict, result.where) == ("failed", line and line_of(line))
    assert result.probably == "the usual mistake"
    assert not any("num_free" in name or "check" in name for name, _ in result.ran)


def test_an_exception_of_the_file_is_said_without_the_usual_mistake(app: types.ModuleType) -> None:
    result = run(app, lambda lab: lab.app.Pool().wrong(3))
    assert (result.raised, result.probably, result.where) == (True, "", line_of("        return n // 0"))
    assert result.reason == "ZeroDivisionError: integer division or modulo by zero"


def test_what_check_finds_is_no_fault_of_check(app: types.ModuleType) -> None:
    result = run(app, fails_after("take(2)", "check()"))
    assert (result.raised, result.probably, result.where) == (False, "the usual mistake", line_of("        return ids"))
    assert result.reason == "your check() says: 0 is held"


def test_what_the_file_raises_on_purpose_keeps_it(app: types.ModuleType) -> None:
    result = run(app, lambda lab: lab.app.Pool().refuses())
    assert (result.raised, result.probably) == (True, "the usual mistake")


def test_a_text_that_lacks_something_points_to_the_line_that_raised(app: types.ModuleType) -> None:
    result = run(app, lambda lab: lab.raises(ValueError, lambda: lab.app.Pool().refuses(), naming=[7]))
    assert (result.raised, result.where) == (False, line_of('        raise ValueError("no")'))


def test_an_exception_without_a_text_has_no_colon(app: types.ModuleType) -> None:
    def check(lab: Lab) -> None:
        next(iter(lab.app.Pool().take(0)))

    assert run(app, check).reason == "StopIteration"


def test_a_none_in_place_of_an_answer_is_said_by_name(app: types.ModuleType) -> None:
    result = run(app, lambda lab: lab.measure(len(lab.app.Pool().nothing())))
    assert (result.reason, result.probably, result.raised) == ("Pool.nothing answered None", "", False)


def test_a_call_that_raised_has_not_answered_none(app: types.ModuleType) -> None:
    def check(lab: Lab) -> None:
        pool = lab.app.Pool()
        lab.raises(ZeroDivisionError, lambda: pool.wrong(1))
        len(None)  # type: ignore[arg-type]

    assert run(app, check).reason == "TypeError: object of type 'NoneType' has no len()"


def test_a_check_that_took_long_is_not_run_again(app: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("course.runner.worker.SLOW", 0.05)

    def check(lab: Lab) -> None:
        lab.app.Pool().take(1)
        time.sleep(0.1)
        lab.expect(False)

    assert run(app, check).where == ""
    assert not PATH.exists()
