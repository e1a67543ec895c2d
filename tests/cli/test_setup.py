"""`vc` and `setup.sh` on a fresh clone: what they say before anything is there, when it cannot be had, and when interrupted.

What needs a package index is not tried here: a whole set-up is what runs these tests. PIP_NO_INDEX stands for no network.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """What set-up reads of a checkout, in a folder whose name has a space."""
    folder = tmp_path / "a clone"
    folder.mkdir()
    for name in ("vc", "setup.sh", "constraints.txt", "pyproject.toml"):
        shutil.copy2(ROOT / name, folder)
    return folder


def shell(*command: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "CUTAWAY"))}
    return subprocess.run(
        command, cwd=cwd, env=clean | environment, capture_output=True, text=True, timeout=120,
        stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip


def refuses(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 1, done
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done
    assert lines[0].startswith("setup: ")
    return lines[0]


# --- a fresh clone ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("args", [["-h"], ["--help"], ["help"]])
def test_a_fresh_clone_says_at_once_what_it_is(clone: Path, tmp_path: Path, args: list[str]) -> None:
    link = tmp_path / "link"
    link.symlink_to("a clone/vc")
    done = shell(link, *args, cwd=Path("/"))
    assert done.returncode == 0
    assert "next   ./vc serve, or ./vc guide" in done.stdout
    assert not (clone / ".venv").exists()


def test_a_wrong_verb_sets_nothing_up(clone: Path) -> None:
    done = shell(clone / "vc", "serv", cwd=Path("/"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "vc: there is no verb serv; ./vc --help lists them\n"
    assert shell(clone / "vc", "verify", "--fast", cwd=clone).returncode == 2
    assert (
        shell(clone / "setup.sh", "--fast", cwd=clone).stderr == "setup: unknown option --fast; ./setup.sh --help lists them\n"
    )
    assert not (clone / ".venv").exists()


def test_the_version_is_the_project_s(clone: Path) -> None:
    from cutaway import __version__

    assert shell(clone / "vc", "--version", cwd=clone).stdout == f"cutaway {__version__}\n"


# --- what cannot be had -------------------------------------------------------------------------------------------------


def test_a_python_that_is_none_is_one_line(clone: Path) -> None:
    for python in ("/nowhere/python", shutil.which("true") or "true"):
        assert f"PYTHON={python} is not a Python 3.11 or newer" in refuses(shell(clone / "setup.sh", cwd=clone, PYTHON=python))


def test_no_python_at_all_is_one_line(clone: Path, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "cat", "cksum", "dirname", "mktemp", "readlink", "sed", "tr", "uname"):
        (tools / name).symlink_to(shutil.which(name) or name)
    refuses(shell("/bin/bash", clone / "setup.sh", cwd=clone, PATH=str(tools)))
    for verb in ("serve", "list"):
        done = shell("/bin/bash", clone / "vc", verb, cwd=clone, PATH=str(tools))
        assert done.stderr.startswith("vc: no Python 3.11 or newer here; install one")
        assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert done.stdout == ""


def test_a_folder_that_is_something_else_is_left_alone(clone: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "lib").write_text("precious")
    line = refuses(shell(clone / "setup.sh", cwd=clone, PYTHON=sys.executable, CUTAWAY_VENV=str(theirs)))
    assert "holds something else than a virtual environment" in line
    assert (theirs / "lib").read_text() == "precious"


@pytest.mark.parametrize(
    ("options", "says"), [("size=1m", "make room, or set CUTAWAY_VENV"), ("ro", "cannot write to"), ("size=30m", "make room")]
)
def test_a_disk_without_room_or_without_rights_is_one_line(clone: Path, tmp_path: Path, options: str, says: str) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    own = ("unshare", "--map-root-user", "--mount", "sh", "-c")  # a mount that only this command sees
    try:
        able = shell(*own, f"mount -t tmpfs -o {options} tmpfs {disk}", cwd=tmp_path).returncode == 0
    except FileNotFoundError:
        able = False
    if not able:
        pytest.skip("this system lets nobody mount a disk for a test")
    # 30 MB: as if the room had been there when it began, and ran out on the way
    begun = f"mkdir -p {disk}/venv/.setup &&" if "30" in options else ""
    if options == "ro":
        options = "ro,size=9g"
    command = f"mount -t tmpfs -o {options} tmpfs {disk} && {begun} exec '{clone}/setup.sh'"
    line = refuses(shell(*own, command, cwd=tmp_path, PYTHON=sys.executable, CUTAWAY_VENV=f"{disk}/venv"))
    assert says in line
    assert f"{disk}/venv" in line


# --- interruptions ------------------------------------------------------------------------------------------------------


def test_a_torn_environment_is_not_taken_for_the_system_s_python(clone: Path) -> None:
    """Without its pyvenv.cfg, .venv/bin/python is the system's Python, and pip would change the whole machine."""
    binary = clone / ".venv" / "bin"
    binary.mkdir(parents=True)
    (binary / "python").symlink_to(Path(sys.executable).resolve())
    index = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
    done = shell(clone / "setup.sh", cwd=clone, PYTHON=sys.executable, **index)
    refuses(done)
    assert "virtual environment" in done.stdout
    where = subprocess.run(
        [binary / "python", "-c", "import sys; print(sys.prefix)"], capture_output=True, text=True, check=True
    )  # fmt: skip
    assert where.stdout.strip() == str(clone / ".venv")


@pytest.mark.slow
def test_set_up_goes_on_after_any_interruption(clone: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "CUTAWAY"))}
    environment |= {"PYTHON": sys.executable, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
    for seconds, number in ((0.2, signal.SIGTERM), (0.6, signal.SIGKILL), (1.2, signal.SIGINT), (2.0, signal.SIGTERM)):
        with subprocess.Popen(
            [clone / "setup.sh"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as process:
            time.sleep(seconds)
            process.send_signal(number)
            output = process.communicate(timeout=60)[0].decode()
        assert process.returncode in (-number, 128 + number, 1), output
        assert number == signal.SIGKILL or process.returncode == 1 or "The same command goes on from here." in output
    done = subprocess.run([clone / "setup.sh"], env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "build tools" in done.stdout  # the environment and its pip stand; what is missing has to come from an index
    assert len(done.stderr.splitlines()) == 1
    version = subprocess.run([clone / ".venv/bin/python", "-m", "pip", "--version"], capture_output=True, check=False)
    assert version.returncode == 0


# --- the last line of verify --------------------------------------------------------------------------------------------

PYTHON = """#!/bin/sh
case "$*" in
*"-m pytest"*) shift $(($# - 1)); cp "$RESULT" "$1" 2>/dev/null; exit ${PYTEST:-0} ;;
*" prove "*) shift $(($# - 1)); [ -z "$LADDER" ] || echo "$LADDER" >"$1"; exit ${PROVE:-0} ;;
*"-m $BROKEN"*) echo "what $BROKEN says"; exit 1 ;;
-\\ *) exec 'REAL' "$@" ;;
esac
"""
GOOD = '<testsuites><testsuite><testcase name="a"/><testcase name="b"/></testsuite></testsuites>'
MIXED = (
    '<testsuites><testsuite><testcase name="a"/><testcase name="b"><failure/></testcase><testcase name="c"><error/></testcase>'
    '<testcase name="d"><skipped/></testcase></testsuite></testsuites>'
)


@pytest.mark.parametrize(
    ("result", "status", "broken", "ladder", "last", "code"),
    [
        (GOOD, "0", "nothing", "10 0 0", "16 passed, 0 failed", 0),
        (MIXED, "1", "nothing", "10 0 3", "15 passed, 2 failed", 1),
        (GOOD, "0", "pyright", "10 0 0", "15 passed, 1 failed", 1),
        (GOOD, "0", "nothing", "9 1 0", "15 passed, 1 failed", 1),
        (GOOD, "0", "nothing", "", "6 passed, 1 failed", 1),  # the ladder's part died
        (GOOD, "1", "nothing", "10 0 0", "16 passed, 1 failed", 1),  # pytest says that something failed, and no test did
        (GOOD, "3", "nothing", "10 0 0", "16 passed, 1 failed", 1),  # an internal error after the tests
        (MIXED, "2", "ruff", "10 0 0", "13 passed, 5 failed", 1),
        ("", "4", "nothing", "10 0 0", "14 passed, 2 failed", 1),  # no result at all
        ("<testsuites>", "0", "nothing", "10 0 0", "14 passed, 1 failed", 1),  # cut short
    ],
    ids=["all pass", "some fail", "a check fails", "a stage fails", "no ladder", "status 1 alone", "internal error",
         "all at once", "no result", "cut short"],
)  # fmt: skip
def test_verify_ends_with_the_count(
    clone: Path, result: str, status: str, broken: str, ladder: str, last: str, code: int
) -> None:
    (clone / "setup.sh").write_text("#!/bin/sh\n")
    binary = clone / ".venv" / "bin"
    binary.mkdir(parents=True)
    (binary / "python").write_text(PYTHON.replace("REAL", sys.executable))
    (binary / "python").chmod(0o755)
    if result:
        (clone / "result.xml").write_text(result)
    done = shell(clone / "vc", "verify", cwd=Path("/"), RESULT=str(clone / "result.xml"), PYTEST=status, BROKEN=broken,
                 LADDER=ladder, PROVE=str(int(ladder != "10 0 0")))  # fmt: skip
    assert done.stdout.splitlines()[-1] == last, done
    assert done.returncode == code
    assert (f"what {broken} says" in done.stdout) == (broken != "nothing")


def test_verify_counts_a_set_up_that_failed(clone: Path) -> None:
    done = shell(clone / "vc", "verify", cwd=clone, PYTHON="/nowhere/python")
    assert done.stdout.splitlines()[-1] == "0 passed, 1 failed"
    assert done.returncode == 1
