"""The verbs of the ladder. Errors meet people here: one line on stderr and an exit code (`problems.py`)."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys

from course.runner.problems import Problem

# verb -> the module whose `main(arguments)` answers an exit code; loaded when it is asked for
VERBS = {
    "status": "listing", "list": "listing", "guide": "guide", "test": "testing", "submit": "submit", "resume": "submit",
    "peek": "peek", "predict": "predictions", "backend": "settings", "reset": "settings", "math": "arithmetic",
    "ledger": "ledger", "book": "settings", "prove": "proving",
    "serve": "engine", "chat": "engine", "generate": "engine", "models": "engine", "bench": "engine", "diff-trace": "engine",
}  # fmt: skip
SEVERAL = ("listing", "submit", "settings", "engine")  # modules of several verbs: their main takes the verb first
SET_UP = ("ledger",)  # need more than the standard library in this process


def run(verb: str, arguments: list[str]) -> int:
    if verb not in VERBS:
        raise Problem(f"there is no verb {verb}; ./vc --help lists them")
    name = VERBS[verb]
    if importlib.util.find_spec(f"course.runner.{name}") is None:
        raise Problem(f"./vc {verb} is not in this version yet")
    if verb in SET_UP and not {"-h", "--help"} & set(arguments):
        from course.runner.environment import ensure

        ensure(verb, arguments)
    module = importlib.import_module(f"course.runner.{name}")
    return module.main(verb, arguments) if name in SEVERAL else module.main(arguments)


def main(arguments: list[str]) -> int:
    """Runs a verb and answers the exit code."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    verb, *rest = arguments or ["status"]
    try:
        return run(verb, rest)
    except Problem as problem:
        return complain(str(problem), problem.code)
    except KeyboardInterrupt:
        return complain("stopped", 130)
    except EOFError:
        return complain("nothing was typed", 2)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # whoever read our output has gone; nothing is left to be flushed
        return 1
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    except Exception as error:
        if os.environ.get("CUTAWAY_DEBUG") == "1":
            raise
        return complain(f"{type(error).__name__}: {error}; set CUTAWAY_DEBUG=1 for the traceback", 1)


def complain(text: str, code: int) -> int:
    from course.runner.terminal import warn

    if text:
        warn(f"vc: {text}")
    return code
