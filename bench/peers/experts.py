# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""NVFP4 and experts on one H200: what the quantisers, the router, grouped products and whole layers must
reach, beside PyTorch on the same values in the same process. Shares are of the rate of a copy in the same
run, over the bytes that must move; "in a graph": a call of 20, whose data L2 may hold."""

import torch

from measure import BF16, act, attempt, empty, graph_of, graph_us, in_turns, kernel_us, line, ms

F32, I32, U8 = torch.float32, torch.int32, torch.uint8
RUN = 8  # columns of gate, then of up


def copy_rate():
    a, b = act(1 << 30), empty(1 << 30)
    return 2 * a.nbytes / ms(lambda: b.copy_(a))  # bytes a millisecond


def codes_of(t, d):
    return dict(codes=empty(t, d // 2, dtype=U8), scales=empty(t, d // 16, dtype=U8))


# ---- quantisers ----


def quantise_peer(x, g):
    """The profile rne with a given global, in PyTorch's own operations."""
    xn = x.float().view(x.shape[0], -1, 16) / g
    scale = (xn.abs().amax(2) / 6).clamp(max=448).to(torch.float8_e4m3fn)
    y = (xn / scale.float().clamp(min=2**-9).unsqueeze(2)).clamp(-6, 6)
    size = y.abs()
    code = sum((size > edge).to(U8) for edge in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5)) + 8 * (y < 0).to(U8)
    return code[..., 0::2] | code[..., 1::2] << 4, scale


def swiglu_peer(x, g):
    gate, up = x.view(x.shape[0], -1, 2, RUN).float().unbind(2)
    return quantise_peer((torch.nn.functional.silu(gate) * up).view(x.shape[0], -1), g)


def quantisers(quern):
    """The calls by name, with the bytes that they must move."""
    p, fused = quern.params("nvfp4-quantize"), quern.params("nvfp4-fused-quantize", swiglu=True)
    by_row = quern.params("nvfp4-quantize", global_per="row")

    def made(tokens, width=4096):
        x, g = act(tokens, width), torch.full((), 0.01, device="cuda")
        half = codes_of(tokens, width // 2)
        values = tokens * width
        one, rows = {"global": torch.empty((), device="cuda")}, {"global": empty(tokens, dtype=F32)}
        out = dict(x=x, **codes_of(tokens, width))
        return x, g, {
            "given": (quern.call("nvfp4_quantize", p, given_global=g, **out), 2 + 9 / 16),
            "computed": (quern.call("nvfp4_quantize", p, **one, **out), 4 + 9 / 16),
            "row": (quern.call("nvfp4_quantize", by_row, **rows, **out), 2 + 9 / 16),
            "swiglu": (
                quern.call(
                    "nvfp4_fused_quantize",
                    fused,
                    x=x,
                    gate_global=g,
                    gate_codes=half["codes"],
                    gate_scales=half["scales"],
                ),
                2 + 9 / 32,
            ),
        }, values

    rate = copy_rate()
    x, g, calls, values = made(16384)
    for name, target, what in (
        ("given", 0.7, "quantise rne, 16k x 4096, global given"),
        ("computed", 0.65, "the same, global computed, by 4 9/16 bytes a value"),
        ("row", 0.65, "the same, a global a row"),
        ("swiglu", 0.65, "de-interleave, SwiGLU and quantise, 16k x 2 x 2048"),
    ):
        call, bytes_each = calls[name]
        t = ms(call)
        print(f"    {what}: {t * 1e3:.1f} us")
        line(f"{what}, over the copy rate", target, values * bytes_each / t / rate, "")
    for name, peer in (("given", quantise_peer), ("swiglu", swiglu_peer)):
        compiled = torch.compile(peer)
        eager, t = ms(lambda: peer(x, g), 5, 1), ms(lambda: compiled(x, g), 5, 2)
        print(f"    PyTorch, {name}: eager {eager * 1e3:.0f} us, torch.compile {t * 1e3:.0f} us", flush=True)
    del x, calls
    _, _, calls, _ = made(64)
    for name in calls:
        line(f"quantise 64 tokens in a graph, {name}", 6, graph_us(calls[name][0]), "us", True)


# ---- products ----


class Experts:
    """Weights of experts, repacked, and products on them."""

    def __init__(self, quern, experts, k, n):
        self.quern, self.experts, self.k, self.n = quern, experts, k, n
        self.bytes = quern.repacked_bytes(n, k)
        codes = torch.randint(0, 256, (experts, k // 2, n), dtype=U8, device="cuda")
        scales = torch.randint(0x28, 0x38, (experts, k // 16, n), dtype=U8, device="cuda")
        self.b = empty(experts, self.bytes, dtype=U8)
        p = quern.params("moe-prepack")
        quern.call("moe_prepack", p, b_codes=codes, b_scales=scales, b_repacked=self.b)()
        self.globals = torch.full((experts,), 2**-6, device="cuda")

    def offsets(self, tokens):
        return torch.arange(1, self.experts + 1, dtype=I32, device="cuda") * tokens

    def call(self, rows, offsets, out=BF16, a=None, **options):
        width = self.n // 2 if options.get("activation") == "swiglu" else self.n
        return self.quern.call(
            "nvfp4_gemm",
            self.quern.params("nvfp4-gemm", n=self.n, **options),
            **(a if a is not None else dict(a=act(rows, self.k))),
            b_repacked=self.b,
            b_global=self.globals,
            offsets=offsets,
            c=empty(rows, width, dtype=out),
        )

    def equal(self, tokens, **options):
        return self.call(self.experts * tokens, self.offsets(tokens), **options)

    def flops(self, tokens):
        return 2 * self.experts * tokens * self.k * self.n


def grouped_mm(experts, k, n, tokens, offsets):
    a, b = act(experts * tokens, k), act(experts, n, k)
    return lambda: torch._grouped_mm(a, b.transpose(1, 2), offs=offsets)


def products(quern):
    rate, experts = copy_rate(), Experts(quern, 32, 4096, 4096)
    tera, rates = 1e-9, {}
    for tokens, share in ((1, 0.75), (8, 0.75), (16, None), (32, None)):
        t = ms(experts.equal(tokens))
        moved = experts.b.nbytes + 32 * tokens * (4096 + 4096) * 2
        what = f"W4A16, E 32, 4096 x 4096, {tokens} tokens an expert"
        print(f"    {what}: {t * 1e3:.1f} us, {moved / t / rate:.3f} of copy", flush=True)
        if share is not None:
            line(f"{what}, over the copy rate", share, moved / t / rate, "")
    for tokens, target in ((64, 400), (128, None), (256, None), (512, 500), (4096, 560)):
        call, flops = experts.equal(tokens), experts.flops(tokens) * tera
        rates[tokens] = flops / ms(call)
        ours, peer = in_turns(call, grouped_mm(32, 4096, 4096, tokens, experts.offsets(tokens)))
        print(
            f"    W4A16, {tokens} tokens: {rates[tokens]:.0f} TFLOP/s; in turns with PyTorch's grouped_mm "
            f"{flops / ours:.0f}, which has {flops / peer:.0f}",
            flush=True,
        )
        if target is not None:
            line(f"W4A16, {tokens} tokens an expert", target, rates[tokens], "TFLOP/s")
        if tokens >= 512:
            line("    over PyTorch's grouped_mm in bf16, in turns", 0.8, peer / ours, "x")
    for tokens, target in ((64, None), (512, 600), (4096, 720)):
        flops = experts.flops(tokens) * tera
        ours, own = in_turns(experts.equal(tokens, a8="fp8"), experts.equal(tokens))
        print(f"    W4A8 FP8, {tokens} tokens: {flops / ours:.0f} TFLOP/s; W4A16 in turns {flops / own:.0f}")
        if target is not None:
            line(f"W4A8 FP8, rows rounded too, {tokens} tokens an expert", target, flops / ours, "TFLOP/s")
            line("    over own W4A16, in turns", 1.15, own / ours, "x")
    coded = dict(
        a_codes=torch.randint(0, 256, (32 * 512, 2048), dtype=U8, device="cuda"),
        a_scales=torch.randint(0x28, 0x38, (32 * 512, 256), dtype=U8, device="cuda"),
    )
    flops = experts.flops(512) * tera
    line("W4A4, 512 tokens an expert", 470, flops / ms(experts.equal(512, a=coded)), "TFLOP/s")
    line("gradient of A, 512 tokens an expert", 400, flops / ms(gradient(experts, 512)), "TFLOP/s")
    del experts, coded
    torch.cuda.empty_cache()
    for k, n in ((2880, 2880), (4096, 288)):
        odd = Experts(quern, 32, k, n)
        r = odd.flops(512) * tera / ms(odd.equal(512))
        print(f"    W4A16, 512 tokens, N {n} K {k}: {r:.0f} TFLOP/s")
        line(f"W4A16, 512 tokens, N {n} K {k}, over the rate at 4096", 0.85, r / rates[512], "")


def gradient(experts, tokens):
    rows = experts.experts * tokens
    return experts.quern.call(
        "nvfp4_gemm_backward",
        experts.quern.params("nvfp4-gemm", n=experts.n),
        a=act(rows, experts.k),
        b_repacked=experts.b,
        b_global=experts.globals,
        offsets=experts.offsets(tokens),
        d_c=act(rows, experts.n),
        d_a=empty(rows, experts.k),
    )


# ---- layers ----


class Layer:
    """A layer of 256 experts, top 6, 4096 / 2048, from logits, without a shared expert."""

    def __init__(self, quern):
        self.quern = quern
        self.up, self.down = Experts(quern, 256, 4096, 4096), Experts(quern, 256, 2048, 4096)
        self.params = quern.params("moe", top_k=6, intermediate=2048, renormalize=True)

    def whole(self, tokens):
        """The layer's call, its products alone on the same rows, and its tensors."""
        slots = tokens * 6
        t = dict(
            hidden=act(tokens, 4096),
            logits=act(tokens, 256),
            gate_up_repacked=self.up.b,
            gate_up_global=self.up.globals,
            down_repacked=self.down.b,
            down_global=self.down.globals,
            out=empty(tokens, 4096),
            offsets=empty(256, dtype=I32),
            permutation=empty(slots, dtype=I32),
        )
        layer = self.quern.call("moe_forward", self.params, **t)
        layer()
        up = self.up.call(slots, t["offsets"], activation="swiglu")
        down = self.down.call(slots, t["offsets"], out=F32)

        def products():
            up()
            down()

        return layer, products, t


def layers(quern):
    made = Layer(quern)
    for tokens in (64, 1024, 8192):
        layer, both, _ = made.whole(tokens)
        ours, own = in_turns(graph_of(layer, 1), graph_of(both, 1), reps=11)
        what = f"layer, E 256 top 6, 4096 / 2048, {tokens} tokens"
        print(f"    {what}: {ours * 1e3:.0f} us, its products {own * 1e3:.0f} us", flush=True)
        line(f"{what}, over its products", 1.08, ours / own, "x", True)
        del layer, both
        torch.cuda.empty_cache()
    layer, both, _ = made.whole(1)
    ours, own = graph_us(layer), graph_us(both)
    print(f"    layer of 1 token in a graph {ours:.1f} us, its products {own:.1f} us", flush=True)
    line("layer of 1 token in a graph, beyond its products", 15, ours - own, "us", True)


def moving(quern):
    """What a layer does beside its products, by the times of its kernels, and those of the products."""
    rate, tokens, slots = copy_rate(), 8192, 8192 * 6
    layer, _, t = Layer(quern).whole(tokens)
    times = kernel_us(layer)
    for name, us in times.items():
        print(f"    {name}: {us:.1f} us")
    beside = sum(us for name, us in times.items() if "grouped_gemm" not in name) * 1e-3
    moved = t["logits"].nbytes + t["hidden"].nbytes + slots * 4096 * (2 + 4) + t["out"].nbytes
    line("route, permute and combine, 8192 tokens, over the copy rate", 0.7, moved / beside / rate, "")


def memory(quern):
    attempt(quantisers, quern)
    attempt(moving, quern)
    torch.cuda.empty_cache()


def moe(quern):
    for part in (products, layers):
        attempt(part, quern)
        torch.cuda.empty_cache()
