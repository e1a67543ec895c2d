"""The life of the server's process: port, banner, signals, drain, exit, a killed engine."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from processes import banner_of, serve_process, url_of

import tiny
from cutaway.core.errors import CutawayError
from cutaway.engine.parts import PARTS, Parts
from cutaway.server.serve import bind, played, serve

FAKE = "cutaway.backends.fake:create"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_folder(tmp_path_factory.mktemp("model") / "tiny-llama", "llama")


def test_a_file_that_plays_is_called_as_its_person_called_it() -> None:
    report = Parts({"blocks": "/home/ada/app/s06_blocks.py", "chunked": "s11_chunked.py"}).report()
    report["scheduler"]["shadow"] = {"source": "/home/ada/app/s10_scheduler.py"}
    rows = dict(played(report))
    assert rows["Yours"] == "s06_blocks.py (06)  s11_chunked.py (11)"
    assert rows["Beside"] == "s10_scheduler.py (10)"
    assert rows["Reference"] == f"{len(PARTS) - 2} other parts"


@contextmanager
def process(
    model: Path, *, backend: str = FAKE, seconds: float = 0.0, drain: float = 5.0, host: str = "127.0.0.1"
) -> Iterator[subprocess.Popen[str]]:
    config = {"model": str(model), "backend": backend, "max_model_len": 256}
    env = {"CUTAWAY_FAKE_VOCABULARY": "384", "CUTAWAY_FAKE_SECONDS": str(seconds)}
    with serve_process(config, env, host=host, drain=drain) as server:
        yield server


def engine_of(server: subprocess.Popen[str]) -> psutil.Process:
    return next(p for p in psutil.Process(server.pid).children(recursive=True) if "cutaway.engine.process" in p.cmdline())


def body(model: Path, tokens: int, stream: bool = True) -> dict[str, Any]:
    return {
        "model": model.stem,
        "prompt": "the state of",
        "max_tokens": tokens,
        "temperature": 0,
        "stream": stream,
        "ignore_eos": True,
    }


def test_the_banner_says_where_and_what_and_the_page_is_there_then(model: Path) -> None:
    with process(model) as server:
        lines = banner_of(server)
        assert lines[0] == f"Cutaway   {model.stem}\n"
        rows = dict(line.strip().split(maxsplit=1) for line in lines if line.startswith("  ") and " " in line.strip())
        url = rows["Page"].removesuffix("/")
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+", url)
        assert rows["API"] == f"{url}/v1"
        assert rows["KV"].startswith("pool     257 blocks of 16 tokens, 0.0 MiB, room for 4,096 tokens")
        assert rows["A"] == "step      at most 16 requests and 512 tokens"
        assert rows["Reference"] == f"all {len(PARTS)} parts"
        assert re.fullmatch(r"Ready in [\d.]+ s\. Ctrl-C finishes what is running, twice stops at once\.\n", lines[-1])
        assert max(map(len, lines)) <= 81
        with httpx.Client(base_url=url, timeout=20) as http:
            assert http.get("/").status_code == 200
            assert http.get("/ready").json() == {"ready": True, "state": "ready"}
            assert http.post("/v1/completions", json=body(model, 4, stream=False)).json()["usage"]["completion_tokens"] == 4
        children = psutil.Process(server.pid).children(recursive=True)
        server.send_signal(signal.SIGTERM)
        out, err = server.communicate(timeout=20)
        assert server.returncode == 0
        assert (out, err) == ("", "")
        assert psutil.wait_procs(children, timeout=5)[1] == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_running_answer_is_finished_before_the_process_ends(model: Path, number: int) -> None:
    with process(model, seconds=0.01) as server:
        with httpx.Client(base_url=url_of(server), timeout=20) as http:  # noqa: SIM117
            with http.stream("POST", "/v1/completions", json=body(model, 60)) as response:
                pieces = response.iter_raw()
                raw = next(pieces)
                server.send_signal(number)
                time.sleep(0.2)
                with pytest.raises(httpx.ConnectError):
                    httpx.get(str(http.base_url) + "/ready")  # no new connections
                raw += b"".join(pieces)
        assert raw.endswith(b"data: [DONE]\n\n")
        server.communicate(timeout=20)
        assert server.returncode == 0


def test_an_answer_that_takes_too_long_ends_with_an_error_event(model: Path) -> None:
    with process(model, seconds=0.05, drain=0.3) as server:
        with httpx.Client(base_url=url_of(server), timeout=20) as http:  # noqa: SIM117
            with http.stream("POST", "/v1/completions", json=body(model, 200)) as response:
                pieces = response.iter_raw()
                raw = next(pieces)
                begun = time.monotonic()
                server.send_signal(signal.SIGTERM)
                raw += b"".join(pieces)
        last = json.loads(raw.decode().split("\n\n")[-2][6:])
        assert last["error"]["message"] == "the server is shutting down"
        out, err = server.communicate(timeout=20)
        assert server.returncode == 0, err
        assert "Traceback" not in out + err
        assert time.monotonic() - begun < 9


def test_a_second_signal_does_not_wait(model: Path) -> None:
    with process(model, seconds=0.05, drain=30) as server:
        with httpx.Client(base_url=url_of(server), timeout=20) as http:
            children = psutil.Process(server.pid).children(recursive=True)
            with http.stream("POST", "/v1/completions", json=body(model, 200)) as response:
                pieces = response.iter_raw()
                next(pieces)
                server.send_signal(signal.SIGINT)
                time.sleep(0.3)
                assert server.poll() is None
                server.send_signal(signal.SIGINT)
                server.wait(5)
                with suppress(httpx.TransportError):
                    list(pieces)
        assert server.returncode == 128 + signal.SIGINT
        assert psutil.wait_procs(children, timeout=5)[1] == []


def test_a_signal_while_the_engine_loads_ends_it(tmp_path: Path, model: Path) -> None:
    backend = tmp_path / "sleeper.py"
    backend.write_text("import time\ndef create(config, parts):\n    time.sleep(60)\n")
    with process(model, backend=f"{backend}:create") as server:
        parent = psutil.Process(server.pid)
        end = time.monotonic() + 20
        while not (children := parent.children(recursive=True)):
            assert time.monotonic() < end
            time.sleep(0.02)
        time.sleep(0.5)
        server.send_signal(signal.SIGTERM)
        out, err = server.communicate(timeout=15)
        assert server.returncode == 0
        assert (out, err) == ("", "")
        assert psutil.wait_procs(children, timeout=5)[1] == []


def test_a_killed_engine_fails_its_stream_in_words_and_the_next_request_works(model: Path) -> None:
    with process(model, seconds=0.02) as server:
        url = url_of(server)
        with httpx.Client(base_url=url, timeout=20) as http:
            with http.stream("POST", "/v1/completions", json=body(model, 200)) as response:
                pieces = response.iter_raw()
                raw = next(pieces)
                engine_of(server).kill()
                killed = time.monotonic()
                raw += b"".join(pieces)
            assert time.monotonic() - killed < 5
            events = [line[6:] for line in raw.decode().split("\n\n") if line]
            assert events[-1] != "[DONE]"
            error = json.loads(events[-1])["error"]
            assert error["code"] == "engine_died"
            assert "engine" in error["message"]
            again = http.post("/v1/completions", json=body(model, 3, stream=False))
            assert again.status_code == 200, again.text
            assert time.monotonic() - killed < 10
            assert http.get("/health").json()["engine"]["restarts"] == 1
            assert "cutaway:engine_restarts_total" in http.get("/metrics").text
        server.send_signal(signal.SIGTERM)
        _, err = server.communicate(timeout=20)
        assert server.returncode == 0
        assert "Traceback" not in err
        assert "the engine process ended (SIGKILL" in err
        assert "restarting it" in err


def test_an_open_network_without_a_key_is_said(model: Path) -> None:
    with process(model, host="0.0.0.0") as server:
        assert url_of(server).startswith("http://127.0.0.1:")
        server.send_signal(signal.SIGTERM)
        _, err = server.communicate(timeout=20)
        assert len(err.splitlines()) == 1
        assert err.startswith("warning: --host 0.0.0.0")
        assert "--api-key" in err


# ---- the port ------------------------------------------------------------------------------------------------------------


def test_a_port_in_use_is_one_line_that_names_it_and_the_option() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CutawayError, match=rf"port {port} .*in use.*--port"):
            bind("127.0.0.1", port)


def test_a_bound_port_does_not_accept_before_it_listens() -> None:
    with bind("127.0.0.1", 0) as sock, pytest.raises(ConnectionRefusedError):
        socket.create_connection(sock.getsockname(), timeout=5)


@pytest.mark.parametrize(
    ("host", "port", "words"),
    [
        ("no.such.host.invalid", 0, "--host"),
        ("192.0.2.1", 0, "no address of this machine"),
        ("127.0.0.1", 70000, "--port"),
        ("127.0.0.1", -1, "--port"),
        ("a" * 70, 0, "--host"),
        ("\x00", 0, "--host"),
    ],
)
def test_addresses_that_are_not_to_be_had(host: str, port: int, words: str) -> None:
    with pytest.raises(CutawayError, match=words) as raised:
        bind(host, port)
    assert "\n" not in str(raised.value)


def test_a_port_in_use_is_told_before_the_model_is_looked_for(tmp_path: Path) -> None:
    from cutaway.engine.config import EngineConfig

    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(CutawayError, match="in use"):
        serve(EngineConfig(model=str(tmp_path / "nothing")), port=taken.getsockname()[1])


def test_a_missing_model_is_one_line(tmp_path: Path) -> None:
    with serve_process({"model": str(tmp_path / "nothing"), "backend": FAKE}, {}) as server:
        out, err = server.communicate(timeout=60)
    assert server.returncode == 2
    assert out == ""
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1
    assert "nothing" in err
