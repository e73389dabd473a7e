# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""DeepSeek-V4's hyper-connections for every framework."""

from __future__ import annotations

from typing import Any, NamedTuple

from ._faces import run


class Hyper(NamedTuple):
    """What hyper() makes; None: not asked for."""

    h: Any  # [T, Dm]
    pre: Any  # f32 [T, n]
    post: Any  # f32 [T, n]
    comb: Any  # f32 [T, n, n]
    new: Any  # [T, n, Dm]


def hyper(
    x: Any,
    norm_weight: Any,
    fn: Any = None,
    base: Any = None,
    scale: Any = None,
    f: Any = None,
    *,
    pre_in: Any = None,
    head: bool = False,
    iters: int = 20,
    eps: float = 1e-6,
    rms_eps: float = 1e-6,
) -> Hyper:
    """The input h of a sub-layer from n copies x [T, n, Dm] of the residual stream; with its output f [T, Dm]
    also the copies after it, new.

    fn f32 [n(n + 2), n·Dm], base f32 [n(n + 2)] and scale f32 [3] make a token's weights pre, post and comb.
    pre_in f32 [T, n] stands in for pre, which is then returned for the sub-layer after this one. head: the
    end of a model, h alone, with fn [n, n·Dm], base [n] and scale [1], or pre_in without these. With torch it
    is differentiable by all floats.
    """
    settings = (("iters", iters), ("eps", eps), ("rms_eps", rms_eps), ("head", head))
    tensors = {"x": x, "fn": fn, "base": base, "scale": scale, "norm_weight": norm_weight}
    tensors.update(f=f, pre_in=pre_in)
    results = ["h"]
    if not head:
        results += ["pre"] * (pre_in is not None) + ["post", "comb"] + ["x_new"] * (f is not None)
    made = dict(zip(results, run("v4-hyper", settings, tensors, tuple(results))))
    return Hyper(*(made.get(field) for field in ("h", "pre", "post", "comb", "x_new")))
