# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""The programs of examples/python run, and are short."""

import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("torch")

FOLDER = pathlib.Path(__file__).parents[2] / "examples" / "python"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.name)
def test_example(path):
    assert path.read_text().count("\n") <= 120
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
