# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""What stands between DeepSeek-V4's attention and experts on one H200, for hopper.py: projections by FP8
weights, eight of 4096 x 4096 in turn in a graph; hyper-connections of four copies of 4096 channels; the
indexer's loss with its gradients; examples/v4 (bench/accept/v4.c, target accept_v4). Shares are of the rate
of a copy in the same run, over the bytes that must move: weights once; of hyper-connections (2 n + 2) C
elements a token forward, (3 n + 3) C backward. Operations: 2 M N K; of the loss 2 (H D + 3 Hi C) a pair of
query and entry."""

import json
import os
import subprocess
import sys

import torch

from experts import copy_rate
from measure import act, attempt, empty, graph_us, line, ms
from v4 import random_lists

F32, U8 = torch.float32, torch.uint8
WIDTH, PROJECTIONS, COPIES = 4096, 8, 4


def projection(quern, x, **options):
    codes = torch.randint(0, 256, (WIDTH, WIDTH), dtype=U8, device="cuda")
    codes[codes & 0x7F == 0x7F] = 0x3F
    scale = torch.randint(119, 123, (WIDTH // 128, WIDTH // 128), dtype=U8, device="cuda")
    p = quern.params("linear", **options)
    return quern.call("linear_forward", p, x=x, w=codes, w_scale=scale, y=empty(len(x), WIDTH))


def projection_us(quern, rows, **options):
    """Microseconds of one of eight projections of the same rows."""
    x = act(rows, WIDTH)
    calls = [projection(quern, x, **options) for _ in range(PROJECTIONS)]

    def turn():
        for call in calls:
            call()

    return graph_us(turn, 4) / PROJECTIONS


def projection_rate(quern, rows, **options):
    return 2e-6 * rows * WIDTH * WIDTH / projection_us(quern, rows, **options)


def mixing(tokens):
    """Tensors of a call, and its gradients'."""
    rows, weights = COPIES * WIDTH, COPIES * (COPIES + 2)
    given = dict(x=act(tokens, COPIES, WIDTH), norm_weight=torch.randn(WIDTH, device="cuda"))
    given |= dict(fn=torch.randn(weights, rows, device="cuda") / rows**0.5)
    given |= dict(base=torch.randn(weights, device="cuda"), scale=torch.randn(3, device="cuda"))
    return given


def mix_ms(quern, tokens, with_f=True):
    t = mixing(tokens) | dict(h=empty(tokens, WIDTH))
    if with_f:
        t |= dict(f=act(tokens, WIDTH), x_new=empty(tokens, COPIES, WIDTH))
    return ms(quern.call("dsv4_hyper", quern.params("v4-hyper"), **t), 9, 2)


def mix_backward_ms(quern, tokens):
    t = mixing(tokens) | dict(f=act(tokens, WIDTH), d_h=act(tokens, WIDTH), d_new=act(tokens, COPIES, WIDTH))
    for name in ("fn", "base", "scale", "norm_weight"):
        t["d_" + name] = torch.empty_like(t[name])
    t |= dict(d_x=torch.empty_like(t["x"]), d_f=torch.empty_like(t["f"]))
    return ms(quern.call("dsv4_hyper_backward", quern.params("v4-hyper"), **t), 9, 2)


def mix_share(quern, tokens, backward):
    moved = 2 * tokens * WIDTH * (3 * COPIES + 3 if backward else 2 * COPIES + 2)
    took = mix_backward_ms(quern, tokens) if backward else mix_ms(quern, tokens)
    return moved / copy_rate() / took


def loss_rate(quern, top, queries=1024, entries=16384, heads=64, dim=128):
    """Of the last queries of a context of 4 entries a token, as the indexer's choice or all they see."""
    start = 4 * entries - queries
    t = dict(q_index=act(1, queries, heads, dim), k_index=act(1, entries, dim), w=act(1, queries, heads))
    t |= dict(q=act(1, queries, heads, dim), kv_cmp=act(1, entries, dim))
    t |= dict(lse_win=torch.randn(1, heads, queries, device="cuda"))
    if top > 0:
        t |= dict(idx=random_lists(4 * entries, top)[:, start:].contiguous())
    t |= dict(loss=torch.empty((), device="cuda"), row_loss=empty(1, queries, dtype=F32))
    t |= dict(d_q_index=torch.empty_like(t["q_index"]), d_k_index=torch.empty_like(t["k_index"]))
    t |= dict(d_w=torch.empty_like(t["w"]))
    pairs = queries * top if top > 0 else sum((start + q + 1) // 4 for q in range(queries))
    took = ms(quern.call("dsv4_index_loss", quern.params("v4-index-loss", start_abs_pos=start), **t), 7, 2)
    return 2e-9 * (heads * dim + 3 * heads * dim) * pairs / took


def rows(quern):
    """Of each figure what it is, its target, how to measure it, its unit, and whether less is better."""
    what = "FP8 weights 4096 x 4096, 1 row, in a graph, over the copy rate"
    yield what, 0.75, lambda: WIDTH**2 * 1e3 / copy_rate() / projection_us(quern, 1), "", False
    for n in (2048, 8192):
        yield f"the same, {n >> 10}k rows", 550, lambda: projection_rate(quern, n), "TFLOP/s", False
        what = f"the same, {n >> 10}k rows rounded to FP8"
        yield what, 800, lambda: projection_rate(quern, n, a8="fp8"), "TFLOP/s", False
    what = "hyper-connections 4 x 4096, 64k tokens"
    yield f"{what}, over the copy rate", 0.7, lambda: mix_share(quern, 65536, False), "", False
    yield f"{what}, backward, over the copy rate", 0.55, lambda: mix_share(quern, 65536, True), "", False
    what = "hyper-connections 4 x 4096, 8k tokens"
    yield f"{what}, a sub-layer's input", 0.17, lambda: mix_ms(quern, 8192, False), "ms", True
    yield f"{what}, the copies after it", 0.13, lambda: mix_ms(quern, 8192), "ms", True
    for top, name in ((512, "lists of 512"), (0, "all")):
        what = f"indexer's loss and gradients, 64 x 128, 1k queries, 16k entries, {name}"
        yield what, 200, lambda: loss_rate(quern, top), "TFLOP/s", False


def example(build):
    """examples/v4 on a made model: of the copy rate on a step's bytes, with 1 and 64 sequences."""
    program = os.path.join(build, "accept_v4")
    if not os.path.exists(program):
        subprocess.run(["cmake", "--build", build, "--target", "accept_v4"], stdout=subprocess.DEVNULL)
    if not os.path.exists(program):
        raise RuntimeError("accept_v4 cannot be built: jansson is needed")
    found = json.loads(subprocess.run([program, build, "cuda"], check=True, stdout=subprocess.PIPE).stdout)
    what = "examples/v4, Flash's widths, 4.2 GB, 8k tokens, in graphs, {}: of the copy rate"
    line(what.format("1 sequence"), 0.6, found["one"], "")
    line(what.format("64 sequences"), 0.6, found["many"], "")


def accept(quern):
    def one(what, target, measure, unit, less):
        line(what, target, measure(), unit, less)
        torch.cuda.empty_cache()

    for row in rows(quern):
        attempt(one, *row)
    attempt(example, os.path.dirname(os.path.abspath(sys.argv[1])))
