"""`pip install .` into an environment outside the checkout gives the command, with all that it reads from its own folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(
        command, cwd=cwd, env=clean | environment, capture_output=True, text=True, timeout=300, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_wheel_gives_the_command_with_its_data(tmp_path: Path) -> None:
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, ROOT, cwd=tmp_path)
    (wheel,) = tmp_path.glob("cutaway-*.whl")
    home = tmp_path / "environment"
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    run(*pip, "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    # The libraries are borrowed from this environment; the package itself is not: .pth files in it are not read from here.
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])", cwd=tmp_path).strip())
    (site / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")

    command = home / "bin" / "cutaway"
    assert run(command, "--version", cwd=tmp_path).startswith("cutaway 0.")
    assert "smollm2-135m-instruct" in run(command, "models", cwd=tmp_path, CUTAWAY_HOME=str(tmp_path / "nothing"))
    code = (
        "from pathlib import Path; import cutaway; from cutaway import LLM, SamplingParams;"
        "folder = Path(cutaway.__file__).parent;"
        "print(folder); print(*sorted(str(p.relative_to(folder)) for p in folder.rglob('*') if p.suffix in ('.html', '.json')))"
    )
    where, data = run(python, "-c", code, cwd=tmp_path).splitlines()
    assert Path(where).is_relative_to(home)
    source = ROOT / "src" / "cutaway"
    assert data.split() == sorted(str(p.relative_to(source)) for p in source.rglob("*") if p.suffix in (".html", ".json"))
    assert "server/page.html" in data


def test_every_dependency_is_pinned_within_its_range() -> None:
    from packaging.requirements import Requirement  # what pip itself goes by
    from packaging.utils import canonicalize_name

    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pins = dict(re.fullmatch(r"(\S+)==(\S+)", line).groups() for line in lines)  # type: ignore[union-attr]
    pins = {canonicalize_name(name): pin for name, pin in pins.items()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *(r for extra in project["optional-dependencies"].values() for r in extra)]
    for requirement in map(Requirement, asked):
        assert pins[canonicalize_name(requirement.name)] in requirement.specifier, str(requirement)
    assert f"TORCH={pins['torch']}" in (ROOT / "setup.sh").read_text().splitlines()
