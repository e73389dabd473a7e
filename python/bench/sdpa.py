# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""How many times faster quern.attention is than PyTorch's scaled_dot_product_attention on the CPU, forward
and backward, causal, 8 heads of 128 channels, 2 threads, as JSON. The two take turns, each in the layout
that it prefers; the medians of the rounds' ratios count."""

import argparse
import json
import os
import statistics
import time

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--n", type=int, default=4096, help="tokens (default 4096)")
parser.add_argument("--dtype", choices=("f32", "bf16"), default="f32")
parser.add_argument("--rounds", type=int, default=5)
options = parser.parse_args()

os.environ["OMP_NUM_THREADS"] = "2"
os.environ["OMP_WAIT_POLICY"] = "passive"  # neither's idle threads take the other's cores

import torch  # noqa: E402

import quern  # noqa: E402

torch.set_num_threads(2)
dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[options.dtype]
given = [torch.randn(1, options.n, 8, 128, dtype=dtype, requires_grad=True) for _ in range(3)]
turned = [t.detach().transpose(1, 2).contiguous().requires_grad_() for t in given]
d_o = torch.randn(1, options.n, 8, 128, dtype=dtype)
d_turned = d_o.transpose(1, 2).contiguous()


def timed(function):
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


def turn(attend, tensors, d_out):
    """Seconds of a forward and of its backward."""
    forward, o = timed(lambda: attend(*tensors))
    backward, grads = timed(lambda: torch.autograd.grad(o, tensors, d_out))
    return (forward, backward), (o.detach(), *grads)


def peer(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


rounds = []
for i in range(options.rounds + 1):  # the first warms up
    ours, results = turn(quern.attention, given, d_o)
    theirs, expected = turn(peer, turned, d_turned)
    if i == 0:
        for a, b in zip(results, expected):
            a, b = a.float(), b.transpose(1, 2).float()
            error = float((a - b).norm() / b.norm())
            if error > (1e-4 if options.dtype == "f32" else 2e-2):
                raise SystemExit(f"the two differ by {error:.3g}")
    else:
        rounds.append([b / a for a, b in zip(ours, theirs)])
forward, backward = (statistics.median(ratios) for ratios in zip(*rounds))
print(json.dumps({"n": options.n, "dtype": options.dtype, "forward": forward, "backward": backward}))
