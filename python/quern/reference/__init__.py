# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""What the operations compute, in float64 PyTorch with dense masks: differentiable, slow, short enough to
read.

It shares no code with the library. Choices (block_idx, idx, experts) may be handed in, so that two results
differ by rounding alone. Memory grows with N²; use it up to a few thousand tokens.
"""

from . import dsv4, moe, nvfp4
from ._attention import attention, masked_attention, window_mask
from ._nsa import chosen_blocks, compress, gate, nsa, select

__all__ = [
    "attention",
    "chosen_blocks",
    "compress",
    "dsv4",
    "gate",
    "masked_attention",
    "moe",
    "nsa",
    "nvfp4",
    "select",
    "window_mask",
]
