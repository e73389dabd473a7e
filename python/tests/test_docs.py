# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""The code blocks of docs/python.md run."""

import pathlib
import re

import pytest

pytest.importorskip("torch")

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "python.md"


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL))
def test_code_block(block):
    if "from transformers import" in block:
        pytest.importorskip("transformers", minversion="5.20")
    names = {}
    exec(compile(block, str(PAGE), "exec"), names)
    if "q" in names and names["q"].requires_grad:
        assert names["o"].shape == names["q"].shape and names["q"].grad.isfinite().all()
