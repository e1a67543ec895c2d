"""What goes wrong between a person and the ladder: one line, and an exit code.

0 done · 1 the answer is no · 2 something a person can mend · 130 stopped by Ctrl-C.
"""

from __future__ import annotations


class Problem(Exception):
    """Its text is the line; an empty one was said already."""

    code = 2


class Refused(Problem):
    code = 1
