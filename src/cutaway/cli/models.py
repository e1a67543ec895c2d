"""`models`: what can be asked for by name, and what is here."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from cutaway.checkpoints.hub import BUILTIN, models_folder


def show() -> None:
    """The built-in models, then other model files in the same folder. In a pipe: a line each, with its path."""
    folder = models_folder()
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 10_000
    columns = ["name", "what", "size", "licence", "here"] + ([] if console.is_terminal else ["path"])
    table = Table(*columns, box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for model in BUILTIN:
        path = folder / model.file
        here = path.is_file() and path.stat().st_size == model.size
        row = [
            model.name,
            model.what,
            f"{model.size / 1e6:.1f} MB",
            model.licence,
            "yes" if here else "no, fetched when asked for",
        ]
        table.add_row(*[*row, str(path) if here else ""][: len(columns)])
    known = {model.file for model in BUILTIN}
    for path in sorted(folder.glob("*.gguf")):
        if path.name not in known:
            table.add_row(*[path.name, "", f"{path.stat().st_size / 1e6:.1f} MB", "", "yes", str(path)][: len(columns)])
    console.print(table)
    if console.is_terminal:
        console.print(f"\nThey are kept in {folder}. --model takes a path or a hub id as well.", soft_wrap=True)
