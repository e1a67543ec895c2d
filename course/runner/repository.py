"""git, as far as the ladder needs it: one commit of app/ alone with a trailer, and the trailers of old ones.

Whatever keeps git from committing is one line, and costs no progress.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from course.runner.declaration import ROOT

KEY = "Cutaway-Stage"
PATIENCE = 2.0  # seconds for another git to let go of the index
BUSY = {"MERGE_HEAD": "a merge", "CHERRY_PICK_HEAD": "a cherry-pick", "REVERT_HEAD": "a revert",
        "rebase-merge": "a rebase", "rebase-apply": "a rebase"}  # fmt: skip
IDENTITY = 'no name and e-mail are set for git: git config user.name "Your Name"\n    git config user.email you@example.com'


class NoCommit(Exception):
    """Its text says why there is none, and what to do."""


@dataclass(frozen=True, slots=True)
class Banked:
    """What a trailer tells: stage id, track, when, and by which commit."""

    stage: str
    track: str
    at: float
    commit: str


def git(*arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    """Runs git in the checkout, whatever repository the caller's environment points to."""
    elsewhere = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_OBJECT_DIRECTORY")
    environment = {k: v for k, v in os.environ.items() if k not in elsewhere} | {"LC_ALL": "C.UTF-8"}
    return subprocess.run(
        ["git", *arguments],
        cwd=ROOT,
        env=environment,
        input=text or "",
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )


def check_repository() -> Path:
    """The git directory. Raises NoCommit where there is none of this checkout's own."""
    if shutil.which("git") is None:
        raise NoCommit("there is no git here, so nothing is committed")
    found = git("rev-parse", "--show-toplevel", "--absolute-git-dir")
    if found.returncode:
        if "dubious ownership" in found.stderr:
            raise NoCommit(f"git does not trust this folder's owner: git config --global --add safe.directory {ROOT}")
        raise NoCommit("this is not a git repository, so nothing is committed: git init makes it one")
    top, folder = found.stdout.splitlines()[:2]
    if Path(top).resolve() != ROOT:
        raise NoCommit(f"this folder is part of another repository ({top}), so nothing is committed")
    return Path(folder)


def commit(subject: str, value: str) -> tuple[str, bool]:
    """Commits the files under app/, nothing else that is staged or changed; an empty commit where they are unchanged, none
    where this branch tells the same already. Answers the commit's id, and whether it is new. Raises NoCommit."""
    folder = check_repository()
    for name, what in BUSY.items():
        if (folder / name).exists():
            raise NoCommit(f"{what} is in progress: finish it")
    if not git("status", "--porcelain", "--", "app").stdout:
        for each in banked():
            if f"{each.stage} {each.track}" == value:
                return each.commit, False
    until = time.monotonic() + PATIENCE
    while True:
        done = _commit(f"{subject}\n\n{KEY}: {value}\n")
        if done.returncode == 0:
            return git("rev-parse", "HEAD").stdout.strip(), True
        if "index.lock" not in done.stderr or time.monotonic() > until:
            break
        time.sleep(0.25)
    raise NoCommit(_why(done.stderr + "\n" + done.stdout, folder))


def _commit(message: str) -> subprocess.CompletedProcess[str]:
    unseen = git("ls-files", "--others", "--exclude-standard", "-z", "--", "app").stdout.split("\0")[:-1]
    if unseen:  # files that git has not seen yet belong to the commit as well
        new = git("add", "--intent-to-add", "--", *unseen)
        if new.returncode:
            return new
    paths = ("--", "app") if git("ls-files", "--", "app").stdout else ()
    # useConfigOnly: where nobody has said who they are, git would make up a name and an address
    done = git("-c", "user.useConfigOnly=true", "commit", "--allow-empty", "--only", "--file", "-", *paths, text=message)
    if done.returncode and unseen:
        git("rm", "--cached", "--quiet", "--force", "--", *unseen)  # the index as it was
    return done


def _why(said: str, folder: Path) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    if "index.lock" in said:
        return f"another git is at work, or one died: if none runs, delete {folder / 'index.lock'}"
    if (
        "tell me who you are" in said
        or "empty ident" in said
        or "unable to auto-detect email" in said
        or "no email was given" in said
    ):
        return IDENTITY
    if "failed to sign" in said or "gpg" in said.lower() or "signing" in said:
        return f"git could not sign the commit: {_last(lines, r'sign|gpg|ssh')}"
    if "read-only" in said.lower() or "permission denied" in said.lower():
        return f"git cannot write: {_last(lines, r'read-only|denied')}"
    hooks = [h for h in ("pre-commit", "prepare-commit-msg", "commit-msg") if _hook(h)]
    if hooks and not any(line.startswith("fatal:") for line in lines):
        words = lines[-1] if lines else "it says nothing; git commit -- app shows it at work"
        return f"a hook of yours refused the commit ({', '.join(hooks)}): {words}"
    return f"git would not commit: {_last(lines, r'fatal|error')}"


def _hook(name: str) -> bool:
    path = git("rev-parse", "--git-path", f"hooks/{name}").stdout.strip()
    return os.access(ROOT / path, os.X_OK)


def _last(lines: list[str], pattern: str) -> str:
    return next((line for line in lines if re.search(pattern, line, re.IGNORECASE)), lines[-1] if lines else "it says nothing")


def banked() -> list[Banked]:
    """What the trailers of this branch tell, the newest of each stage and track. Raises NoCommit."""
    check_repository()
    if git("rev-parse", "--verify", "--quiet", "HEAD").returncode:
        return []
    log = git("log", f"--format=%H %ct %(trailers:key={KEY},valueonly,separator=%x2C)", f"--grep=^{KEY}:", "HEAD")
    if log.returncode:
        raise NoCommit(f"git cannot read the history: {log.stderr.strip().splitlines()[-1] if log.stderr.strip() else ''}")
    found: dict[tuple[str, str], Banked] = {}
    for line in log.stdout.splitlines():
        commit_id, _, rest = line.partition(" ")
        at, _, values = rest.partition(" ")
        for value in values.split(","):
            if (match := re.fullmatch(r"\s*(\d\d) (torch|jax)\s*", value)) and at.isdigit():
                found.setdefault((match[1], match[2]), Banked(match[1], match[2], float(at), commit_id))
    return list(found.values())


def is_shallow() -> bool:
    return git("rev-parse", "--is-shallow-repository").stdout.strip() == "true"
