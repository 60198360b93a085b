"""Shared by the outer tests (test_*.py) and, inside every worker, by the cases (cases_*.py)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

# So that `import launch` works under every import mode of pytest.
sys.path.insert(0, str(Path(__file__).parent))

import launch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """An outer test may run many cases, each of which has a limit of its own."""
    for item in items:
        outer = item.path.parent == launch.HERE and item.path.name.startswith("test_")
        if outer and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(launch.CASES_TIMEOUT + 100))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    launch.outer_test = item
    try:
        return (yield)
    finally:
        launch.outer_test = None


@pytest.fixture(scope="session")
def hvd() -> Any:
    """Horovod, initialised once per worker. For cases only: an outer test is not a worker."""
    import horovod.tensorflow as horovod

    horovod.init()
    return horovod
