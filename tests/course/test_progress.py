"""`.progress.json`: what is kept, and what happens where it cannot be kept or is not what was written."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import ANSWER, Checkout


def aside(checkout: Checkout) -> list[str]:
    return sorted(p.name for p in checkout.root.glob(".progress.json.*"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is damaged"), ("", "is damaged"), ("\0\xff", "is damaged"), ("[" * 100_000, "is damaged"),
        ("[]", "is not what this program writes"), ('{"version": 1, "track": "rust"}', "is not what this program writes"),
        ('{"version": 9}', "was written by a newer version"),
    ],
)  # fmt: skip
def test_a_file_that_is_not_ours_is_set_aside_and_said(checkout: Checkout, text: str, says: str) -> None:
    for n in (1, 2):
        (checkout.root / ".progress.json").write_text(text, encoding="latin-1")
        done = checkout.vc("predict", "2", "3")
        assert done.returncode == 0
        assert says in done.stderr
        assert f"kept as .progress.json.damaged-{n}" in done.stderr
        assert (checkout.root / f".progress.json.damaged-{n}").read_text(encoding="latin-1") == text
    assert checkout.progress["shared"]["predictions"]["02"]
    checkout.git("init", "-q")
    assert ".progress" not in checkout.git("status", "--short", "--ignored=no")


@pytest.mark.parametrize("path", [("shared", "banked", "02"), ("torch", "best"), ("shared", "peeks", "02"), ("jax",)])
def test_a_wrong_shape_inside_is_set_aside_as_well(checkout: Checkout, path: tuple[str, ...]) -> None:
    checkout.vc("backend", "torch")
    told = checkout.progress
    inner = told
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = 7
    (checkout.root / ".progress.json").write_text(json.dumps(told))
    for verb in ((), ("list",), ("predict",)):
        assert checkout.vc(*verb).returncode == 0
    assert aside(checkout) == [".progress.json.damaged-1"]


def test_writers_at_once_lose_nothing(checkout: Checkout) -> None:
    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(lambda n: checkout.vc("peek", "1" if n % 2 else "2"), range(8)))
    assert {d.returncode for d in done} == {0}
    assert len(checkout.progress["shared"]["peeks"]["02"]) == len(checkout.progress["torch"]["peeks"]["01"]) == 4
    assert aside(checkout) == []


def test_a_checkout_that_cannot_be_written_is_one_line(checkout: Checkout) -> None:
    own = ("unshare", "--map-root-user", "--mount", "sh", "-c")
    command = f"mount --bind '{checkout.root}' '{checkout.root}' && mount -o remount,bind,ro '{checkout.root}' && exec"
    checkout.write("s02_shared", ANSWER)
    program = f"'{sys.executable}' -P '{checkout.root}/course/runner'"
    if (
        shutil.which("unshare") is None
        or subprocess.run([*own, command + " true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("this system lets nobody mount a folder for a test")

    def vc(verb: str) -> subprocess.CompletedProcess[str]:
        line = [*own, f"{command} {program} {verb}"]
        return subprocess.run(line, env=checkout.environment, capture_output=True, text=True, check=False)

    done = vc("test 2")
    assert done.returncode == 0, done
    assert "3 passed" in done.stdout
    for verb, code in (("test 2", 0), ("list", 0), ("submit 2", 2), ("backend jax", 2), ("predict 2 3", 2)):
        done = vc(verb)
        assert done.returncode == code, done
        assert len(done.stderr.splitlines()) == (verb != "list") + (verb == "submit 2"), done


def test_the_best_of_each_number_is_kept_and_shown(checkout: Checkout) -> None:
    checkout.write("s02_shared", ANSWER)
    first = checkout.vc("test", "2").stdout
    assert "before" not in first
    checkout.write("s02_shared", ANSWER.replace("a + b", "a + b + (a == 1)"))
    second = checkout.vc("test", "2").stdout
    assert re.search(r"sum of many, against one +5.00x +> 2.00x +4.00x", second)
    assert "sum of many, against one: 5.00x, compared with 1.00x.\n1.00x better than your best.\n" in second
    checkout.write("s02_shared", ANSWER)
    assert "1.00x short of your best" in checkout.vc("test", "2").stdout


def test_runs_of_answers_and_of_some_checks_are_no_runs_of_yours(checkout: Checkout) -> None:
    checkout.vc("test", "2", "--answers")
    assert not (checkout.root / ".progress.json").exists()
    checkout.vc("test", "2", "-k", "zero")
    assert checkout.progress["shared"]["last"] == {}


def test_a_prediction_is_held_against_the_next_measurement(checkout: Checkout) -> None:
    checkout.write("s02_shared", ANSWER)
    assert "Noted: sum of many, against one, 3.2x." in checkout.vc("predict", "2", "3.2x").stdout
    assert "not run yet" in checkout.vc("predict").stdout
    checkout.vc("test", "2", "--answers")
    assert "You expected 3.2x and measured 4.00x: 1.25 times off." in checkout.vc("test", "2").stdout
    assert "You expected" not in checkout.vc("test", "2").stdout
    assert "1.25 times off" in checkout.vc("predict").stdout
    late = checkout.vc("predict", "2", "4")
    assert (late.returncode, late.stdout) == (1, "")
    assert "stage 02 has been measured: 4.00x; --again notes what you expect of another design" in late.stderr
    assert "not run yet" not in checkout.vc("predict").stdout
    assert "Noted: sum of many, against one, 5x." in checkout.vc("predict", "2", "5", "--again").stdout


def test_a_share_is_predicted_in_percent_and_is_points_off(checkout: Checkout) -> None:
    checkout.write("s02_shared", ANSWER)
    path = checkout.root / "course/stages/s02_shared/checks.py"
    path.write_text(path.read_text().replace('unit="x"', 'unit="%"'))
    assert "./vc predict 2 N, N in percent" in checkout.vc("predict", "2").stderr
    small = checkout.vc("predict", "2", "0.8").stdout
    assert "Noted: sum of many, against one, 0.8%." in small
    assert "This number is in percent: for 80% type ./vc predict 2 80" in small
    assert "in percent" not in checkout.vc("predict", "2", "13.2").stdout
    assert "You expected 13.2% and measured 4.00%: 9.2 points off." in checkout.vc("test", "2").stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(("2", "many"), "a prediction is a number, such as 12.5, got 'many'"),
     (("2",), "type the number as well: ./vc predict 2 N, N in times"),
     (("3", "1"), "is not in this version yet"), (("2", "nan"), "a prediction is a number"), (("2", "1", "2"), "unrecognized")],
)  # fmt: skip
def test_what_is_no_prediction_is_one_line(checkout: Checkout, arguments: tuple[str, ...], says: str) -> None:
    done = checkout.vc("predict", *arguments)
    assert done.returncode in (1, 2)
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_reset_reopens_and_leaves_the_code(checkout: Checkout) -> None:
    for name in ("s01_sum", "s02_shared"):
        checkout.write(name, ANSWER)
    checkout.vc("submit", "1")
    checkout.vc("submit", "2")
    assert "Open again: 02." in checkout.vc("reset", "2").stdout
    assert (checkout.banked("01") is None, checkout.banked("02")) == (False, None)
    assert (checkout.root / "app/s02_shared.py").read_text() == ANSWER


def test_peeks_are_recorded_and_what_was_there_is_kept(checkout: Checkout) -> None:
    assert "def add" in checkout.vc("peek", "1").stdout
    assert checkout.vc("peek", "1", "Adder.run").stdout.splitlines()[1:] == ["    def run(self):", "        return 1"]
    assert "has no Nothing; it has add, Adder" in checkout.vc("peek", "1", "Nothing").stderr
    assert "peeked" in checkout.vc("list").stdout
    checkout.write("s01_sum", "mine")
    (checkout.root / "app/s01_sum.py.bak-1").write_text("older")
    assert "Yours is kept as app/s01_sum.py.bak-2." in checkout.vc("peek", "1", "--apply").stdout
    kept = {p.name: p.read_text() for p in (checkout.root / "app").glob("s01*")}
    assert kept == {"s01_sum.py": ANSWER, "s01_sum.py.bak-1": "older", "s01_sum.py.bak-2": "mine"}
    assert "answer applied" in checkout.vc("list").stdout
    assert "Peeked at: 01." in checkout.vc().stdout
