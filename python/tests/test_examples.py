# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""The programs of examples/python run, and are short; so do those of python/examples."""

import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("torch")

ROOT = pathlib.Path(__file__).parents[2]
SHORT, LONGER = ROOT / "examples" / "python", ROOT / "python" / "examples"


@pytest.mark.parametrize(
    "path", sorted([*SHORT.glob("*.py"), *LONGER.glob("*.py")]), ids=lambda path: path.name
)
def test_example(path):
    assert path.read_text().count("\n") <= (120 if path.parent == SHORT else 200)
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
