# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""Quern: sparse attention, compressed attention and FP4 experts on CPUs and NVIDIA GPUs."""

import importlib
import sys
from typing import Any

from . import dsv4, moe, nvfp4
from ._attention import attention
from ._caches import KVCache, NSACache
from ._checkpoint import Checkpoint, load_nvfp4
from ._faults import faults, status_word
from ._linear import linear, rms_norm, rope
from ._lists import block_mask, convert_blocks
from ._nsa import nsa
from ._nsa_parts import nsa_attend, nsa_compress, nsa_gate, nsa_index, nsa_index_loss, nsa_select
from ._operations import version

if sys.modules.get("torch") is not None:
    from . import _torch  # noqa: F401

_LATER = ("compat", "nn", "reference")  # what needs torch, or is seldom used


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})


__version__ = version()
__all__ = [
    "Checkpoint",
    "KVCache",
    "NSACache",
    "__version__",
    "attention",
    "block_mask",
    "convert_blocks",
    "dsv4",
    "faults",
    "linear",
    "load_nvfp4",
    "moe",
    "nsa",
    "nsa_attend",
    "nsa_compress",
    "nsa_gate",
    "nsa_index",
    "nsa_index_loss",
    "nsa_select",
    "nvfp4",
    "rms_norm",
    "rope",
    "status_word",
]
