"""The code of README.md and docs/model-parallelism.md on split models runs as it stands, on two workers."""

from __future__ import annotations

import re

import launch
import pytest

PRELUDE = """
import os, tempfile
import numpy as np
os.chdir(tempfile.mkdtemp())
random = np.random.default_rng(0)
x, y = random.standard_normal((256, 784)).astype("float32"), random.integers(0, 10, 256)
"""
CHECKS = """
assert np.isfinite(model.predict(x, verbose=0)).all()
"""


def blocks(path: str) -> list[str]:
    """The Python code of a page that has to do with `parallel`."""
    text = (launch.ROOT / path).read_text(encoding="utf-8")
    return [code for code in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S) if "parallel" in code]


@pytest.mark.parametrize(("path", "count"), [("README.md", 1), ("docs/model-parallelism.md", 2)])
def test_the_code_runs(path, count):
    found = blocks(path)
    assert len(found) == count
    result = launch.run_python("\n".join([PRELUDE, *found, CHECKS]), workers=2, timeout=200)
    if count == 2:
        assert "relative error" in result.stdout(0)
