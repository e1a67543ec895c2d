"""The command as a person meets it: real processes, their exit codes, and what stands on which stream."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import jsonschema
import pytest

import tiny

FAKE = ("--backend", "cutaway.backends.fake:create")
ENVIRONMENT = os.environ | {"CUTAWAY_FAKE_VOCABULARY": str(tiny.VOCABULARY), "OMP_NUM_THREADS": "1"}
COMMAND = (sys.executable, "-P", "-m", "cutaway.cli")


def cutaway(*args: str, stdin: bytes | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*COMMAND, *args], input=stdin or b"", capture_output=True, timeout=120, env=ENVIRONMENT | environment, check=False
    )
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def refuses(*args: str, stdin: bytes | None = None, **environment: str) -> str:
    """The one line that stands on stderr when the command refuses; nothing else may."""
    done = cutaway(*args, stdin=stdin, **environment)
    lines = done.stderr.splitlines()
    assert (done.returncode, done.stdout, len(lines)) == (2, "", 1), done
    assert lines[0].startswith("cutaway: ")
    return lines[0].removeprefix("cutaway: ")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.write_folder(tmp_path_factory.mktemp("models") / "tiny", "llama"))


# --- help and mistakes on the command line ------------------------------------------------------------------------------


def test_help_answers_at_once_and_names_every_verb() -> None:
    begun = time.monotonic()
    done = cutaway("--help")
    assert time.monotonic() - begun < 5  # 0.1 s on an idle machine; what matters is that no engine is loaded
    assert done.returncode == 0
    assert re.findall(r"^  ([a-z-]+)  ", done.stdout, re.MULTILINE) == [
        "serve",
        "generate",
        "chat",
        "models",
        "bench",
        "diff-trace",
    ]
    assert cutaway().stdout == done.stdout


def test_help_loads_no_engine() -> None:
    code = (
        "import sys; from cutaway.cli import run; run(['serve', '--help']);"
        "print([m for m in ('numpy', 'fastapi', 'tokenizers', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_serve_explains_each_option() -> None:
    text = cutaway("serve", "--help", COLUMNS="200").stdout
    rows = dict(re.findall(r"^  (--[a-z-]+)[^\n]*?  +(\S[^\n]*)$", text, re.MULTILINE))
    assert {"--host", "--port", "--model", "--dtype", "--max-model-len", "--kv-blocks", "--max-num-seqs",
            "--max-num-batched-tokens", "--no-prefix-cache", "--api-key", "--trace", "--part"} <= set(rows)  # fmt: skip
    assert "--backend" not in text
    assert all(len(explanation) > 25 for explanation in rows.values()), rows


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["serv"], "Did you mean 'serve'?"),
        (["serve", "--modle", "x"], "No such option"),
        (["serve", "--port", "70000"], "--port"),
        (["serve", "--dtype", "fp8"], "'auto', 'bf16', 'fp32'"),
        (["serve", "--kv-blocks", "many"], "--kv-blocks"),
        (["generate"], "standard input is empty"),
        (["bench", "cqu"], "No such command 'cqu'"),
        (["serve", "--part", "scheduler"], "--part takes NAME=FILE, got 'scheduler'"),
        (["serve", "--part", "shedule=mine.py"], "there is no part called 'shedule'; the parts are blocks, attention"),
        (["serve", "--part", "scheduler=/nowhere/mine.py"], "no such file: /nowhere/mine.py"),
        (["serve", "--part", "blocks=a.b", "--part", "blocks=c.d"], "names blocks twice"),
        (["serve", "--api-key", ""], "--api-key must not be empty"),
        (["serve", "--trace", "/nowhere/at/all.jsonl"], "there is no folder /nowhere/at"),
        (["serve", "--model", "/nowhere/model.gguf"], "/nowhere/model.gguf"),
        (["generate", "x", "--model", "/nowhere/model"], "/nowhere/model"),
        (["generate", "x", "--temperature", "-1"], "temperature must be a number from 0 to 100, got -1.0"),
        (["generate", "-"], "standard input is empty"),
        (["diff-trace", "/nowhere/a", "/nowhere/b"], "cannot read the trace /nowhere/a"),
    ],
)
def test_a_mistake_gets_one_line_that_says_what_to_do(args: list[str], says: str) -> None:
    assert says in refuses(*args)


def test_a_port_in_use_is_one_line_before_anything_loads(model: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        line = refuses("serve", "--port", port, "--model", model, *FAKE)
    assert f"port {port} on 127.0.0.1 is in use" in line
    assert "--port" in line


def test_a_hostile_model_file_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "hostile.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 2**62, 2**62))
    assert "hostile.gguf" in refuses("serve", "--port", "0", "--model", str(path), *FAKE)
    assert "hostile.gguf" in refuses("generate", "x", "--model", str(path))


def test_a_part_that_cannot_be_one_is_named(model: str, tmp_path: Path) -> None:
    part = tmp_path / "mine.py"
    part.write_text("def something():\n    return 1\n")
    line = refuses("serve", "--port", "0", "--model", model, "--part", f"blocks={part}", *FAKE)
    assert "BlockAllocator" in line


def test_without_torch_one_line_names_the_extra(model: str, tmp_path: Path) -> None:
    code = (
        "import sys, importlib.util as u; real = u.find_spec;"
        "u.find_spec = lambda name, *a: None if name == 'torch' else real(name, *a);"
        f"from cutaway.cli import run; sys.exit(run(['serve', '--model', {model!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    told = "the torch backend needs torch, which is not installed: pip install '.[torch]' in a checkout, or pip install torch"
    assert done.stderr == f"cutaway: {told}\n"


def test_a_fault_of_ours_is_one_line_unless_asked_for() -> None:
    code = "import sys; from cutaway.cli import models, run; models.show = lambda: 1 / 0; sys.exit(run(['models']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr == "cutaway: ZeroDivisionError: division by zero; set CUTAWAY_DEBUG=1 for the traceback\n"
    asked = os.environ | {"CUTAWAY_DEBUG": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False, env=asked)
    assert "Traceback" in done.stderr


# --- verbs --------------------------------------------------------------------------------------------------------------


def test_generate_answers_on_stdout_and_counts_on_stderr(model: str) -> None:
    done = cutaway("generate", "the state of the world", "--max-tokens", "9", "--model", model, *FAKE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert re.search(r"^\d tokens in [\d.]+ s, first after [\d.]+ s", done.stderr.splitlines()[-1])
    again = cutaway("generate", "-", "--max-tokens", "9", "--model", model, *FAKE, stdin=b"the state of the world")
    assert again.stdout == done.stdout
    raw = cutaway("generate", "the state of the world", "--raw", "--max-tokens", "9", "--model", model, *FAKE)
    assert raw.stdout != done.stdout


def test_generate_says_whose_parts_play_and_goes_on_without_one_that_fails(model: str, tmp_path: Path) -> None:
    ask = ("generate", "the state of the world", "--max-tokens", "9", "--model", model, *FAKE)
    part = tmp_path / "mine.py"
    part.write_text(
        "from cutaway.core.scheduler import Scheduler as Own\nclass Scheduler(Own):\n    def schedule(self):\n"
        "        self.n = getattr(self, 'n', 0) + 1\n        return super().schedule() if self.n < 5 else 1 / 0\n"
    )
    done = cutaway(*ask, "--part", f"scheduler={part}")
    assert done.returncode == 0, done.stderr
    assert done.stdout == cutaway(*ask).stdout
    said = done.stderr.splitlines()
    assert said[0] == "with your mine.py (10)"
    assert said[1].startswith(f"cutaway: {part}, line 5, in schedule (part scheduler, stage 10): ZeroDivisionError: ")
    assert len(said) == 3


def test_a_banked_file_that_cannot_be_loaded_says_the_way_out(model: str, tmp_path: Path) -> None:
    part = tmp_path / "s10_scheduler.py"
    part.write_text("class Scheduler(:\n")
    ask = ("generate", "x", "--model", model, *FAKE, "--part", f"scheduler={part}")
    done = cutaway(*ask, CUTAWAY_COMMAND="./vc")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert f"{part}, line 1: cannot be the part scheduler (stage 10): SyntaxError" in done.stderr
    assert done.stderr.endswith("; --reference runs the engine's own\n")
    assert "--reference" not in cutaway(*ask, CUTAWAY_COMMAND="cutaway").stderr  # which only ./vc has


def test_generate_with_a_seed_answers_the_same(model: str) -> None:
    ask = (
        "generate",
        "the state",
        "--temperature",
        "1",
        "--seed",
        "7",
        "--max-tokens",
        "12",
        "--dtype",
        "fp32",
        "--model",
        model,
    )
    first, second = cutaway(*ask), cutaway(*ask)
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout


def test_generate_refuses_text_that_is_none(model: str) -> None:
    assert "not valid Unicode" in refuses("generate", "-", "--model", model, *FAKE, stdin=b"\xff\xfe")


def test_a_prompt_past_the_window_is_one_line(model: str) -> None:
    line = refuses("generate", "the state " * 600, "--model", model, *FAKE)
    assert re.search(r"window", line)


def test_a_reader_that_leaves_is_no_error(model: str) -> None:
    ask = [*COMMAND, "generate", "the state", "--max-tokens", "400", "--model", model, *FAKE]
    with subprocess.Popen(ask, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        errors = process.stderr.read().decode()
        assert process.wait(60) in (0, 1)
    assert "Traceback" not in errors
    assert "BrokenPipe" not in errors


def test_models_is_a_table_that_a_program_can_read(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "mine.gguf").write_bytes(b"GGUF")
    done = cutaway("models", CUTAWAY_HOME=str(tmp_path))
    header, builtin, mine = done.stdout.splitlines()
    assert header.split() == ["name", "what", "size", "licence", "here", "path"]
    assert builtin.startswith("smollm2-135m-instruct ")
    assert "Apache-2.0" in builtin
    assert str(folder / "mine.gguf") in mine
    assert "\033" not in done.stdout


def test_diff_trace_answers_by_its_exit_code(model: str, tmp_path: Path) -> None:
    step = {"step": 0, "budget": 8, "rows": [{"id": 0, "start": 0, "n": 3, "drafts": 0, "accepted": 1, "blocks": [1]}],
            "waiting": [], "preempted": [], "admitted": [0], "finished": [], "copies": [], "free": 6, "cached": 0, "used": 2,
            "hits": 0}  # fmt: skip
    other = step | {"free": 5}
    for name, record in (("a", step), ("b", step), ("c", other)):
        (tmp_path / name).write_text(json.dumps(record) + "\n")
    (tmp_path / "d").write_text("not a trace\n")
    same = cutaway("diff-trace", str(tmp_path / "a"), str(tmp_path / "b"))
    assert (same.returncode, same.stderr) == (0, "")
    differ = cutaway("diff-trace", str(tmp_path / "a"), str(tmp_path / "c"))
    assert differ.returncode == 1
    assert "free is 6 in the first, 5 in the second" in differ.stdout
    assert "line 1" in refuses("diff-trace", str(tmp_path / "a"), str(tmp_path / "d"))


# --- serve --------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def served(*args: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server and its URL, which its banner gives."""
    process = subprocess.Popen(
        [*COMMAND, "serve", "--port", "0", *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        page = next((line for line in process.stdout if line.split()[:1] == ["Page"]), "")
        assert "http://" in page, process.communicate(timeout=30)
        yield process, page.split()[1].rstrip("/")
    finally:
        process.kill()
        process.communicate()


def test_serve_answers_writes_its_trace_and_stops_in_order(model: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    with served("--model", model, "--trace", str(trace), "--api-key", "k", "--max-num-seqs", "2", *FAKE) as (process, url):
        body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "the state"}], "max_tokens": 5}).encode()
        headers = {"Content-Type": "application/json", "Authorization": "Bearer k"}
        with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/chat/completions", body, headers), timeout=30) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] >= 1
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()
    schema = json.loads((resources.files("cutaway.server") / "trace.schema.json").read_text())
    steps = [json.loads(line) for line in trace.read_text().splitlines()]
    assert len(steps) >= 2
    for step in steps:
        jsonschema.validate(step, schema)


# --- chat ---------------------------------------------------------------------------------------------------------------


def test_chat_from_a_pipe_keeps_what_was_said(model: str) -> None:
    ask = ("chat", "--temperature", "0", "--max-tokens", "6", "--model", model, *FAKE)

    def said(*lines: str) -> str:
        done = cutaway(*ask, stdin="".join(f"{line}\n" for line in lines).encode())
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    first, second = said("the state"), said("and the people")
    assert said("the state", "/clear", "and the people") == first + "The conversation is forgotten.\n" + second
    both = said("the state", "and the people")
    assert both.startswith(first)
    assert both != first + second


def test_chat_tells_its_commands_and_leaves(model: str) -> None:
    done = cutaway("chat", "--model", model, *FAKE, stdin=b"/help\n/nothing\n/system be brief\n/exit\nnever asked\n")
    assert done.returncode == 0
    assert "/clear          forget the conversation" in done.stdout
    assert "There is no /nothing." in done.stdout
    assert "with that system message" in done.stdout
    assert "never asked" not in done.stdout


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, *args: str, **environment: str) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.execve(sys.executable, [*COMMAND, *args], ENVIRONMENT | {"TERM": "xterm", "NO_COLOR": "1"} | environment)
        self.seen = ""

    def until(self, pattern: str, seconds: float = 60.0) -> None:
        """Reads until `pattern` is seen; forgets all up to it."""
        end = time.monotonic() + seconds
        while not (found := re.search(pattern, self.seen)):
            assert time.monotonic() < end, self.seen
            if select.select([self.fd], [], [], 0.2)[0]:
                self.seen += os.read(self.fd, 65536).decode(errors="replace")
                if "\033[6n" in self.seen:  # prompt-toolkit asks where the cursor is
                    self.seen = self.seen.replace("\033[6n", "")
                    os.write(self.fd, b"\033[1;1R")
        self.seen = self.seen[found.end() :]

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def wait(self) -> int:
        with contextlib.suppress(OSError):
            while os.read(self.fd, 65536):
                pass
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def test_ctrl_c_stops_an_answer_and_ctrl_d_leaves(model: str, tmp_path: Path) -> None:
    terminal = Terminal(
        "chat", "--model", model, "--max-tokens", "400", "--temperature", "0", *FAKE,
        CUTAWAY_HOME=str(tmp_path / "home"), CUTAWAY_FAKE_SECONDS="0.05",
    )  # fmt: skip
    terminal.until("lists the rest.")
    terminal.until(">")
    terminal.type("the state\r")
    terminal.until("the state")
    time.sleep(1.0)
    terminal.type("\x03")
    terminal.until(r"\d+ tokens in .* stopped")
    terminal.until(">")
    terminal.type("\x03")
    terminal.type("/help\r")
    terminal.until("forget the conversation")
    terminal.until(">")
    terminal.type("\x04")
    assert terminal.wait() == 0
    assert "the state" in (tmp_path / "home" / "chat_history").read_text()
