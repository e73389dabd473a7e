# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""DeepSeek-V4's hyper-connections."""

from __future__ import annotations

import torch
from torch import Tensor


def hyper(
    x: Tensor,
    norm_weight: Tensor,
    fn: Tensor | None = None,
    base: Tensor | None = None,
    scale: Tensor | None = None,
    f: Tensor | None = None,
    *,
    pre_in: Tensor | None = None,
    head: bool = False,
    iters: int = 20,
    eps: float = 1e-6,
    rms_eps: float = 1e-6,
) -> tuple[Tensor | None, ...]:
    """→ h, pre, post, comb, new; None where there is none."""
    n = x.shape[1]
    pre = post = comb = new = None
    if fn is not None:
        flat = x.flatten(1)
        m = flat @ fn.T * torch.rsqrt(flat.square().mean(-1, keepdim=True) + rms_eps)
        pre = torch.sigmoid(m[:, :n] * scale[0] + base[:n]) + eps
    if fn is not None and not head:
        post = 2 * torch.sigmoid(m[:, n : 2 * n] * scale[1] + base[n : 2 * n])
        comb = (m[:, 2 * n :] * scale[2] + base[2 * n :]).unflatten(1, (n, n)).softmax(-1) + eps
        comb = comb / (comb.sum(1, keepdim=True) + eps)
        for _ in range(iters - 1):
            comb = comb / (comb.sum(2, keepdim=True) + eps)
            comb = comb / (comb.sum(1, keepdim=True) + eps)
    factors = pre if pre_in is None else pre_in
    sums = torch.einsum("tn,tnd->td", factors, x)
    h = sums * torch.rsqrt(sums.square().mean(-1, keepdim=True) + rms_eps) * norm_weight
    if f is not None:
        new = post[:, :, None] * f[:, None] + torch.einsum("tik,tid->tkd", comb, x)
    return h, pre if pre_in is not None and not head else None, post, comb, new
