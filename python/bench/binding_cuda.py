# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""What calls without gradients of tensors on a GPU cost the host, to the return of the call, in microseconds,
as JSON: attention and NSA of 64 tokens on an idle stream, by bf16, heads 8/2, D 128, and PyTorch's own
attention beside them. Medians of batches, the three in turns. `apart`: each result stays while the next call
is made, so that addresses change from call to call.
usage: binding_cuda.py"""

import json
import statistics
import time

import torch
import torch.nn.functional as F

import quern

CALLS, BATCHES = 100, 41


def batch_us(function, keep):
    """Of one call; the GPU's work of a batch fits its queue."""
    kept = []
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(CALLS):
        made = function()
        if keep:
            kept.append(made)
    taken = time.perf_counter() - start
    torch.cuda.synchronize()
    return 1e6 * taken / CALLS


q, k, v = (torch.randn(1, 64, heads, 128, device="cuda", dtype=torch.bfloat16) for heads in (8, 2, 2))
rows = [t.transpose(1, 2) for t in (q, k, v)]
calls = {
    "attention": lambda: quern.attention(q, k, v),
    "nsa": lambda: quern.nsa(q, k, v),
    "sdpa": lambda: F.scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=True),
}
found = {}
with torch.no_grad():
    for keep in (False, True):
        taken = {name: [] for name in calls}
        for _ in range(BATCHES):
            for name, function in calls.items():
                taken[name].append(batch_us(function, keep))
        for name, times in taken.items():
            found[f"{name}_apart_us" if keep else f"{name}_us"] = statistics.median(times)
print(json.dumps(found))
