# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""What DeepSeek-V4's attention and indexer must reach on one H200, for hopper.py: prefill over random lists,
each token its own; decode from rows of 584 bytes in pages, in graphs that rotate eight caches; the indexer of
keys that all queries see; compressors. Operations: 4 H D a pair of query and key, an entry in list and window
counted twice, 10 H D in the backward; 2 Hi C a pair of query and entry."""

import torch

from experts import copy_rate
from measure import act, attempt, empty, graph_us, in_turns, line, ms, smooth

F32, I32, U8 = torch.float32, torch.int32, torch.uint8
DIM, WINDOW, TOP, PAGE, POOLS = 512, 128, 512, 64, 8


def tables(positions, dim=64):
    angle = torch.arange(positions, device="cuda")[:, None] * 10000 ** (
        -torch.arange(0, dim, 2, device="cuda") / dim
    )
    return torch.cat([angle.cos(), angle.sin()], 1).to(F32)


def random_lists(n, top=TOP, ratio=4):
    """Of each token a random choice among the entries it sees."""
    lists = torch.full((1, n, top), -1, dtype=I32, device="cuda")
    for t0 in range(0, n, 1024):
        t = torch.arange(t0, min(t0 + 1024, n), device="cuda")
        seen = (t + 1) // ratio
        score = torch.rand(len(t), n // ratio, device="cuda")
        score.masked_fill_(torch.arange(n // ratio, device="cuda") >= seen[:, None], -1)
        k = min(top, n // ratio)
        value, index = score.topk(k, 1)
        index = index.masked_fill(value < 0, n).sort(1)[0]
        lists[0, t0 : t0 + len(t), :k] = index.masked_fill(index == n, -1).to(I32)
    return lists


def smooth_lists(quern, n, top=TOP, ratio=4):
    """The indexer's choice where its queries, weights and keys move slowly from token to token."""
    t = dict(q=smooth(n, 64, 128), w=smooth(n, 64, 1)[..., 0].contiguous())
    t |= dict(k=smooth(n, 1, 128)[:, ratio - 1 :: ratio, 0].contiguous())
    t |= dict(idx=empty(1, n, top, dtype=I32), count=empty(1, n, dtype=I32))
    quern.call("dsv4_index", quern.params("v4-index", top_k=top), **t)()
    return t["idx"]


def pairs_of(n, top=TOP, ratio=4):
    t = torch.arange(1, n + 1, dtype=torch.float64)
    return ((t // ratio).clamp(max=top) + t.clamp(max=WINDOW)).sum().item()


def prefill(quern, n, heads, lists=None):
    """TFLOP/s of the attention of n tokens; lists: random ones."""
    p = quern.params("v4-attention")
    t = dict(q=act(1, n, heads, DIM), kv=act(1, n, DIM), kv_cmp=act(1, n // 4, DIM))
    t |= dict(idx=random_lists(n) if lists is None else lists)
    t |= dict(o=empty(1, n, heads, DIM), lse=empty(1, heads, n, dtype=F32))
    t |= dict(sink=torch.randn(heads, device="cuda"), cos_sin=tables(n))
    return 4e-9 * heads * DIM * pairs_of(n) / ms(quern.call("dsv4_attention", p, **t), 9, 2)


def backward(quern, n, heads):
    """TFLOP/s of the attention's backward, 10 H D a pair: five products. Every token chose entry 0."""
    p, lists = quern.params("v4-attention"), random_lists(n)
    lists[:, :, 0].clamp_(max=0)
    t = dict(q=act(1, n, heads, DIM), kv=act(1, n, DIM), kv_cmp=act(1, n // 4, DIM), idx=lists)
    t |= dict(o=empty(1, n, heads, DIM), lse=empty(1, heads, n, dtype=F32))
    t |= dict(sink=torch.randn(heads, device="cuda"), cos_sin=tables(n))
    quern.call("dsv4_attention", p, **t)()
    t |= dict(d_o=act(1, n, heads, DIM), d_q=empty(1, n, heads, DIM), d_kv=empty(1, n, DIM))
    t |= dict(d_kv_cmp=empty(1, n // 4, DIM), d_sink=empty(heads, dtype=F32))
    call = quern.call("dsv4_attention_backward", p, **t)
    return 10e-9 * heads * DIM * pairs_of(n) / ms(call, 7, 2)


def row584_pool(pages):
    """Pages of random rows: 448 e4m3 and 64 bf16 of every slot, then their scales."""
    codes = torch.randint(0, 256, (pages, PAGE, 576), dtype=U8, device="cuda")
    codes[codes & 0x7F == 0x7F] = 0x3F
    codes[:, :, 448:] = act(pages, PAGE, 64).view(U8)
    scales = torch.full((pages, PAGE, 8), 120, dtype=U8, device="cuda")
    return torch.cat([codes.view(pages, -1), scales.view(pages, -1)], 1)


def step_of(quern, sequences, tokens, heads, context):
    """A step of new tokens at the end of a context, from caches of its own."""
    start, columns = context - tokens, context // PAGE
    table = torch.full((sequences, columns), -1, dtype=I32, device="cuda")
    held = torch.arange((start - WINDOW + 1) // PAGE, columns, device="cuda")
    table[:, held] = torch.randperm(sequences * len(held), device="cuda").to(I32).view(sequences, -1)
    entries = context // 4
    entry_table = torch.randperm(sequences * entries // PAGE, device="cuda").to(I32).view(sequences, -1)
    idx = torch.rand(sequences * tokens, entries - 1, device="cuda").topk(TOP, 1)[1].sort(1)[0]
    t = dict(q=act(sequences, tokens, heads, DIM), kv=row584_pool(table.max().item() + 1))
    t |= dict(kv_cmp=row584_pool(entry_table.numel()), kv_table=table, kv_cmp_table=entry_table)
    t |= dict(idx=idx.to(I32).view(sequences, tokens, TOP), sink=torch.randn(heads, device="cuda"))
    t |= dict(cos_sin=tables(context), o=empty(sequences, tokens, heads, DIM))
    t |= dict(lse=empty(sequences, heads, tokens, dtype=F32))
    t |= dict(start_positions=torch.full((sequences,), start, dtype=I32, device="cuda"))
    return quern.call("dsv4_attention", quern.params("v4-attention", format="row584", page=PAGE), **t)


def decode_us(quern, sequences, tokens, heads, context=32768):
    steps = [step_of(quern, sequences, tokens, heads, context) for _ in range(POOLS)]

    def turn():
        for step in steps:
            step()

    return graph_us(turn, 4) / POOLS


APPENDS = 4  # steps of each pool that follow one another: each sequence ends a block in one of them


def append_steps(quern, sequences, ring=2, context=32768, ratio=4):
    """Steps of one token a sequence, a quarter of which end a block, into states and pages of POOLS pools;
    and what sets the states' counts of rows back to where the steps begin."""
    first = context - 2 * ratio + torch.arange(sequences, dtype=I32, device="cuda") % ratio
    entries = context // ratio
    shared = dict(slots=torch.randperm(sequences, device="cuda").to(I32), cos_sin=tables(context))
    shared |= dict(cu=torch.arange(sequences + 1, dtype=I32, device="cuda"))
    begin = torch.empty_like(first)
    begin[shared["slots"].long()] = first - ring
    begin = begin.repeat(POOLS, 2, 1)
    counts, steps = begin.clone(), []
    for name, width in (("", DIM), ("index_", 128)):
        shared |= {name + bias: torch.randn(ratio, width, device="cuda") for bias in ("b_a", "b_b")}
        shared |= {name + "norm_weight": act(width)}
    for pool in range(POOLS):
        t = dict(shared)
        for i, (name, width, row) in enumerate((("", DIM, 584), ("index_", 128, 132))):
            pages = sequences * (entries // PAGE)
            t[name + "proj"] = act(sequences, 4 * width)
            t[name + "states"] = torch.rand(sequences, (6 + 4 * ring) * width, device="cuda") + 0.5
            t[name + "merged"] = counts[pool, i]
            t[name + "out"] = empty(pages, PAGE * row, dtype=U8)
            t[name + "table"] = torch.randperm(pages, device="cuda").to(I32).view(sequences, -1)
        steps.append(t)
    p = quern.params("v4-append-step", format="row584", index_format="fp8", index_hadamard=True)
    calls = [
        quern.call("dsv4_append_step", p, positions=first + i, **t) for i in range(APPENDS) for t in steps
    ]
    return calls, lambda: counts.copy_(begin)


def append_us(quern, sequences):
    calls, reset = append_steps(quern, sequences)

    def turn():
        reset()
        for call in calls:
            call()

    return graph_us(turn, 1) / len(calls)


def key_pool(pages):
    """Pages of random FP8 keys: the codes of every slot, then their scales."""
    codes = torch.randint(0, 256, (pages, PAGE * 128), dtype=U8, device="cuda")
    codes[codes & 0x7F == 0x7F] = 0x3F
    scales = torch.rand(pages, PAGE, device="cuda") * 0.01 + 0.01
    return torch.cat([codes, scales.view(U8)], 1)


def layer_step(quern, sequences, context=32768, ring=2, ratio=4):
    """A step of one token a sequence through a CSA layer of Flash's dims, a quarter of which end a block."""
    width, lora, heads, groups, o_lora = 4096, 1024, 64, 8, 1024
    pages, at = sequences * (context // ratio // PAGE), torch.arange(sequences, dtype=I32, device="cuda")
    positions = context - 2 * ratio + at % ratio

    def weight(*shape):
        return act(*shape) * shape[-1] ** -0.5

    t = dict(x=act(sequences, width), out=empty(sequences, width), cos_sin=tables(context))
    t |= dict(sinks=torch.randn(heads, device="cuda"), q_a=weight(lora, width), q_a_norm=act(lora))
    t |= dict(q_b=weight(heads * DIM, lora), kv=weight(DIM, width), kv_norm=act(DIM))
    t |= dict(o_a=weight(groups * o_lora, heads * DIM // groups), o_b=weight(width, groups * o_lora))
    for name, states, columns in (("compressor", "", DIM), ("indexer", "indexer_", 128)):
        t[name + "_bias"] = torch.randn(ratio, 2 * columns, device="cuda")
        t |= {f"{name}_{part}": weight(2 * columns, width) for part in ("kv", "gate")}
        t[name + "_norm"] = act(columns)
        t[states + "states"] = torch.rand(sequences, (6 + 4 * ring) * columns, device="cuda") + 0.5
        t[states + "merged"] = positions - ring
    t |= dict(indexer_q_b=weight(64 * 128, lora), indexer_heads=weight(64, width))
    t |= dict(slots=at, positions=positions, cu=torch.arange(sequences + 1, dtype=I32, device="cuda"))
    raw = row584_pool(sequences * (WINDOW + ring) // PAGE + 1).flatten()[: sequences * (WINDOW + ring) * 584]
    t |= dict(raw=raw.view(sequences, WINDOW + ring, 584) % 0x70, raw_table=at.view(-1, 1))
    t |= dict(entries=row584_pool(pages), keys=key_pool(pages), fault=torch.zeros_like(at))
    t |= dict(entries_table=torch.randperm(pages, device="cuda").to(I32).view(sequences, -1))
    p = quern.params("v4-layer-step", format="row584", key_format="fp8", top_k=TOP, window=WINDOW)
    return quern.call("dsv4_layer_step", p, **t)


def index_call(quern, batch, queries, entries, form):
    p = quern.params("v4-index", start_abs_pos=4 * entries, top_k=TOP)
    t = dict(q=act(batch, queries, 64, 128), w=act(batch, queries, 64))
    if form == "fp8 products":
        p.products, form = 1, "fp8"
    if form == "rows":
        t |= dict(k=act(batch, entries, 128))
    else:
        p.key_format = form
        bytes_of = dict(fp8=132, fp4=68)[form]
        k = torch.randint(0, 256, (batch, entries, bytes_of), dtype=U8, device="cuda")
        if form == "fp8":
            k[k & 0x7F == 0x7F] = 0x3F
            k[:, :, 128:] = (torch.rand(batch, entries, 1, device="cuda") * 0.01 + 0.01).view(U8)
        else:
            k[:, :, 64:] = k[:, :, 64:] % 4 + 124
        t |= dict(k=k)
    t |= dict(idx=empty(batch, queries, TOP, dtype=I32), count=empty(batch, queries, dtype=I32))
    return quern.call("dsv4_index", p, **t)


def index_rate(quern, queries, entries, form):
    """TFLOP/s of the indexer where every query sees all entries."""
    return 2e-9 * 64 * 128 * queries * entries / ms(index_call(quern, 1, queries, entries, form), 7, 2)


def index_decode(quern, sequences, entries, form="fp8"):
    """What reading the keys once would take at the rate of a copy, over what a step takes."""
    a, b = act(1 << 29), empty(1 << 29)
    copy = 2 * a.numel() * 2 / ms(lambda: b.copy_(a))
    del a, b
    call = index_call(quern, sequences, 1, entries, form)
    return sequences * entries * 132 / copy / ms(call, 9, 2)


def compressor(kind, n):
    """The tensors of a compressor's pooling, norm and rotation of n rows, but for these."""
    r, series = (4, "ab") if kind == "csa" else (128, "a")
    t = {f"b_{s}": torch.randn(r, DIM, device="cuda") for s in series}
    t |= dict(norm_weight=torch.randn(DIM, device="cuda"), cos_sin=tables(n), out=empty(1, n // r, DIM))
    return t


def columns(kind):
    return (4 if kind == "csa" else 2) * DIM


def pooling(quern, kind, n, backward=False):
    """What moving rows and entries, and the rows' gradients, would take at the rate of a copy, over what it
    takes."""
    p, t = quern.params(kind + "-compress"), compressor(kind, n)
    t |= dict(proj=act(1, n, columns(kind)))
    moved = t["proj"].nbytes * (2 if backward else 1) + t["out"].nbytes
    name = "dsv4_compress_backward" if backward else "dsv4_compress"
    if backward:
        t |= {"d_" + x: torch.empty_like(t[x]) for x in ("proj", "b_a", "b_b", "norm_weight") if x in t}
        t |= dict(d_out=act(*t.pop("out").shape))
    return moved / copy_rate() / ms(quern.call(name, p, **t))


def from_hidden(quern, kind, f32, n=16384, width=4096):
    """A compressor from hidden states over its product alone. In f32 the call has both; in bf16 the product
    comes before it."""
    p, t = quern.params(kind + "-compress"), compressor(kind, n)
    x, w = act(1, n, width), act(width, columns(kind)) * width**-0.5
    proj = empty(1, n, columns(kind), dtype=F32 if f32 else x.dtype)

    def product():
        if f32:
            torch.mm(x[0], w, out_dtype=F32, out=proj[0])
        else:
            torch.mm(x[0], w, out=proj[0])

    if f32:
        both = quern.call("dsv4_compress", p, x=x, w=w, **t)
    else:
        pool = quern.call("dsv4_compress", p, proj=proj, **t)

        def both():
            product()
            pool()

    mine, alone = in_turns(both, product, reps=15)
    return mine / alone


def rows(quern):
    """Of each figure what it is, its target, how to measure it, its unit, and whether less is better."""
    csa = "CSA prefill, window 128 + top-512 random"
    for heads, n, least in ((64, 8192, 580), (64, 32768, 515), (8, 8192, 200), (8, 32768, 110)):
        yield f"{csa}, {heads} heads, {n >> 10}k", least, lambda: prefill(quern, n, heads), "TFLOP/s", False
    what = "CSA prefill, window 128 + top-512 smooth, 8 heads, 8k"
    yield what, 300, lambda: prefill(quern, 8192, 8, smooth_lists(quern, 8192)), "TFLOP/s", False
    for n, least in ((8192, 220), (32768, 200)):
        what = f"{csa}, backward, 64 heads, {n >> 10}k"
        yield what, least, lambda: backward(quern, n, 64), "TFLOP/s", False
    for b, t, h, most in ((128, 2, 64, 60), (64, 1, 64, 32), (8, 1, 64, 18), (1, 1, 64, 11), (1, 1, 8, 9)):
        what = f"CSA decode, row584, {b} x {t} tokens, {h} heads, 32k, in a graph"
        yield what, most, lambda: decode_us(quern, b, t, h), "us", True
    what = "append, main + indexer, ring 2, 128 sequences, row584 + fp8, in a graph"
    yield what, 6, lambda: append_us(quern, 128), "us", True
    what = "CSA layer step, Flash dims, bf16 weights, 64 sequences of 32k, row584 + fp8, in a graph"
    yield what, 170, lambda: graph_us(layer_step(quern, 64), 4), "us", True
    for kind, passes in (("csa", (0.85, 0.75)), ("hca", (0.85, 0.65))):
        for n in (65536, 262144):
            what = f"{kind} pooling, norm and RoPE, bf16, {n >> 10}k rows, over the copy rate"
            yield what, passes[0], lambda: pooling(quern, kind, n), "", False
            yield what + ": backward", passes[1], lambda: pooling(quern, kind, n, True), "", False
    for kind in ("csa", "hca"):
        for f32, most in enumerate((1.1, 1.15)):
            what = f"{kind} compressor from hidden states, 16k, {('bf16', 'f32')[f32]}, over its product"
            yield what, most, lambda: from_hidden(quern, kind, f32), "x", True
    for form, least in (("rows", 500), ("fp8", 440), ("fp4", 400), ("fp8 products", 750)):
        what = f"indexer + top-512, 64 x 128, 64k entries, 1k queries, {form}"
        yield what, least, lambda: index_rate(quern, 1024, 65536, form), "TFLOP/s", False
    what = "indexer decode, 64 sequences of 64k entries, fp8, over the copy rate"
    yield what, 0.7, lambda: index_decode(quern, 64, 65536), "", False


def accept(quern):
    def one(what, target, measure, unit, less):
        line(what, target, measure(), unit, less)
        torch.cuda.empty_cache()

    for row in rows(quern):
        attempt(one, *row)
