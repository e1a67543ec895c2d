"""`./vc math`: its divisions, what it refuses, what it keeps; typed figures need the standard library alone."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from course.runner import arithmetic
from course.runner.problems import Problem

ROOT = Path(__file__).parent.parent.parent
TYPED = ["--bandwidth", "400GB/s", "--rate", "80TFLOP/s"]
ENTRY = {"bandwidth": 20e9, "rates": {"bf16": 100e9, "fp32": 50e9}, "when": 1e9, "how": "a test"}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CUTAWAY_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("CUTAWAY_SET_UP", "1")  # as inside the environment: no other program takes this one's place
    return tmp_path / "home"


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert arithmetic.main(list(arguments)) == 0
    return capsys.readouterr().out


def columns(text: str, label: str) -> list[str]:
    """The figures of the first line that begins with a label."""
    line = next(line for line in text.splitlines() if line.strip().startswith(label))
    return re.split(r"\s{2,}", line.strip())[1:]


def test_every_division_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "7B", "4", *TYPED)
    seconds = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}
    units = {"GB/s": 1e9, "GFLOP/s": 1e9, "GB": 1e9, "MB": 1e6, "M": 1e6, **seconds}
    divisions = 0
    for line in text.splitlines():
        if found := re.fullmatch(r" {4}(\S.*?) ÷ (\S+ \S+)( a request)? {2,}(\S+)x?( \S+)?", line):
            left, right, _, result, unit = found.groups()
            factors = [float(f) for f in re.findall(r"([\d,.]+)(?= x)", left)]
            amount, name = left.split(" x ")[-1].replace(",", "").split()
            value = float(amount) * units[name]
            for factor in factors:
                value *= factor
            by = float(right.replace(",", "").split()[0]) * units[right.split()[1]]
            answer = (
                float(result.rstrip("x").replace(",", "")) * units[(unit or "").strip()] if unit else float(result.rstrip("x"))
            )
            assert answer == pytest.approx(value / by, rel=0.02), line
            divisions += 1
    assert divisions == 8
    assert max(map(len, text.splitlines())) <= 78


def test_the_figures_of_the_book(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "--bandwidth", "21.4GB/s", "--rate", "96GFLOP/s", "--dtype", "q8_0")
    assert columns(text, "read bandwidth, typed") == ["21.4 GB/s", "2,039 GB/s"]
    assert columns(text, "matmul rate, typed") == ["96.0 GFLOP/s", "312,000 GFLOP/s"]
    assert columns(text, "142.9 MB ÷ 21.4 GB/s") == ["6.68 ms"]
    assert columns(text, "2 x 134.5 M ÷ 96.0 GFLOP/s") == ["2.80 ms"]
    assert columns(text, "6.68 ms ÷ 2.80 ms") == ["2.38x"]
    assert "Up to batch 2 another request costs it almost nothing." in text.replace("\n ", "")


def test_more_requests_take_arithmetic_and_no_more_reading(capsys: pytest.CaptureFixture[str]) -> None:
    one, many = (said(capsys, "7B", batch, *TYPED) for batch in ("1", "1000"))
    assert columns(one, "14.0 GB ÷ 400 GB/s") == columns(many, "14.0 GB ÷ 400 GB/s") == ["35.0 ms"]
    assert columns(one, "2 x 7,000 M ÷ 80,000") == ["175 µs"]
    assert columns(many, "2 x 1,000 x 7,000 M ÷ 80,000") == ["175 ms"]
    assert "At batch 1 this machine waits for memory." in one
    assert "At batch 1,000 this machine waits for the arithmetic." in many
    assert columns(one, "35.0 ms ÷ 175 µs a request") == columns(many, "35.0 ms ÷ 175 µs a request") == ["200"]
    slow = said(capsys, "7B", "--bandwidth", "100GB/s", "--rate", "60GFLOP/s").replace("\n ", "")
    assert "Each further request costs it about as much time again." in slow


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["7Q"], "'7Q' is no size of a model: 135M, 0.6B, 7B"),
        (["0B"], "'0B' is no size"), (["nanB"], "'nanB' is no size"), (["1e9B"], "is no size"), (["7"], "'7' is no size"),
        (["1.2.3B"], "'1.2.3B' is no size"), (["999999999999B"], "is no size"), ([""], "'' is no size"),
        (["7B", "0"], "'0' is no batch: a whole number of requests"), (["7B", "-1"], "'-1' is no batch"),
        (["7B", "1.5"], "'1.5' is no batch"), (["7B", "4", "5"], "unrecognized arguments: 5"), (["--bogus"], "--bogus"),
        (["--bandwidth", "400"], "'400' is no rate: --bandwidth 400GB/s"), (["--bandwidth", "0GB/s"], "'0GB/s' is no rate"),
        (["--rate", "80TB/s"], "'80TB/s' is no rate: --rate 80TFLOP/s"), (["--rate", "infTFLOP/s"], "is no rate"),
        (["--bytes", "0"], "'0' is no number of bytes a weight"), (["--bytes", "99"], "'99' is no number"),
        (["--bytes", "2", "--dtype", "bf16"], "not allowed with"), (["--dtype", "int3"], "invalid choice: 'int3'"),
        (["--again", *TYPED], "leaves nothing to measure"),
    ],
)  # fmt: skip
def test_what_is_no_answerable_question_is_one_line(arguments: list[str], line: str) -> None:
    with pytest.raises(Problem) as problem:
        arithmetic.main(arguments)
    assert problem.value.code == 2
    assert line in str(problem.value)
    assert "\n" not in str(problem.value)


@pytest.mark.parametrize(("text", "value"), [("400GB/s", 400e9), ("2 TB/s", 2e12), ("0.5tb/S", 5e11), ("900MB/s", 9e8)])
def test_rates_are_read(text: str, value: float) -> None:
    assert arithmetic._rate("B/s", "")(text) == value
    assert arithmetic._rate(r"FLOP/?s", "")(re.sub("(?i)b/s", "FLOPS", text)) == value


def test_typed_figures_need_the_standard_library_alone(home: Path) -> None:
    """`-S` and `-I`: no installed package, no environment; and nothing is measured or written."""
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); sys.argv = ['vc']\n"
        "from course.runner.verbs import main\n"
        f"status = main(['math', '0.6B', *{TYPED!r}])\n"
        "print(sorted({'torch', 'numpy', 'cutaway'} & set(sys.modules)), status)"
    )
    done = subprocess.run([sys.executable, "-S", "-I", "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.endswith("[] 0\n")
    assert "1.2 GB ÷ 400 GB/s" in done.stdout
    assert not home.exists()


def test_nonsense_ends_with_2_and_one_line() -> None:
    command = [sys.executable, str(ROOT / "course" / "runner"), "math", "7Q"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("vc: argument size: '7Q' is no size of a model")


def test_a_machine_is_measured_once_and_kept(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    times = []
    monkeypatch.setattr(
        arithmetic, "_by_torch", lambda torch: times.append(1) or {k: v for k, v in ENTRY.items() if k != "when"}
    )
    monkeypatch.setattr(arithmetic, "has_gpu", lambda: False)
    assert arithmetic.machine() == (20e9, 100e9)
    assert arithmetic.machine("fp32") == (20e9, 50e9)
    text = said(capsys, "7B")
    assert columns(text, "read bandwidth, measured") == ["20.0 GB/s", "2,039 GB/s"]
    assert "Measured just now by a test; ./vc math --again measures it now." in text
    assert columns(said(capsys, "7B", "--dtype", "fp32"), "matmul rate, fp32, measured")[0] == "50.0 GFLOP/s"
    assert columns(said(capsys, "7B", "--rate", "1TFLOP/s"), "read bandwidth, measured")[0] == "20.0 GB/s"
    assert len(times) == 1
    said(capsys, "7B", "--again")
    assert len(times) == 2
    assert [p.name for p in home.iterdir()] == ["machine.json"]
    monkeypatch.setattr(arithmetic, "device", lambda: "another card")
    assert arithmetic.kept() is None
    arithmetic.machine()
    assert len(json.loads((home / "machine.json").read_text())) == 2


@pytest.mark.parametrize("text", ["", "[]", "{", '{"x": 3}', "null", "bytes"])
def test_a_damaged_file_is_measured_anew(text: str, home: Path) -> None:
    home.mkdir()
    told = {"bytes": "\udcff"}.get(text, text)
    (home / "machine.json").write_text(told, encoding="utf-8", errors="surrogateescape")
    assert arithmetic.kept() is None
    name = f"{os.uname().nodename}: {arithmetic.device()}"
    broken = ENTRY | {"rates": {"bf16": float("nan"), "fp32": 1.0}}
    (home / "machine.json").write_text(json.dumps({name: broken}))
    assert arithmetic.kept() is None
    (home / "machine.json").write_text(json.dumps({name: ENTRY}))
    assert arithmetic.kept() == ENTRY


def test_this_machine_can_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """By NumPy as by torch, in plausible figures; a home that cannot be written to is no error."""
    monkeypatch.setenv("CUTAWAY_HOME", "/proc/nowhere")
    torch = pytest.importorskip("torch")
    for found in (arithmetic._by_numpy(), arithmetic._by_torch(torch)):
        assert 1e8 < found["bandwidth"] < 1e13
        assert all(1e8 < rate < 1e16 for rate in found["rates"].values())
    monkeypatch.setattr(arithmetic, "_by_torch", lambda torch: ENTRY)
    monkeypatch.setattr(arithmetic, "has_gpu", lambda: False)
    assert arithmetic.machine() == (20e9, 100e9)


@pytest.mark.model
def test_the_built_in_model_has_as_many_weights() -> None:
    from cutaway.bench.ceilings import Work
    from cutaway.checkpoints.hub import known_models

    if not known_models()[0].present:
        pytest.skip("the built-in model is not here")
    assert Work.of("smollm2-135m-instruct", "bf16").weights == arithmetic.PARAMETERS
