"""`models`: what can be asked for by name, and what is here."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from cutaway.checkpoints.hub import BUILTIN, models_folder


def show() -> None:
    """A table of the built-in models, then other model files in the same folder."""
    folder = models_folder()
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for column in ("name", "what", "size", "licence", "here", "path"):
        table.add_column(column, justify="right" if column == "size" else "left", overflow="fold")
    for model in BUILTIN:
        path = folder / model.file
        here = path.is_file() and path.stat().st_size == model.size
        table.add_row(
            model.name, model.what, f"{model.size / 1e6:.1f} MB", model.licence, "yes" if here else "when first asked for",
            str(path) if here else "",
        )  # fmt: skip
    known = {model.file for model in BUILTIN}
    for path in sorted(folder.glob("*.gguf")):
        if path.name not in known:
            table.add_row(str(path), "yours", f"{path.stat().st_size / 1e6:.1f} MB", "", "yes", str(path))
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 10_000  # lines in a pipe are for programs: one a model
    console.print(table)
