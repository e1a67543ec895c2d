"""A server whose part never comes back, on the command line's own way: what its client, /health and standard error say. Swap
under `serve`, and its counters."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from processes import LIMIT, environment, url_of

import tiny

FAKE = "cutaway.backends.fake:create"
PART = """from cutaway.core.scheduler import Scheduler as Own
class Scheduler(Own):
    def schedule(self):
        while any(r.params.max_tokens == 7 for r in self.waiting):
            pass
        return super().schedule()
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", "llama")


@contextmanager
def command(model: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """`cutaway serve` as a person types it."""
    words = [sys.executable, "-m", "cutaway.cli", "serve", "--port", "0", "--model", str(model), "--dtype", "fp32", *options]
    variables = environment({"CUTAWAY_PART_SECONDS": "1", "CUTAWAY_FAKE_VOCABULARY": str(tiny.VOCABULARY)})
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables) as server:
        try:
            yield server
        finally:
            server.kill()


def test_a_part_that_never_comes_back_under_serve(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(PART)
    with command(model, "--part", f"scheduler={file}") as server, httpx.Client(base_url=url_of(server), timeout=LIMIT) as http:
        body = {"model": "tiny", "prompt": "the state", "temperature": 0, "ignore_eos": True}
        before = http.post("/v1/completions", json=body | {"max_tokens": 8}).json()["choices"][0]["text"]
        assert "dropped" not in http.get("/health").json()["parts"]["scheduler"]
        failed = http.post("/v1/completions", json=body | {"max_tokens": 7})
        assert failed.status_code == 500 or failed.status_code == 503
        where = rf"{re.escape(str(file))}, line [45], in \S+ \(part scheduler, stage 10\): has not come back for 1 s"
        told = failed.json()["error"]["message"]
        assert re.fullmatch(rf"the engine process failed \({where}\); it is being restarted with the engine's own scheduler, "
                            "send the request again", told)  # fmt: skip
        again = http.post("/v1/completions", json=body | {"max_tokens": 7})
        assert again.status_code == 200, again.text
        assert before.startswith(again.json()["choices"][0]["text"])
        health = http.get("/health").json()
        part = health["parts"]["scheduler"]
        assert (part["reference"], health["engine"]["restarts"], health["status"]) == (True, 1, "ok")
        assert re.fullmatch(where, part["dropped"])
        server.terminate()
        out, error = server.communicate(timeout=30)
        assert server.returncode == 0
        assert re.search(rf"the engine process failed \({where}\); restarting it with the engine's own scheduler\n", error)
        assert "Traceback" not in out + error


def test_swap_under_serve(model: Path) -> None:
    with command(model, "--preemption", "swap", "--kv-blocks", "12") as server:
        url = url_of(server)
        with httpx.Client(base_url=url, timeout=LIMIT) as http:
            body = {"model": "tiny", "temperature": 0, "ignore_eos": True, "max_tokens": 60}
            prompts = [f"the state of {i}" * 3 for i in range(4)]
            alone = [http.post("/v1/completions", json=body | {"prompt": p}).json()["choices"][0]["text"] for p in prompts]
            together = http.post("/v1/completions", json=body | {"prompt": prompts}).json()["choices"]
            assert [choice["text"] for choice in together] == alone
            assert http.get("/health").json()["engine"]["preemption"] == "swap"
            found = re.findall(
                r'^cutaway:swapped_blocks_total\{direction="(\w+)",.*\} ([\d.]+)$', http.get("/metrics").text, re.M
            )
            assert {name: float(n) > 0 for name, n in found} == {"out": True, "in": True}


@pytest.mark.parametrize("text", ["    def step(self, *a, **k): 1 / 0\n", "    def arrived(self, *a): 1 / 0\n",
                                  "    def finished(self, *a): 1 / 0\n", "    def snapshot(self): 1 / 0\n"])  # fmt: skip
def test_metrics_that_fail_fail_no_request(model: Path, tmp_path: Path, text: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text("from cutaway.core.metrics import Metrics as Own, percentile, poisson\nclass Metrics(Own):\n" + text)
    with command(model, "--part", f"metrics={file}", "--backend", FAKE) as server:
        url = url_of(server)
        with httpx.Client(base_url=url, timeout=LIMIT) as http:
            body = {"model": "tiny", "prompt": "the state", "temperature": 0, "max_tokens": 4}
            assert [http.post("/v1/completions", json=body).status_code for _ in range(3)] == [200] * 3
            assert http.get("/metrics").status_code == 200
            assert f"{file}, line 3, in " in http.get("/health").json()["parts"]["metrics"]["dropped"]


def test_a_detokenizer_that_fails_three_times(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("from cutaway.text.detokenizer import Detokenizer as Own\nclass Detokenizer(Own):\n"
                    "    def push(self, ids):\n        return None\n")  # fmt: skip
    with command(model, "--part", f"detokenizer={file}", "--backend", FAKE) as server:
        url = url_of(server)
        with httpx.Client(base_url=url, timeout=LIMIT) as http:
            body = {"model": "tiny", "prompt": "the state", "temperature": 0, "max_tokens": 4}
            replies = [http.post("/v1/completions", json=body) for _ in range(4)]
            assert [reply.status_code for reply in replies] == [500, 500, 500, 200]
            assert "mine.py (part detokenizer, stage 14) answered" in replies[0].json()["error"]["message"]
            part = http.get("/health").json()["parts"]["detokenizer"]
            assert (part["reference"], part["dropped"][:8]) == (True, "3 faults")
