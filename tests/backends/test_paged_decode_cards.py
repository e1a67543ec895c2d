"""What the decode kernel becomes on cards that are not here: compiled to PTX for each, with the choices made for it.

In a process of its own: the other tests have switched Triton's interpreter on.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import subprocess
import sys

import pytest

COMPILE = """
import json, sys
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from cutaway.backends.torch.kernels.paged_decode import DOTS, choices, decode_kernel

name, major, minor, dim, split = json.loads(sys.argv[1])
dtype = getattr(torch, name)
built, width = choices((major, minor), dtype), triton.next_power_of_2(dim)
tile = max(16, min(built["tile"], 16384 // (width * dtype.itemsize)))
fixed = dict(KV_HEADS=8, GROUP=4, ROWS=16, DIM=dim, WIDTH=width, BLOCK=16, TILE=tile, SPLIT=split, DOT=built["dot"])
own = {"part_ptr": "*fp32", "stat_ptr": "*fp32", "tables_ptr": "*i32", "lens_ptr": "*i32", "scale": "fp32"}
names = decode_kernel.arg_names
kind = {n: "constexpr" if n in fixed else own.get(n, f"*{DOTS[dtype]}" if n.endswith("_ptr") else "i32") for n in names}
step = [n for n in names if kind[n] not in ("constexpr", "fp32") and n != "window"]
aligned = {(names.index(n),): [["tt.divisibility", 16]] for n in step}
source = ASTSource(decode_kernel, kind, constexprs={(names.index(n),): v for n, v in fixed.items()}, attrs=aligned)
options = {"num_warps": built["warps"], "num_stages": built["stages"]}
kernel = triton.compile(source, target=GPUTarget("cuda", 10 * major + minor, 32), options=options)
print(json.dumps({"ptx": kernel.asm["ptx"], "shared": kernel.metadata.shared}))
"""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no triton here: it exists for Linux alone"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="compiled where the compiler was seen to work"),
]


def compiled(dtype: str, capability: tuple[int, int], dim: int, split: bool) -> tuple[str, int]:
    """(PTX, bytes of shared memory)."""
    argument = json.dumps([dtype, *capability, dim, split])
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", COMPILE, argument], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    return told["ptx"], told["shared"]


@pytest.mark.parametrize(("dtype", "dim", "split"), [("float16", 128, True), ("float32", 80, False)])
def test_a_t4_gets_nothing_that_it_has_not(dtype, dim, split):
    """sm_75: no bf16, no fp8, no TMA, no copies in the background, 64 KB of shared memory."""
    ptx, shared = compiled(dtype, (7, 5), dim, split)
    assert ".target sm_75" in ptx
    assert not [word for word in ("bf16", "e4m3", "e5m2", "cp.async", "tensormap", "wgmma") if word in ptx]
    assert shared <= 48 << 10


@pytest.mark.parametrize(("capability", "dim"), [((8, 0), 256), ((9, 0), 96)])
def test_newer_cards_read_wide_and_ahead(capability, dim):
    """Tensor cores, copies in the background, and room for at least two programs a multiprocessor."""
    ptx, shared = compiled("bfloat16", capability, dim, False)
    assert "mma" in ptx and "cp.async.cg" in ptx and ".local" not in ptx
    assert shared <= 48 << 10
