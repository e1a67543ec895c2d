"""The last own ledger's numbers, for the guides. A ledger is JSON:
{"machine": ..., "date": ..., "rows": [{"id": "naive", "stage": "01", "tokens_per_second": ..., ...}]}.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from course.runner.declaration import ROOT

Rows = dict[str, dict[str, Any]]
PLACE = re.compile(r"\{\{ *(\w+)\.(\w+) *(?::([^{}]*))?\}\}")


def own_path() -> Path:
    """Beside the progress, since it is measured with this checkout's banked files."""
    return ROOT / ".ledger.json"


def _read(path: Path) -> tuple[Rows, str, str] | None:
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        return {row["id"]: row for row in told["rows"]}, str(told.get("machine", "")), str(told.get("date", ""))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def latest() -> tuple[Rows, str]:
    """Rows by id, and whose they are in words; ({}, "") where there is no ledger."""
    if found := _read(own_path()):
        return found[0], f"measured on this machine, {found[2]}".rstrip(", ")
    shipped = [f for p in (ROOT / "benchmarks" / "results").glob("ledger-*.json") if (f := _read(p))]
    if not shipped:
        return {}, ""
    rows, machine, date = max(shipped, key=lambda f: f[2])
    return rows, f"measured on {machine or 'another machine'}, {date}".rstrip(", ") + "; ./vc ledger measures this one"


def fill(text: str, rows: Rows) -> tuple[str, bool]:
    """The text with its placeholders `{{row.field:format}}` filled in, "?" where there is no number; and whether it has any."""

    def value(match: re.Match[str]) -> str:
        found = rows.get(match[1], {}).get(match[2])
        try:
            return format(found, match[3] or "") if isinstance(found, int | float) else "?"
        except ValueError:
            return str(found)

    return PLACE.sub(value, text), bool(PLACE.search(text))
