"""How the ladder looks: 80 columns, without colour, in a pipe, on terminals of other encodings; what a mistake gets."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import subprocess
import sys

import pytest
from conftest import ANSWER, GUIDE, ROOT, Checkout
from course.runner.declaration import stage
from course.runner.environment import lacks
from course.runner.report import Run, heading
from course.runner.terminal import Screen, figure, gate_of, must

SCREENS = [
    (),
    ("list",),
    ("guide", "1"),
    ("test", "1"),
    ("test", "2"),
    ("test", "2", "-v"),
    ("test", "all"),
    ("predict",),
    ("peek", "1"),
]


def on_a_terminal(checkout: Checkout, *arguments: str, **environment: str) -> str:
    """What a terminal shows, escapes included."""
    parent, child = pty.openpty()
    command = [sys.executable, "-P", str(checkout.root / "course" / "runner"), *arguments]
    process = subprocess.Popen(
        command, env=checkout.environment | {"TERM": "xterm"} | environment, stdin=child, stdout=child, stderr=child
    )
    os.close(child)
    seen = b""
    while True:
        try:
            if not (more := os.read(parent, 4096)):
                break
        except OSError:
            break
        seen += more
    process.wait(20)
    os.close(parent)
    return seen.decode()


def fill(checkout: Checkout) -> None:
    checkout.write("s02_shared", ANSWER)
    checkout.vc("submit", "2")
    checkout.write("s01_sum", ANSWER.replace("a + b", "a - b"))


@pytest.mark.parametrize("arguments", SCREENS, ids=" ".join)
def test_a_screen_reads_the_same_everywhere(checkout: Checkout, arguments: tuple[str, ...]) -> None:
    fill(checkout)
    clock = re.compile(r"\d+\.\d s|\d+ minutes? ago")
    plain = checkout.vc(*arguments).stdout
    checkout.vc(*arguments)
    assert "\x1b" not in plain
    assert max(map(len, plain.splitlines())) <= 80
    colour = on_a_terminal(checkout, *arguments).replace("\r\n", "\n")
    colour = re.sub(r"\r  \d+ of \d+\r|\r\x1b\[K", "", colour)
    assert set(re.findall(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", colour)) <= {
        "\x1b[0m",
        "\x1b[1m",
        "\x1b[2m",
        "\x1b[31m",
        "\x1b[32m",
        "\x1b[33m",
    }
    assert clock.sub("", re.sub(r"\x1b\[\d+m", "", colour)).split() == clock.sub("", checkout.vc(*arguments).stdout).split()
    assert "\x1b[" not in re.sub(r"\r\x1b\[K", "", on_a_terminal(checkout, *arguments, NO_COLOR="1"))
    assert "\x1b[" not in re.sub(r"\r\x1b\[K", "", on_a_terminal(checkout, *arguments, TERM="dumb"))


@pytest.mark.parametrize("arguments", SCREENS, ids=" ".join)
def test_a_terminal_that_is_not_utf_8_gets_ascii(checkout: Checkout, arguments: tuple[str, ...]) -> None:
    fill(checkout)
    done = checkout.vc(*arguments, PYTHONIOENCODING="ascii")
    assert done.stdout.isascii()
    assert "?" not in done.stdout.replace("One?", "").replace("? tokens", "").replace("A ? is", "")
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_green_says_number_gate_best_and_what_it_is_compared_with(checkout: Checkout) -> None:
    checkout.write("s02_shared", ANSWER)
    lines = checkout.vc("test", "2").stdout.splitlines()
    assert lines[0].split() == ["02", "Shared", "sums", "shared,", "CPU"]
    assert "  ✓ sum of many, against one                         4.00x    > 2.00x" in lines
    assert "  ✓ a None is refused" in lines
    assert "sum of many, against one: 4.00x, compared with 1.00x." in lines
    assert any(line.startswith("3 passed, 0 failed, 0 not measured") for line in lines)
    assert lines[-1] == "  next   ./vc submit 2"


def test_green_names_the_baseline_and_tells_the_further_numbers(checkout: Checkout) -> None:
    path = checkout.root / "course/stages/s02_shared/checks.py"
    more = 'lab.measure(1.5, name="slower than plain", unit="x"); '
    text = path.read_text().replace("lab.measure(lab.app.add(1, 3)", more + "lab.measure(lab.app.add(1, 3)")
    path.write_text(text.replace("baseline=1.0", 'baseline=1.0, against="a sum of one"'))
    checkout.write("s02_shared", ANSWER)
    text = " ".join(checkout.vc("test", "2").stdout.split())
    assert "sum of many, against one: 4.00x, compared with 1.00x of a sum of one; slower than plain: 1.5x." in text


def test_an_exception_of_the_file_is_told_once_with_every_check_that_came_to_it(checkout: Checkout) -> None:
    checkout.write("s02_shared", ANSWER.replace("return a + b", "return a + b[0]"))
    text = checkout.vc("test", "2").stdout
    assert text.count("Your file raised TypeError: 'int' object is not subscriptable.\n") == 1
    assert "  At app/s02_shared.py:6, in add:\n      return a + b[0]\n  also in:\n    what two zeros come to\n" in text
    assert "Probably" not in text
    assert text.endswith("  next   edit app/s02_shared.py:6, then ./vc test 2\n")


def test_a_long_detail_is_cut_and_whole_with_v(checkout: Checkout) -> None:
    path = checkout.root / "course/stages/s02_shared/checks.py"
    path.write_text(path.read_text().replace('detail="one and three"', 'detail="seen " * 200'))
    checkout.write("s02_shared", ANSWER.replace("a + b", "a - b"))
    text = checkout.vc("test", "2").stdout
    assert re.search(r"  … and \d+ lines more: -v shows them\n", text)
    assert text.count("seen") < 70
    assert checkout.vc("test", "2", "-v").stdout.count("seen") == 200


def test_failures_that_are_not_told_are_one_a_line(checkout: Checkout) -> None:
    path = checkout.root / "course/stages/s02_shared/checks.py"
    more = "".join(
        f'\n\n@check(probably="x")\ndef c{n}(lab: Lab) -> None:\n    """claim {n}, and more"""\n    lab.expect(False)\n'
        for n in range(5)
    )
    path.write_text(path.read_text() + more)
    checkout.write("s02_shared", ANSWER.replace("a + b", "a - b"))
    assert "✗ and 2 more\n  claim 3, and more\n  claim 4, and more\n" in checkout.vc("test", "2").stdout


CARDS = [
    ((7, 5), "Tesla T4", "sm_75"),
    ((7, 0), "Tesla V100", "sm_70"),
    ((8, 0), "A100", ""),
    ((9, 0), "NVIDIA H200", ""),
    ((12, 0), "B", ""),
]


@pytest.mark.parametrize(("capability", "name", "says"), CARDS)
def test_a_card_is_named_and_so_is_what_an_old_one_lacks(
    capability: tuple[int, int], name: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = lacks(name, capability)
    lacking = f"{name}, {says}: fp16 in place of bf16, no TMA, no fp8; gates compare two times on this card"
    assert told == (lacking if says else "")
    monkeypatch.setattr("course.runner.report.card", lambda: (name, capability))
    lines = io.StringIO()
    heading(Screen(lines), Run(stage("06"), "torch", "app", gpu=True))
    assert lines.getvalue().splitlines()[0].endswith(f"shared, {name}")
    assert " ".join(lines.getvalue().splitlines()[1:]).strip() == told
    assert max(map(len, lines.getvalue().splitlines())) <= 80


@pytest.mark.parametrize(
    ("text", "says"),
    [(figure(1, "slots"), "1 slot"), (figure(1, "passes"), "1 pass"), (figure(2, "slots"), "2 slots"), (figure(1, "x"), "1x"),
     (figure(1, "bytes off"), "1 byte off"), (figure(1, "of 10"), "1 of 10"), (figure(1, "GB/s"), "1 GB/s"),
     (figure(1, "ms"), "1 ms"), (must("= 1", "positions"), "1 position"), (gate_of("= 2000", "of 2,000"), "= 2,000")],
)  # fmt: skip
def test_one_of_a_thing_is_singular(text: str, says: str) -> None:
    assert text == says


def test_the_answers_of_a_guide_are_apart(checkout: Checkout) -> None:
    guide = checkout.root / "course/stages/s01_sum/guide.md"
    for told in ("Answers\n\n1. Forty-two.\n", "Answers: forty-two\nof them.\n"):
        guide.write_text(GUIDE + "\n" + told)
        plain = checkout.vc("guide", "1").stdout
        assert "orty-two" not in plain
        assert "  1. One?\n\n  Answers  ./vc guide 1 --answers\n" in plain
        answered = checkout.vc("guide", "1", "--answers").stdout
        assert re.search(r"  1\. One\?\n\nAnswers\n  (1\. F|f)orty-two", answered)
        assert "What to build" not in answered


def test_the_book_s_chapter_has_its_title(checkout: Checkout) -> None:
    toml = checkout.root / "course/stages.toml"
    toml.write_text('[chapters]\nS01 = "The generation loop"\n' + toml.read_text())
    assert "chapter S01, The generation loop: not in this version yet" in checkout.vc("guide", "1").stdout


def test_red_says_number_gate_probable_mistake_and_the_line(checkout: Checkout) -> None:
    checkout.write("s02_shared", ANSWER.replace("a + b", "a - b"))
    text = checkout.vc("test", "2").stdout
    assert "✗ sum of many, against one\n  measured -2.00x, must be more than 2.00x\n" in text
    assert "  Probably: the last one is left out.\n  Look at app/s02_shared.py:6, in add:\n      return a - b\n" in text
    assert "  one and three\n" in text
    assert "Traceback" not in text.replace("Traceback: ./vc test 2 -k adds --traceback", "")
    assert text.endswith("  next   edit app/s02_shared.py:6, then ./vc test 2\n")
    assert "Traceback (most recent call last)" in checkout.vc("test", "2", "-k", "adds", "--traceback").stdout


def test_a_stub_is_one_short_message(checkout: Checkout) -> None:
    text = checkout.vc("test", "2").stdout
    assert "✗ Nothing of app/s02_shared.py is written yet: 3 checks wait for it.\n  add  " in text
    assert len(text.splitlines()) < 10


def test_what_was_not_measured_says_why(checkout: Checkout) -> None:
    checkout.write("s01_sum", ANSWER)
    text = checkout.vc("test", "1").stdout
    assert re.search(r"○ faster on a card +not measured +> 5.00", text)
    assert "1 of 4 not measured: needs a GPU, and this machine has none." in text
    assert "banks this stage as provisional" in text


def test_the_guide_takes_its_numbers_from_the_last_ledger(checkout: Checkout) -> None:
    assert "? tokens." in checkout.vc("guide", "1").stdout
    results = checkout.root / "benchmarks" / "results"
    results.mkdir(parents=True)
    for date, speed in (("2026-01-01", 7), ("2026-02-01", 8.4)):
        told = {"machine": "a box", "date": date, "rows": [{"id": "naive", "stage": "01", "tokens_per_second": speed}]}
        (results / f"ledger-{date}.json").write_text(json.dumps(told))
    (results / "ledger-broken.json").write_text("{")
    shipped = checkout.vc("guide", "1").stdout
    assert "  8 tokens." in shipped
    assert "Measured on a box, 2026-02-01; ./vc ledger measures this one." in shipped
    own = {"machine": "mine", "date": "2026-03-01", "rows": [{"id": "naive", "stage": "01", "tokens_per_second": 3}]}
    (checkout.root / ".ledger.json").write_text(json.dumps(own))
    assert "  3 tokens." in checkout.vc("guide", "1").stdout
    assert "**" not in shipped
    assert re.search(r"^  sum of many, against one +more than 2.00x$", shipped, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("test", "3"), 1, "stage 03, Later, is not in this version yet"),
        (("test", "44"), 2, "there is no stage '44'; they are 1 to 3"),
        (("test", "-1"), 2, "there is no stage '-1'"),
        (("test", "--fast"), 2, "unrecognized arguments: --fast; ./vc test --help lists what there is"),
        (("test", "2", "-k", "nothing"), 2, "no check of stage 02 has 'nothing' in its name; they are adds, zero, refuses"),
        (("test", "all", "-k", "nothing"), 2, "no check has 'nothing' in its name"),
        (("test", "1", "--jax"), 1, "stage 01 on the JAX track is not in this version yet"),
        (("test", "--jax", "--torch"), 2, "not allowed with argument"),
        (("guide", "x"), 2, "there is no stage 'x'"),
        (("backend", "rust"), 2, "invalid choice"),
        (("reset",), 2, "required"),
        (("peek", "3"), 1, "not in this version yet"),
        (("peek", "1", "add", "--apply"), 2, "leave the name out"),
        (("book",), 1, "the book is not in this version yet"),
        (("frobnicate",), 2, "there is no verb frobnicate"),
        (("submit", "2", "3"), 2, "unrecognized arguments: 3"),
        (("resume",), 1, "this is not a git repository"),
    ],
)
def test_a_mistake_is_one_line_that_says_what_to_do(
    checkout: Checkout, arguments: tuple[str, ...], code: int, says: str
) -> None:
    done = checkout.vc(*arguments)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (code, "", 1), done
    assert says in done.stderr


def test_a_file_that_is_gone_is_one_line(checkout: Checkout) -> None:
    (checkout.root / "app/s02_shared.py").unlink()
    for verb in ("test", "submit"):
        done = checkout.vc(verb, "2")
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert "git checkout -- app/s02_shared.py" in done.stderr
    assert checkout.vc("guide", "2").returncode == checkout.vc("list").returncode == 0


def test_a_reader_that_leaves_is_no_error(checkout: Checkout) -> None:
    command = f"'{sys.executable}' -P '{checkout.root}/course/runner' peek 1 | true"
    done = subprocess.run(command, shell=True, env=checkout.environment, capture_output=True, text=True, check=False)
    assert done.stderr == ""


# --- the engine's verbs -------------------------------------------------------------------------------------------------


def engine(checkout: Checkout, *arguments: str) -> tuple[list[str], str]:
    """What the engine's command would get, and what stands on stderr."""
    (checkout.root / "setup.sh").write_text('#!/bin/sh\nshift\nprintf "%s\\n" "$@"\n')
    done = checkout.vc(*arguments)
    assert done.returncode == 0
    return done.stdout.splitlines(), done.stderr


def test_a_shadow_is_named_by_its_stage_and_leaves_the_part_to_the_engine(checkout: Checkout) -> None:
    fill(checkout)
    file = f"blocks={checkout.root}/app/s02_shared.py"
    head = ["-m", "cutaway.cli"]
    assert engine(checkout, "serve", "--shadow", "2", "--port", "0") == ([*head, "serve", "--shadow", file, "--port", "0"], "")
    assert engine(checkout, "generate", "--shadow=02", "--reference", "x")[0] == [*head, "generate", f"--shadow={file}", "x"]
    typed = ["--shadow", "blocks=mine.py", "--shadow", "scheduler=s.py"]
    assert engine(checkout, "serve", *typed) == ([*head, "serve", *typed], "")
    assert engine(checkout, "serve", "--shadow") == ([*head, "serve", "--part", file, "--shadow"], "")  # the engine says it
    assert engine(checkout, "generate", "--", "--shadow", "2")[0][-3:] == ["--", "--shadow", "2"]
    for word, says in (("1", "stage 01 plays no part in the engine; those that do are 2"), ("99", "there is no stage '99'")):
        done = checkout.vc("serve", "--shadow", word)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert says in done.stderr
    (checkout.root / "app/s02_shared.py").unlink()
    assert "there is no app/s02_shared.py" in checkout.vc("serve", "--shadow", "2").stderr


def test_banked_parts_run_in_the_engine(checkout: Checkout) -> None:
    fill(checkout)
    own = ["--part", f"blocks={checkout.root}/app/s02_shared.py"]
    head = ["-m", "cutaway.cli"]
    assert engine(checkout, "serve", "--reference", "--port", "0") == ([*head, "serve", "--port", "0"], "")
    assert engine(checkout, "chat", "--part", "blocks=mine.py") == ([*head, "chat", "--part", "blocks=mine.py"], "")
    assert engine(checkout, "generate", "--part=blocks=m.py", "x")[0] == [*head, "generate", "--part=blocks=m.py", "x"]
    assert engine(checkout, "generate", "--", "--reference")[0] == [*head, "generate", *own, "--", "--reference"]
    assert engine(checkout, "models") == ([*head, "models"], "")
    assert engine(checkout, "serve", "--help") == ([*head, "serve", "--help"], "")
    checkout.write("s02_shared", ANSWER + "\n")
    told = engine(checkout, "serve")
    assert told[0] == [*head, "serve", *own]
    assert "app/s02_shared.py has changed since it was banked" in told[1]
    (checkout.root / "app/s02_shared.py").unlink()
    told = engine(checkout, "serve")
    assert (told[0], told[1].count("\n")) == ([*head, "serve"], 1)


def test_before_anything_is_set_up_the_ladder_answers(checkout: Checkout) -> None:
    """On any Python that is new enough, with the standard library alone; and at once."""
    (checkout.root / "setup.sh").write_text("#!/bin/sh\necho set up >&2\nexit 1\n")
    for verb in (
        (),
        ("list",),
        ("guide",),
        ("peek", "1"),
        ("predict", "1", "2"),
        ("backend",),
        ("test", "--help"),
        ("submit", "--help"),
    ):
        done = subprocess.run(
            [checkout.root / "vc", *verb], env=checkout.environment, capture_output=True, text=True, check=False, cwd="/"
        )
        assert (done.returncode, done.stderr) == (0, ""), done
    done = checkout.vc("test", "1")
    assert (done.returncode, done.stderr, done.stdout) == (1, "set up\n", "")


def test_no_module_but_the_standard_library_is_loaded_for_a_list() -> None:
    code = (
        "import sys, course.runner.verbs as v; v.main(['list']); v.main(['guide', '1']);"
        "roots = {m.partition('.')[0] for m in sys.modules} - set(sys.stdlib_module_names);"
        "print(sorted(r for r in roots if not r.startswith('_')))"
    )
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-S", "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] in ("['course']", "['course', 'sitecustomize']")


def test_a_list_takes_no_time(checkout: Checkout) -> None:
    taken: list[float] = []
    for _ in range(4):
        before = os.times()
        checkout.vc("list", PYTHONDONTWRITEBYTECODE="")
        after = os.times()
        taken.append(after.children_user + after.children_system - before.children_user - before.children_system)
    assert min(taken) < 0.15  # seconds of the CPU, which a busy machine does not stretch far
