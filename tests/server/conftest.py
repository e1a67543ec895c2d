from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import OpenAI
from serving import Served, serving


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for the tests that leave it as they found it."""
    with serving(tmp_path_factory.mktemp("served")) as running:
        yield running


@pytest.fixture
def http(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=20) as client:
        yield client


@pytest.fixture
def openai(served: Served) -> Iterator[Any]:
    with OpenAI(base_url=f"{served.url}/v1", api_key="none", timeout=20, max_retries=0) as client:
        yield client
