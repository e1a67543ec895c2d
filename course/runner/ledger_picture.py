"""The ledger as a drawing: a bar a row, and its factor over the row before. SVG by hand, light and dark by CSS."""

from __future__ import annotations

from html import escape
from typing import Any

WIDTH, LEFT, BAR, TOP, STEP = 1040, 250, 352, 112, 44
COLUMNS = ((786, "factor"), (900, "MB a token"), (1016, "worst gap"))
SANS = '"Avenir Next","Segoe UI","Helvetica Neue",Helvetica,Arial,"Liberation Sans",sans-serif'
MONO = 'ui-monospace,"SF Mono","Cascadia Mono",Menlo,Consolas,"DejaVu Sans Mono",monospace'
STYLE = f"""svg{{--paper:#F4F6F5;--ink:#13202A;--ink3:#5C6A74;--rule:#D5DCDD}}
@media (prefers-color-scheme:dark){{svg{{--paper:#0F161B;--ink:#E8EDEF;--ink3:#8C9BA4;--rule:#2A3740}}}}
text{{font-family:{SANS};font-size:14px;fill:var(--ink)}}.m{{font-family:{MONO};font-size:13px}}
.t{{font-size:18px;font-weight:700}}.n{{font-size:13px;fill:var(--ink3)}}.r{{text-anchor:end}}.b{{font-weight:700}}
.rule{{stroke:var(--rule)}}.bar{{fill:var(--ink)}}"""


def shown(value: float, unit: str = "") -> str:
    """Three digits, as the look has it: 3.50x, 81.3x, 174 ms, 44.1 ms, 1,024."""
    text = f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
    return text + unit


def svg(document: dict[str, Any]) -> str:
    """The drawing of a ledger, as `ledger.document` makes it."""
    rows, most = document["rows"], max(row["tokens_per_second"] for row in document["rows"])
    bottom = TOP + STEP * len(rows)
    height = bottom + 76
    sentence = (
        f"{rows[0]['tokens_per_second']:.1f} tokens a second with {rows[0]['name']}, {rows[-1]['tokens_per_second']:.0f} with "
        f"{rows[-1]['name']}: {shown(document['product'], 'x')} in {len(rows) - 1} steps."
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img" '
        'aria-labelledby="t d">',
        f'<title id="t">The ledger of Cutaway</title><desc id="d">{escape(sentence)}</desc>',
        f"<style>\n{STYLE}\n</style>",
        f'<rect width="{WIDTH}" height="{height}" fill="var(--paper)"/>',
        _text(24, 38, "One workload, stage by stage", "t"),
        _text(24, 62, document["workload"].split(";")[0], "n"),
        _text(LEFT, TOP - 14, "tokens a second", "n"),
        *(_text(x, TOP - 14, name, "n r") for x, name in COLUMNS),
    ]
    for index, row in enumerate(rows):
        parts += _row(row, TOP + STEP * index, row["tokens_per_second"] / most, first=index == 0)
    parts += [
        _line(bottom),
        _text(24, bottom + 30, "in all", "b"),
        _text(COLUMNS[0][0], bottom + 30, shown(document["product"], "x"), "m b r"),
        _text(
            24,
            bottom + 56,
            f"{document['model']} on {document['machine']}, {document['threads']} in use, {document['date']}",
            "n",
        ),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _row(row: dict[str, Any], y: int, share: float, first: bool) -> list[str]:
    width = max(1, round(BAR * share))
    gap = f"{row['worst_gap_ms']:,.0f} ms" if row["worst_gap_ms"] >= 100 else f"{row['worst_gap_ms']:.1f} ms"
    cells = ("" if first else shown(row["factor"], "x"), shown(row["bytes_per_token"] / 1e6), gap)
    return [
        _line(y),
        _text(24, y + 27, row["stage"], "m n"),
        _text(58, y + 27, row["name"]),
        f'<rect class="bar" x="{LEFT}" y="{y + 12}" width="{width}" height="20"/>',
        _text(LEFT + width + 8, y + 27, shown(row["tokens_per_second"]), "m b"),
        *(_text(x, y + 27, cell, "m r") for (x, _), cell in zip(COLUMNS, cells, strict=True) if cell),
    ]


def _text(x: int, y: int, text: str, kind: str = "") -> str:
    return f'<text{f" class={chr(34)}{kind}{chr(34)}" if kind else ""} x="{x}" y="{y}">{escape(text)}</text>'


def _line(y: int) -> str:
    return f'<line class="rule" x1="24" x2="{WIDTH - 24}" y1="{y}.5" y2="{y}.5"/>'
