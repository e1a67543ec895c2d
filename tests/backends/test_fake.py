"""The backend without a model: what it answers shows whether every block was right."""

from __future__ import annotations

import pytest

from cutaway.backends.fake import create
from cutaway.engine.config import EngineConfig
from looping import Recorder, a_request, answer, drain, make


def test_a_backend_from_a_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTAWAY_FAKE_VOCABULARY", "50")
    backend = create(EngineConfig(model="fake", kv_blocks=20, max_model_len=100))
    assert backend.kv().num_blocks == 20 and backend.vocabulary == 50 and backend.seconds == 0
    assert create(EngineConfig(model="fake", max_model_len=100, max_num_seqs=2)).kv().num_blocks == 15


def test_blocks_go_out_and_come_back() -> None:
    backend = Recorder(num_blocks=11)
    engine = make(backend=backend)
    engine.add(a_request(0, length=9, max_tokens=20))
    engine.step()
    table = engine.scheduler.running[0].table.blocks
    kept = backend.export_blocks(table)
    assert kept.data.shape == (len(table), backend.kv().bytes_per_block)
    backend._kv[:] = 0
    backend.import_blocks(table, kept)
    request = engine.scheduler.running[0]
    drain(engine)
    assert request.tokens[9:] == answer(a_request(0, length=9, max_tokens=20))


@pytest.mark.parametrize("damage", ["stale block", "wrong block"])
def test_a_wrong_block_is_visible(damage: str) -> None:
    backend = Recorder(num_blocks=11)
    engine = make(backend=backend)
    engine.add(a_request(0, length=9, max_tokens=20))
    engine.step()
    request = engine.scheduler.running[0]
    if damage == "stale block":
        backend._kv[request.table.slot(2)] += 1
    else:
        row = backend._rows[0]
        row.places[:4] = row.places[4:8]
    drain(engine)
    assert request.tokens[10:] != answer(a_request(0, length=9, max_tokens=20))[1:]
