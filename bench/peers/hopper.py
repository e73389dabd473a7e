# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""What attention and experts must reach on one H200: dense beside cuDNN, NSA's stages, whole layers beside
cuDNN's dense attention, short sequences in graphs, DeepSeek-V4's core and indexer (v4.py), the rest of its
layers (models.py), decoding from paged caches (pages.py), and MiniMax-M3's attention (msa.py). Medians of
CUDA events, dense attention in turns with cuDNN's, random data; "smooth" data moves from one random vector to
the next over 512 tokens. Operations: 4 D a pair of query and key that see each other, 10 D in the backward.
usage: hopper.py LIBQUERN QUERN_ACCEPT_PARTS names the parts to run (all)"""

import os
import sys

import torch

import experts
import models
import msa
import pages
import v4
from measure import act, attempt, beside_cudnn, cudnn, empty, failures, graph_of, graph_us
from measure import in_turns, line, ms, smooth
from quern import Quern

quern = Quern(sys.argv[1])
F32, I32 = torch.float32, torch.int32
CMP, SLC, WIN = 1, 2, 4
dense_ms = {}


def dense_of(n, heads, kv_heads, backward):
    """Milliseconds of cuDNN's forward, and of its forward and backward, measured once a shape."""
    key = n, heads, kv_heads
    if key not in dense_ms or (backward and dense_ms[key][1] == 0):
        do = act(1, n, heads, 128) if backward else None
        dense_ms[key] = cudnn(act(1, n, heads, 128), act(1, n, kv_heads, 128), act(1, n, kv_heads, 128), do)
    return dense_ms[key]


def one_dense(heads, kv_heads, dim, dim_v, n, least_forward, least_backward):
    q, k, v = act(1, n, heads, dim), act(1, n, kv_heads, dim), act(1, n, kv_heads, dim_v)
    o, do, lse = empty(1, n, heads, dim_v), act(1, n, heads, dim_v), empty(1, heads, n, dtype=F32)
    p, given = quern.attention_params(), dict(q=q, k=k, v=v, o=o, lse=lse)
    grads = dict(d_q=torch.empty_like(q), d_k=torch.empty_like(k), d_v=torch.empty_like(v))
    forward, backward, peer, peer_backward = beside_cudnn(
        quern.call("attention_forward", p, **given),
        quern.call("attention_backward", p, **given, d_o=do, **grads),
        *(q, k, v, do),
    )
    what = f"dense {heads}/{kv_heads}, D {dim}" + (f"/{dim_v}" if dim != dim_v else "") + f", {n >> 10}k"
    rate = 4 * heads * n * n / 2 * (dim + dim_v) / 2 * 1e-9
    print(
        f"    {what}: {rate / forward:.0f} and {2.5 * rate / backward:.0f} TFLOP/s; "
        f"cuDNN {rate / peer:.0f} and {2.5 * rate / peer_backward:.0f}"
    )
    line(f"{what}: forward over cuDNN", least_forward, peer / forward, "x")
    line(f"{what}: backward over cuDNN", least_backward, peer_backward / backward, "x")


def dense():
    for shape in (
        (32, 8, 128, 128, 8192, 0.95, 0.9),
        (32, 8, 128, 128, 32768, 0.95, 0.9),
        (64, 8, 128, 128, 16384, 0.95, 0.9),
        (32, 8, 64, 64, 16384, 0.9, 0.85),
        (32, 8, 192, 128, 16384, 0.9, 0.85),
        (32, 8, 256, 256, 16384, 0.9, 0.7),
    ):
        attempt(one_dense, *shape)
        torch.cuda.empty_cache()


class Layer:
    """Tensors of a layer of 64/4 heads at 64k, and its stages one by one."""

    def __init__(self, make=act, n=65536, heads=64, kv_heads=4):
        self.n, self.heads, self.kv_heads = n, heads, kv_heads
        self.q, self.k, self.v, self.do = (
            make(n, heads),
            make(n, kv_heads),
            make(n, kv_heads),
            act(1, n, heads, 128),
        )
        self.o, self.lse = empty(1, n, heads, 128), empty(1, heads, n, dtype=F32)
        self.kc, self.vc = empty(1, n // 64, kv_heads, 128), empty(1, n // 64, kv_heads, 128)
        quern.call("nsa_compress", quern.nsa_params(), k=self.k, v=self.v, k_cmp=self.kc, v_cmp=self.vc)()

    def select(self, **options):
        """The lists of blocks, and the milliseconds that choosing them takes, with the compressed
        branch's lse where it helps."""
        p = quern.nsa_params(**options)
        lists = empty(1, self.kv_heads, (self.n + p.tile - 1) // p.tile, p.num_selected, dtype=I32)
        given = {} if p.metric == 1 else dict(lse_cmp=self.lse)
        if p.metric == 0:
            self.attend(CMP, {}, "cmp")
        return lists, ms(quern.call("nsa_select", p, q=self.q, k_cmp=self.kc, block_idx=lists, **given), 7, 2)

    def attend(self, branch, given, name, backward=False, **options):
        """Milliseconds of a branch's forward, and of its backward."""
        p = quern.nsa_params(branches=branch, **options)
        given = dict(q=self.q, **given, **{f"o_{name}": self.o, f"lse_{name}": self.lse})
        given |= dict(k_cmp=self.kc, v_cmp=self.vc) if branch == CMP else dict(k=self.k, v=self.v)
        forward = ms(quern.call("nsa_attend", p, **given), 7, 2)
        if not backward:
            return forward, 0
        grads = dict(d_q=torch.empty_like(self.q))
        grads |= (
            dict(d_k_cmp=torch.empty_like(self.kc), d_v_cmp=torch.empty_like(self.vc))
            if branch == CMP
            else dict(d_k=torch.empty_like(self.k), d_v=torch.empty_like(self.v))
        )
        return forward, ms(
            quern.call("nsa_attend_backward", p, **given, **{f"d_o_{name}": self.do}, **grads), 7, 2
        )


def most(what, targets, measured):
    line(f"{what}: forward", targets[0], measured[0], "ms", True)
    line(f"{what}: backward", targets[1], measured[1], "ms", True)


def stages():
    layer = Layer(lambda n, h: act(1, n, h, 128))
    attempt(lambda: most("compressed, 64/4, 64k", (2.3, 6.5), layer.attend(CMP, {}, "cmp", True)))
    attempt(lambda: most("window 512, 64/4, 64k", (3.2, 9), layer.attend(WIN, {}, "win", True)))

    def tiled():
        lists, t = layer.select(tile=128, metric=1)
        line("score and select, 64/4, 64k, mean_logit, tile 128", 0.4, t, "ms", True)
        forward, backward = layer.attend(SLC, dict(block_idx=lists), "slc", True, tile=128, metric=1)
        per_query = (
            torch.arange(1, layer.n + 1, dtype=torch.float64).clamp(max=1024).sum().item()
        )  # keys of 16 blocks of 64
        rate = 4 * 128 * layer.heads * per_query * 1e-9
        line("selected, 64/4, 64k, tile 128: forward", 500, rate / forward, "TFLOP/s")
        line("selected, 64/4, 64k, tile 128: backward", 360, 2.5 * rate / backward, "TFLOP/s")

    def by_token(of, what, targets):
        lists, t = of.select(tile=1)
        line(f"score and select, 64/4, 64k, softmax, T 1, {what}", 2.0, t, "ms", True)
        most(
            f"selected, 64/4, 64k, T 1, {what}",
            targets,
            of.attend(SLC, dict(block_idx=lists), "slc", True, tile=1),
        )

    attempt(tiled)
    attempt(by_token, layer, "noise", (13.5, 30))
    del layer
    attempt(lambda: by_token(Layer(lambda n, h: smooth(n, h, 128)), "smooth", (7, 17)))


def copies():
    """Compression and the gate, over the rate of a copy in the same run."""
    a, b = act(1 << 30), empty(1 << 30)
    copy = 4 * 2**30 / ms(lambda: b.copy_(a))
    del a, b
    n, h, d, l = 1 << 20, 8, 128, 64
    p, moved = quern.nsa_params(), 2 * n * h * d * 2 * (1 + 1 / l)
    k, v, kc, vc = act(1, n, h, d), act(1, n, h, d), act(1, n // l, h, d), act(1, n // l, h, d)
    line(
        "compress, 1M tokens, over the copy rate",
        0.92,
        moved / ms(quern.call("nsa_compress", p, k=k, v=v, k_cmp=kc, v_cmp=vc)) / copy,
        "",
    )
    back = quern.call(
        "nsa_compress_backward",
        p,
        k=k,
        v=v,
        d_k_cmp=kc,
        d_v_cmp=vc,
        d_k=torch.empty_like(k),
        d_v=torch.empty_like(v),
    )
    line("its backward", 0.92, moved / ms(back) / copy, "")
    del k, v, kc, vc, back
    torch.cuda.empty_cache()
    n, h = 65536, 64
    p, one, few = quern.nsa_params(gate=1), n * h * d * 2, n * h * 12
    t = dict(q=act(1, n, h, d), w_gate=act(h, 3, d) * d**-0.5, gates=empty(1, n, h, 3, dtype=F32))
    t |= {name: act(1, n, h, d) for name in ("o_cmp", "o_slc", "o_win")}
    line(
        "gate, H 64, 64k tokens, over the copy rate",
        0.86,
        (5 * one + few) / ms(quern.call("nsa_gate", p, o=empty(1, n, h, d), **t)) / copy,
        "",
    )
    grads = {name: empty(1, n, h, d) for name in ("d_o_cmp", "d_o_slc", "d_o_win", "d_q")} | dict(
        d_w_gate=empty(h, 3, d, dtype=F32)
    )
    back = quern.call("nsa_gate_backward", p, d_o=act(1, n, h, d), **t, **grads)
    line("its backward", 0.84, (9 * one + few) / ms(back) / copy, "")


def whole(n, heads, kv_heads, backward, make=None, preset=None, **options):
    """Yields the call of a whole layer's forward, then that of its backward, whose memory is taken only then.
    A forward that trains keeps the branches' outputs."""
    make = make or (lambda n, h: act(1, n, h, 128))
    p = quern.nsa_params(preset, gate=1, **options)
    f32 = dict(dtype=F32)
    made = dict(
        q=make(n, heads),
        k=make(n, kv_heads),
        v=make(n, kv_heads),
        w_gate=act(heads, 3, 128) * 128**-0.5,
        o=empty(1, n, heads, 128),
    )
    if backward:
        made |= dict(
            gates=empty(1, n, heads, 3, **f32),
            k_cmp=empty(1, n // 64, kv_heads, 128),
            v_cmp=empty(1, n // 64, kv_heads, 128),
            block_idx=empty(
                1, heads if p.scope == 1 else kv_heads, (n + p.tile - 1) // p.tile, p.num_selected, dtype=I32
            ),
        )
        made |= {name: empty(1, heads, n, **f32) for name in ("lse_cmp", "lse_slc", "lse_win")}
        made |= {name: empty(1, n, heads, 128) for name in ("o_cmp", "o_slc", "o_win")}
    yield quern.call("nsa_forward", p, **made)
    if not backward:
        return
    made.pop("o")
    torch.cuda.empty_cache()
    grads = {f"d_{name}": torch.empty_like(made[name]) for name in ("q", "k", "v")} | dict(
        d_w_gate=empty(heads, 3, 128, **f32)
    )
    yield quern.call("nsa_backward", p, d_o=act(1, n, heads, 128), **made, **grads)


def layer(what, n, heads, kv_heads, targets, **options):
    """targets: of the forward, and of forward and backward; None: not this one."""
    torch.cuda.empty_cache()
    reps = 1 if n > 1 << 18 else 5
    times = []
    for call in whole(n, heads, kv_heads, targets[1] is not None, **options):
        times.append(ms(call, reps, 1))
        del call
    torch.cuda.empty_cache()
    peer = dense_of(n, heads, kv_heads, targets[1] is not None)
    print(
        f"    {what}: {', '.join(f'{t:.2f}' for t in times)} ms; "
        f"cuDNN {peer[0]:.2f}, with backward {peer[1]:.2f} ms",
        flush=True,
    )
    if targets[0] is not None:
        line(f"{what}: forward over cuDNN dense", targets[0], peer[0] / times[0], "x")
    if targets[1] is not None:
        line(f"{what}: forward and backward over cuDNN dense", targets[1], peer[1] / sum(times), "x")


def layers():
    by_tile = dict(tile=128, metric=1)

    def smoothly(n, h):
        return smooth(n, h, 128)

    for name, n, targets in (
        ("16k", 1 << 14, (2.5, 2.5)),
        ("64k", 1 << 16, (8, 8)),
        ("256k", 1 << 18, (18, 20)),
    ):
        attempt(layer, f"NSA 64/4, {name}, tile 128", n, 64, 4, targets, **by_tile)
    attempt(layer, "NSA 64/4, 64k, T 1, noise", 1 << 16, 64, 4, (5, 5.3))
    attempt(layer, "NSA 64/4, 64k, T 1, smooth", 1 << 16, 64, 4, (7, 7), make=smoothly)
    attempt(layer, "NSA 8/2, 64k, T 1, noise", 1 << 16, 8, 2, (2.5, None))
    attempt(layer, "NSA 32/8, 64k, T 1, noise", 1 << 16, 32, 8, (2.5, None))


def longest():
    by_tile = dict(tile=128, metric=1)
    attempt(layer, "NSA 64/4, 1M, tile 128", 1 << 20, 64, 4, (36, None), **by_tile)
    attempt(
        layer,
        "NSA 64/4, 1M, tile 128, 16 groups",
        1 << 20,
        64,
        4,
        (90, None),
        max_compressed_groups=16,
        **by_tile,
    )
    attempt(layer, "NSA 64/4, 1M, tile 128", 1 << 20, 64, 4, (None, 38), **by_tile)


def over_dense(n, heads, kv_heads, preset):
    """Times as long as Quern's own dense forward, both in graphs, in turns."""
    t = dict(
        q=act(1, n, heads, 128),
        k=act(1, n, kv_heads, 128),
        v=act(1, n, kv_heads, 128),
        o=empty(1, n, heads, 128),
    )
    dense = graph_of(quern.call("attention_forward", quern.attention_params(), **t))
    layer = graph_of(next(whole(n, heads, kv_heads, False, preset=preset)))
    ours, own = in_turns(layer, dense, reps=21)
    return ours / own


def cudnn_us(n, heads, kv_heads):
    q, k, v = (act(1, h, n, 128) for h in (heads, kv_heads, kv_heads))
    with torch.no_grad(), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
        return graph_us(
            lambda: torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=True
            ),
            10,
        )


def break_even(what, heads, kv_heads, target, **options):
    """The first of these lengths where NSA is no slower than cuDNN's dense attention, both in graphs."""
    n = 0
    for n in (2048, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 65536):
        nsa = graph_us(next(whole(n, heads, kv_heads, False, **options)), 10)
        if nsa <= cudnn_us(n, heads, kv_heads):
            break
    else:
        n *= 2
    line(f"break-even with cuDNN dense, forward, {what}", target / 1024, n / 1024, "k", True)


def short():
    def smoothly(n, h):
        return smooth(n, h, 128)

    for heads, kv_heads, tile, token in ((64, 4, 6144, 8192), (8, 2, 8192, 24576)):
        attempt(break_even, f"tile 256, {heads}/{kv_heads}", heads, kv_heads, tile, preset="tile256")
        attempt(break_even, f"T 1, smooth, {heads}/{kv_heads}", heads, kv_heads, token, make=smoothly)
    for name, preset in (("tile 256", "tile256"), ("T 1", None)):
        what = f"whole forward of 64 tokens in a graph, 8/2, {name}"
        attempt(lambda: line(what, 25, graph_us(next(whole(64, 8, 2, False, preset=preset))), "us", True))
    for name, preset, target in (("tile 256", "tile256", 1.3), ("T 1", None, 1.8)):
        attempt(
            lambda: line(
                f"whole forward of 2k tokens in a graph, 8/2, {name}, over Quern's dense",
                target,
                over_dense(2048, 8, 2, preset),
                "x",
                True,
            )
        )


parts = dict(dense=dense, stages=stages, copies=copies, short=short, layers=layers, longest=longest)
parts["moe"] = lambda: experts.moe(quern)
parts["v4"] = lambda: v4.accept(quern)
parts["models"] = lambda: models.accept(quern)
parts["pages"] = lambda: pages.accept(quern)
parts["msa"] = lambda: msa.accept(quern, dense_of)
for part in os.environ.get("QUERN_ACCEPT_PARTS", " ".join(parts)).split():
    attempt(parts[part])
    torch.cuda.empty_cache()
print(f"{failures()} failed")
sys.exit(failures() != 0)
