"""How a step's token budget is shared out: decodes first, prompts in slices of what is left (stage 11).

A long prompt computed whole makes every other row wait for it. In slices that ride along with the decodes, each step takes
about the same time, and the tokens between two decodes of a row are bounded by the budget (Sarathi-Serve, Agrawal et al. 2024).

Invariants: never over budget; never more than a row has pending, nor than `chunk` for a row.
"""

from __future__ import annotations

from collections.abc import Sequence


def split(pending: Sequence[int], budget: int, chunk: int) -> list[int]:
    """Tokens to compute for each row, in the order of `pending`.

    pending   tokens that each row has to compute, in the order of admission; may be 0
    budget    most tokens of the step
    chunk     most tokens of one row; at least 1, so that every row comes on

    A row with one pending token (a decode) goes before all others; those take slices, the earliest admitted first.
    """
    granted = [0] * len(pending)
    for decodes in (True, False):
        for row, tokens in enumerate(pending):
            if (tokens == 1) == decodes:
                granted[row] = max(0, min(tokens, chunk, budget))
                budget -= granted[row]
    return granted
