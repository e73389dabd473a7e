# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""DeepSeek-V4's compressors over projected tensors, under the names of the fused CUDA kernels.

Entries are not normalised; the main compressor's are rotated by the position of their block's last token, the
indexer's are not. Tensors may be of any dtype of floats. `stream` may be None (torch's current one), an
integer, or an object with `cuda_stream`; `COLS_PER_CTA` tunes another kernel and is ignored.
"""

from __future__ import annotations

import contextlib
from typing import Any, ContextManager, NamedTuple

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


_TAKEN = (torch.float32, torch.float16, torch.bfloat16)


def _in(dtypes: tuple[torch.dtype, ...], tensor: Any) -> Any:
    """Floats of other dtypes in f32."""
    if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.dtype not in dtypes:
        tensor = tensor.float()
    return dense(tensor)


def _widths(**tensors: tuple[Tensor, int]) -> None:
    for name, (tensor, expected) in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}: a torch.Tensor is accepted")
        if tensor.dim() != 2 or tensor.shape[1] != expected:
            raise ValueError(f"{name} has shape {list(tensor.shape)}: {expected} columns are accepted")


class _Call(NamedTuple):
    """A compressor's call, and the rows that its result is copied to, where it cannot be written there."""

    name: str
    params: bytes
    tensors: dict[str, Tensor | None]
    rows: Tensor | None


def _call(
    proj: Tensor,
    b_a: Tensor,
    b_b: Tensor | None,
    prev_b: Tensor | None,
    cos_sin: Tensor | None,
    out: Tensor,
    **settings: Any,
) -> _Call:
    proj = _in(_TAKEN, proj)
    weights = {"b_a": b_a, "b_b": b_b, "prev_b": prev_b, "cos_sin": cos_sin}
    tensors = {name: _in((torch.float32, proj.dtype), tensor) for name, tensor in weights.items()}
    tensors["proj"] = proj
    rows = out[: settings["n_blocks"]]
    other = rows.is_floating_point() and (rows.dtype not in _TAKEN or rows.stride(-1) != 1)
    if other:
        dtype = rows.dtype if rows.dtype in _TAKEN else torch.float32
        tensors["out"] = torch.empty(rows.shape, dtype=dtype, device=rows.device)
    else:
        tensors["out"] = rows
    name = "hca-compress" if b_b is None else "csa-compress"
    return _Call(name, ops.params(name, rope_last="last", **settings), tensors, rows if other else None)


def _run(*calls: _Call) -> None:
    """Runs all of them, or none."""
    for call in calls:
        ops.check(call.name, call.params, call.tensors)
    for call in calls:
        (made,) = ops.call(call.name, call.params, call.tensors, ("out",))
        if call.rows is not None:
            call.rows.copy_(made)


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
    if NOPE + ROPE != C:
        raise ValueError(f"NOPE {NOPE} and ROPE {ROPE}: {C} in sum is accepted")
    _widths(
        proj_main=(proj_main, 4 * C),
        proj_indexer=(proj_indexer, 4 * C_I),
        cos_sin_cache=(cos_sin_cache, ROPE),
        kv_out=(kv_out, C),
        indexer_out=(indexer_out, C_I),
    )
    if n_blocks == 0:
        return
    before = (prev_main_b, prev_indexer_b) if has_external_prev else (None, None)
    if has_external_prev and (prev_main_b is None or prev_indexer_b is None):
        raise ValueError("prev_main_b or prev_indexer_b is None: has_external_prev needs both")
    settings = {
        "ratio": M,
        "start_token": start_token_in_proj,
        "start_abs_pos": start_abs_pos,
        "n_blocks": n_blocks,
    }
    with _on(stream, proj_main.device):
        _run(
            _call(proj_main, B_a, B_b, before[0], cos_sin_cache, kv_out, **settings),
            _call(proj_indexer, B_I_a, B_I_b, before[1], None, indexer_out, **settings),
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
    if NOPE + ROPE != C:
        raise ValueError(f"NOPE {NOPE} and ROPE {ROPE}: {C} in sum is accepted")
    _widths(proj=(proj, 2 * C), cos_sin_cache=(cos_sin_cache, ROPE), kv_out=(kv_out, C))
    if n_blocks == 0:
        return
    settings = {
        "ratio": M,
        "start_token": start_token_in_proj,
        "start_abs_pos": start_abs_pos,
        "n_blocks": n_blocks,
    }
    with _on(stream, proj.device):
        _run(_call(proj, B, None, None, cos_sin_cache, kv_out, **settings))


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
