"""`./vc guide`: how the last stage broke, what to build, where, and how you will know."""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

from course.runner.arguments import Parser, stage_here
from course.runner.declaration import Claim, Stage, Track, chapters
from course.runner.ledger_values import fill, latest
from course.runner.progress import load
from course.runner.terminal import WIDTH, Screen, must

LABEL = 16
NEEDS = {"gpu": ", needs a GPU", "triton": "", "": ""}


def main(arguments: list[str]) -> int:
    parser = Parser("guide", "What a stage is about and what to build: of the one you are at, or of stage n.")
    parser.add_argument("stage", nargs="?", metavar="n")
    parser.add_argument("--answers", action="store_true", help="what it asks at its end, with the answers")
    given, progress = parser.parse_args(arguments), load()
    stage = stage_here(given.stage, progress.track, progress)
    if given.answers:
        answers(Screen(), stage)
    else:
        show(Screen(), stage, progress.track)
    return 0


def show(screen: Screen, stage: Stage, track: Track) -> None:
    many = len(stage.claims(track))
    title = f"{stage.id}  {stage.title}"
    right = f"{screen.stars(stage.stars)}   {many} checks"
    screen.say(screen.bold(title) + " " * max(2, WIDTH - screen.length(title) - screen.length(right)) + right)
    sections = _sections(stage)
    for heading, body in sections[:2]:
        _section(screen, heading, body)
    screen.say()
    for label, text in _facts(stage, track):
        lines = textwrap.wrap(text, WIDTH - LABEL, break_on_hyphens=False) or [""]
        screen.say(screen.bold(f"{label:<{LABEL}}") + lines[0])
        for line in lines[1:]:
            screen.say(" " * LABEL + line)
    _claims(screen, stage, stage.claims(track))
    number = stage.id.lstrip("0")
    for heading, body in sections[2:]:
        questions, told = _apart(body)
        _section(screen, heading, questions)
        if told:
            screen.say()
            screen.say(f"  {screen.dim('Answers')}  ./vc guide {number} --answers")
    screen.next(f"edit app/{stage.file(track).name}", f", then {screen.bold(f'./vc test {number}')}")


def answers(screen: Screen, stage: Stage) -> None:
    """The questions at a guide's end, and their answers."""
    screen.say(screen.bold(f"{stage.id}  {stage.title}"))
    for heading, body in _sections(stage)[2:]:
        questions, told = _apart(body)
        _section(screen, heading, questions)
        if told:
            _section(screen, "Answers", told)
    screen.next(f"./vc predict {stage.id.lstrip('0')}")


def _apart(body: str) -> tuple[str, str]:
    """Questions and answers: what stands before and after the line, or the word with a colon, `Answers`."""
    questions, _, told = re.sub(r"^Answers(:|$)", "\0", body, count=1, flags=re.MULTILINE).partition("\0")
    return questions.rstrip(), told.strip()


def _sections(stage: Stage) -> list[tuple[str, str]]:
    """Headings and bodies of guide.md, with the ledger's numbers."""
    path = stage.folder / "guide.md"
    if not path.is_file():
        return [("What to build", stage.deliver)] if stage.deliver else []
    rows, told = latest()
    found: list[tuple[str, str]] = []
    for part in re.split(r"^## +", path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        heading, _, body = part.partition("\n")
        body, numbers = fill(body, rows)
        if numbers:
            body += f"\n\n<dim>{told[:1].upper()}{told[1:]}." if told else "\n\n<dim>A ? is a number that ./vc ledger measures."
        found.append((heading.strip(), body))
    return found


def _section(screen: Screen, heading: str, body: str) -> None:
    screen.say()
    screen.say(screen.bold(heading))
    fenced = False
    for n, block in enumerate(re.split(r"\n\s*\n", body.strip("\n"))):
        if n:
            screen.say()
        lines = block.splitlines()
        if fenced or any(line.lstrip().startswith("```") for line in lines):
            for line in lines:
                if line.lstrip().startswith("```"):
                    fenced = not fenced
                else:
                    screen.say(f"      {line}")
        elif block.startswith("<dim>"):
            screen.paragraph(block.removeprefix("<dim>"), style="dim")
        elif lines and re.match(r"\s*([-*]|\d+[.)]) ", lines[0]):
            _items(screen, lines)
        elif lines and (lines[0].startswith("    ") or lines[0].lstrip().startswith("|")):
            for line in lines:
                screen.say(f"  {line}")
        else:
            screen.paragraph(_inline(block))


def _items(screen: Screen, lines: list[str]) -> None:
    items: list[str] = []
    for line in lines:
        if re.match(r"\s*([-*]|\d+[.)]) ", line) or not items:
            items.append(line.strip())
        else:
            items[-1] += " " + line.strip()
    for item in items:
        sign, _, text = item.partition(" ")
        lead = f"  {'-' if sign in '-*' else sign} "
        for line in textwrap.wrap(_inline(text), WIDTH, initial_indent=lead, subsequent_indent=" " * len(lead),
                                  break_on_hyphens=False):  # fmt: skip
            screen.say(line)


def _inline(text: str) -> str:
    """Without the signs of Markdown; a times sign stays."""
    bold = re.sub(r"\*\*(.+?)\*\*", r"\1", text.replace("`", ""), flags=re.DOTALL)
    return re.sub(r"(?<![\w*])\*(\w[^*]*)\*(?![\w*])", r"\1", bold)


def _facts(stage: Stage, track: Track) -> list[tuple[str, str]]:
    path = stage.file(track)
    names = ", ".join(public_names(path))
    answer = stage.answers[track]
    if stage.part:
        home = f"{engine_file(stage, track)}: once banked, your file replaces it"
    elif answer.startswith("src/"):
        home = answer.removeprefix("src/cutaway/")
    else:
        home = "no longer: this is a stage of its history"
    facts = [("The file", f"app/{path.name}" + (f"   {names}" if names else "")), ("In the engine", home)]
    title = f", {named}" if (named := chapters().get(stage.chapter)) else ""
    return [*facts, ("In the book", f"chapter {stage.chapter}{title}: not in this version yet")]


def engine_file(stage: Stage, track: Track) -> str:
    """Where the engine's own part of a stage is, under src/cutaway."""
    answer = stage.answers[track]
    if answer.startswith("src/"):
        return answer.removeprefix("src/cutaway/")
    return f"backends/{track}/{stage.part}.py"


def public_names(path: Path) -> list[str]:
    """Classes and functions at the top of a file."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return []
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [n.name for n in tree.body if isinstance(n, kinds) and not n.name.startswith("_")]


def _claims(screen: Screen, stage: Stage, claims: list[Claim]) -> None:
    screen.say()
    screen.say(screen.bold("How you will know"))
    for c in sorted(claims, key=lambda c: c.name != stage.number):
        gate = must(c.gate, c.unit) if c.gate else ""
        text = f"  {c.claim:<41} {screen.dim(gate + NEEDS[c.needs] if gate else NEEDS[c.needs].removeprefix(', '))}"
        screen.say(screen.bold(text[:43]) + text[43:] if c.name == stage.number else text)
