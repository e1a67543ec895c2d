"""What a learner's unfinished file can do to the process that runs it, and what is said of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
from conftest import ANSWER, Checkout


def checks(checkout: Checkout, *arguments: str) -> dict[str, dict[str, Any]]:
    """By name, of a run as JSON: stdout holds nothing else."""
    done = checkout.vc("test", "2", "--json", *arguments)
    told = json.loads(done.stdout)
    assert done.returncode == int(any(c["verdict"] == "failed" for c in told["checks"]))
    assert [c["name"] for c in told["checks"]] == ["adds", "zero", "refuses"]
    return {c["name"]: c for c in told["checks"]}


def on_zero(body: str) -> str:
    """An answer that does something else where both are zero."""
    return ANSWER.replace("    return a + b", f"    if a == 0 and b == 0:\n        {body}\n    return a + b")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("while True: pass", "an endless loop: did not end within 1 s"),
        ("import time; time.sleep(60)", "an endless loop: did not end within 1 s"),
        ("import os; os._exit(0)", "it ended the process, with exit code 0"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "its process died of SIGSEGV"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "its process was killed: out of memory?"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("raise MemoryError", "MemoryError"),
        ("return add(0, 0)", "RecursionError"),
        ("raise KeyboardInterrupt", "it ended the process"),
        ("return None", "TypeError"),
    ],
    ids=["loop", "sleep", "os._exit", "segfault", "killed", "sys.exit", "memory", "recursion", "interrupt", "None"],
)
def test_one_check_fails_and_the_others_go_on(checkout: Checkout, body: str, says: str) -> None:
    checkout.write("s02_shared", on_zero(body))
    found = checks(checkout)
    assert {name: c["verdict"] for name, c in found.items()} == {"adds": "passed", "zero": "failed", "refuses": "passed"}
    assert says in found["zero"]["reason"]


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("import os; os._exit(0)\n", "it ended the process, with exit code 0"),
        ("def add(:\n", "SyntaxError"),
        ("import nothing_of_this_name\n", "ModuleNotFoundError"),
        ("raise SystemExit\n", "SystemExit"),
        ("", "AttributeError"),
    ],
)
def test_a_file_that_cannot_be_imported_fails_every_check(checkout: Checkout, source: str, says: str) -> None:
    checkout.write("s02_shared", source)
    found = checks(checkout)
    assert all(c["verdict"] == "failed" for c in found.values())
    assert says in found["adds"]["reason"]


def test_a_file_that_cannot_be_imported_is_said_once_with_its_line(checkout: Checkout) -> None:
    checkout.write("s02_shared", "x = 1\ndef add(:\n")
    done = checkout.vc("test", "2")
    assert done.stdout.count("cannot be imported") == 1
    assert "app/s02_shared.py:2" in done.stdout


def test_what_the_file_prints_is_on_stderr_and_harms_nothing(checkout: Checkout) -> None:
    checkout.write("s02_shared", on_zero("import os; print('hello'); os.write(1, b'{\"result\": 1}\\n')"))
    done = checkout.vc("test", "2", "--json")
    assert all(c["verdict"] == "passed" for c in json.loads(done.stdout)["checks"])
    assert "hello" in done.stderr
    assert '{"result": 1}' in done.stderr


def test_a_process_that_the_file_left_behind_keeps_nobody_waiting(checkout: Checkout) -> None:
    body = (
        "import os, time\n        if os.fork() == 0:\n            time.sleep(30)\n            os._exit(0)\n        os._exit(7)"
    )
    checkout.write("s02_shared", on_zero(body))
    begun = time.monotonic()
    assert checks(checkout)["zero"]["verdict"] == "failed"
    assert time.monotonic() - begun < 15


def test_numbers_that_json_has_not_are_null(checkout: Checkout) -> None:
    checkout.write("s02_shared", on_zero("return float('nan')"))
    found = checks(checkout)["zero"]
    assert (found["verdict"], found["measures"][0]["value"]) == ("failed", None)


def test_an_edit_of_the_same_length_within_the_second_is_seen(checkout: Checkout) -> None:
    for source, verdict in ((ANSWER, "passed"), (ANSWER.replace("a + b", "a - b"), "failed"), (ANSWER, "passed")):
        checkout.write("s02_shared", source)
        os.utime(checkout.root / "app/s02_shared.py", (1e9, 1e9))
        assert checks(checkout)["adds"]["verdict"] == verdict


def test_json_has_the_shape_that_is_promised(checkout: Checkout) -> None:
    checkout.write("s02_shared", ANSWER)
    told = json.loads(checkout.vc("test", "2", "--json").stdout)
    assert told["track"] == "torch"
    first = told["checks"][0]
    assert {"stage", "name", "verdict", "measures", "seconds", "reason"} <= set(first)
    assert {"name": "sum of many, against one", "value": 4.0, "unit": "x", "gate": "> 2.00"}.items() <= first["measures"][
        0
    ].items()


def running(checkout: Checkout, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", str(checkout.root / "course" / "runner"), *arguments]
    return subprocess.Popen(command, env=checkout.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def alive(mark: str) -> bool:
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    return any(mark in line and "worker.py" in line for line in listed.splitlines())


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -15), (signal.SIGKILL, -9)])
def test_a_stop_ends_the_checks_as_well(checkout: Checkout, number: int, code: int) -> None:
    path = checkout.root / "course/stages/s02_shared/checks.py"
    path.write_text(path.read_text().replace("seconds=1.0", "seconds=50.0"))
    checkout.write("s02_shared", on_zero("import time; open('/dev/stderr', 'w').write('at it\\n'); time.sleep(50)"))
    process = running(checkout, "test", "2")
    assert process.stderr is not None
    assert process.stderr.readline() == "at it\n"
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert process.returncode == code
    assert "Traceback" not in out + err
    limit = time.monotonic() + 10
    while alive(str(checkout.root)) and time.monotonic() < limit:
        time.sleep(0.1)
    assert not alive(str(checkout.root))


def test_a_worker_whose_asker_has_left_says_nothing(checkout: Checkout) -> None:
    checkout.write("s02_shared", ANSWER)
    command = [sys.executable, "-P", str(checkout.root / "course/runner/worker.py"), "--serve"]
    worker = subprocess.Popen(
        command, env=checkout.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip
    assert worker.stdin is not None and worker.stdout is not None and worker.stderr is not None
    worker.stdout.close()  # stdin stays open: nothing else tells it
    jobs = [{"fault": "", "names": ["adds", "zero"]}]
    worker.stdin.write(json.dumps({"stage": "02", "track": "torch", "origin": "app", "jobs": jobs}).encode() + b"\n")
    worker.stdin.flush()
    assert worker.wait(20) == 0
    assert worker.stderr.read() == b""
    worker.stdin.close()
    worker.stderr.close()
