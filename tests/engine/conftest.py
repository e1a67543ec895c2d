"""Fixtures of the engine's tests."""

from __future__ import annotations

import pytest


@pytest.fixture
def slow_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake backend takes 20 ms a step, so that there is time to interfere."""
    monkeypatch.setenv("CUTAWAY_FAKE_SECONDS", "0.02")
