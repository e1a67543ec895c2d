"""Options that several verbs share, and what they become: an `EngineConfig`."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from cutaway.core.errors import CutawayError
from cutaway.engine.config import EngineConfig

Dtype = Literal["auto", "bf16", "fp32"]

DEFAULTS = EngineConfig()

ModelOption = Annotated[
    str,
    typer.Option(
        "--model",
        metavar="MODEL",
        help="A folder as Hugging Face has it, a .gguf file, a name that `models` lists, or a hub id.",
    ),
]
DtypeOption = Annotated[
    Dtype,
    typer.Option("--dtype", help="What weights and the KV cache are kept in. fp32 is exact and slower; auto is bf16 on a CPU."),
]
MaxModelLenOption = Annotated[
    int | None,
    typer.Option(
        "--max-model-len",
        min=2,
        max=2**31 - 1,
        metavar="TOKENS",
        help="The window: most tokens of prompt and answer together. Without it, the model's own.",
    ),
]
KVBlocksOption = Annotated[
    int | None,
    typer.Option(
        "--kv-blocks",
        min=2,
        max=2**31 - 1,
        metavar="N",
        help="Blocks of 16 tokens in the KV cache. When they run out, requests wait, and the last ones admitted start again"
        " later. Without it: as many as 16 windows need, at most a quarter of the free memory.",
    ),
]
PartOption = Annotated[
    list[str],
    typer.Option(
        "--part",
        metavar="NAME=FILE",
        help="A file of your own that plays a part of the engine (blocks, scheduler, sampler, ...). May be given again.",
    ),
]
ShadowOption = Annotated[
    list[str],
    typer.Option(
        "--shadow",
        metavar="NAME=FILE",
        help="A file of your own that runs beside the engine's own part, on the same calls, until it decides something else:"
        " then both are shown. What is served is the engine's. May be given again.",
    ),
]
NO_TORCH = "the torch backend needs torch, which is not installed: pip install '.[torch]' in a checkout, or pip install torch"
MaxNumSeqsOption = Annotated[
    int,
    typer.Option(min=1, max=4096, metavar="N", help="Most requests that run at once, a row each of every step; others wait."),
]
PreemptionOption = Annotated[
    Literal["recompute", "swap"],
    typer.Option(
        "--preemption",
        help="How a request that gave its blocks back goes on: it computes them again, or has a copy of them kept on the host.",
    ),
]
BackendOption = Annotated[str, typer.Option("--backend", hidden=True, metavar="MODULE:FUNCTION")]
MaxTokensOption = Annotated[
    int | None, typer.Option("--max-tokens", min=1, metavar="N", help="End an answer after so many tokens. Default: 512.")
]
TemperatureOption = Annotated[
    float, typer.Option("--temperature", metavar="T", help="0 takes the likeliest token each time; more, more chance.")
]
TopPOption = Annotated[
    float, typer.Option("--top-p", metavar="P", help="Keep the smallest set of tokens whose probability reaches P.")
]
TopKOption = Annotated[int, typer.Option("--top-k", metavar="K", help="Keep the K most likely tokens; 0 keeps all.")]
SeedOption = Annotated[
    int | None, typer.Option("--seed", metavar="N", help="The same seed gives the same answer. Without it one is drawn.")
]


def parts_of(given: Sequence[str], option: str = "--part") -> dict[str, str]:
    """NAME=FILE options as a mapping. Raises CutawayError for a name that is no part, or a file that is not there."""
    from cutaway.engine.parts import PARTS

    chosen: dict[str, str] = {}
    for text in given:
        name, equals, source = text.partition("=")
        if not equals or not source:
            raise CutawayError(f"{option} takes NAME=FILE, got {text!r}; the parts are {', '.join(PARTS)}")
        if name not in PARTS:
            raise CutawayError(f"{option} {text}: there is no part called {name!r}; the parts are {', '.join(PARTS)}")
        if name in chosen:
            raise CutawayError(f"{option} names {name} twice")
        if source.endswith(".py") or "/" in source:
            if not Path(source).is_file():
                raise CutawayError(f"{option} {text}: no such file: {source}")
            if not source.endswith(".py"):
                raise CutawayError(f"{option} {text}: {source} is not a .py file")
            source = str(Path(source).resolve())
        chosen[name] = source
    return chosen


def config_from(**given: Any) -> EngineConfig:
    """An EngineConfig from options. `part` and `shadow` are lists of NAME=FILE. Raises CutawayError where it cannot run."""
    given["parts"] = parts_of(given.pop("part", ()))
    given["shadow"] = parts_of(given.pop("shadow", ()), "--shadow")
    if both := given["parts"].keys() & given["shadow"].keys():
        raise CutawayError(f"--shadow {both.pop()}: a shadow runs beside the engine's own part, so --part cannot replace that")
    trace: str | None = given.get("trace")
    if trace is not None and (not trace or Path(trace).is_dir()):
        raise CutawayError(f"--trace {trace!r}: give the name of a file to write to")
    if trace is not None and not Path(trace).absolute().parent.is_dir():
        raise CutawayError(f"--trace {trace}: there is no folder {Path(trace).absolute().parent}")
    config = EngineConfig(**{f.name: given[f.name] for f in fields(EngineConfig) if f.name in given})
    if config.backend == DEFAULTS.backend and importlib.util.find_spec("torch") is None:
        raise CutawayError(NO_TORCH)
    return config
