"""`models`: what can be asked for by name, and what is here."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from cutaway.checkpoints.hub import known_models, models_folder


def show() -> None:
    """The built-in models, then other model files in the same folder. In a pipe: a line each, with its path."""
    folder = models_folder()
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 10_000
    columns = ["name", "what", "size", "licence", "here"] + ([] if console.is_terminal else ["path"])
    table = Table(*columns, box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for model in known_models():
        here = "yes" if model.present else "no, fetched when asked for"
        row = [model.name, model.what, f"{model.size / 1e6:.1f} MB", model.licence, here]
        table.add_row(*[*row, str(model.path) if model.present else ""][: len(columns)])
    console.print(table)
    if console.is_terminal:
        console.print(f"\nThey are kept in {folder}. --model takes a path or a hub id as well.", soft_wrap=True)
