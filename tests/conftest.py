"""Shared by all tests."""

from __future__ import annotations

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import soak


@pytest.fixture
def record_soak():
    """`soak.record`: keeps what a soak test found."""
    return soak.record
