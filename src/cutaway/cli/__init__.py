"""The command `cutaway`. Errors meet people here and nowhere else: one line on stderr, and an exit code.

0 done · 1 the answer is no (two traces differ, a gate is missed) or a fault of ours · 2 something a person can mend ·
130 stopped by Ctrl-C.

Nothing heavy is imported before a verb needs it: `cutaway --help` takes as long as Typer takes to load.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Sequence

import typer

from cutaway.core.errors import CutawayError


def invoke(app: typer.Typer, args: Sequence[str], name: str) -> int:
    """Runs a Typer app's verb and answers its exit code. A verb's own exceptions come through."""
    result = typer.main.get_command(app).main(args=list(args) or ["--help"], prog_name=name, standalone_mode=False)
    return result if isinstance(result, int) else 0


OWN = "; --reference runs the engine's own"


def run(args: Sequence[str]) -> int:
    """The whole command but for ending the process: answers the exit code."""
    from cutaway.cli.verbs import app

    try:
        return invoke(app, args, os.environ.get("CUTAWAY_COMMAND", "cutaway"))  # ./vc gives its own name
    except CutawayError as error:
        from cutaway.engine.parts import PartFault

        banked = isinstance(error, PartFault) and os.environ.get("CUTAWAY_COMMAND") == "./vc"  # that gave the file
        return _complain(f"{error}{OWN if banked else ''}", 2)
    except KeyboardInterrupt:
        if sys.stderr.isatty():
            print(file=sys.stderr)  # the prompt does not stand behind ^C
        return 130
    except BrokenPipeError:
        # Whoever read our output has gone; at exit Python would complain about what is still to be flushed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except Exception as error:
        usage = getattr(error, "format_message", None)  # Typer's complaint about the command line
        if usage is not None:
            context = getattr(error, "ctx", None)
            path: str = context.command_path if context is not None else "cutaway"
            text: str = usage()
            return _complain(f"{text if text.endswith(('.', '?')) else text + '.'} `{path} --help` lists what there is.", 2)
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            from cutaway.cli.options import NO_TORCH

            return _complain(NO_TORCH, 2)
        if os.environ.get("CUTAWAY_DEBUG") == "1":
            raise
        text = " ".join(str(error).split())
        return _complain(f"{type(error).__name__}: {text}; set CUTAWAY_DEBUG=1 for the traceback", 1)


def _complain(text: str, code: int) -> int:
    with contextlib.suppress(OSError):
        print("cutaway:", " ".join(text.split()), file=sys.stderr)
    return code


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # an answer may hold what the terminal's encoding cannot write
    sys.exit(run(sys.argv[1:]))
