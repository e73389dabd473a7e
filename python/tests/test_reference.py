# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""quern.reference has every operation of the library, and computes the same."""

import pytest

torch = pytest.importorskip("torch")

import quern  # noqa: E402
from quern import _operations as ops  # noqa: E402
from quern import dsv4, moe, nvfp4, reference  # noqa: E402
from quern._dsv4_layer import tensors_of  # noqa: E402
from quern._faces import run  # noqa: E402

BOUND = 2e-6
CASES = {}


def case(name):
    """Of the operation of that name: compares the library with the reference that has its name."""

    def keep(function):
        CASES[name] = lambda near: function(near, reference.OPERATIONS[name])
        return function

    return keep


def wide(*tensors):
    return [None if t is None else t.double() for t in tensors]


def same_bytes(got, want):
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        assert torch.equal(*(t.view(torch.uint8) if t.element_size() == 1 else t for t in (a, b)))


def qkv(n=70, heads=4, kv_heads=2):
    torch.manual_seed(8)
    return [torch.randn(2, n, h, d) for h, d in ((heads, 16), (kv_heads, 16), (kv_heads, 24))]


# ---- attention ----


@case("attention")
def attention(near, exact):
    q, k, v = qkv()
    some = {"kv_first": torch.tensor([0, 23]), "kv_count": torch.tensor([61, 70])}
    sink = torch.randn(q.shape[2])
    for settings in (
        {"window": 9},
        {"causal": False, "window": 9},
        {"query_offset": 20},
        {"sink": sink},
        {"window": 9, **some, "sink": sink},
    ):
        for a, b in zip(
            quern.attention(q[:, 30:], k, v, **settings, return_lse=True),
            exact(*wide(q[:, 30:], k, v), **settings, return_lse=True),
        ):
            seen = b.isfinite()
            assert torch.equal(a.isfinite(), seen)
            near(a[seen], b[seen], BOUND)


SELECT = {"block_size": 8, "num_selected": 4, "tile": 4, "scope": "group", "metric": "softmax"}
FORCED = {"forced_first": 1, "forced_local": 1}


@case("nsa-compress")
def nsa_compress(near, exact):
    _, k, v = qkv()
    w_k, w_v = torch.randn(2, 16, 16), torch.randn(2, 24, 24)
    got = quern.nsa_compress(k, v, block_size=8, stride=4, w_k=w_k, w_v=w_v)
    for a, x, w in zip(got, (k, v), (w_k, w_v)):
        near(a, exact(*wide(x), 8, *wide(w), stride=4), BOUND)


@case("nsa-select")
def nsa_select(near, exact):
    q, k, v = qkv()
    k_cmp, _ = quern.nsa_compress(k, v, block_size=8)
    for metric in ("softmax", "mean_logit"):
        chosen = exact(*wide(q, k_cmp), **{**SELECT, "metric": metric}, **FORCED)
        got = quern.nsa_select(q, k_cmp, **{**SELECT, "metric": metric}, **FORCED)
        same_bytes(got, reference.listed(chosen, 4))
    q, k, v = qkv(600)
    k_cmp, _ = quern.nsa_compress(k, v, block_size=1)
    groups = {"block_size": 1, "tile": 16, "scope": "group", "num_selected": 20}
    got = quern.nsa_select(q, k_cmp, **groups, metric="mean_logit", forced_local=1, max_compressed_groups=3)
    chosen = reference.select_groups(*wide(q, k_cmp), 1, 3, 16, scope="group")
    same_bytes(got[2:], reference.listed(chosen, 3)[:1])


@case("nsa-index")
def nsa_index(near, exact):
    torch.manual_seed(4)
    q, keys = torch.randn(2, 90, 3, 16), torch.randn(2, 120, 3, 16)
    for k in (keys, keys[:, :, 0]):
        for settings in ({"forced_first": 1, "forced_local": 2}, {"query_offset": 10}):
            more = {"select_block": 8, "num_selected": 5, **settings}
            *got, scores = quern.nsa_index(q, k, **more, return_scores=True)
            chosen, want = exact(*wide(q, k), **more)
            same_bytes(got, reference.listed(chosen, 5))
            assert torch.equal(scores.isfinite(), want.isfinite())
            near(scores[scores.isfinite()], want[want.isfinite()], BOUND)


@case("nsa-index-loss")
def nsa_index_loss(near, exact):
    torch.manual_seed(5)
    q_index, keys = torch.randn(2, 90, 2, 16), torch.randn(2, 120, 2, 16)
    q, k = torch.randn(2, 90, 6, 24), torch.randn(2, 120, 2, 24)
    lists = torch.randint(-1, 16, (2, 2, 90, 5), dtype=torch.int32)
    for k_index in (keys, keys[:, :, 0]):
        for more in ({}, {"query_offset": 10, "lambda_": 0.5, "scale": 0.3, "index_scale": 0.2}):
            given = [t.clone().requires_grad_() for t in (q_index, k_index)]
            exactly = [t.double().requires_grad_() for t in (q_index, k_index)]
            loss, rows = quern.nsa_index_loss(*given, q, k, lists, select_block=8, return_rows=True, **more)
            want, want_rows = exact(*exactly, *wide(q, k), lists, select_block=8, **more)
            near(loss, want, BOUND)
            near(rows, want_rows, BOUND)
            got_gradients = torch.autograd.grad(3 * loss, given)
            for a, b in zip(got_gradients, torch.autograd.grad(3 * want, exactly)):
                near(a, b, 1e-5)


@case("nsa-attend")
def nsa_attend(near, exact):
    q, k, v = qkv(300)
    k_cmp, v_cmp = quern.nsa_compress(k, v, block_size=1)
    idx, _, group_idx = quern.nsa_select(
        q, k_cmp, block_size=1, num_selected=20, tile=4, metric="mean_logit", max_compressed_groups=2
    )
    more = {"block_size": 1, "window": 9, "tile": 4}
    got = quern.nsa_attend(q, k, v, k_cmp, v_cmp, idx, **more, group_idx=group_idx, return_lse=True)
    want = exact(*wide(q, k, v, k_cmp, v_cmp), idx, **more, group_idx=group_idx)
    for a, b in zip(got, (*want[0], *want[1])):
        near(a[a.isfinite()], b[b.isfinite()], BOUND)


def gated():
    q = qkv()[0]
    return q, torch.randn(4, 3, 16), [torch.randn(2, 70, 4, 24) for _ in range(3)]


@case("nsa-gates")
def nsa_gates(near, exact):
    q, weights, _ = gated()
    params = ops.params("nsa-gates", gate="weights")
    (got,) = ops.call("nsa-gates", params, {"q": q, "w_gate": weights}, ("gates",))
    near(got, exact(*wide(q, weights)), BOUND)


@case("nsa-combine")
def nsa_combine(near, exact):
    q, weights, branches = gated()
    gates = reference.gates_of(q, weights)
    tensors = dict(zip(("o_cmp", "o_slc", "o_win"), branches))
    for kind, given in (("given", gates), ("none", None)):
        params = ops.params("nsa-combine", gate=kind)
        (got,) = ops.call("nsa-combine", params, {**tensors, "gates": given}, ("o",))
        near(got, exact(*wide(*branches, given)), BOUND)


@case("nsa-gate")
def nsa_gate(near, exact):
    q, weights, branches = gated()
    got, _ = quern.nsa_gate(q, *branches, gate=weights)
    near(got, exact(*wide(q, *branches, weights)), BOUND)


@case("nsa")
def nsa(near, exact):
    q, k, v = qkv()
    weights = torch.randn(4, 3, 16)
    got = quern.nsa(q, k, v, gate=weights, window=9, **SELECT, **FORCED)
    near(got, exact(*wide(q, k, v), w_gate=weights.double(), window=9, **SELECT, **FORCED), BOUND)


@case("nsa-list-convert")
def nsa_list_convert(near, exact):
    lists = torch.tensor([[5, 0, 2, -1], [6, 6, 1, 9]], dtype=torch.int32)
    for to in (16, 32, 8, 64):
        same_bytes(quern.convert_blocks(lists, 16, to, 101), exact(lists, 16, to, 101))


# ---- DeepSeek-V4 ----


def compressors(near, exact, columns, biases):
    torch.manual_seed(5)
    given = [torch.randn(2, 45, columns * 64), *(torch.randn(4, 64) for _ in range(biases))]
    given[0][0, 4:8, 64] = given[0][0, :4, 192 % (64 * columns)] = -torch.inf  # no logit of a channel counts
    table = dsv4.rope_table(64, 8, like=given[0])
    more = {"norm_weight": torch.rand(64), "cos_sin": table}
    exact_more = {"norm_weight": more["norm_weight"].double(), "cos_sin": table.double()}
    places = {"n_blocks": 7, "start_token": 3, "start_abs_pos": 8}
    near(dsv4.compress(*given, **more, **places), exact(*wide(*given), **exact_more, **places), BOUND)
    near(dsv4.compress(*given, hadamard=True), exact(*wide(*given), hadamard=True), BOUND)
    near(dsv4.compress(*given, round_bf16=True), exact(*wide(*given), round_bf16=True), 1e-3)
    rows = dsv4.compress(*given)
    for format in ("fp8", "fp8_power", "fp4"):
        same_bytes([dsv4.compress(*given, format=format)], [reference.dsv4.store(rows, format)])
        near(reference.dsv4.stored(rows, format), exact(*wide(*given), format=format), 1e-2)


@case("csa-compress")
def csa_compress(near, exact):
    compressors(near, exact, 4, 2)


@case("hca-compress")
def hca_compress(near, exact):
    compressors(near, exact, 2, 1)


@case("v4-append-step")
def v4_append_step(near, exact):
    torch.manual_seed(12)
    for series in (1, 2):
        width, ratio, ring = 16, 3, 4
        columns, floats = 2 * series * width, (3 + 2 * ring) * series * width
        bias = [torch.randn(ratio, width) for _ in range(series)]
        more = {"b_b": bias[1]} if series == 2 else {}
        more |= {"norm_weight": torch.randn(width), "cos_sin": torch.randn(20, 8)}
        states, merged = torch.full((3, floats), float("nan")), torch.full((3,), 77, dtype=torch.int32)
        positions = torch.tensor([0, 0, 0], dtype=torch.int32)
        for counts in ((7, 0, 2), (1, 0, 4), (2, 0, 6)):
            cu = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
            step = {"slots": torch.tensor([2, -1, 0], dtype=torch.int32), "positions": positions, "cu": cu}
            proj = torch.randn(int(cu[-1]), columns)
            want = exact(
                *wide(proj, bias[0]), **step, states=states.double(), merged=merged,
                **{name: t.double() for name, t in more.items()},
            )
            given = {"proj": proj, "b_a": bias[0], **more, **step, "states": states, "merged": merged}
            settings = lines(kind="csa" if series == 2 else "hca", ratio=ratio)
            (out,) = run("v4-append-step", settings, given, ("out",))
            near(out, want[0], BOUND)
            assert torch.equal(merged, want[2])
            live = merged != 77
            sums = (x[live][:, : 3 * series * width].nan_to_num(neginf=0) for x in (states, want[1]))
            near(*sums, BOUND)
            positions = positions + torch.tensor(counts, dtype=torch.int32)


def paged(rows, page, format="rows"):
    """Rows [B, n, D] in pages in reverse: the pool, the table, and the rows that stand there."""
    columns = -(-rows.shape[1] // page)
    pages = rows.shape[0] * columns
    table = torch.arange(pages - 1, -1, -1, dtype=torch.int32).view(rows.shape[0], columns)
    slots = table[:, torch.arange(rows.shape[1]) // page] * page + torch.arange(rows.shape[1]) % page
    if format == "rows":
        pool = rows.new_zeros(pages, page, rows.shape[-1])
    else:
        pool = torch.zeros(pages, page * reference.dsv4.store(rows, format).shape[-1], dtype=torch.uint8)
    dsv4.store(rows.flatten(0, 1), slots.flatten().int(), pool, format=format, page=page)
    found = reference.dsv4.gather_pages(pool, table, page, format)[:, : rows.shape[1]]
    same_bytes([found], [rows if format == "rows" else reference.dsv4.store(rows, format)])
    return pool, table


@case("v4-index")
def v4_index(near, exact):
    torch.manual_seed(9)
    q, k, w = torch.randn(2, 40, 16, 32), torch.randn(2, 10, 32), torch.randn(2, 40, 16)
    for format in ("rows", "fp8", "fp8-power", "fp4"):
        keys = k if format == "rows" else reference.dsv4.store(k, format)
        idx, count, scores = dsv4.index(q, keys, w, top_k=4, key_format=format, return_scores=True)
        given = keys.double() if format == "rows" else keys
        want, sums = exact(q.double(), given, w.double(), top_k=4, key_format=format)
        same_bytes((idx, count), (want, (want >= 0).sum(-1).int()))
        near(scores[scores.isfinite()], sums[sums.isfinite()], BOUND)
        pool, table = paged(k, 4, format)
        settings = {"top_k": 4, "key_format": format, "page": 4}
        tensors = {"q": q, "k": pool, "w": w, "k_table": table}
        found = ops.call("v4-index", ops.params("v4-index", **settings), tensors, ("idx", "count"))
        same_bytes(found, (idx, count))


@case("v4-index-loss")
def v4_index_loss(near, exact):
    torch.manual_seed(16)
    indexer = torch.randn(2, 40, 4, 16), torch.randn(2, 12, 16), torch.randn(2, 40, 4)
    rest = torch.randn(2, 40, 3, 24), torch.randn(2, 12, 24), torch.randn(2, 3, 40)
    idx = torch.randint(-1, 12, (2, 40, 6), dtype=torch.int32)
    for lists in (None, idx):
        for sink in (None, torch.randn(3)):
            given = [t.clone().requires_grad_() for t in indexer]
            exactly = [t.double().requires_grad_() for t in indexer]
            more = {"idx": lists, "start_abs_pos": 3, "lambda_": 0.5}
            loss, rows = dsv4.index_loss(*given, *rest, sink=sink, **more, return_rows=True)
            wide_sink = sink if sink is None else sink.double()
            want, want_rows = exact(*exactly, *wide(*rest), sink=wide_sink, **more)
            near(loss, want, BOUND)
            near(rows, want_rows, BOUND)
            got_gradients = torch.autograd.grad(3 * loss, given)
            for a, b in zip(got_gradients, torch.autograd.grad(3 * want, exactly)):
                near(a, b, 1e-5)


@case("v4-attention")
def v4_attention(near, exact):
    torch.manual_seed(4)
    q, sink = torch.randn(2, 20, 2, 512), torch.randn(2)
    kv, kv_cmp = torch.randn(2, 24, 512), torch.randn(2, 6, 512)
    idx = torch.tensor([5, 0, -1], dtype=torch.int32).expand(2, 20, 3).contiguous()
    more = {"ratio": 4, "window": 6}
    got = dsv4.attention(q, kv, kv_cmp, idx, sink=sink, **more, return_lse=True, return_lse_win=True)
    for a, b in zip(got, exact(*wide(q, kv, kv_cmp), idx, sink=sink.double(), **more, return_lse=True)):
        near(a, b, BOUND)
    rows = [reference.dsv4.store(t, "row584") for t in (kv, kv_cmp)]
    want = exact(q.double(), *rows, **more, format="row584")
    near(dsv4.attention(q, *rows, **more, format="row584"), want, BOUND)
    (kv_pool, kv_table), (cmp_pool, cmp_table) = (paged(t, 16, "row584") for t in (kv, kv_cmp))
    tables = {"kv_table": kv_table, "kv_cmp_table": cmp_table, "start_abs_pos": 4}
    near(dsv4.attention(q, kv_pool, cmp_pool, **more, format="row584", page=16, **tables), want, BOUND)


@case("v4-layer")
def v4_layer(near, exact):
    from quern.nn import CompressedSparseAttention

    torch.manual_seed(6)
    sizes = {"q_lora": 24, "groups": 2, "o_lora": 16, "index_heads": 16, "index_dim": 16}
    made = CompressedSparseAttention(64, 4, 32, **sizes, window=8, top_k=4)
    x, table = torch.randn(2, 40, 64), dsv4.rope_table(64, 8, like=torch.empty(0))
    weights = {name: t.detach() for name, t in made.named_parameters()}
    got, idx = dsv4.layer(x, table, weights, window=8, top_k=4, results=("idx_topk",))
    exact_weights = {name: t.double() for name, t in weights.items()}
    near(got, exact(*wide(x, table), exact_weights, window=8, top_k=4, idx=idx), 5e-6)


def kept(width=32, ring=2):
    """What a layer of heads of 32 channels keeps: 3 pages of raw rows and of entries, 3 slots of states."""
    floats = (3 + 2 * ring) * width
    return {
        "raw": torch.randn(3, 9, width), "raw_table": torch.tensor([[2], [0]]).int(),
        "entries": torch.randn(5, 3, width), "entries_table": torch.tensor([[4, 1], [0, 3]]).int(),
        "states": torch.randn(3, floats), "merged": torch.tensor([5, 6, 7]).int(),
    }  # fmt: skip


@case("v4-layer-step")
def v4_layer_step(near, exact):
    from quern.nn import HeavilyCompressedAttention

    torch.manual_seed(6)
    made = HeavilyCompressedAttention(64, 4, 32, q_lora=24, groups=2, o_lora=16, ratio=4, window=8)
    table, pools = dsv4.rope_table(64, 8, like=torch.empty(0)), kept()
    weights = {name: t.detach() for name, t in made.named_parameters()}
    before = [torch.zeros(0, 64), torch.zeros(0, 64)]
    for counts in ((11, 3), (1, 6), (2, 0)):
        cu = torch.tensor([0, counts[0], sum(counts)]).int()
        step = {"slots": torch.tensor([1, 2]).int(), "cu": cu}
        step["positions"] = torch.tensor([len(old) for old in before]).int()
        x = torch.randn(sum(counts), 64)
        given = tensors_of(x, table, weights)
        (out,) = run("v4-layer-step", lines(kind="hca", window=8), {**given, **step, **pools}, ("out",))
        wide_weights = {name: t.double() for name, t in weights.items()}
        old = [t.double() for t in before]
        want = exact(x.double(), cu, table.double(), wide_weights, old, kind="hca", window=8)
        near(out, want, BOUND)
        before = [torch.cat((old, new)) for old, new in zip(before, x.split(counts))]


@case("v4-layer-pack")
def v4_layer_pack(near, exact):
    pools = kept()
    tables = {"raw_table": pools["raw_table"][1], "entries_table": pools["entries_table"][1]}
    given = {**pools, **tables, "slot": torch.tensor([2]).int()}
    (packed,) = run("v4-layer-pack", lines(tokens=21, ratio=4), given, ("packed",))
    states = (pools["states"], pools["merged"])
    want = exact(
        pools["raw"], tables["raw_table"], 21, 4, (pools["entries"],), tables["entries_table"], states, 2
    )
    assert torch.equal(packed, want)


@case("v4-layer-unpack")
def v4_layer_unpack(near, exact):
    pools, other = kept(), kept()
    tables = {"raw_table": pools["raw_table"][1], "entries_table": pools["entries_table"][1]}
    at = (tables["raw_table"], 21, 4)
    packed = reference.dsv4.layer_pack(
        other["raw"], *at, (other["entries"],), tables["entries_table"], (other["states"], other["merged"]), 2
    )
    want = {name: t.clone() for name, t in pools.items()}
    states = (want["states"], want["merged"])
    exact(packed, want["raw"], *at, (want["entries"],), tables["entries_table"], states, 2)
    given = {**pools, **tables, "slot": torch.tensor([2]).int(), "packed": packed}
    run("v4-layer-unpack", lines(tokens=21, ratio=4), given, ())
    assert all(torch.equal(pools[name], want[name]) for name in pools)


@case("v4-store")
def v4_store(near, exact):
    torch.manual_seed(5)
    slots = torch.tensor([7, 0, -1, 12, 5], dtype=torch.int32)
    for format, size in {"rows": 64, "fp8": 68, "fp8-power": 68, "fp4": 34, "row584": 584}.items():
        x = torch.randn(5, 512 if format == "row584" else 64)
        for page in (0, 4):
            if format == "rows":
                cache = torch.randn(4, 4, size).bfloat16() if page else torch.randn(16, size).half()
            else:
                cache = torch.randint(0, 256, (4, 4 * size) if page else (16, size), dtype=torch.uint8)
            want = exact(x, slots, cache, format=format, page=page)
            dsv4.store(x, slots, cache, format=format, page=page)
            assert torch.equal(cache, want)


# ---- steps over pages ----


def step():
    """Two sequences of 70 and 9 tokens, of which a step brings 4 and 9; a row without a sequence between."""
    torch.manual_seed(8)
    step = {
        "slots": torch.tensor([0, -1, 1]),
        "positions": torch.tensor([66, 0, 0]),
        "cu": torch.tensor([0, 4, 4, 13]),
        "tokens_table": torch.tensor([[3, 1], [0, 0], [2, 0]]),
    }
    return {name: t.int() for name, t in step.items()}, torch.randn(5, 2, 64 * (16 + 8))


def lines(**settings):
    return tuple(settings.items())


@case("cache-append-step")
def cache_append_step(near, exact):
    some, tokens = step()
    entries, entries_table = torch.zeros(3, 2, 64 * 24), torch.tensor([[2], [0], [1]]).int()
    k, v = torch.randn(13, 2, 16), torch.randn(13, 2, 8)
    copies = torch.tensor([[0, 2, 4], [-1, -1, -1]]).int()
    more = {"entries": entries, "entries_table": entries_table, "copies": copies}
    want = exact(
        *wide(k, v), **{n: t for n, t in some.items()}, tokens=tokens.double(), block_size=8, stride=4,
        **{**more, "entries": entries.double()},
    )
    given = {"k": k, "v": v, **some, "tokens": tokens, **more}
    run("cache-append-step", lines(block_size=8, stride=4), given, ())
    near(tokens, want[0], 1e-6)
    near(entries, want[1], 1e-6)


@case("attention-decode-step")
def attention_decode_step(near, exact):
    some, tokens = step()
    q, sink = torch.randn(13, 4, 16), torch.randn(4)
    given = {"q": q, **some, "tokens": tokens, "sink": sink}
    (o,) = run("attention-decode-step", lines(window=20), given, ("o",))
    near(o, exact(q.double(), **some, tokens=tokens.double(), window=20, sink=sink.double()), 2e-6)


@case("nsa-decode-step")
def nsa_decode_step(near, exact):
    some, tokens = step()
    settings = {"block_size": 8, "num_selected": 4, "window": 12}
    entries, table = torch.zeros(3, 2, 64 * 24), torch.tensor([[2], [0], [1]]).int()
    k, v = reference.cache.read(tokens, some["tokens_table"][0], 0, 66, 16)
    old = {"slots": torch.tensor([0]), "positions": torch.tensor([0]), "cu": torch.tensor([0, 66])}
    old = {name: t.int() for name, t in old.items()}
    old |= {"tokens": tokens, "tokens_table": some["tokens_table"][:1], "entries": entries}
    run("cache-append-step", lines(block_size=8), {"k": k, "v": v, **old, "entries_table": table[:1]}, ())
    k, v, q = torch.randn(13, 2, 16), torch.randn(13, 2, 8), torch.randn(13, 4, 16)
    pools = {**some, "tokens": tokens, "entries": entries, "entries_table": table}
    run("cache-append-step", lines(block_size=8), {"k": k, "v": v, **pools}, ())
    (o,) = run("nsa-decode-step", lines(**settings), {"q": q, **pools}, ("o",))
    near(o, exact(q.double(), **some, tokens=tokens.double(), **settings), 5e-6)


@case("cache-pack")
def cache_pack(near, exact):
    some, tokens = step()
    table = some["tokens_table"][0]
    given = {"tokens": tokens, "tokens_table": table}
    (packed,) = run("cache-pack", lines(tokens=70, dim=16), given, ("packed",))
    assert torch.equal(packed.view(torch.float32).reshape(70, 2, 24), exact(tokens, table, 70, 16))


@case("cache-unpack")
def cache_unpack(near, exact):
    some, tokens = step()
    table, rows = some["tokens_table"][0], torch.randn(70, 2, 24)
    want = exact(rows, tokens, table, 16)
    given = {"tokens": tokens, "tokens_table": table, "packed": rows.view(torch.uint8).flatten()}
    run("cache-unpack", lines(tokens=70, dim=16), given, ())
    assert torch.equal(tokens, want)


# ---- NVFP4 and experts ----


def experts(count=3, k=64, n=64):
    torch.manual_seed(2)
    return nvfp4.quantize(torch.randn(count, k, n), weight=True, global_per="expert")


@case("nvfp4-quantize")
def nvfp4_quantize(near, exact):
    x = torch.randn(5, 40)
    same_bytes(nvfp4.quantize(x), exact(x))


@case("nvfp4-dequantize")
def nvfp4_dequantize(near, exact):
    x = torch.randn(5, 40)
    made = nvfp4.quantize(x, global_per="row")
    same_bytes([nvfp4.dequantize(*made, global_per="row", columns=40)], [exact(*made, columns=40).float()])


@case("nvfp4-from-mxfp4")
def nvfp4_from_mxfp4(near, exact):
    torch.manual_seed(1)
    codes = torch.randint(0, 256, (9, 64), dtype=torch.uint8)
    codes[0, :16] = 0x80
    for first, last in ((120, 130), (80, 140)):
        exponents = torch.randint(first, last, (9, 4), dtype=torch.uint8)
        *got, rounded = nvfp4.from_mxfp4(codes, exponents)
        *want, count = exact(codes, exponents)
        same_bytes(got, want)
        assert rounded == count and (count > 0) == (first == 80)
    zeros = codes[:1, :16], exponents[:1, :1]
    same_bytes(nvfp4.from_mxfp4(*zeros)[:3], exact(*zeros)[:3])


@case("nvfp4-fused-quantize")
def nvfp4_fused_quantize(near, exact):
    torch.manual_seed(1)
    x = torch.randn(7, 80)
    one, two = torch.tensor(0.003), torch.tensor(0.002)
    for profile in ("rne", "halfstep", "modelopt"):
        for globals in ((one, two), (one,), (None, two)):
            settings = {"profile": profile, "granularity": 4}
            same_bytes(nvfp4.fused_quantize(x, *globals, **settings), exact(x, *globals, **settings))
    swiglu = {"activation": "swiglu", "limit": 2.0, "alpha": 1.702, "beta": 1.0}
    same_bytes(nvfp4.fused_quantize(x, one, **swiglu), exact(x, one, **swiglu))


@case("nvfp4-swizzle")
def nvfp4_swizzle(near, exact):
    torch.manual_seed(1)
    scales = torch.randint(0, 127, (200, 9), dtype=torch.uint8)
    swizzled = exact(scales)
    same_bytes([nvfp4.swizzle(scales)], [swizzled])
    unswizzle = reference.nvfp4.unswizzle
    same_bytes([nvfp4.unswizzle(swizzled, 200, 9), unswizzle(swizzled, 200, 9)], [scales, scales])
    tokens = torch.tensor([130, 0, 60], dtype=torch.int32)
    same_bytes(nvfp4.swizzle(scales, tokens_per_expert=tokens), exact(scales, tokens_per_expert=tokens))
    swizzled, _ = exact(scales, tokens_per_expert=tokens)
    kept = scales.clone()
    kept[190:] = 0
    for back in (nvfp4.unswizzle, unswizzle):
        same_bytes([back(swizzled, 200, 9, tokens_per_expert=tokens)], [kept])
    weight = torch.randint(0, 127, (2, 9, 200), dtype=torch.uint8)
    swizzled = exact(weight, weight=True)
    same_bytes([nvfp4.swizzle(weight, weight=True)], [swizzled])
    for back in (nvfp4.unswizzle, unswizzle):
        same_bytes([back(swizzled, 200, 9, weight=True)], [weight])


@case("nvfp4-interleave")
def nvfp4_interleave(near, exact):
    for x in (torch.randn(3, 2, 40), torch.randint(0, 256, (5, 44), dtype=torch.uint8)):
        runs = exact(x)
        same_bytes([nvfp4.interleave(x)], [runs])
        same_bytes([nvfp4.interleave(runs, inverse=True)], [exact(runs, inverse=True)])


@case("nvfp4-gemm")
def nvfp4_gemm(near, exact):
    codes, scales, one = experts()
    offsets = torch.tensor([4, 4, 9], dtype=torch.int32)
    a, bias = torch.randn(10, 64), torch.randn(3, 64)
    more = {"b_global": one, "bias": bias}
    near(nvfp4.grouped_mm(a, codes, scales, offsets, **more), exact(a, codes, scales, offsets, **more), BOUND)
    for a8 in (True, "int8", "fp8"):
        rounded = {"a8": a8, **more}
        near(
            nvfp4.grouped_mm(a, codes, scales, offsets, **rounded),
            exact(a, codes, scales, offsets, **rounded),
            BOUND,
        )
    quantized, a_scales, a_global = nvfp4.quantize(a, global_per="row")
    more.update(a_scales=a_scales, a_global=a_global, a_global_per="row")
    more["b_global"] = one[:, None] * torch.tensor([1.0, 3.0])
    swiglu = {"activation": "swiglu", "limit": 2.0, "alpha": 1.702, "beta": 1.0}
    want = exact(quantized, codes, scales, offsets, **more, **swiglu)
    near(nvfp4.grouped_mm(quantized, codes, scales, offsets, **more, **swiglu), want, BOUND)
    c = torch.randn(10, 64)
    near(
        nvfp4.grouped_mm(quantized, codes, scales, offsets, **more, c=c),
        exact(quantized, codes, scales, offsets, **more, c=c),
        BOUND,
    )
    more["c_global"] = want.abs().max().float() / 2688
    got = nvfp4.grouped_mm(quantized, codes, scales, offsets, **more, **swiglu, output="nvfp4")
    same_bytes(got, exact(quantized, codes, scales, offsets, **more, **swiglu))


@case("moe-prepack")
def moe_prepack(near, exact):
    codes, scales, _ = experts(2, 80, 100)
    repacked = exact(codes, scales)
    same_bytes([nvfp4.prepack(codes, scales)], [repacked])
    same_bytes(reference.nvfp4.unpack_weights(repacked, 100, 80), (codes, scales))


@case("moe-route")
def moe_route(near, exact):
    torch.manual_seed(1)
    logits, bias = torch.randn(30, 8), torch.randn(8)
    settings = {"top_k": 3, "score": "sigmoid", "renormalize": True}
    chosen, weights, *order = moe.route(logits, bias=bias, **settings)
    want, shares = exact(logits.double(), bias=bias.double(), **settings)
    same_bytes([chosen, *order], [want.int(), *reference.moe.permutation_of(want, 8)])
    near(weights, shares, BOUND)


@case("moe")
def moe_layer(near, exact):
    gate_up, down = experts(), experts(3, 32, 64)
    shared = [torch.randn(48, 64), torch.randn(48, 64), torch.randn(64, 48)]
    hidden, logits = torch.randn(20, 64), torch.randn(20, 3)
    names = ("codes", "scales", "global")
    given = {f"gate_up_{kind}": t for kind, t in zip(names, gate_up)}
    given.update((f"down_{kind}", t) for kind, t in zip(names, down))
    given.update(zip(("shared_gate", "shared_up", "shared_down"), shared))
    matrices = [reference.nvfp4.dequantize(*made, weight=True) for made in (gate_up, down)]
    twice = torch.cat((shared[0].T, shared[1].T), 1)
    runs = reference.nvfp4.interleave(twice)
    globals = {"gate_up_input_global": torch.rand(3) / 500, "down_input_global": torch.rand(3) / 10}
    for a4 in ({"a4": False}, {"a4": True}, {"a4": True, **globals}):
        out, chosen, weights = moe.layer(
            hidden, logits=logits, **given, **a4, top_k=2, limit=9.0, return_routing=True
        )
        want = exact(
            hidden.double(),
            chosen,
            weights.double(),
            *matrices,
            granularity=8,
            limit=9.0,
            shared=(runs.double(), shared[2].T.double()),
            **a4,
        )
        near(out, want, BOUND)


# ---- projections and rows ----


def same_gradients(near, got, want, given, exactly):
    d = torch.randn(got.shape)
    exact = torch.autograd.grad(want, exactly, d.double())
    for a, b in zip(torch.autograd.grad(got, given, d), exact):
        near(a, b, 1e-5)


@case("v4-hyper")
def v4_hyper(near, exact):
    torch.manual_seed(15)
    n, width, tokens = 4, 24, 30
    x, norm, f = torch.randn(tokens, n, width), torch.randn(width), torch.randn(tokens, width)
    handed = torch.rand(tokens, n)
    for head, pre_in, with_f in ((0, 0, 1), (0, 1, 1), (0, 1, 0), (1, 0, 0), (1, 1, 0)):
        rows = n if head else n * (n + 2)
        mix = [torch.randn(rows, n * width) * 0.2, torch.randn(rows), torch.randn(1 if head else 3)]
        tensors = [x, norm, *(mix if not head or not pre_in else [None] * 3), f if with_f else None]
        given = [t if t is None else t.clone().requires_grad_() for t in tensors]
        exactly = [t if t is None else t.double().requires_grad_() for t in tensors]
        more = [t.clone().requires_grad_() if pre_in else None for t in (handed, handed.double())]
        got = dsv4.hyper(*given, pre_in=more[0], head=bool(head), iters=5, eps=1e-3, rms_eps=1e-2)
        want = exact(*exactly, pre_in=more[1], head=bool(head), iters=5, eps=1e-3, rms_eps=1e-2)
        for a, b in zip(got, want):
            if a is not None:
                near(a, b, BOUND)
        pairs = [(a, b) for a, b in zip(got, want) if a is not None]
        weights = [torch.randn(b.shape) for _, b in pairs]
        sum((a * w).sum() for (a, _), w in zip(pairs, weights)).backward()
        sum((b * w).sum() for (_, b), w in zip(pairs, weights)).backward()
        for a, b in zip([*given, more[0]], [*exactly, more[1]]):
            if a is not None:
                near(a.grad, b.grad, 1e-5)


@case("linear")
def linear(near, exact):
    torch.manual_seed(12)
    for groups in (1, 2):
        shapes = ((9, 64), (40, 64 // groups), (40,))
        given = [torch.randn(*shape).requires_grad_() for shape in shapes]
        exactly = [t.detach().double().requires_grad_() for t in given]
        got, want = quern.linear(*given, groups=groups), exact(*exactly, groups=groups)
        near(got, want, BOUND)
        same_gradients(near, got, want, given, exactly)
        x, n, k = given[0].detach(), 40, 64 // groups
        bytes_ = torch.randint(0, 127, (n, k), dtype=torch.uint8)
        for scale in (torch.rand(2, k // 32 or 1), torch.tensor([120], dtype=torch.uint8)):
            values = reference.fp8_weight(bytes_, scale, 32)
            got = quern.linear(x, bytes_, w_scale=scale, block=32, groups=groups)
            near(got, exact(x.double(), values, groups=groups), BOUND)
        codes, scales, one = nvfp4.quantize(torch.randn(n, k))
        values = reference.nvfp4.dequantize(codes, scales, one, columns=k).double()
        packed = {"w_codes": codes, "w_scales": scales, "w_global": one}
        near(quern.linear(x, **packed, groups=groups), exact(x.double(), values, groups=groups), BOUND)
        rounded = quern.linear(x, **packed, groups=groups, a8="fp8")
        near(rounded, exact(x.double(), values, groups=groups), 0.1)


@case("rms-norm")
def rms_norm(near, exact):
    torch.manual_seed(13)
    given = [torch.randn(9, 64).requires_grad_(), torch.randn(64).requires_grad_()]
    exactly = [t.detach().double().requires_grad_() for t in given]
    got, want = quern.rms_norm(*given, eps=1e-3), exact(*exactly, eps=1e-3)
    near(got, want, BOUND)
    same_gradients(near, got, want, given, exactly)


@case("rope")
def rope(near, exact):
    torch.manual_seed(14)
    x, table = torch.randn(9, 3, 24).requires_grad_(), dsv4.rope_table(20, 8, like=torch.empty(0))
    x_exact = x.detach().double().requires_grad_()
    positions = torch.randint(0, 20, (9,), dtype=torch.int32)
    counted = torch.arange(5, 14)
    for inverse in (False, True):
        got = quern.rope(x, table, positions=positions, inverse=inverse)
        want = exact(x_exact, table.double(), positions, inverse)
        near(got, want, BOUND)
        same_gradients(near, got, want, [x], [x_exact])
        got = quern.rope(x, table, start_abs_pos=5, inverse=inverse)
        near(got, exact(x_exact, table.double(), counted, inverse), BOUND)


# ---- all of them ----


def test_every_operation_has_a_reference():
    """An operation that the library gains needs a reference, and a case here."""
    assert set(ops.OPERATIONS) == set(reference.OPERATIONS) == set(CASES)


@pytest.mark.parametrize("name", sorted(CASES))
def test_operation(near, name):
    CASES[name](near)
