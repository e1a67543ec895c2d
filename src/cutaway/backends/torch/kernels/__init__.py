"""Triton kernels. On a machine without a GPU they run in Triton's interpreter: slow, and the same numbers.

Triton decides which of the two when it is imported, so this package, which is imported before any kernel, decides for it.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
