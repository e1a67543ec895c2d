"""What the server's tests share: a tiny tokenizer and template, the fake backend, a server on a thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import tokenizers
import uvicorn
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from cutaway.backends.fake import FakeBackend
from cutaway.core.text_assets import TextAssets
from cutaway.engine.channel import InProcessChannel
from cutaway.engine.config import EngineConfig
from cutaway.engine.front import Front
from cutaway.engine.parts import Parts
from cutaway.server.app import create_app
from cutaway.server.service import Metered, Service
from cutaway.text.chat import ChatTemplate
from cutaway.text.tokenizer import Tokenizer

T = TypeVar("T")
MODEL = "tiny"
WINDOW = 256
VOCABULARY = 400
BOS, EOS = "<|bos|>", "<|eos|>"
TEMPLATE = (
    "{% for m in messages %}{% if m.content == 'tools' %}{{ raise_exception('tools are not for this model') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tokenizer_assets(folder: Path) -> TextAssets:
    """Byte-level BPE trained on a few sentences: every byte is a token, so any id decodes."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    text = ["the table maps each page to a block", "a block holds sixteen tokens of one sequence", "the quick brown fox"] * 4
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 2, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    backend.train_from_iterator(text, trainer)
    backend.add_special_tokens([AddedToken(BOS, special=True), AddedToken(EOS, special=True)])
    file = folder / "tokenizer.json"
    backend.save(str(file))
    return TextAssets(MODEL, backend.get_vocab_size(), file, chat_template=TEMPLATE, special_tokens={"eos_token": EOS})


def front_of(folder: Path, parts: Parts, window: int = WINDOW) -> Front:
    assets = tokenizer_assets(folder)
    tokenizer = Tokenizer.open(assets)
    return Front(MODEL, tokenizer, ChatTemplate.open(assets), tokenizer.eos_ids, window, parts)


def quick(config: EngineConfig, parts: object) -> FakeBackend:
    return FakeBackend(config.kv_blocks or 129, vocabulary=290)


def slow(config: EngineConfig, parts: object) -> FakeBackend:
    return FakeBackend(config.kv_blocks or 129, vocabulary=290, seconds=0.02)


def poisoned(config: EngineConfig, parts: object) -> FakeBackend:
    """A row that holds token 7 gets logits that are not finite."""
    return FakeBackend(129, vocabulary=290, seconds=0.005, poison=7)


@dataclass
class Served:
    """A running server. `call` runs a coroutine on its loop."""

    url: str
    service: Service
    loop: asyncio.AbstractEventLoop

    def call(self, work: Coroutine[Any, Any, T], timeout: float = 20.0) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout)


async def open_service(front: Front, config: EngineConfig, parts: Parts, **settings: Any) -> Service:
    channel = InProcessChannel(config)
    metrics = parts.get("metrics").Metrics()
    engine = parts.get("async_engine").AsyncEngine(Metered(channel, channel, metrics))
    await engine.start()
    front.adopt(channel.ready)
    return Service(engine, front, channel, parts, metrics, version="0.test", **settings)


@contextmanager
def serving(folder: Path, backend: str = "quick", *, parts: dict[str, str] | None = None, **settings: Any) -> Iterator[Served]:
    """A server on a thread of its own, on a free port of 127.0.0.1, over the fake backend."""
    config = EngineConfig(
        model=MODEL, backend=f"{__file__}:{backend}", max_model_len=WINDOW, kv_blocks=settings.pop("kv_blocks", None)
    )
    registry = Parts(parts or {})
    front = front_of(folder, registry)
    with running(lambda: open_service(front, config, registry, **settings)) as served:
        yield served


@contextmanager
def running(open_it: Callable[[], Coroutine[Any, Any, Service]]) -> Iterator[Served]:
    box: dict[str, Any] = {}
    up = threading.Event()

    async def main() -> None:
        box["stop"] = asyncio.Event()
        service = await open_it()
        server = uvicorn.Server(uvicorn.Config(create_app(service), port=0, lifespan="off", log_config=None, access_log=False))
        server.capture_signals = _no_signals  # type: ignore[method-assign]
        task = asyncio.ensure_future(server.serve())
        while not server.started:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        port = server.servers[0].sockets[0].getsockname()[1]
        box["served"] = Served(f"http://127.0.0.1:{port}", service, asyncio.get_running_loop())
        up.set()
        await box["stop"].wait()
        server.should_exit = True
        service.stop()
        await asyncio.wait_for(task, 10)
        await service.engine.stop()

    def target() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            box["error"] = error
        finally:
            up.set()

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    assert up.wait(30), "the server did not start"
    if "served" not in box:
        raise box["error"]
    try:
        yield box["served"]
    finally:
        box["served"].loop.call_soon_threadsafe(box["stop"].set)
        thread.join(15)
        assert not thread.is_alive(), "the server did not stop"
    if "error" in box:
        raise box["error"]


@contextmanager
def _no_signals() -> Iterator[None]:
    yield


def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    """Waits for what another thread does."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.002)
