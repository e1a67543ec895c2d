"""What ends an answer early: its client, the engine, a stop of the server."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import MODEL, Served, serving, until

LONG: dict[str, Any] = {"model": MODEL, "prompt": "the table maps each page to a block", "max_tokens": 200, "temperature": 0}


@pytest.fixture(scope="module")
def slowly(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A step takes 20 ms, so the long answer above takes 4 seconds."""
    with serving(tmp_path_factory.mktemp("slow"), "slow") as running:
        yield running


class Watch:
    """Steps that the engine made between an abort and the first figures without its blocks."""

    def __init__(self, served: Served) -> None:
        self.channel: Any = served.service.channel
        self.aborted: list[int] = []
        self.step_at_abort = -1
        self._abort = self.channel.abort
        self.channel.abort = self._note

    def _note(self, ids: Sequence[int]) -> None:
        self.step_at_abort = self.channel.stats.step
        self.aborted += ids
        self._abort(ids)

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.abort = self._abort

    def holds(self) -> bool:
        return self.channel.stats is not None and self.channel.stats.used > 1

    def is_free(self) -> bool:
        """Only the dummy block is in use, and nothing runs or waits."""
        stats = self.channel.stats
        return stats.used == 1 and stats.running == 0 and stats.waiting == 0


def test_a_client_that_leaves_a_stream_frees_its_blocks_within_one_step(slowly: Served) -> None:
    with Watch(slowly) as watch, httpx.Client(base_url=slowly.url, timeout=20) as http:
        with http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
            next(response.iter_raw(1))
            assert watch.holds()
        until(watch.is_free)
        assert len(watch.aborted) == 1
        # the step that ran when the abort was sent, and the one that it takes effect before
        assert watch.channel.stats.step - watch.step_at_abort <= 2
        assert slowly.service.engine.num_active == 0


def test_a_client_that_leaves_before_its_answer_is_whole_frees_its_blocks(slowly: Served) -> None:
    with Watch(slowly) as watch, httpx.Client(base_url=slowly.url) as http:
        with pytest.raises(httpx.ReadTimeout):
            http.post("/v1/completions", json=LONG, timeout=0.3)
        until(watch.is_free)
        assert len(watch.aborted) == 1
        assert watch.channel.stats.step - watch.step_at_abort <= 2
        assert slowly.service.engine.num_active == 0


@pytest.mark.parametrize("stream", [True, False])
def test_all_prompts_of_a_client_that_leaves_are_aborted(slowly: Served, stream: bool) -> None:
    body = {**LONG, "prompt": ["the table", "a block", "sixteen tokens"], "stream": stream}
    with Watch(slowly) as watch:
        with httpx.Client(base_url=slowly.url) as http, pytest.raises(httpx.ReadTimeout):
            http.post("/v1/completions", json=body, timeout=0.3) if not stream else _read_for(http, body, 0.3)
        until(watch.is_free)
        assert len(watch.aborted) == 3
        assert watch.channel.stats.step - watch.step_at_abort <= 2


def _read_for(http: httpx.Client, body: dict[str, Any], seconds: float) -> None:
    end = time.monotonic() + seconds
    with http.stream("POST", "/v1/completions", json=body, timeout=5) as response:
        for _ in response.iter_raw():
            if time.monotonic() > end:
                raise httpx.ReadTimeout("enough")


def test_an_answer_that_ends_by_itself_sends_no_abort_one_that_a_stop_string_ends_sends_one(slowly: Served) -> None:
    with Watch(slowly) as watch, httpx.Client(base_url=slowly.url, timeout=20) as http:
        text = http.post("/v1/completions", json={**LONG, "max_tokens": 12}).json()["choices"][0]["text"]
        assert watch.aborted == []
        stopped = http.post("/v1/completions", json={**LONG, "stop": text[4:7]}).json()
        assert stopped["choices"][0]["finish_reason"] == "stop"
        assert len(watch.aborted) == 1
        until(watch.is_free)


def test_the_stream_comes_in_pieces_as_the_engine_makes_them(slowly: Served) -> None:
    body = {**LONG, "max_tokens": 10, "stream": True}
    with httpx.Client(base_url=slowly.url, timeout=20) as http, http.stream("POST", "/v1/completions", json=body) as response:
        times = [time.monotonic() for piece in response.iter_raw() if piece]
    assert len(times) >= 6
    assert times[-1] - times[0] > 0.1


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A row that holds token 7 has logits that are not finite."""
    with serving(tmp_path_factory.mktemp("poisoned"), "poisoned") as running:
        yield running


def test_what_fails_before_the_first_token_gets_a_status_streamed_or_not(poisoned: Served) -> None:
    body = {"model": MODEL, "prompt": [5, 7, 9], "max_tokens": 4, "temperature": 0}
    with httpx.Client(base_url=poisoned.url, timeout=20) as http:
        for stream in (False, True):
            response = http.post("/v1/completions", json={**body, "stream": stream})
            assert response.status_code == 500
            error = response.json()["error"]
            assert error["type"] == "server_error"
            assert error["code"] == "engine_error"
            assert "finite" in error["message"] or "NaN" in error["message"]
        served = [http.post("/v1/completions", json={**body, "prompt": [5, 9 + i]}).status_code for i in range(4)]
        assert 200 in served  # it goes on; an answer may draw the poisoned token itself
        assert set(served) <= {200, 500}
        assert http.get("/ready").status_code == 200


def test_what_fails_in_a_stream_is_an_error_event_and_the_end_of_it(slowly: Served) -> None:
    channel: Any = slowly.service.channel
    raw = b""
    with httpx.Client(base_url=slowly.url, timeout=20) as http:
        with http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
            pieces = response.iter_raw()
            raw += next(pieces)
            ids = list(channel._live)
            slowly.loop.call_soon_threadsafe(channel._fail, ids, "the engine process was killed")
            for piece in pieces:
                raw += piece
        slowly.loop.call_soon_threadsafe(channel.abort, ids)
    events = [line[6:] for line in raw.decode().split("\n\n") if line]
    error = json.loads(events[-1])["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] == "the engine process was killed"
    assert error["type"] == "server_error"
    chunks = [json.loads(e) for e in events[:-1]]
    assert chunks
    assert all(c["choices"][0]["finish_reason"] is None for c in chunks)


def test_one_prompt_that_fails_fails_the_request_and_aborts_the_others(poisoned: Served) -> None:
    body = {"model": MODEL, "prompt": [[5, 6], [5, 7]], "max_tokens": 200, "temperature": 0}
    with httpx.Client(base_url=poisoned.url, timeout=20) as http, Watch(poisoned) as watch:
        assert http.post("/v1/completions", json=body).status_code == 500
        until(watch.is_free)
    assert poisoned.service.engine.num_active == 0


def test_a_stop_of_the_server_ends_answers_with_an_error(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}
    begun = threading.Event()

    def stream(url: str) -> None:
        with httpx.Client(base_url=url, timeout=20) as http:
            with http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
                raw = b""
                for piece in response.iter_raw():
                    raw += piece
                    begun.set()
            seen["events"] = raw.decode()

    def whole(url: str) -> None:
        seen["whole"] = httpx.post(f"{url}/v1/completions", json=LONG, timeout=20)

    with serving(tmp_path, "slow") as served:
        clients = [threading.Thread(target=work, args=(served.url,)) for work in (stream, whole)]
        for client in clients:
            client.start()
        assert begun.wait(10)
        until(lambda: len(served.service.running) == 2)
    for client in clients:
        client.join(10)
        assert not client.is_alive()
    assert json.loads(seen["events"].split("\n\n")[-2][6:])["error"]["code"] == "unavailable"
    assert "shutting down" in seen["events"]
    assert seen["whole"].status_code == 503
    assert seen["whole"].headers["retry-after"] == "2"
    assert seen["whole"].json()["error"]["message"] == "the server is shutting down"


@pytest.mark.parametrize("where", ["complete", "stream"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_bug_is_one_line_without_its_text_and_the_server_goes_on(
    slowly: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str, stream: bool
) -> None:
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("a secret of the inside")

    body = {**LONG, "max_tokens": 2, "stream": stream}
    with httpx.Client(base_url=slowly.url, timeout=20) as http:
        with monkeypatch.context() as patch:
            patch.setattr(slowly.service.front, where, broken)
            response = http.post("/v1/completions", json=body)
        assert response.status_code == 500
        error = response.json()["error"]
        assert error["code"] == "internal_error"
        assert "ZeroDivisionError" in error["message"]
        assert "secret" not in response.text
        assert [r.getMessage() for r in caplog.records if "test_faults.py" in r.getMessage()]
        assert http.post("/v1/completions", json=body).status_code == 200
        assert slowly.service.engine.num_active == 0


def test_a_dead_engine_is_503_in_words(tmp_path: Path) -> None:
    with serving(tmp_path) as served, httpx.Client(base_url=served.url, timeout=20) as http:
        channel: Any = served.service.channel
        channel.state, channel.failure = "failed", "the engine process was killed by SIGKILL"
        for stream in (True, False):
            response = http.post("/v1/completions", json={**LONG, "stream": stream})
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "engine_died"
            assert "SIGKILL" in response.json()["error"]["message"]
        assert http.get("/ready").status_code == 503
        health = http.get("/health")
        assert health.status_code == 503
        assert health.json()["status"] == "down"
        assert health.json()["engine"]["failure"] == channel.failure
        assert "cutaway:engine_up{" in http.get("/metrics").text
        channel.state = "ready"
        assert http.post("/v1/completions", json={**LONG, "max_tokens": 2}).status_code == 200
