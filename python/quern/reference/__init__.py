# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""What the operations compute, in float64 PyTorch with dense masks: differentiable, slow, short enough to
read.

It shares no code with the library. Choices (block_idx, idx, experts) may be handed in, so that two results
differ by rounding alone. They have no gradient, nor have codes, scales and bytes of rows, which are computed
as their formats say, to the bit; what stands for them has the gradient of what was rounded. Sequences are of
one length: a varlen batch is a call for each of them, and a row from a cache is that of the whole sequence.
Memory grows with N²; use it up to a few thousand tokens.
"""

from . import cache, dsv4, moe, nvfp4
from ._attention import attention, masked_attention, window_mask
from ._linear import fp8_weight, linear, rms_norm, rope
from ._nsa import attend, combine, compress, gate, gates_of, nsa
from ._nsa_select import chosen_blocks, convert_blocks, index, index_loss, listed, select, select_groups

# The operations of the library, by the names of `quern run`.
OPERATIONS = {
    "attention": attention,
    "attention-decode-step": cache.attention_step,
    "cache-append-step": cache.append_step,
    "cache-pack": cache.pack,
    "cache-unpack": cache.unpack,
    "csa-compress": dsv4.compress,
    "hca-compress": dsv4.compress,
    "linear": linear,
    "moe": moe.layer,
    "moe-prepack": nvfp4.prepack,
    "moe-route": moe.route,
    "nsa": nsa,
    "nsa-attend": attend,
    "nsa-combine": combine,
    "nsa-compress": compress,
    "nsa-decode-step": cache.nsa_step,
    "nsa-gate": gate,
    "nsa-gates": gates_of,
    "nsa-index": index,
    "nsa-index-loss": index_loss,
    "nsa-list-convert": convert_blocks,
    "nsa-select": select,
    "nvfp4-dequantize": nvfp4.dequantize,
    "nvfp4-from-mxfp4": nvfp4.from_mxfp4,
    "nvfp4-fused-quantize": nvfp4.fused_quantize,
    "nvfp4-gemm": nvfp4.gemm,
    "nvfp4-interleave": nvfp4.interleave,
    "nvfp4-quantize": nvfp4.quantize,
    "nvfp4-swizzle": nvfp4.swizzle,
    "rms-norm": rms_norm,
    "rope": rope,
    "v4-append-step": dsv4.append_step,
    "v4-attention": dsv4.attention,
    "v4-hyper": dsv4.hyper,
    "v4-index": dsv4.index,
    "v4-index-loss": dsv4.index_loss,
    "v4-layer": dsv4.layer,
    "v4-layer-pack": dsv4.layer_pack,
    "v4-layer-step": dsv4.layer_step,
    "v4-layer-unpack": dsv4.layer_unpack,
    "v4-store": dsv4.write_slots,
}

__all__ = [
    "OPERATIONS",
    "attend",
    "attention",
    "cache",
    "chosen_blocks",
    "combine",
    "compress",
    "convert_blocks",
    "dsv4",
    "fp8_weight",
    "gate",
    "gates_of",
    "index",
    "index_loss",
    "linear",
    "listed",
    "masked_attention",
    "moe",
    "nsa",
    "nvfp4",
    "rms_norm",
    "rope",
    "select",
    "select_groups",
    "window_mask",
]
