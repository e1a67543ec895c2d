"""What is banked and what is committed, with real git repositories in every state that a person leaves one in."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ANSWER, Checkout

ZERO = "lab.measure(lab.app.add(0, 0))"
HOOK = "a hook of yours refused the commit"
IDENTITY = """no name and e-mail are set for git: git config user.name "Your Name"
    git config user.email you@example.com"""


def ready(checkout: Checkout) -> None:
    checkout.repository()
    checkout.write("s02_shared", ANSWER)


def commits(checkout: Checkout) -> int:
    return int(checkout.git("rev-list", "--count", "HEAD"))


def trailer(checkout: Checkout) -> str:
    return checkout.git("log", "-1", "--format=%(trailers:key=Cutaway-Stage,valueonly)").strip()


def files_of_head(checkout: Checkout) -> list[str]:
    return checkout.git("show", "--format=", "--name-only", "HEAD").split()


# --- what a run allows --------------------------------------------------------------------------------------------------


def test_red_is_refused_and_says_what_to_do(checkout: Checkout) -> None:
    checkout.repository()
    done = checkout.vc("submit", "2")
    assert done.returncode == 1
    assert "Not banked: 3 of 3 checks failed." in done.stdout
    assert commits(checkout) == 1
    assert checkout.banked("02") is None


def test_a_file_that_changes_while_it_is_checked_is_not_banked(checkout: Checkout) -> None:
    checkout.repository()
    later = "import pathlib\nfile = pathlib.Path(__file__)\nfile.write_text(file.read_text() + '# saved meanwhile')\n"
    checkout.write("s01_sum", ANSWER + later)
    done = checkout.vc("submit")
    assert done.returncode == 1
    assert "changed while it was checked" in done.stdout
    assert commits(checkout) == 1
    assert checkout.banked("01") is None


def test_without_its_gpu_part_a_stage_is_provisional(checkout: Checkout) -> None:
    checkout.repository()
    checkout.write("s01_sum", ANSWER)
    done = checkout.vc("submit")
    assert done.returncode == 0
    assert "Banked as provisional: 01, Sums." in done.stdout
    assert checkout.progress["torch"]["banked"]["01"]["provisional"] is True
    assert "02  Shared sums" in done.stdout  # the next guide
    assert "1 provisional" in checkout.vc().stdout


def test_out_of_order_the_end_says_what_was_banked_and_what_follows(checkout: Checkout) -> None:
    ready(checkout)
    lines = checkout.vc("submit", "2").stdout.splitlines()
    assert lines[-2:] == ["", "  next   ./vc guide 1   Sums"]
    assert "Banked: 02, Shared sums." in lines[-7:]
    assert "app/s02_shared.py now plays as blocks in ./vc serve, chat and generate." in lines[-4:]
    assert "plays as" not in checkout.vc("submit", "1").stdout


def test_where_a_library_is_missing_for_every_check_the_stage_is_provisional(checkout: Checkout) -> None:
    ready(checkout)
    path = checkout.root / "course/stages/s02_shared/checks.py"
    path.write_text(path.read_text().replace("@check(", '@check(needs="triton", '))
    worker = checkout.root / "course/runner/worker.py"
    worker.write_text(worker.read_text().replace('find_spec("triton")', 'find_spec("no_such_library")'))
    done = checkout.vc("submit", "2")
    assert done.returncode == 0, done
    assert "Banked as provisional: 02, Shared sums." in done.stdout
    assert "The rest is offered again where triton is." in done.stdout
    assert "GPU" not in done.stdout.replace("needs a GPU", "")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (ZERO, "from course.runner.checking import NotMeasured; raise NotMeasured('machine busy', True)",
         "the machine was too busy for a verdict on what two zeros come to: close what else is running"),
        (ZERO, 'lab.not_measured("the model is not here")', "not measured: what two zeros come to (the model"),
        ("@check(", '@check(needs="gpu", ', "nothing was measured"),
    ],
    ids=["busy", "required", "nothing"],
)  # fmt: skip
def test_what_was_not_measured_is_not_green(checkout: Checkout, old: str, new: str, says: str) -> None:
    ready(checkout)
    path = checkout.root / "course/stages/s02_shared/checks.py"
    path.write_text(path.read_text().replace(old, new))
    done = checkout.vc("submit", "2")
    assert done.returncode == 1
    assert says in " ".join(done.stdout.split())
    assert checkout.banked("02") is None


# --- the commit ---------------------------------------------------------------------------------------------------------


def test_the_commit_holds_app_and_nothing_else_that_is_staged(checkout: Checkout) -> None:
    ready(checkout)
    checkout.write("s09_new", "x = 1\n")
    (checkout.root / "notes.txt").write_text("mine")
    checkout.git("add", "notes.txt")
    (checkout.root / "vc").write_text((checkout.root / "vc").read_text() + "# edited\n")
    done = checkout.vc("submit", "2")
    assert done.returncode == 0, done
    assert files_of_head(checkout) == ["app/s02_shared.py", "app/s09_new.py"]
    assert trailer(checkout) == "02 torch"
    assert checkout.git("log", "-1", "--format=%an %ae") == "Ada ada@example.com"
    assert checkout.git("diff", "--cached", "--name-only") == "notes.txt"
    assert checkout.git("diff", "--name-only") == "vc"
    entry = checkout.banked("02")
    assert entry is not None
    assert entry["commit"] == checkout.git("rev-parse", "HEAD")


def test_nothing_changed_makes_an_empty_commit_that_resume_can_find(checkout: Checkout) -> None:
    ready(checkout)
    checkout.git("commit", "-qam", "by hand")
    (checkout.root / "notes.txt").write_text("mine")
    checkout.git("add", "notes.txt")
    assert checkout.vc("submit", "2").returncode == 0
    assert (files_of_head(checkout), trailer(checkout)) == ([], "02 torch")
    assert checkout.git("diff", "--cached", "--name-only") == "notes.txt"


def test_what_was_committed_before_and_is_unchanged_is_not_committed_twice(checkout: Checkout) -> None:
    ready(checkout)
    checkout.vc("submit", "2")
    made = checkout.git("rev-parse", "HEAD")
    checkout.vc("reset", "2")
    assert f"Committed before, and unchanged: {made[:9]}" in checkout.vc("submit", "2").stdout
    assert checkout.git("rev-parse", "HEAD") == made
    entry = checkout.banked("02")
    assert entry is not None
    assert entry["commit"] == made
    checkout.write("s02_shared", ANSWER + "\n")
    checkout.vc("submit", "2")
    assert checkout.git("rev-parse", "HEAD") != made


def test_a_repository_without_commits_gets_its_first(checkout: Checkout) -> None:
    checkout.git("init", "-q")
    checkout.git("config", "user.name", "Ada")
    checkout.git("config", "user.email", "ada@example.com")
    checkout.write("s02_shared", ANSWER)
    assert checkout.vc("submit", "2").returncode == 0
    assert sorted(files_of_head(checkout)) == ["app/s01_sum.py", "app/s02_shared.py"]


def test_a_detached_head_gets_a_commit_too(checkout: Checkout) -> None:
    ready(checkout)
    checkout.git("checkout", "-q", "--detach")
    done = checkout.vc("submit", "2")
    assert done.returncode == 0
    assert trailer(checkout) == "02 torch"
    assert "no branch holds that commit" in done.stdout


def test_the_person_s_own_hooks_run(checkout: Checkout) -> None:
    ready(checkout)
    hook(checkout, "commit-msg", 'echo "Reviewed-by: Bob" >>"$1"')
    assert checkout.vc("submit", "2").returncode == 0
    assert "Reviewed-by: Bob" in checkout.git("log", "-1", "--format=%B")
    assert trailer(checkout) == "02 torch"


# --- what keeps git from committing: one line, and the stage is banked ---------------------------------------------------


def hook(checkout: Checkout, name: str, body: str) -> None:
    path = checkout.root / ".git" / "hooks" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def merging(checkout: Checkout) -> None:
    (checkout.root / "x").write_text("1")
    checkout.git("add", "x")
    checkout.git("commit", "-qm", "one")
    checkout.git("checkout", "-qb", "side", "HEAD~1")
    (checkout.root / "x").write_text("2")
    checkout.git("add", "x")
    checkout.git("commit", "-qm", "two")
    checkout.git("merge", "main")


def nobody(checkout: Checkout) -> None:
    checkout.git("config", "--unset", "user.name")
    checkout.git("config", "--unset", "user.email")


def signing(checkout: Checkout) -> None:
    checkout.git("config", "commit.gpgsign", "true")
    checkout.git("config", "gpg.program", shutil.which("false") or "false")


def inside_another(checkout: Checkout) -> None:
    shutil.rmtree(checkout.root / ".git")
    checkout.git("-C", "..", "init", "-q")


@pytest.mark.parametrize(
    ("obstacle", "says"),
    [
        (lambda c: hook(c, "pre-commit", "echo flake says no; exit 1"), f"{HOOK} (pre-commit): flake says no"),
        (lambda c: hook(c, "commit-msg", "echo too long >&2; exit 1"), f"{HOOK} (commit-msg): too long"),
        (merging, "a merge is in progress: finish it"),
        (nobody, IDENTITY),
        (signing, "git could not sign the commit: error: gpg failed to sign the data"),
        (lambda c: shutil.rmtree(c.root / ".git"), "this is not a git repository, so nothing is committed"),
        (inside_another, "this folder is part of another repository"),
        (lambda c: (c.root / ".git/index.lock").touch(), "another git is at work, or one died: if none runs, delete"),
    ],
    ids=["hook", "commit-msg hook", "merge", "no identity", "signing", "no repository", "inside another", "index.lock"],
)  # fmt: skip
def test_without_a_commit_the_stage_is_banked_all_the_same(
    checkout: Checkout, obstacle: Callable[[Checkout], object], says: str
) -> None:
    ready(checkout)
    obstacle(checkout)
    done = checkout.vc("submit", "2")
    assert done.returncode == 0, done
    assert f"Not committed: {says}" in done.stdout
    assert done.stderr == ""
    entry = checkout.banked("02")
    assert entry is not None
    assert entry["commit"] == ""
    assert "./vc submit 2 commits it, once that is mended" in done.stdout
    assert "next   " in done.stdout


def test_without_git_the_stage_is_banked_all_the_same(checkout: Checkout, tmp_path: Path) -> None:
    ready(checkout)
    (tmp_path / "none").mkdir()
    done = checkout.vc("submit", "2", PATH=str(tmp_path / "none"))
    assert done.returncode == 0, done
    assert "Not committed: there is no git here" in done.stdout
    assert checkout.banked("02") is not None
    assert "there is no git here" in checkout.vc("resume", PATH=str(tmp_path / "none")).stderr


def test_a_lock_that_goes_away_is_waited_for(checkout: Checkout) -> None:
    ready(checkout)
    lock = checkout.root / ".git" / "index.lock"
    lock.touch()
    if os.fork() == 0:
        time.sleep(1.5)
        lock.unlink()
        os._exit(0)
    assert checkout.vc("submit", "2").returncode == 0
    assert trailer(checkout) == "02 torch"
    os.wait()


# --- resume -------------------------------------------------------------------------------------------------------------


def test_resume_rebuilds_progress_in_a_fresh_clone_and_runs_the_checks(checkout: Checkout, tmp_path: Path) -> None:
    ready(checkout)
    checkout.write("s01_sum", ANSWER)
    assert checkout.vc("submit").returncode == checkout.vc("submit").returncode == 0
    made = checkout.git("rev-parse", "HEAD")
    fresh = Checkout(tmp_path / "fresh", checkout.environment)
    checkout.git("clone", "-q", str(checkout.root), str(fresh.root))
    assert not (fresh.root / ".progress.json").exists()
    done = fresh.vc("resume")
    assert done.returncode == 0, done
    assert [fresh.banked(s)["commit"] == made for s in ("01", "02")] == [False, True]  # type: ignore[index]
    assert fresh.progress["torch"]["banked"]["01"]["provisional"] is True
    fresh.write("s02_shared", ANSWER.replace("a + b", "a - b"))
    fresh.vc("reset", "1")
    done = fresh.vc("resume")
    assert done.returncode == 1
    assert (fresh.banked("01") is None, fresh.banked("02")) == (False, None)
    assert "checks failed; ./vc test 2" in done.stdout


def test_resume_reads_nothing_that_is_no_trailer_of_its_own(checkout: Checkout) -> None:
    checkout.repository()
    checkout.git(
        "commit", "-q", "--allow-empty", "-m", "x\n\nCutaway-Stage: 99 torch\nCutaway-Stage: 02 rust\nCutaway-Stage: $(x)"
    )
    done = checkout.vc("resume")
    assert (done.returncode, done.stdout) == (0, "No commit of this branch says that a stage was banked.\n")


def test_a_shared_stage_counts_on_both_tracks(checkout: Checkout) -> None:
    ready(checkout)
    checkout.vc("submit", "2")
    checkout.vc("backend", "jax")
    assert "ladder 1 of 1 (3 in all)" in checkout.vc().stdout
    assert "Every stage of this version is banked" in checkout.vc().stdout
