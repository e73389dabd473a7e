# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""What the GPU backend must reach, beside PyTorch eager, torch.compile and cuDNN attention in one process on
the same buffers. Medians of CUDA events, the L2 cache written over before each repetition, random data.
usage: accept.py LIBQUERN"""

import sys

import torch

import experts
from measure import BF16, act, cudnn, empty, fail, failures, graph_us, line, ms
from quern import Quern

quern = Quern(sys.argv[1])


def peers(what, function, *inputs):
    eager = ms(lambda: function(*inputs), reps=7)
    compiled_function = torch.compile(function)
    compiled = ms(lambda: compiled_function(*inputs), reps=7)
    print(f"    {what}: eager {eager:.3f} ms, torch.compile {compiled:.3f} ms", flush=True)
    return eager, compiled


def agree(what, a, b):
    error = ((a.float() - b.float()).norm() / b.float().norm()).item()
    if not error < 1e-2:
        fail(f"{what}: differs from PyTorch by {error:.3g}")


def rates():
    a, b = act(1 << 30), empty(1 << 30)
    copy, fill = 2 * 2 * 2**30 / ms(lambda: b.copy_(a)) * 1e-9, 2 * 2**30 / ms(lambda: b.fill_(1)) * 1e-9
    print(f"copy {copy:.3f} TB/s, fill {fill:.3f} TB/s", flush=True)
    return copy, fill


def compress():
    n, h, d, l = 1 << 20, 8, 128, 64
    p = quern.nsa_params()
    k, v, kc, vc = act(1, n, h, d), act(1, n, h, d), empty(1, n // l, h, d), empty(1, n // l, h, d)
    moved = 2 * n * h * d * 2 * (1 + 1 / l)

    def forward(k, v):
        return k.view(1, n // l, l, h, d).mean(2), v.view(1, n // l, l, h, d).mean(2)

    def backward(dk, dv):
        return (
            (dk / l).unsqueeze(2).expand(1, n // l, l, h, d).reshape(1, n, h, d),
            (dv / l).unsqueeze(2).expand(1, n // l, l, h, d).reshape(1, n, h, d),
        )

    fixed = quern.call("nsa_compress", p, k=k, v=v, k_cmp=kc, v_cmp=vc)
    t = ms(fixed)
    agree("compress", kc, forward(k, v)[0])
    _, compiled = peers("compress", forward, k, v)
    line("compress K+V mean, 1M tokens, fixed", 0.88 * 4.2, moved / t * 1e-9, "TB/s")
    line("    over torch.compile", 3, compiled / t, "x")
    cu = torch.tensor([0, n // 4 + 7, n // 2, n - 100, n], dtype=torch.int32, device="cuda")
    varlen = quern.call(
        "nsa_compress",
        p,
        k=k[0],
        v=v[0],
        k_cmp=kc[0],
        v_cmp=vc[0],
        cu_seqlens=cu,
        cu_seqlens_cmp=torch.empty_like(cu),
    )
    line("compress K+V mean, 1M tokens, varlen", 0.88 * 4.2, moved / ms(varlen) * 1e-9, "TB/s")
    dk, dv = act(1, n // l, h, d), act(1, n // l, h, d)
    run = quern.call(
        "nsa_compress_backward",
        p,
        k=k,
        v=v,
        d_k_cmp=dk,
        d_v_cmp=dv,
        d_k=empty(1, n, h, d),
        d_v=empty(1, n, h, d),
    )
    t = ms(run)
    _, compiled = peers("compress backward", backward, dk, dv)
    line("compress backward, 1M tokens", 0.95 * 3.37, moved / t * 1e-9, "TB/s")
    print(f"    over torch.compile: {compiled / t:.2f} x", flush=True)
    m = 4096
    small = quern.call(
        "nsa_compress",
        p,
        k=act(1, m, h, d),
        v=act(1, m, h, d),
        k_cmp=empty(1, m // l, h, d),
        v_cmp=empty(1, m // l, h, d),
    )
    line("compress of 4k tokens in a graph", 14, graph_us(small), "us", True)


def gate():
    n, h, d = 65536, 64, 128
    p = quern.nsa_params(gate=1)
    q, w, o_b, o, g, do = (
        act(1, n, h, d),
        act(h, 3, d) * d**-0.5,
        [act(1, n, h, d) for _ in range(3)],
        empty(1, n, h, d),
        empty(1, n, h, 3, dtype=torch.float32),
        act(1, n, h, d),
    )
    one, few = n * h * d * 2, n * h * 12

    # The peers keep the logits and their gradients in f32, as Quern does and its bound on the gates needs;
    # what PyTorch makes of the same products in bf16, whose gates are 2^-9 off, is printed beside them.
    def forward(q, w, a, b, c, wide=torch.float32):
        g = torch.sigmoid(torch.einsum("bnhd,hcd->bnhc", q.to(wide), w.to(wide)).float())
        return g, (g[..., 0:1] * a + g[..., 1:2] * b + g[..., 2:3] * c).to(BF16)

    def backward(q, w, g, do, a, b, c, wide=torch.float32):
        dz = (torch.stack([(do.float() * x.float()).sum(-1) for x in (a, b, c)], -1) * g * (1 - g)).to(wide)
        return (
            (g[..., 0:1] * do).to(BF16),
            (g[..., 1:2] * do).to(BF16),
            (g[..., 2:3] * do).to(BF16),
            torch.einsum("bnhc,hcd->bnhd", dz, w.to(wide)).to(BF16),
            torch.einsum("bnhc,bnhd->hcd", dz, q.to(wide)).float(),
        )

    def narrow(function):
        return lambda *inputs: function(*inputs, wide=BF16)

    def gate_error(wide):
        return (forward(q, w, *o_b, wide=wide)[0] - g).abs().max().item()

    branches = dict(o_cmp=o_b[0], o_slc=o_b[1], o_win=o_b[2])
    run = quern.call("nsa_gate", p, q=q, w_gate=w, gates=g, o=o, **branches)
    t = ms(run)
    agree("gate", o, forward(q, w, *o_b)[1])
    print(
        f"    largest difference of a gate: PyTorch in f32 {gate_error(torch.float32):.2g}, "
        f"in bf16 {gate_error(BF16):.2g}",
        flush=True,
    )
    peers("gate, logits in bf16", narrow(forward), q, w, *o_b)
    eager, compiled = peers("gate", forward, q, w, *o_b)
    line("gate forward, H 64, 64k tokens", 0.88 * 4.2, (5 * one + few) / t * 1e-9, "TB/s")
    line("    over eager", 9, eager / t, "x")
    line("    over torch.compile", 1.8, compiled / t, "x")
    d_o_b, dq, dw = (
        [empty(1, n, h, d) for _ in range(3)],
        empty(1, n, h, d),
        empty(h, 3, d, dtype=torch.float32),
    )
    run = quern.call(
        "nsa_gate_backward",
        p,
        q=q,
        w_gate=w,
        gates=g,
        d_o=do,
        d_o_cmp=d_o_b[0],
        d_o_slc=d_o_b[1],
        d_o_win=d_o_b[2],
        d_q=dq,
        d_w_gate=dw,
        **branches,
    )
    t = ms(run)
    agree("gate backward", dq, backward(q, w, g, do, *o_b)[3])
    peers("gate backward, logits in bf16", narrow(backward), q, w, g, do, *o_b)
    eager, compiled = peers("gate backward", backward, q, w, g, do, *o_b)
    line("gate backward, H 64, 64k tokens", 0.85 * 4.2, (9 * one + few) / t * 1e-9, "TB/s")
    line("    over eager", 9, eager / t, "x")
    line("    over torch.compile", 2.4, compiled / t, "x")
    m = 64
    small = quern.call(
        "nsa_gate",
        p,
        q=act(1, m, h, d),
        w_gate=w,
        gates=empty(1, m, h, 3, dtype=torch.float32),
        o=empty(1, m, h, d),
        o_cmp=act(1, m, h, d),
        o_slc=act(1, m, h, d),
        o_win=act(1, m, h, d),
    )
    line("gate forward of 64 tokens in a graph", 6, graph_us(small), "us", True)


def dense():
    n, h, hkv, d = 32768, 32, 8, 128
    q, k, v, o, lse, do = (
        act(1, n, h, d),
        act(1, n, hkv, d),
        act(1, n, hkv, d),
        empty(1, n, h, d),
        empty(1, h, n, dtype=torch.float32),
        act(1, n, h, d),
    )
    p = quern.attention_params()
    f = ms(quern.call("attention_forward", p, q=q, k=k, v=v, o=o, lse=lse), 5, 1)
    b = ms(
        quern.call(
            "attention_backward",
            p,
            q=q,
            k=k,
            v=v,
            o=o,
            lse=lse,
            d_o=do,
            d_q=torch.empty_like(q),
            d_k=torch.empty_like(k),
            d_v=torch.empty_like(v),
        ),
        5,
        1,
    )
    peer = cudnn(q, k, v, do)
    print(
        f"    dense 32k: cuDNN forward {peer[0]:.3f} ms, with backward {peer[1]:.3f} ms; "
        f"Quern {f:.3f}, {f + b:.3f} ms",
        flush=True,
    )
    line("dense causal forward, H 32/8, D 128, 32k", 300, 4 * d * h * n * n / 2 / f * 1e-9, "TFLOP/s")
    line("dense causal backward", 200, 10 * d * h * n * n / 2 / b * 1e-9, "TFLOP/s")


def layer(what, n, h, hkv, targets, backward=True, **options):
    d = 128
    p = quern.nsa_params(gate=1, **options)
    q, k, v, w, o = (
        act(1, n, h, d),
        act(1, n, hkv, d),
        act(1, n, hkv, d),
        act(h, 3, d) * d**-0.5,
        empty(1, n, h, d),
    )
    nc, lists = n // p.block_size, h if p.scope == 1 else hkv
    f32 = dict(dtype=torch.float32)
    made = dict(q=q, k=k, v=v, w_gate=w, o=o)
    if backward:
        made |= dict(
            gates=empty(1, n, h, 3, **f32),
            lse_cmp=empty(1, h, n, **f32),
            lse_slc=empty(1, h, n, **f32),
            lse_win=empty(1, h, n, **f32),
            k_cmp=empty(1, nc, hkv, d),
            v_cmp=empty(1, nc, hkv, d),
            block_idx=empty(1, lists, (n + p.tile - 1) // p.tile, p.num_selected, dtype=torch.int32),
        )
    reps = 1 if n > 1 << 18 else 5
    f = ms(quern.call("nsa_forward", p, **made), reps, 1)
    do = act(1, n, h, d) if backward else None
    b = 0
    if backward:
        made.pop("o")
        b = ms(
            quern.call(
                "nsa_backward",
                p,
                d_o=do,
                d_q=torch.empty_like(q),
                d_k=torch.empty_like(k),
                d_v=torch.empty_like(v),
                d_w_gate=empty(h, 3, d, **f32),
                **made,
            ),
            reps,
            1,
        )
    peer = cudnn(q, k, v, do)
    print(
        f"    {what}: cuDNN {peer[0]:.2f} ms, with backward {peer[1]:.2f} ms; Quern {f:.2f}, {f + b:.2f} ms",
        flush=True,
    )
    line(f"{what}: forward over cuDNN dense", targets[0], peer[0] / f, "x")
    if backward:
        line(f"{what}: forward and backward over cuDNN dense", targets[1], peer[1] / (f + b), "x")


rates()
for part in (
    compress,
    gate,
    dense,
    lambda: layer("NSA 64/4, 64k, tile 128, mean_logit", 65536, 64, 4, (3, 3), tile=128, metric=1),
    lambda: layer("NSA 64/4, 64k, T 1, softmax", 65536, 64, 4, (2, 2)),
    lambda: layer("NSA 8/2, 1M, tile256 preset", 1 << 20, 8, 2, (12,), False, preset="tile256"),
    lambda: experts.memory(quern),
):
    try:
        part()
    except (RuntimeError, torch.OutOfMemoryError) as error:
        fail(str(error)[:300])
    torch.cuda.empty_cache()
print(f"{failures()} failed")
sys.exit(failures() != 0)
