# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""NVFP4: 4-bit floats in blocks of 16 with an E4M3 scale a block and an f32 global.

With torch, codes are torch.float4_e2m1fn_x2 and scales torch.float8_e4m3fn; uint8 is accepted for both, and
is what NumPy has. Blocks of an activation [.., D] lie along D, those of a weight [K, N] or [E, K, N] along K.
"""

from __future__ import annotations

from typing import Any

from . import _arrays
from . import _operations as ops
from ._faces import run

__all__ = [
    "dequantize",
    "from_mxfp4",
    "fused_quantize",
    "grouped_mm",
    "interleave",
    "prepack",
    "quantize",
    "quantize_",
    "swizzle",
    "unpack",
    "unswizzle",
]


def as_bytes(tensor: Any) -> Any:
    """The same memory as uint8, whatever 8-bit dtype says what the bytes mean."""
    if tensor is None or not _arrays.is_torch(tensor):
        return tensor
    import torch

    named = tensor.element_size() == 1 and tensor.dtype != torch.uint8  # what is wider is refused by the call
    return tensor.view(torch.uint8) if named else tensor


def _named(tensor: Any, dtype: str) -> Any:
    """Bytes as torch's dtype of that name; NumPy has none."""
    if not _arrays.is_torch(tensor):
        return tensor
    import torch

    return tensor.view(getattr(torch, dtype))


def _layout(weight: bool) -> str:
    return "weight" if weight else "activation"


def quantize(
    x: Any,
    *,
    profile: str = "rne",
    scales: str = "rne",
    global_per: str = "tensor",
    global_scale: Any = None,
    offsets: Any = None,
    weight: bool = False,
) -> tuple[Any, Any, Any]:
    """[.., D] → codes [.., 8·⌈D/16⌉], scales [.., ⌈D/16⌉], global; with weight [(E,) K, N] → [(E,) K/2, N],
    [(E,) K/16, N], global.

    x: f32, f16 or bf16, finite. profile "rne", "halfstep", "modelopt" or "compressed-tensors" (whose global
    is the reciprocal); scales "rne", "four-over-six" or "search". global_per "tensor": []; "expert": [E], of
    an activation [T, D] with offsets int32 [E], where each expert's rows end, or of a stack [E, n, D]
    without; "row": x's leading shape. global_scale: given instead of computed; its shape says what shares it.
    """
    settings = (
        ("profile", profile),
        ("scales", scales),
        ("global_per", global_per),
        ("weight", _layout(weight)),
    )
    tensors = {"x": x, "given_global": global_scale, "offsets": offsets}
    codes, made, one = run("nvfp4-quantize", settings, tensors, ("codes", "scales", "global"))
    return _named(codes, "float4_e2m1fn_x2"), _named(made, "float8_e4m3fn"), one


def dequantize(
    codes: Any,
    scales: Any,
    global_scale: Any,
    *,
    profile: str = "rne",
    global_per: str = "tensor",
    offsets: Any = None,
    weight: bool = False,
    columns: int | None = None,
    out: Any = None,
) -> Any:
    """What quantize() made, back to values: f32, or as `out` [.., D], which is then written.

    columns: D of an activation where it is not that of whole blocks.
    """
    settings = (("profile", profile), ("global_per", global_per), ("weight", _layout(weight)))
    tensors = {
        "codes": as_bytes(codes),
        "scales": as_bytes(scales),
        "global": global_scale,
        "offsets": offsets,
    }
    written = None if out is None else {"x": out}
    asked = () if columns is None else (("columns", columns),)
    return run("nvfp4-dequantize", settings, tensors, ("x",), out=written, asked=asked)[0]


def from_mxfp4(codes: Any, exponents: Any) -> tuple[Any, Any, Any, Any]:
    """MXFP4, codes [.., K/2] with exponents [.., K/32] (torch.float8_e8m0fnu or uint8) → codes, scales [..,
    K/16], global [], and how many blocks of 32 had to be rounded; 0: the values are the same. On the device
    meta, where nobody counts, a tensor without data stands for that number."""
    tensors = {"mx_codes": as_bytes(codes), "exponents": as_bytes(exponents)}
    made, scales, one, rounded = run(
        "nvfp4-from-mxfp4", (), tensors, ("codes", "scales", "global", "rounded_blocks")
    )
    counted = rounded if _arrays.is_meta(rounded) else int(rounded)
    return _named(made, "float4_e2m1fn_x2"), _named(scales, "float8_e4m3fn"), one, counted


def fused_quantize(
    x: Any,
    gate_global: Any = None,
    up_global: Any = None,
    *,
    activation: str = "none",
    limit: float = 0.0,
    alpha: float = 1.0,
    beta: float = 0.0,
    granularity: int = 8,
    profile: str = "rne",
) -> tuple[Any, ...]:
    """A product's x [M, 2I], gate and up in runs of `granularity` columns that alternate, to NVFP4 in one
    pass → codes [M, 8·⌈I/16⌉] and scales [M, ⌈I/16⌉] of gate, then of up, each where its global f32 [] is
    given; with activation "swiglu" of their SwiGLU, by gate_global."""
    settings = (
        ("profile", profile),
        ("swiglu", activation),
        ("limit", limit),
        ("alpha", alpha),
        ("beta", beta),
        ("granularity", granularity),
    )
    parts = (("gate", gate_global), ("up", up_global))
    names = tuple(f"{part}_{kind}" for part, one in parts if one is not None for kind in ("codes", "scales"))
    tensors = {"x": x, "gate_global": gate_global, "up_global": up_global}
    made = run("nvfp4-fused-quantize", settings, tensors, names)
    dtypes = ("float4_e2m1fn_x2", "float8_e4m3fn")
    return tuple(_named(t, dtypes[i % 2]) for i, t in enumerate(made))


def prepack(codes: Any, scales: Any) -> Any:
    """Experts' weights, codes [E, K/2, N] and scales [E, K/16, N], to the layout that products read fastest →
    uint8 [E, bytes]."""
    tensors = {"b_codes": as_bytes(codes), "b_scales": as_bytes(scales)}
    return run("moe-prepack", (), tensors, ("b_repacked",))[0]


def unpack(repacked: Any, columns: int, rows: int) -> tuple[Any, Any]:
    """prepack()'s bytes of matrices [rows, columns] = [K, N], exactly back → codes, scales."""
    names, asked = ("b_codes", "b_scales"), (("n", columns), ("k", rows))
    codes, scales = run("moe-prepack", (("inverse", True),), {"b_repacked": repacked}, names, asked=asked)
    return _named(codes, "float4_e2m1fn_x2"), _named(scales, "float8_e4m3fn")


def swizzle(scales: Any, *, tokens_per_expert: Any = None, weight: bool = False) -> Any:
    """Scales in the order of tensor cores, in tiles of 128 rows × 4 columns that zeros fill → [bytes].

    scales [rows, columns]. weight: [E, columns, rows] → [E, bytes]. tokens_per_expert int32 [E]: the experts'
    rows one after the other, each padded to whole tiles → ([bytes], pad_row_offsets int32 [E+1]); waits for
    the device. Under torch.compile, whose graph cannot depend on the counts, bytes are the most that any
    counts take, 0 past the last tile.
    """
    settings = (("weight", _layout(weight)), ("experts", tokens_per_expert is not None))
    tensors = {"linear": as_bytes(scales), "tokens_per_expert": tokens_per_expert}
    if tokens_per_expert is None:
        (swizzled,) = run("nvfp4-swizzle", settings, tensors, ("swizzled",))
        return _named(swizzled, "float8_e4m3fn")
    results = ("swizzled", "pad_row_offsets")
    if _arrays.has_no_data(scales):
        swizzled, starts = run("nvfp4-swizzle", settings, tensors, results)
    else:
        params = ops.params_of("nvfp4-swizzle", settings)
        swizzled, starts = ops.call("nvfp4-swizzle", params, tensors, results)
    return _named(swizzled, "float8_e4m3fn"), starts


def unswizzle(
    swizzled: Any, rows: int, columns: int, *, tokens_per_expert: Any = None, weight: bool = False
) -> Any:
    """swizzle() back: [bytes] → scales [rows, columns], of experts rows past the last token 0; weight: [E,
    bytes] → [E, columns, rows]."""
    settings = (
        ("inverse", True),
        ("weight", _layout(weight)),
        ("experts", tokens_per_expert is not None),
    )
    tensors = {"swizzled": as_bytes(swizzled), "tokens_per_expert": tokens_per_expert}
    asked = (("rows", rows), ("columns", columns))
    (scales,) = run("nvfp4-swizzle", settings, tensors, ("linear",), asked=asked)
    return _named(scales, "float8_e4m3fn")


def interleave(x: Any, *, granularity: int = 8, inverse: bool = False) -> Any:
    """Gate and up of the last dimension, [.., 2I] in two halves, to runs of `granularity` columns that
    alternate; inverse: back. Where granularity does not divide I both are padded with zeros to it first.
    Weights, codes, scales and biases alike."""
    bytewise = _arrays.is_torch(x) and x.element_size() == 1
    settings = (("granularity", granularity), ("inverse", inverse))
    (out,) = run("nvfp4-interleave", settings, {"x": as_bytes(x) if bytewise else x}, ("out",))
    return out.view(x.dtype) if bytewise else out


def grouped_mm(
    a: Any,
    b: Any,
    b_scales: Any = None,
    offsets: Any = None,
    *,
    a_scales: Any = None,
    a_global: Any = None,
    b_global: Any = None,
    bias: Any = None,
    activation: str = "none",
    limit: float = 0.0,
    alpha: float = 1.0,
    beta: float = 0.0,
    granularity: int = 8,
    output: str = "input",
    c_global: Any = None,
    profile: str = "rne",
    a_global_per: str = "tensor",
    a_layout: str = "linear",
    pad_row_offsets: Any = None,
    b_layout: str = "linear",
    b_scales_layout: str = "linear",
    a8: bool | str = False,
    columns: int = 0,
    c: Any = None,
    out: Any = None,
) -> Any:
    """The rows of each expert times its weights → [T, N], or [T, N/2] with activation "swiglu".

    a: f32, f16 or bf16 [T, K], or codes [T, K/2] with a_scales [T, K/16]. b: codes [E, K/2, N], also with K
    contiguous, and b_scales [E, K/16, N]; or of prepack() [E, bytes], with `columns` N. offsets int32 [E]:
    where each expert's rows end; rows past the last give 0. Globals f32: a_global [], [E] or [T] as
    a_global_per says; b_global [], [E] or [E, 2], gate's and up's; 1 where absent. bias [E, N]. "swiglu":
    gate and up alternate in runs of `granularity` columns; silu with alpha, beta and limit (0: no clamp).
    output "input" (a's dtype, f32 for codes), "f32", "bf16" or "f16", or `out`; "nvfp4" → codes, scales by
    c_global f32 [] in the profile. c: of the result's dtype and shape, to which the product is added. a8
    "int8" or True: a, of floats, is rounded to int8; "fp8": a by row and 128 of K, and the weights, to e4m3.

    a_layout "swizzled": a_scales and pad_row_offsets of swizzle(). b_layout "k-major": b [E, N, K/2].
    b_scales_layout "k-major", [E, N, K/16], or "swizzled", of swizzle(weight=True).

    With torch it is differentiable by a, in floats; weights are frozen.
    """
    settings = (
        ("n", columns),
        ("activation", activation),
        ("limit", limit),
        ("alpha", alpha),
        ("beta", beta),
        ("granularity", granularity),
        ("output", output),
        ("profile", profile),
        ("a_global_per", a_global_per),
        ("a_swizzled", a_layout),
        ("b_codes", b_layout),
        ("b_scales", b_scales_layout),
        ("a8", a8 if isinstance(a8, str) else "int8" if a8 else "none"),
    )
    _arrays.need_plain("grouped_mm's c", c)
    quantized, repacked = a_scales is not None, b_scales is None
    tensors = {
        "a": None if quantized else a,
        "a_codes": as_bytes(a) if quantized else None,
        "a_scales": as_bytes(a_scales),
        "pad_row_offsets": pad_row_offsets,
        "a_global": a_global,
        "b_codes": None if repacked else as_bytes(b),
        "b_scales": as_bytes(b_scales),
        "b_repacked": b if repacked else None,
        "b_global": b_global,
        "c_global": c_global,
        "c_old": c,
        "offsets": offsets,
        "bias": bias,
    }
    if output == "nvfp4":
        codes, scales = run("nvfp4-gemm", settings, tensors, ("c_codes", "c_scales"))
        return _named(codes, "float4_e2m1fn_x2"), _named(scales, "float8_e4m3fn")
    return run("nvfp4-gemm", settings, tensors, ("c",), out=None if out is None else {"c": out})[0]


def quantize_(
    model: Any, filter_fn: Any = None, *, profile: str = "rne", scales: str = "rne", a8: bool | str = False
) -> None:
    """Replaces the torch.nn.Linear layers of a model by quern.nn.NVFP4Linear, in place.

    filter_fn: called with a layer and its name in the model; only layers for which it returns true are
    replaced. Without it all are whose in_features is a multiple of 16. Layers that stand in several places
    stay one layer. profile and scales are quantize()'s, a8 is NVFP4Linear's.
    """
    from torch import nn

    from .nn import NVFP4Linear

    if isinstance(model, nn.Linear):
        raise TypeError("model is a Linear: a module that holds it is accepted; see NVFP4Linear.from_linear")
    made: dict[int, Any] = {}
    for path, module in list(model.named_modules()):
        for name, child in list(module.named_children()):
            where = f"{path}.{name}" if path else name
            wanted = type(child) is nn.Linear and (
                child.in_features % 16 == 0 if filter_fn is None else filter_fn(child, where)
            )
            if not wanted:
                continue
            if id(child) not in made:
                linear = NVFP4Linear.from_linear(child, profile=profile, scales=scales, a8=a8)
                made[id(child)] = (linear, child)  # which keeps the id taken
            setattr(module, name, made[id(child)][0])
