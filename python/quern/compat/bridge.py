# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""NVFP4 experts under the names of the CuTe DSL bridge: quantisers, layouts, grouped products.

FP4 is torch.float4_e2m1fn_x2 and its scales are torch.float8_e4m3fn; uint8 is accepted for both. Globals are
f32, one ([] or [1]) or [E], those of activations also [T], or [T, 1] where there are as many rows as experts.
expert_offsets are int32 and inclusive. `mma_tiler_mn` and `cluster_shape_mn` tune another kernel and are
ignored.
"""

from __future__ import annotations

from typing import Any, Sequence

import torch
from torch import Tensor

from .. import _operations as ops
from .. import nvfp4
from .._arrays import narrowed
from ._varlen import dense

# How the quantisers round: "halfstep" is what existing checkpoints of these kernels hold; "rne", "modelopt"
# and "compressed_tensors" are the library's others.
PROFILE = "halfstep"
_BLOCK = 16
_TILE = 128  # rows of scales that an expert's are padded to
_ROW = 4  # columns
_RUN = 8  # columns of gate, then of up, in fused weights


def ceil_div(a: int, b: int) -> int:
    """⌈a / b⌉."""
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    """The least multiple of b that is not below a."""
    return ceil_div(a, b) * b


def _bytes(tensor: Tensor) -> Tensor:
    """The same memory as uint8: what the library calls codes and scales."""
    made: Tensor = nvfp4.as_bytes(tensor)
    return made


def _codes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.float4_e2m1fn_x2)


def _scales(tensor: Tensor) -> Tensor:
    return tensor.view(torch.float8_e4m3fn)


def _new(like: Tensor, *shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=like.device)


# ---- quantisers ----


def _check_block(block_size: int) -> None:
    if block_size != _BLOCK:
        raise ValueError(f"block_size {block_size}: {_BLOCK} is accepted")


def _quantize(x: Tensor, given: Tensor | None, weight: bool) -> tuple[Tensor, Tensor, Tensor]:
    along = x.dim() - 2 if weight else x.dim() - 1
    shape = list(x.shape)
    blocks = ceil_div(shape[along], _BLOCK)
    codes = _new(x, *shape[:along], blocks * _BLOCK // 2, *shape[along + 1 :])
    scales = _new(x, *shape[:along], blocks, *shape[along + 1 :])
    per = "row" if given is not None and given.dim() > 0 else "tensor"
    one = _new(x, dtype=torch.float32) if given is None else given
    tensors = {
        "x": dense(x),
        "given_global": given,
        "codes": codes,
        "scales": scales,
        "global": one if given is None else None,
    }
    params = ops.params(
        "nvfp4-quantize", profile=PROFILE, weight="weight" if weight else None, global_per=per
    )
    ops.call("nvfp4-quantize", params, tensors, ())
    return _codes(codes), _scales(scales), one


def quantize_to_nvfp4(x_bf16: Tensor, block_size: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    """[.., D] → x_fp4 [.., D/2], x_sf [.., D/16] (D rounded up to whole blocks), global_scale []."""
    _check_block(block_size)
    return _quantize(x_bf16, None, weight=False)


def quantize_activation_nvfp4(
    x_bf16: Tensor, global_scale: Tensor | float, block_size: int = 16
) -> tuple[Tensor, Tensor]:
    """quantize_to_nvfp4 with a given global, [] or one a row: → x_fp4 [.., D/2], x_sf [.., D/16]."""
    _check_block(block_size)
    given = torch.as_tensor(global_scale, dtype=torch.float32, device=x_bf16.device)
    rows = x_bf16.shape[:-1]
    if given.shape == (*rows, 1):
        given = given.reshape(rows)
    elif given.numel() == 1 and given.shape != rows:
        given = given.reshape(())
    return _quantize(x_bf16, given.contiguous(), weight=False)[:2]


def quantize_weight_to_nvfp4(w_bf16: Tensor, block_size: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    """[K, N], blocks along K → [K/2, N], [K/16, N], global_scale []."""
    _check_block(block_size)
    return _quantize(w_bf16, None, weight=True)


def deinterleave_quantize_nvfp4_cuda(
    fused_bf16: Tensor, intermediate: int, global_scale: Tensor, granularity: int = 8
) -> tuple[Tensor, Tensor]:
    """The gate columns of [M, 2I], quantised → x_fp4 [M, I/2], x_sf [M, I/16]. I is `intermediate`."""
    if fused_bf16.shape[-1] != 2 * intermediate:
        raise ValueError(f"fused_bf16 has {fused_bf16.shape[-1]} columns: {2 * intermediate} are accepted")
    blocks = ceil_div(intermediate, _BLOCK)
    codes, scales = (
        _new(fused_bf16, fused_bf16.shape[0], 8 * blocks),
        _new(fused_bf16, fused_bf16.shape[0], blocks),
    )
    given = torch.as_tensor(global_scale, dtype=torch.float32, device=fused_bf16.device).reshape(())
    params = ops.params("nvfp4-fused-quantize", profile=PROFILE, granularity=granularity)
    ops.call(
        "nvfp4-fused-quantize",
        params,
        {"x": dense(fused_bf16), "gate_global": given, "gate_codes": codes, "gate_scales": scales},
        (),
    )
    return _codes(codes), _scales(scales)


# ---- layouts ----


def interleave_l1_weights(w_ekn: Tensor, granularity_bf16: int = 8) -> Tensor:
    """Gate and up of the last dimension, from halves to alternating runs of columns: [E, K, 2I] → the same,
    where granularity_bf16 divides I; else both are padded with zeros to it. Weights, codes, scales and biases
    alike."""
    return nvfp4.interleave(dense(w_ekn), granularity=granularity_bf16)


def deinterleave_l1_weights(w_ekn: Tensor, granularity_bf16: int = 8) -> Tensor:
    """The inverse of interleave_l1_weights, padding included."""
    return nvfp4.interleave(dense(w_ekn), granularity=granularity_bf16, inverse=True)


def assemble_scales_2d_side(scales: Sequence[Tensor]) -> Tensor:
    """The experts' [M_e, K_sf] → one after the other, each padded to whole tiles of 128 × 4 and swizzled:
    [bytes]."""
    counts = [one.shape[0] for one in scales]
    linear = torch.cat([_bytes(one) for one in scales])
    rows = sum(round_up(count, _TILE) for count in counts)
    out = _new(linear, rows * round_up(linear.shape[1], _ROW))
    tokens = torch.tensor(counts, dtype=torch.int32, device=linear.device)
    ops.call(
        "nvfp4-swizzle",
        ops.params("nvfp4-swizzle", experts=True),
        {"linear": linear, "swizzled": out, "tokens_per_expert": tokens},
        (),
    )
    return _scales(out)


def assemble_scales_3d_side(scales: Sequence[Tensor]) -> Tensor:
    """The experts' [K_sf, N] → each as [N, K_sf], padded to whole tiles of 128 × 4 and swizzled: [E,
    bytes]."""
    linear = torch.stack([_bytes(one) for one in scales])
    experts, columns, rows = linear.shape
    out = _new(linear, experts, round_up(rows, _TILE) * round_up(columns, _ROW))
    ops.call(
        "nvfp4-swizzle", ops.params("nvfp4-swizzle", weight="weight"), {"linear": linear, "swizzled": out}, ()
    )
    return _scales(out)


def make_b_k_major(b_tensor: Tensor) -> Tensor:
    """[E, K/2, N] → the same shape and values with K contiguous."""
    return _bytes(b_tensor).transpose(-2, -1).contiguous().view(b_tensor.dtype).transpose(-2, -1)


def compute_expert_offsets(
    tokens_per_expert: Tensor | Sequence[int], num_experts: int, device: torch.device | str = "cuda"
) -> Tensor:
    """Where each expert's rows end: int32 [num_experts]."""
    tokens = torch.as_tensor(tokens_per_expert, device=device)
    if tokens.shape != (num_experts,):
        raise ValueError(f"tokens_per_expert has shape {list(tokens.shape)}: [{num_experts}] is accepted")
    return narrowed("expert_offsets", tokens.cumsum(0))


# ---- grouped products ----


def _pad_row_offsets(expert_offsets: Tensor) -> Tensor:
    """Where the experts' rows of assembled scales begin: int32 [E+1]."""
    counts = expert_offsets.diff(prepend=expert_offsets.new_zeros(1))
    padded = (counts + _TILE - 1) // _TILE * _TILE
    return torch.nn.functional.pad(padded.cumsum(0), (1, 0)).to(torch.int32)


def _plain(one: Tensor) -> Tensor:
    """A global in f32, without extents of 1 beside the experts' or rows'."""
    one = one.float().contiguous()
    if one.numel() == 1:
        return one.reshape(())
    return one.reshape(-1) if one.dim() == 2 and one.shape[1] == 1 else one


def _global_of_rows(one: Tensor, experts: int) -> tuple[Tensor, str]:
    """The activations' global, and what it is of: the "tensor", an "expert" or a "row"."""
    plain = _plain(one)
    if plain.dim() == 0:
        return plain, "tensor"
    return plain, "expert" if one.dim() == 1 and one.shape[0] == experts else "row"


def _product(
    mat_a: Tensor,
    mat_b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    expert_offsets: Tensor,
    global_scale_a: Tensor | None,
    global_scale_b: Tensor | None,
    **settings: Any,
) -> Tensor:
    """C [T, N], or [T, N/2] under SwiGLU, in the dtype that `output` names."""
    a, b, expert_offsets = _bytes(mat_a), _bytes(mat_b), dense(expert_offsets)
    if b.stride(-1) != 1 and b.stride(-2) != 1:
        b = b.contiguous()
    tokens, experts = a.shape[0], b.shape[0]
    swizzled = scale_a.dim() == 1
    if global_scale_a is not None:
        global_scale_a, settings["a_global_per"] = _global_of_rows(global_scale_a, experts)
    tensors = {
        "a_codes": dense(a),
        "a_scales": dense(_bytes(scale_a)),
        "pad_row_offsets": _pad_row_offsets(expert_offsets) if swizzled else None,
        "a_global": global_scale_a,
        "b_codes": b,
        "b_scales": dense(_bytes(scale_b)),
        "b_global": None if global_scale_b is None else _plain(global_scale_b),
        "offsets": expert_offsets,
    }
    half = settings.get("activation") == "swiglu"
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[settings["output"]]
    tensors["c"] = _new(a, tokens, b.shape[2] // 2 if half else b.shape[2], dtype=dtype)
    params = ops.params("nvfp4-gemm", b_scales="swizzled" if scale_b.dim() == 2 else "linear", **settings)
    return ops.call("nvfp4-gemm", params, tensors, ("c",))[0]


def run_nvfp4_grouped_gemm(
    mat_a: Tensor,
    mat_b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    expert_offsets: Tensor,
    global_scale_a: Tensor | None = None,
    global_scale_b: Tensor | None = None,
    mma_tiler_mn: tuple[int, int] = (128, 128),
    cluster_shape_mn: tuple[int, int] = (1, 1),
) -> Tensor:
    """The rows of each expert times its weights → bf16 [T, N]; rows past the last offset are 0.

    mat_a [T, K/2], scale_a [T, K/16] or assembled [bytes]. mat_b [E, K/2, N], also with K contiguous, scale_b
    [E, K/16, N] or assembled [E, bytes]. expert_offsets int32 [E].
    """
    return _product(
        mat_a, mat_b, scale_a, scale_b, expert_offsets, global_scale_a, global_scale_b, output="bf16"
    )


def run_fused_swiglu_grouped_gemm(
    mat_a: Tensor,
    mat_b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    expert_offsets: Tensor,
    global_scale_a: Tensor | None = None,
    global_scale_b: Tensor | None = None,
    swiglu_limit: float = 0.0,
    mma_tiler_mn: tuple[int, int] = (128, 128),
    cluster_shape_mn: tuple[int, int] = (1, 1),
    *,
    paired: bool = True,
) -> Tensor:
    """run_nvfp4_grouped_gemm on weights that interleave gate and up by 8, then SwiGLU → bf16 [T, N].

    The gate columns hold silu(min(gate, L)) · clamp(up, ±L), where L is swiglu_limit (0: no clamp), and the
    up columns 0: what deinterleave_quantize_nvfp4_cuda reads. paired=False: silu(min(x, L)) of every
    column x.
    """
    given = (mat_a, mat_b, scale_a, scale_b, expert_offsets, global_scale_a, global_scale_b)
    if not paired:
        x = _product(*given, output="f32")
        return torch.nn.functional.silu(x.clamp(max=swiglu_limit) if swiglu_limit > 0 else x).bfloat16()
    result = _product(*given, output="bf16", activation="swiglu", limit=float(swiglu_limit), granularity=_RUN)
    out = result.new_zeros(result.shape[0], 2 * result.shape[1])
    out.unflatten(1, (-1, 2, _RUN))[:, :, 0] = result.unflatten(1, (-1, _RUN))
    return out


def _no_tokens(
    num_experts: int, K_packed: int, N_packed: int, device: torch.device | str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The arguments of a product of no rows; its weights take no memory."""
    row = torch.zeros(N_packed, dtype=torch.uint8, device=device)
    offsets = torch.zeros(num_experts, dtype=torch.int32, device=device)
    blocks = 2 * K_packed // _BLOCK
    return (
        row.new_empty(0, K_packed),
        row.expand(num_experts, K_packed, N_packed),
        row.new_empty(0, blocks),
        row.expand(num_experts, blocks, N_packed),
        offsets,
    )


def warmup_compilation(
    num_experts: int,
    K_packed: int,
    N_packed: int,
    device: torch.device | str,
    mma_tiler_mn: tuple[int, int] = (128, 128),
    cluster_shape_mn: tuple[int, int] = (1, 1),
) -> None:
    """Checks these extents (mat_b.shape[1], mat_b.shape[2]) and loads what run_nvfp4_grouped_gemm needs
    there. Nothing is compiled."""
    run_nvfp4_grouped_gemm(*_no_tokens(num_experts, K_packed, N_packed, device))


def warmup_fused_swiglu_compilation(
    num_experts: int,
    K_packed: int,
    N_packed: int,
    device: torch.device | str,
    swiglu_limit: float = 0.0,
    mma_tiler_mn: tuple[int, int] = (128, 128),
    cluster_shape_mn: tuple[int, int] = (1, 1),
) -> None:
    """warmup_compilation for run_fused_swiglu_grouped_gemm."""
    run_fused_swiglu_grouped_gemm(
        *_no_tokens(num_experts, K_packed, N_packed, device), swiglu_limit=swiglu_limit
    )
