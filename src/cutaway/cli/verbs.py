"""The verbs. Each says what it does in `--help`, reads its options, and hands over to the room that does the work."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from cutaway.cli import options as o
from cutaway.core.errors import CutawayError

app = typer.Typer(
    help="An LLM inference engine that you can see into.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # boxes cut the long names of options off
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print("cutaway", version("cutaway"))
        raise typer.Exit


@app.callback()
def _root(  # pyright: ignore[reportUnusedFunction]
    version: Annotated[bool, typer.Option("--version", "-V", callback=_show_version, is_eager=True, help="Print it.")] = False,
) -> None:
    pass


@app.command()
def serve(
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Address to listen at. 0.0.0.0 lets other machines in.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="N", help="Port to listen at; 0 takes a free one.")] = 8000,
    model: o.ModelOption = o.DEFAULTS.model,
    dtype: o.DtypeOption = o.DEFAULTS.dtype,
    max_model_len: o.MaxModelLenOption = None,
    kv_blocks: o.KVBlocksOption = None,
    max_num_seqs: o.MaxNumSeqsOption = o.DEFAULTS.max_num_seqs,
    max_num_batched_tokens: Annotated[
        int,
        typer.Option(
            min=1,
            max=2**24,
            metavar="N",
            help="Most tokens computed in one step, over all requests. Prompts are cut to fit beside running answers: less"
            " keeps answers fluent while a long prompt arrives, more reads prompts faster.",
        ),
    ] = o.DEFAULTS.max_num_batched_tokens,
    no_prefix_cache: Annotated[
        bool, typer.Option("--no-prefix-cache", help="Compute every prompt from its start, also where another had the same.")
    ] = False,
    preemption: o.PreemptionOption = o.DEFAULTS.preemption,
    api_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            envvar="CUTAWAY_API_KEY",
            help="Refuse requests to /v1 without `Authorization: Bearer KEY`. Without it everybody may ask.",
        ),
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write what each step decided, one line of JSON a step; `diff-trace` compares two."),
    ] = None,
    part: o.PartOption = [],  # noqa: B006  # Typer reads it, nobody writes it
    shadow: o.ShadowOption = [],  # noqa: B006
    backend: o.BackendOption = o.DEFAULTS.backend,
) -> None:
    """An OpenAI-compatible server, with a page at / to try it.

    Ctrl-C lets running answers end; twice stops at once.
    """
    if api_key is not None and not api_key.strip():
        raise CutawayError("--api-key must not be empty; leave it out to let everybody ask")
    config = o.config_from(
        model=model, dtype=dtype, max_model_len=max_model_len, kv_blocks=kv_blocks, max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens, prefix_cache=not no_prefix_cache, preemption=preemption,
        trace=trace, part=part, shadow=shadow, backend=backend,
    )  # fmt: skip
    from cutaway.server.serve import serve as run

    run(config, host=host, port=port, api_key=api_key)


@app.command()
def generate(
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="What to answer. Without one, or for -, standard input.", show_default=False)
    ] = "-",
    raw: Annotated[
        bool, typer.Option("--raw", help="Go on from the text as it is, without the model's chat template.")
    ] = False,
    max_tokens: o.MaxTokensOption = None,
    temperature: o.TemperatureOption = 0.0,
    top_p: o.TopPOption = 1.0,
    top_k: o.TopKOption = 0,
    seed: o.SeedOption = None,
    model: o.ModelOption = o.DEFAULTS.model,
    dtype: o.DtypeOption = o.DEFAULTS.dtype,
    max_model_len: o.MaxModelLenOption = None,
    part: o.PartOption = [],  # noqa: B006
    shadow: o.ShadowOption = [],  # noqa: B006
    backend: o.BackendOption = o.DEFAULTS.backend,
) -> None:
    """One answer, to standard output.

    Its figures go to standard error.

    Example: cutaway generate "Why is the sky blue?" --max-tokens 100
    """
    from cutaway.cli.talk import generate as run
    from cutaway.core.request import SamplingParams

    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    config = o.config_from(
        model=model, dtype=dtype, max_model_len=max_model_len, max_num_seqs=1, part=part, shadow=shadow,
        backend=backend,
    )  # fmt: skip
    run(config, prompt, params, max_tokens=max_tokens, raw=raw)


@app.command()
def chat(
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="The system message: how the model is to answer.")] = None,
    max_tokens: o.MaxTokensOption = None,
    temperature: o.TemperatureOption = 0.6,
    top_p: o.TopPOption = 0.95,
    top_k: o.TopKOption = 0,
    seed: o.SeedOption = None,
    model: o.ModelOption = o.DEFAULTS.model,
    dtype: o.DtypeOption = o.DEFAULTS.dtype,
    max_model_len: o.MaxModelLenOption = None,
    part: o.PartOption = [],  # noqa: B006
    backend: o.BackendOption = o.DEFAULTS.backend,
) -> None:
    """A conversation in the terminal.

    Ctrl-C stops an answer; Ctrl-D leaves. /help lists what else can be typed.
    """
    from cutaway.cli.talk import chat as run
    from cutaway.core.request import SamplingParams

    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    config = o.config_from(
        model=model, dtype=dtype, max_model_len=max_model_len, max_num_seqs=1, part=part, backend=backend
    )  # fmt: skip
    run(config, params, max_tokens=max_tokens, system=system)


@app.command()
def models() -> None:
    """The models that can be asked for by name."""
    from cutaway.cli.models import show

    show()


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def bench(context: typer.Context) -> int:
    """Speed, memory, start, invariance: `bench --help`."""
    from cutaway import bench as room
    from cutaway.cli import invoke

    return invoke(room.app, context.args, "cutaway bench")


@app.command()
def diff_trace(
    a: Annotated[Path, typer.Argument(metavar="A", help="A trace that --trace wrote.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another.")],
) -> int:
    """Where two traces first decided differently.

    Exit 0 if nowhere, 1 if somewhere, 2 if a file is no trace.
    """
    from cutaway.engine.trace import diff_traces, read_trace

    difference = diff_traces(read_trace(a), read_trace(b))
    print(difference or "the same decisions in every step", file=sys.stdout)
    return 1 if difference else 0
