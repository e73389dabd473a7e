# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""Projections, RMS norm and rotation for every framework."""

from __future__ import annotations

from typing import Any

from ._faces import run


def linear(
    x: Any,
    w: Any = None,
    bias: Any = None,
    *,
    w_scale: Any = None,
    w_codes: Any = None,
    w_scales: Any = None,
    w_global: Any = None,
    block: int = 128,
    groups: int = 1,
    a8: str = "none",
) -> Any:
    """x [T, G·K] → x Wᵀ + bias [T, G·N], in x's dtype; group g of `groups` reads columns g·K … of x and rows
    g·N … of W [G·N, K].

    W is w of floats; w of e4m3 bytes with w_scale (one number, or one a block × block of w, block 128 or 32;
    f32, or powers of two e8m0 or uint8); or NVFP4: w_codes [G·N, K/2], w_scales [G·N, K/16], w_global [].
    a8 "fp8" rounds x to FP8 by row and 128 columns first; float weights refuse it. With torch it is
    differentiable by x, a float w and bias.
    """
    settings = (("block", block), ("groups", groups), ("a8", a8))
    tensors = {
        "x": x,
        "w": w,
        "w_scale": w_scale,
        "w_codes": w_codes,
        "w_scales": w_scales,
        "w_global": w_global,
        "bias": bias,
    }
    return run("linear", settings, tensors, ("y",))[0]


def rms_norm(x: Any, weight: Any = None, *, eps: float = 1e-6) -> Any:
    """x [T, D] → x · weight / √(mean(x²) + eps) by row, in x's dtype. On the CPU so far. With torch it is
    differentiable by x and weight."""
    return run("rms-norm", (("eps", eps),), {"x": x, "weight": weight}, ("y",))[0]


def rope(
    x: Any, cos_sin: Any, *, positions: Any = None, start_abs_pos: int = 0, inverse: bool = False
) -> Any:
    """x [T, H, D] → x with the pairs (2m, 2m + 1) of a head's last R channels turned by the angles of row
    positions[t], or start_abs_pos + t, of cos_sin [max_pos, R]: R/2 cosines, then as many sines. On the CPU
    so far. With torch it is differentiable by x."""
    settings = (("start_abs_pos", start_abs_pos), ("inverse", inverse))
    return run("rope", settings, {"x": x, "cos_sin": cos_sin, "positions": positions}, ("y",))[0]
