# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""DeepSeek-V4's compressors over projected tensors, under the names of the fused CUDA kernels.

Entries are not normalised; the main compressor's are rotated by the position of their block's last token, the
indexer's are not. `stream` may be None (torch's current one), an integer, or an object with `cuda_stream`;
`COLS_PER_CTA` tunes another kernel and is ignored.
"""

from __future__ import annotations

import contextlib
from typing import Any, ContextManager

import torch
from torch import Tensor

from .. import _operations as ops
from ._varlen import dense

__all__ = [
    "launch_csa_compress_projected",
    "launch_hca_compress_projected",
    "pack_csa_main_weights",
    "pack_csa_indexer_weights",
    "pack_hca_weights",
    "make_dummy_prev_b",
]


def _on(stream: Any, device: torch.device) -> ContextManager[Any]:
    """The work of the block on `stream`, where the tensors have streams."""
    if stream is None or device.type != "cuda":
        return contextlib.nullcontext()
    handle = getattr(stream, "cuda_stream", stream)
    return torch.cuda.stream(torch.cuda.ExternalStream(int(handle), device=device))


def _weight(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Weights are f32 or of the projections' dtype."""
    if isinstance(tensor, Tensor) and tensor.dtype not in (torch.float32, dtype):
        tensor = tensor.float()
    return dense(tensor)


def _width(name: str, tensor: Tensor, expected: int) -> None:
    if tensor.shape[-1] != expected:
        raise ValueError(f"{name} has {tensor.shape[-1]} columns: {expected} is accepted")


def _compress(
    proj: Tensor,
    b_a: Tensor,
    b_b: Tensor | None,
    prev_b: Tensor | None,
    cos_sin: Tensor | None,
    out: Tensor,
    **settings: Any,
) -> None:
    tensors = {
        "proj": dense(proj),
        "b_a": _weight(b_a, proj.dtype),
        "b_b": _weight(b_b, proj.dtype),
        "prev_b": _weight(prev_b, proj.dtype),
        "cos_sin": _weight(cos_sin, proj.dtype),
    }
    name = "hca-compress" if b_b is None else "csa-compress"
    params = ops.params(name, rope_last="last", **settings)
    rows = out[: settings["n_blocks"]]
    if rows.stride(-1) == 1:
        ops.call(name, params, {**tensors, "out": rows}, ("out",))
    else:
        rows.copy_(ops.call(name, params, tensors, ("out",))[0])


def launch_csa_compress_projected(
    proj_main: Tensor,
    proj_indexer: Tensor,
    prev_main_b: Tensor | None,
    prev_indexer_b: Tensor | None,
    B_a: Tensor,
    B_b: Tensor,
    B_I_a: Tensor,
    B_I_b: Tensor,
    cos_sin_cache: Tensor,
    kv_out: Tensor,
    indexer_out: Tensor,
    n_blocks: int,
    start_token_in_proj: int,
    start_abs_pos: int,
    has_external_prev: bool,
    stream: Any = None,
    M: int = 4,
    C: int = 512,
    C_I: int = 128,
    NOPE: int = 448,
    ROPE: int = 64,
    COLS_PER_CTA: int = 128,
) -> None:
    """Writes the first n_blocks rows of kv_out [n, C] and indexer_out [n, C_I].

    proj_main [T, 4C], proj_indexer [T, 4C_I]: columns C_a, Z_a, C_b, Z_b. prev_main_b [M, 2C], prev_indexer_b
    [M, 2C_I]: C_b and Z_b of the block before, read where has_external_prev. B_a, B_b [M, C], B_I_a, B_I_b
    [M, C_I]. cos_sin_cache [max_pos, ROPE].
    """
    _width("proj_main", proj_main, 4 * C)
    _width("proj_indexer", proj_indexer, 4 * C_I)
    _width("cos_sin_cache", cos_sin_cache, ROPE)
    if NOPE + ROPE != C:
        raise ValueError(f"NOPE {NOPE} and ROPE {ROPE}: {C} in sum is accepted")
    if n_blocks == 0:
        return
    settings = {
        "ratio": M,
        "start_token": start_token_in_proj,
        "start_abs_pos": start_abs_pos,
        "n_blocks": n_blocks,
    }
    with _on(stream, proj_main.device):
        _compress(
            proj_main, B_a, B_b, prev_main_b if has_external_prev else None, cos_sin_cache, kv_out, **settings
        )
        _compress(
            proj_indexer,
            B_I_a,
            B_I_b,
            prev_indexer_b if has_external_prev else None,
            None,
            indexer_out,
            **settings,
        )


def launch_hca_compress_projected(
    proj: Tensor,
    B: Tensor,
    cos_sin_cache: Tensor,
    kv_out: Tensor,
    n_blocks: int,
    start_token_in_proj: int,
    start_abs_pos: int,
    stream: Any = None,
    M: int = 128,
    C: int = 512,
    NOPE: int = 448,
    ROPE: int = 64,
    COLS_PER_CTA: int = 128,
) -> None:
    """Writes the first n_blocks rows of kv_out [n, C] from proj [T, 2C] (columns C, Z), B [M, C] and
    cos_sin_cache [max_pos, ROPE]."""
    _width("proj", proj, 2 * C)
    _width("cos_sin_cache", cos_sin_cache, ROPE)
    if NOPE + ROPE != C:
        raise ValueError(f"NOPE {NOPE} and ROPE {ROPE}: {C} in sum is accepted")
    if n_blocks == 0:
        return
    with _on(stream, proj.device):
        _compress(
            proj,
            B,
            None,
            None,
            cos_sin_cache,
            kv_out,
            ratio=M,
            start_token=start_token_in_proj,
            start_abs_pos=start_abs_pos,
            n_blocks=n_blocks,
        )


def pack_csa_main_weights(W_a_KV: Tensor, W_a_Z: Tensor, W_b_KV: Tensor, W_b_Z: Tensor) -> Tensor:
    """Four [Dm, C] → [Dm, 4C], whose product with X is proj_main."""
    return torch.cat((W_a_KV, W_a_Z, W_b_KV, W_b_Z), dim=1)


def pack_csa_indexer_weights(W_I_a_KV: Tensor, W_I_a_Z: Tensor, W_I_b_KV: Tensor, W_I_b_Z: Tensor) -> Tensor:
    """Four [Dm, C_I] → [Dm, 4C_I], whose product with X is proj_indexer."""
    return torch.cat((W_I_a_KV, W_I_a_Z, W_I_b_KV, W_I_b_Z), dim=1)


def pack_hca_weights(W_KV: Tensor, W_Z: Tensor) -> Tensor:
    """Two [Dm, C] → [Dm, 2C], whose product with X is proj."""
    return torch.cat((W_KV, W_Z), dim=1)


def make_dummy_prev_b(M: int, OUT: int, *, device: torch.device | str, dtype: torch.dtype) -> Tensor:
    """[M, 2·OUT] of zeros, for calls without a predecessor, which do not read it."""
    return torch.zeros(M, 2 * OUT, device=device, dtype=dtype)
