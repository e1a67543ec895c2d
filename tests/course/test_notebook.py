"""The notebook's cells, run in order as a person would in a browser tab: clone, set-up, guide, test, submit, push; then
again in a fresh runtime, which finds what was banked.

The clone is of this checkout, through a bare repository that stands for the person's fork. Its environment is a thin one
over this one's libraries, with set-up's own stamps: installing everything anew is what `./vc verify` has just done.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
NOTEBOOK = ROOT / "notebooks" / "ladder.ipynb"
TOKEN = "github_pat_not_a_real_one"


def cells() -> list[str]:
    """Sources of the code cells."""
    told = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in told["cells"] if cell["cell_type"] == "code"]


def titled(number: int) -> str:
    return next(cell for cell in cells() if cell.replace("# @", "#@").startswith(f"#@title {number}. "))


class Runtime:
    """What a cell may use beyond Python: `!command` and `%cd folder`, with {names} filled in as IPython does."""

    def __init__(self, folder: Path, environment: dict[str, str]):
        self.folder, self.environment = folder, environment
        self.names: dict[str, Any] = {"_shell": self.shell, "_cd": self.cd}

    def shell(self, command: str) -> None:
        done = subprocess.run(
            command, shell=True, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=300,
            stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
        print(done.stdout, done.stderr)

    def cd(self, folder: str) -> None:
        self.folder = (self.folder / folder).resolve()
        os.chdir(self.folder)

    def run(self, cell: str) -> str:
        """What the cell printed."""
        code = re.sub(r"^(\s*)!(.*)$", lambda m: f"{m[1]}_shell(f{m[2]!r})", cell, flags=re.MULTILINE)
        code = re.sub(r"^(\s*)%cd (.*)$", lambda m: f"{m[1]}_cd(f{m[2]!r})", code, flags=re.MULTILINE)
        before, kept = Path.cwd(), dict(os.environ)
        out = io.StringIO()
        try:
            os.chdir(self.folder)
            os.environ.clear()
            os.environ.update(self.environment)
            with contextlib.redirect_stdout(out):
                exec(compile(code, "cell", "exec"), self.names)
        finally:
            os.chdir(before)
            os.environ.clear()
            os.environ.update(kept)
        return out.getvalue()


def thin_environment(clone: Path) -> None:
    """A .venv in the clone that uses this environment's libraries, stamped as set-up would for that folder."""
    venv = clone / ".venv"
    site = venv / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    site.mkdir(parents=True)
    (venv / "bin").mkdir()
    (venv / "bin" / "python").symlink_to(Path(sys.executable).resolve())
    (venv / "pyvenv.cfg").write_text(f"home = {Path(sys.executable).resolve().parent}\ninclude-system-site-packages = false\n")
    (site / "here.pth").write_text(f"{clone / 'src'}\n{sysconfig.get_paths()['purelib']}\n")
    line = next(x for x in (ROOT / "setup.sh").read_text(encoding="utf-8").splitlines() if x.startswith("key="))
    key = subprocess.run(
        ["bash", "-c", f'root="$PWD"; {line}; echo "$key"'], cwd=clone, capture_output=True, text=True, check=True
    )
    (venv / ".setup").mkdir()
    for stage, note in (("libraries", ""), ("torch", "cpu")):
        (venv / ".setup" / stage).write_text(f"{key.stdout.strip()} {note}\n")


@pytest.fixture
def fork(tmp_path: Path) -> Path:
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("this checkout is no git repository")
    bare = tmp_path / "fork.git"
    subprocess.run(["git", "clone", "--quiet", "--bare", str(ROOT), str(bare)], check=True, timeout=120)
    return bare


def runtime(folder: Path, fork: Path) -> Runtime:
    """A fresh machine: an empty folder, an empty home, a fork to clone."""
    folder.mkdir()
    home = folder / "home"
    home.mkdir()
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("CUTAWAY", "GIT_", "PYTHON", "PYTEST"))}
    cache = os.environ.get("CUTAWAY_HOME") or str(Path.home() / ".cache" / "cutaway")
    return Runtime(folder, kept | {
        "HOME": str(home), "CUTAWAY_HOME": cache, "CUTAWAY_FORK": str(fork), "CUTAWAY_NAME": "Ada",
        "CUTAWAY_EMAIL": "ada@example.com",
        "GITHUB_TOKEN": TOKEN, "OMP_NUM_THREADS": "1",
    })  # fmt: skip


def test_a_cell_never_holds_or_prints_a_token() -> None:
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert not re.search(r"gh[pousr]_[A-Za-z0-9]{20}|github_pat_[A-Za-z0-9]", text)
    assert all(not cell["outputs"] for cell in json.loads(text)["cells"] if cell["cell_type"] == "code")


@pytest.mark.slow
def test_from_a_fork_to_a_banked_stage_and_on_in_a_fresh_runtime(tmp_path: Path, fork: Path) -> None:
    first = runtime(tmp_path / "first", fork)
    first.run(titled(1))
    assert (first.folder / "vc").is_file()
    clone = first.folder
    first.run(titled(1))
    assert first.folder == clone, "the same cell again makes no clone within the clone"
    thin_environment(first.folder)
    assert "smollm2-135m-instruct" in first.run(titled(2))
    assert "ladder 0 of" in first.run(titled(3))
    assert "Where this begins" in first.run(titled(4))
    assert "app/s01_naive.py" in first.run(titled(5))
    assert "Nothing of app/s01_naive.py is written yet" in first.run(titled(6))
    shutil.copy(first.folder / "course/answers/s01_naive.py", first.folder / "app/s01_naive.py")
    assert "4 passed, 0 failed" in first.run(titled(6))
    assert "How stage 01 broke" in first.run(titled(7)), "banking a stage shows the next guide"
    told = first.run(titled(8))
    assert "\npushed" in told
    config = (first.folder / ".git" / "config").read_text()
    assert TOKEN not in told + config

    second = runtime(tmp_path / "second", fork)
    second.run(titled(1))
    thin_environment(second.folder)
    told = second.run(titled(3))
    assert "ladder 1 of" in told, told
    log = subprocess.run(
        ["git", "log", "-1", "--format=%an %ae%n%B"], cwd=second.folder, capture_output=True, text=True, check=True
    )
    assert log.stdout.startswith("Ada ada@example.com")
    assert "Cutaway-Stage: 01 torch" in log.stdout


@pytest.mark.slow
def test_a_token_is_told_to_github_alone(tmp_path: Path, fork: Path) -> None:
    """git asks the helper for what an address wants; a stand-in for git says what it was given to ask with."""
    machine = runtime(tmp_path / "machine", fork)
    machine.run(titled(1))
    stand_in = tmp_path / "bin" / "git"
    stand_in.parent.mkdir()
    stand_in.write_text(
        '#!/bin/sh\nif [ "$1" = remote ]; then echo "$ORIGIN"; exit; fi\n'
        'echo "asks with [${GIT_ASKPASS:+$("$GIT_ASKPASS" Password)}] [$GITHUB_TOKEN] [$GIT_TRACE_CURL]"\n'
    )
    stand_in.chmod(0o700)
    machine.environment |= {"PATH": f"{stand_in.parent}:{machine.environment['PATH']}", "GIT_TRACE_CURL": "1"}
    machine.environment["ORIGIN"] = "https://github.com/ada/cutaway"
    assert "asks with [***] [] []" in machine.run(titled(8))
    for other in ("http://github.com/ada/cutaway", "https://github.com.example.org/ada/cutaway", str(fork)):
        machine.environment["ORIGIN"] = other
        assert "asks with [] [] []" in machine.run(titled(8))


@pytest.mark.slow
def test_a_push_that_is_refused_says_so(tmp_path: Path, fork: Path) -> None:
    machine = runtime(tmp_path / "machine", fork)
    machine.run(titled(1))
    shutil.rmtree(fork)
    told = machine.run(titled(8))
    assert "NOT pushed" in told
    assert TOKEN not in told
