"""A checkout of a ladder of three small stages around the real runner, on the standard library alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent

STAGES = '''
[[arc]]
id = "A0"
title = "The naive loop"
sentence = "Build the slow thing first."
''' + "".join(
    f'''
[[stage]]
id = "{id}"
file = "{file}"
{more}
title = "{title}"
arc = "A0"
stars = 2
part = "{part}"
chapter = "S01"
number = "adds"
why = ""
deliver = ""
measure = ""
'''
    for id, file, title, part, more in (
        ("01", "s01_sum", "Sums", "", 'jax_file = "j01_sum"\nanswer = "course/answers/s01_sum.py"'),
        ("02", "s02_shared", "Shared sums", "blocks", 'answer = "course/answers/s02_shared.py"'),
        ("03", "s03_later", "Later", "", ""),
    )
)  # fmt: skip

CHECKS = '''
from course.runner.checking import Lab, check


@check(probably="the last one is left out", gate="> 2.00", unit="x")
def adds(lab: Lab) -> None:
    """sum of many, against one"""
    lab.measure(lab.app.add(1, 3) / 1.0, baseline=1.0, detail="one and three")


@check(probably="order is not kept", gate="= 0", seconds=1.0)
def zero(lab: Lab) -> None:
    """what two zeros come to"""
    lab.measure(lab.app.add(0, 0))


@check(probably="a None is not refused")
def refuses(lab: Lab) -> None:
    """a None is refused"""
    lab.raises(TypeError, lambda: lab.app.add(None, 1))


@check(probably="the card is not used", gate="> 5.00", unit="x", needs="gpu")
def on_a_card(lab: Lab) -> None:
    """faster on a card"""
    lab.measure(9.0)
'''
SHARED_CHECKS = CHECKS.partition('\n\n@check(probably="the card')[0] + "\n"
ANSWER = '''"""Sums."""


def add(a, b):
    """The sum."""
    return a + b


class Adder:
    def run(self):
        return 1
'''
STUB = '"""Sums."""\n\n\ndef add(a, b):\n    """The sum."""\n    raise NotImplementedError\n'
GUIDE = """## Where this begins

{{naive.tokens_per_second:.0f}} tokens.

## What to build

A **sum**.

## What you can predict now

1. One?
"""


@dataclass
class Checkout:
    root: Path
    environment: dict[str, str]

    def vc(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """The ladder's command. Nothing that a person may do ends in a traceback."""
        done = subprocess.run(
            [sys.executable, "-P", self.root / "course" / "runner", *arguments], cwd="/", env=self.environment | environment,
            capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
        assert {"--traceback", "--json"} & set(arguments) or "Traceback (most" not in done.stdout, done
        assert "Traceback (most" not in done.stderr, done
        return done

    def git(self, *arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=self.root, env=self.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0 or arguments[0] == "merge", done
        return done.stdout.strip()

    def write(self, name: str, text: str) -> None:
        (self.root / "app" / f"{name}.py").write_text(text, encoding="utf-8")

    def repository(self) -> None:
        """git, with everything committed by somebody of a name."""
        self.git("init", "-q", "-b", "main")
        self.git("config", "user.name", "Ada")
        self.git("config", "user.email", "ada@example.com")
        self.git("add", "-A")
        self.git("commit", "-qm", "clone")

    @property
    def progress(self) -> dict[str, Any]:
        return json.loads((self.root / ".progress.json").read_text())

    def banked(self, stage: str) -> dict[str, Any] | None:
        return self.progress["shared" if stage == "02" else "torch"]["banked"].get(stage)


def make(root: Path) -> Checkout:
    shutil.copytree(ROOT / "course" / "runner", root / "course" / "runner", ignore=shutil.ignore_patterns("__pycache__"))
    (root / "course" / "__init__.py").touch()
    (root / "course" / "stages.toml").write_text(STAGES)
    for name, checks in (("s01_sum", CHECKS), ("s02_shared", SHARED_CHECKS)):
        folder = root / "course" / "stages" / name
        folder.mkdir(parents=True)
        (folder / "checks.py").write_text(checks)
        (folder / "guide.md").write_text(GUIDE)
        for place, text in (("course/answers", ANSWER), ("app", STUB)):
            (root / place).mkdir(exist_ok=True)
            (root / place / f"{name}.py").write_text(text)
    shutil.copy2(ROOT / "vc", root)
    (root / ".gitignore").write_text((ROOT / ".gitignore").read_text())
    (root / "setup.sh").write_text(f'#!/bin/sh\n[ "$1" = --then ] && shift\nexec "{sys.executable}" "$@"\n')
    (root / "setup.sh").chmod(0o755)
    home = root.parent / "home"
    home.mkdir(exist_ok=True)
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "CUTAWAY", "GIT_", "EMAIL"))}
    return Checkout(root, clean | {"HOME": str(home), "GIT_CONFIG_NOSYSTEM": "1", "CUTAWAY_CPU": "1", "CUTAWAY_HOME": str(home),
                                   "PYTHONDONTWRITEBYTECODE": "1", "PYTHON": sys.executable})  # fmt: skip


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    root = tmp_path / "a clone"
    root.mkdir()
    return make(root)
