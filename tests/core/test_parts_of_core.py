"""What makes a file a part: it needs nothing but the standard library, NumPy and the seam, and an evening."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import cutaway.core

FILES = ["blocks.py", "prefix_cache.py", "scheduler.py", "chunked.py"]
SEAM = {"cutaway.core.request", "cutaway.core.plan"}


@pytest.mark.parametrize("name", FILES)
def test_a_part_imports_the_seam_and_nothing_else_of_the_house(name: str) -> None:
    tree = ast.parse(Path(cutaway.core.__file__).with_name(name).read_text())
    modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {m for m in modules if m.split(".")[0] not in {*sys.stdlib_module_names, "numpy"}} <= SEAM


@pytest.mark.parametrize("name", FILES)
def test_a_policy_part_stays_under_200_lines_of_code(name: str) -> None:
    tree = ast.parse(Path(cutaway.core.__file__).with_name(name).read_text())
    texts = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    code = {line for node in ast.walk(tree) if hasattr(node, "lineno") for line in (node.lineno, node.end_lineno)} - texts
    assert len(code) < 200
