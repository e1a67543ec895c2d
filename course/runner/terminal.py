"""What stands on the screen: colour as a second voice, marks, columns, numbers. Every line reads the same without colour."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from typing import TextIO

from course.runner.checking import Verdict, passes

WIDTH = 78
# ruff: noqa: RUF001  # these are the characters that are replaced
PLAIN = str.maketrans({
    "✓": "ok", "✗": "FAIL", "○": "--", "▸": ">", "·": ".", "★": "*", "☆": ".", "…": "...", "×": "x", "÷": "/", "≥": ">=",
    "≤": "<=", "→": "->", "–": "-", "—": "-", "−": "-", "’": "'", "‘": "'", "“": '"', "”": '"', "≈": "~", "²": "^2", "µ": "u",
})  # fmt: skip
MARKS: dict[Verdict, tuple[str, int]] = {"passed": ("✓", 32), "failed": ("✗", 31), "not measured": ("○", 33)}
WORDS = {">": "more than ", "<": "less than ", ">=": "at least ", "<=": "at most ", "=": ""}
CLOSE_UNITS = ("x", "%")  # written without a space
SINGULAR = {"passes": "pass", "launches": "launch", "copies": "copy"}


class Screen:
    """A stream for people. Colour only on a terminal that has not asked for none; marks in ASCII where it is not UTF-8."""

    def __init__(self, stream: TextIO | None = None):
        self.stream = stream or sys.stdout
        self.live = self.stream.isatty()
        self.colour = self.live and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self.utf8 = (self.stream.encoding or "").lower().replace("-", "") == "utf8"

    def say(self, text: str = "") -> None:
        text = text.rstrip()
        if not self.utf8:
            encoding = self.stream.encoding or "ascii"
            text = text.translate(PLAIN).encode(encoding, "replace").decode(encoding)
        self.stream.write(text + "\n")
        self.stream.flush()

    def paragraph(self, text: str, indent: str = "  ", style: str = "", most: int = 0) -> None:
        """Wrapped; of more lines than `most` those, and how many are left."""
        lines = textwrap.wrap(" ".join(text.split()), WIDTH, initial_indent=indent, subsequent_indent=indent,
                              break_long_words=False, break_on_hyphens=False)  # fmt: skip
        for line in lines[: most or None]:
            self.say(self.dim(line) if style == "dim" else line)
        if most and len(lines) > most:
            left = len(lines) - most
            self.say(self.dim(f"{indent}… and {left} line{'s' * (left > 1)} more: -v shows them"))

    def paint(self, text: str, code: int) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.colour and text else text

    def bold(self, text: str) -> str:
        return self.paint(text, 1)

    def dim(self, text: str) -> str:
        return self.paint(text, 2)

    def mark(self, verdict: Verdict) -> str:
        """Painted, with its space: two columns, or as many as the longest of its ASCII forms."""
        mark, code = MARKS[verdict]
        return self.paint(mark, code) + " " * (self.mark_width - self.length(mark))

    @property
    def mark_width(self) -> int:
        return 2 if self.utf8 else 5

    def length(self, text: str) -> int:
        """Columns that a text takes on this screen."""
        text = re.sub(r"\x1b\[\d+m", "", text)
        return len(text if self.utf8 else text.translate(PLAIN))

    def pad(self, text: str, width: int, right: bool = False) -> str:
        """To a width in columns, colour not counted."""
        gap = " " * max(0, width - self.length(text))
        return gap + text if right else text + gap

    def ends(self, left: str, right: str, width: int = WIDTH) -> None:
        """One line with something at either end."""
        self.say(self.pad(left, max(width - self.length(right), self.length(left) + 2)) + right)

    def next(self, what: str, note: str = "") -> None:
        self.say()
        self.say(f"  next   {self.bold(what)}{note}")

    def stars(self, many: int) -> str:
        return "★" * many + "☆" * (5 - many)


def warn(text: str) -> None:
    """One line beside the output."""
    Screen(sys.stderr).say(" ".join(text.split()))


def number(value: float, gate: str = "") -> str:
    """With as many decimals as its gate has, and more where it would seem to be on the other side."""
    bound = re.search(r"-?[\d.]+(e-?\d+)?", gate)
    if value != value or value in (float("inf"), float("-inf")):
        return str(value)
    if bound and "." in bound[0] and not bound[1]:
        decimals, text, more = len(bound[0].split(".")[1]), "", 0
        for more in range(decimals, decimals + 5):
            text = f"{value:.{more}f}"
            if passes(gate, float(text)) == passes(gate, value):
                break
        if float(text) or not value:
            return f"{float(text):,.{more}f}"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 100:
        return f"{value:,.1f}"
    return f"{value:.3g}" if abs(value) >= 0.01 else f"{value:.1e}"


def figure(value: float, unit: str = "", gate: str = "") -> str:
    text = number(value, gate)
    return text + unit if unit in CLOSE_UNITS else f"{text} {one(unit) if value == 1 else unit}".rstrip()


def one(unit: str) -> str:
    """A unit as it stands beside 1: "slots" is "slot"."""
    word, gap, rest = unit.partition(" ")
    if word in SINGULAR:
        return SINGULAR[word] + gap + rest
    return word.removesuffix("s") + gap + rest if word.isalpha() and len(word) > 2 else unit


def gate_of(gate: str, unit: str) -> str:
    """A gate with its unit, where that is a sign: "> 3.00x"."""
    sign, bound = _parts(gate)
    return f"{sign} {bound}{unit if unit in CLOSE_UNITS else ''}".strip() if gate else ""


def _parts(gate: str) -> tuple[str, str]:
    """Operator and number; thousands apart."""
    match = re.fullmatch(r"(<=|>=|<|>|=) ?(.+)", gate)
    sign, bound = (match[1], match[2]) if match else ("", gate)
    return sign, f"{int(bound):,}" if re.fullmatch(r"\d{4,}", bound) else bound


def must(gate: str, unit: str) -> str:
    """A gate in words: "more than 3.00x"."""
    sign, bound = _parts(gate)
    unit = one(unit) if bound == "1" else unit
    return WORDS.get(sign, sign + " ") + (bound + unit if unit in CLOSE_UNITS else f"{bound} {unit}".rstrip())


def ago(then: float, now: float) -> str:
    for size, name in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if (many := int((now - then) // size)) >= 1:
            return f"{many} {name}{'s' if many > 1 else ''} ago"
    return "just now"
