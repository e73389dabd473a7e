# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""quern.NSACache and quern.KVCache: every row is the one of a call over the whole sequence."""

import copy

import numpy as np
import pytest

import quern

SETTINGS = {"block_size": 16, "num_selected": 4, "window": 24}


def inputs(n=70, sequences=2):
    random = np.random.default_rng(5)
    shapes = ((sequences, n, 4, 16), (sequences, n, 2, 16), (sequences, n, 2, 24))
    return [random.standard_normal(shape).astype(np.float32) for shape in shapes]


def near(got, want, bound=2e-6):
    assert got.shape == want.shape
    assert np.linalg.norm(got - want) <= bound * np.linalg.norm(want)


@pytest.mark.parametrize("pieces", [[70], [40, 1, 1, 28], [16] * 4 + [6], [1] * 70])
def test_any_chunking(pieces):
    q, k, v = inputs()
    gate = np.random.default_rng(1).standard_normal((4, 3, 16)).astype(np.float32)
    want = quern.nsa(q, k, v, gate=gate, **SETTINGS)
    cache = quern.NSACache(2, 80, block_size=16)
    first = 0
    for n in pieces:
        rows = slice(first, first + n)
        cache.append(k[:, rows], v[:, rows])
        o = cache.attend(q[:, rows], gate=gate, num_selected=4, window=24)
        near(o, want[:, rows])
        first += n
    assert cache.length() == 70 and cache.entries(1) == 4 and cache.held_bytes > 0


def test_rollback_and_lists():
    q, k, v = inputs()
    k_cmp = quern.nsa_compress(k, v, block_size=16)[0]
    idx = quern.nsa_select(q, k_cmp, block_size=16, num_selected=4)[0]
    cache = quern.NSACache(2, 80, block_size=16)
    cache.append(k[:, :50], v[:, :50])
    cache.append(v[:, 50:55, :, :16], v[:, 50:55])
    cache.rollback(5)
    cache.append(k[:, 50:], v[:, 50:])
    o, lists = cache.attend(q[:, 50:], num_selected=4, window=24, return_lists=True)
    near(o, quern.nsa(q, k, v, **SETTINGS)[:, 50:])
    for b in range(2):
        assert np.array_equal(lists[:, 20 * b : 20 * b + 20], idx[b, :, 50:])
    cache.reset()
    assert cache.length() == 0


@pytest.mark.parametrize("heads", [0, 2])  # of index keys; 0: [B, n, D_I]
@pytest.mark.parametrize("branches", [None, "all"])
def test_the_indexer_chooses(heads, branches):
    q, k, v = inputs()
    random = np.random.default_rng(6)
    q_index = random.standard_normal((2, 70, 2, 8)).astype(np.float32)
    k_index = random.standard_normal((2, 70, *([heads] if heads else []), 8)).astype(np.float32)
    chosen = {"select_block": 8, "num_selected": 3, "forced_first": 0, "forced_local": 1}
    settings = {"preset": "msa", **chosen} if branches is None else {"window": 9, **chosen}
    whole = settings if branches is None else {**settings, "block_size": 16, "stride": 8}
    want = quern.nsa(q, k, v, q_index=q_index, k_index=k_index, **whole)
    idx = quern.nsa_index(q_index, k_index, **chosen)[0]
    cache = quern.NSACache(2, 80, block_size=16 if branches else 0, stride=8 if branches else None)
    first = 0
    for n in (50, 1, 1, 18):
        rows = slice(first, first + n)
        cache.append(k[:, rows], v[:, rows], k_index=k_index[:, rows])
        if n == 1:  # into the middle of a block and on again
            cache.rollback(3)
            back = slice(first - 2, first + 1)
            cache.append(k[:, back], v[:, back], k_index=k_index[:, back])
        o, lists = cache.attend(q[:, rows], q_index=q_index[:, rows], **settings, return_lists=True)
        near(o, want[:, rows])
        assert np.array_equal(lists.reshape(2, 2, n, 3).swapaxes(0, 1), idx[:, :, rows])
        first += n
    other = quern.NSACache(2, 80, block_size=16 if branches else 0, stride=8 if branches else None)
    other.restore(1, cache.save(0))
    o = other.attend(q[:1, 69:], q_index=q_index[:1, 69:], sequences=[1], **settings)
    near(o, want[:1, 69:])
    with pytest.raises(ValueError, match="k_index"):
        cache.append(k[:, :1], v[:, :1])
    with pytest.raises(ValueError, match="q_index"):
        cache.attend(q[:, 69:], q_index=q_index[:, 69:, :1], **settings)
    with pytest.raises(ValueError, match="index_heads"):
        plain = quern.NSACache(2, 80, block_size=16)
        plain.append(k, v)
        plain.attend(q[:, 69:], q_index=q_index[:, 69:], **chosen)


CACHES = {
    "sparse": lambda: quern.NSACache(3, 80, block_size=16),
    "ring": lambda: quern.NSACache(3, 80, block_size=16, separate_win=True, window=4, step=40),
    "dense": lambda: quern.KVCache(3, 80),
}


@pytest.mark.parametrize("kind", CACHES)
def test_rollback_takes_back_all_or_none(kind):
    _, k, v = inputs(40, 3)
    cache = CACHES[kind]()
    more = {"k_win": k, "v_win": v} if kind == "ring" else {}
    cache.append(k, v, **more)
    if kind == "ring":  # as many tokens, and less room in the ring of one of them
        cache.rollback(6, 2)
    else:
        cache.reset(2)
        cache.append(k[:1, :2], v[:1, :2], sequences=[2])
    held = [cache.length(i) for i in range(3)]
    for n in (3, 9, -1):
        with pytest.raises(ValueError, match="n is"):
            cache.rollback(n)
        assert [cache.length(i) for i in range(3)] == held
    cache.rollback(2)
    assert [cache.length(i) for i in range(3)] == [n - 2 for n in held]


@pytest.mark.parametrize("kind", CACHES)
def test_a_first_call_that_fails_says_nothing_of_the_rows(kind):
    def append(cache, k, v):
        cache.append(k, v, **({"k_win": k, "v_win": v} if kind == "ring" else {}))

    _, k, v = (t.astype(np.float16) for t in inputs(30, 3))
    cache, other = CACHES[kind](), CACHES[kind]()
    wide = np.zeros((3, 81, 5, 8), np.float32)
    append(other, wide[:, :5], wide[:, :5])
    damaged = bytearray(other.save(0))
    damaged[-1] ^= 1
    with pytest.raises(ValueError, match="counts"):
        append(cache, wide, wide)
    with pytest.raises(RuntimeError):
        cache.restore(0, bytes(damaged))
    assert cache.length() == 0
    append(cache, k, v)
    assert cache.length(2) == 30


def test_sequences_of_different_lengths():
    q, k, v = inputs()
    cache = quern.NSACache(3, 80, block_size=16)
    packed = np.concatenate((k[0, :33], k[1, :60])), np.concatenate((v[0, :33], v[1, :60]))
    cache.append(*packed, sequences=[2, 0], counts=[33, 60])
    assert [cache.length(i) for i in range(3)] == [60, 0, 33]
    rows = np.concatenate((q[0, 30:33], q[1, 59:60]))
    o = cache.attend(rows, sequences=[2, 0], counts=[3, 1], num_selected=4, window=24)
    near(o[:3], quern.nsa(q[:1, :33], k[:1, :33], v[:1, :33], **SETTINGS)[0, 30:])
    near(o[3:], quern.nsa(q[1:, :60], k[1:, :60], v[1:, :60], **SETTINGS)[0, 59:])


def test_pages():
    q, k, v = inputs()
    want = quern.nsa(q, k, v, **SETTINGS)
    cache = quern.NSACache(2, 200, block_size=16, page=64, pages=4)
    for first, last in ((0, 50), (50, 70)):
        rows = slice(first, last)
        cache.append(k[:, rows], v[:, rows])
        near(cache.attend(q[:, rows], num_selected=4, window=24), want[:, rows])
    cache.append(k[:, :58], v[:, :58])  # two pages each
    with pytest.raises(ValueError, match="lacks 1 pages: 0 are free"):
        cache.append(k[:1, :1], v[:1, :1])


def test_fork_save_restore():
    q, k, v = inputs()
    want = quern.nsa(q, k, v, **SETTINGS)
    cache, other = (quern.NSACache(3, 80, block_size=16) for _ in range(2))
    cache.append(k[:, :50], v[:, :50])
    other.append(v[:1, :3, :, :16], v[:1, :3])
    saved = cache.save(1)
    other.restore(2, saved)
    cache.fork(0, 2)
    rest = [t[:, 50:] for t in (q, k, v)]
    for held, sequence, row in ((cache, 2, 0), (other, 2, 1), (cache, 0, 0)):
        one = [t[row : row + 1] for t in rest]
        held.append(*one[1:], sequences=[sequence])
        o = held.attend(one[0], sequences=[sequence], num_selected=4, window=24)
        near(o, want[row : row + 1, 50:])
    damaged = bytearray(saved)
    damaged[-1] ^= 1
    with pytest.raises(RuntimeError):
        other.restore(0, bytes(damaged))
    assert other.length(0) == 3
    with pytest.raises(RuntimeError):
        other.restore(0, saved[:50])
    fresh = quern.NSACache(1, 60, block_size=16)
    for bad in (bytes(damaged), b"\xff" * len(saved), b""):
        with pytest.raises((RuntimeError, ValueError)):
            quern.NSACache(1, 60, block_size=16).restore(0, bad)
    fresh.restore(0, saved)
    one = [t[1:2] for t in rest]
    fresh.append(*(t[:, :10] for t in one[1:]))
    near(fresh.attend(one[0][:, :10], num_selected=4, window=24), want[1:2, 50:60])


def read_only(*arrays):
    for t in arrays:
        t.flags.writeable = False
    return arrays


def test_read_only_arrays():
    """What a cache only reads may be read-only, what it is to write may not."""
    given = inputs()
    q, k, v = read_only(*given)
    random = np.random.default_rng(1)
    gate, w_k = read_only(*(random.standard_normal(s).astype(np.float32) for s in ((4, 3, 16), (2, 16, 16))))
    cache = quern.NSACache(2, 128, block_size=16, page=64, pages=6)
    cache.append(k, v, w_k=w_k)
    o = cache.attend(q, gate=gate, num_selected=4, window=24)
    near(o, quern.nsa(q, k, v, gate=gate, w_k=w_k, **SETTINGS))
    saved = cache.save(0)
    cache.restore(1, saved)
    cache.fork(0, 1)
    dense = quern.KVCache(2, 80)
    dense.append(k, v)
    near(dense.attend(q), quern.attention(q, k, v))
    shapes = (9, 64), (4, 16), (4, 16)
    proj, b_a, b_b = read_only(*(random.standard_normal(s).astype(np.float32) for s in shapes))
    rows = quern.dsv4.State("csa", 16, ratio=4).append(proj, b_a, b_b)
    assert np.array_equal(rows, quern.dsv4.compress(proj, b_a, b_b))
    slots, x = read_only(np.arange(3, dtype=np.int32), rows[:1].repeat(3, 0))
    kept = np.zeros((4, 16), np.float32)
    quern.dsv4.store(x, slots, kept)
    assert np.array_equal(kept[:3], x)
    read_only(kept)
    with pytest.raises((ValueError, BufferError)):
        quern.dsv4.store(x, slots, kept)
    w = quern.dsv4.pack_weights(*read_only(w_k[0].copy(), w_k[1].copy()))
    assert np.array_equal(w, np.concatenate((w_k[0], w_k[1]), 1))


def window_layer():
    """A small layer of the window alone: x, table, weights."""
    random = np.random.default_rng(2)
    shapes = {
        "sinks": (2,),
        "q_a_proj.weight": (8, 16),
        "q_a_norm.weight": (8,),
        "q_b_proj.weight": (32, 8),
        "kv_proj.weight": (16, 16),
        "kv_norm.weight": (16,),
        "o_a_proj.weight": (8, 32),
        "o_b_proj.weight": (16, 8),
    }
    weights = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    x = random.standard_normal((2, 20, 16)).astype(np.float32)
    return x, quern.dsv4.rope_table(32, 8), weights


def test_a_layers_cache_takes_back_all_or_none():
    x, table, weights = window_layer()
    cache = quern.dsv4.Cache("swa", 2, 32, window=8, ring=8)
    with pytest.raises(ValueError, match="capacity|32"):
        cache.append(x.astype(np.float16).repeat(2, 1), table, weights)
    cache.append(x[1:, :2], table, weights, sequences=[1])  # of other rows than the failed call's
    cache.append(x[:1], table, weights)
    for n in (3, 9, -1):
        with pytest.raises(ValueError, match="n is"):
            cache.rollback(n)
        assert [cache.length(i) for i in range(2)] == [20, 2]
    cache.rollback(2)
    assert [cache.length(i) for i in range(2)] == [18, 0]
    out = cache.append(x[:1, 18:], table, weights)
    near(out, quern.dsv4.layer(x[:1], table, weights, kind="swa", window=8)[:, 18:], 5e-6)


def test_read_only_layer():
    x, table, weights = window_layer()
    read_only(x, table, *weights.values())
    want = quern.dsv4.layer(x, table, weights, kind="swa", window=8)
    cache = quern.dsv4.Cache("swa", 2, 32, window=8)
    near(cache.append(x, table, weights), want, 5e-6)


def test_torch_and_half_precision():
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(t).bfloat16() for t in inputs())
    want = quern.nsa(q, k, v, **SETTINGS)
    cache = quern.NSACache(2, 80, block_size=16)
    cache.append(k, v)
    o = cache.attend(q, num_selected=4, window=24)
    assert o.dtype == torch.bfloat16
    assert (o - want).float().norm() <= 4e-3 * want.float().norm()
    with pytest.raises(ValueError, match="no gradient"):
        cache.attend(q.float().requires_grad_())


def test_sentences():
    q, k, v = inputs()
    cache = quern.NSACache(2, 60, block_size=16)
    with pytest.raises(ValueError, match="empty"):
        cache.attend(q)
    with pytest.raises(ValueError, match="capacity|60"):
        cache.append(k, v)
    assert cache.length() == 0
    with pytest.raises(ValueError, match="compress"):
        quern.NSACache(1, 8, compress="given")
    cache.append(k[:, :20], v[:, :20])
    with pytest.raises(ValueError, match="rollback|8"):
        cache.rollback(9)
    with pytest.raises(ValueError, match="block_size"):
        cache.attend(q[:, :1], block_size=32)
    with pytest.raises(TypeError, match="copied"):
        copy.deepcopy(cache)


DENSE = {
    "whole": {},
    "window": {"window": 24, "scale": 0.3},
    "sink": {"sink": np.linspace(-2, 2, 4, dtype=np.float32)},
}


@pytest.mark.parametrize("case", DENSE)
@pytest.mark.parametrize("pieces", [[70], [40, 1, 1, 28], [1] * 70])
def test_dense(case, pieces):
    q, k, v = inputs()
    want, want_lse = quern.attention(q, k, v, **DENSE[case], return_lse=True)
    cache, first = quern.KVCache(2, 80), 0
    for n in pieces:
        rows = slice(first, first + n)
        cache.append(k[:, rows], v[:, rows])
        o, lse = cache.attend(q[:, rows], **DENSE[case], return_lse=True)
        near(o, want[:, rows])
        near(lse, want_lse[:, :, rows])
        first += n
    assert cache.length(1) == 70 and cache.entries(1) == 0 and cache.held_bytes > 0


def test_dense_in_pages_of_other_lengths():
    q, k, v = inputs()
    cache = quern.KVCache(3, 128, page=64, pages=4)
    packed = [np.concatenate((t[0, :33], t[1, :66])) for t in (k, v)]
    cache.append(*packed, sequences=[1, 0], counts=[33, 66])
    rows = np.concatenate((q[0, 30:33], q[1, 65:66]))
    o = cache.attend(rows, sequences=[1, 0], counts=[3, 1])
    near(o[:3], quern.attention(q[:1, :33], k[:1, :33], v[:1, :33])[0, 30:])
    near(o[3:], quern.attention(q[1:, :66], k[1:, :66], v[1:, :66])[0, 65:])
    cache.rollback(2, 0)
    again = quern.KVCache(1, 70)
    again.restore(0, cache.save(0))
    assert again.length() == 64
    again.append(k[1:, 64:66], v[1:, 64:66])
    near(again.attend(q[1:, 65:66])[0], o[3:])


def test_dense_sentences():
    q, k, v = inputs()
    cache = quern.KVCache(2, 60)
    with pytest.raises(ValueError, match="empty"):
        cache.attend(q)
    with pytest.raises(ValueError, match="capacity|60"):
        cache.append(k, v)
    cache.append(k[:, :20], v[:, :20])
    with pytest.raises(ValueError, match="queries|counts|tokens"):
        cache.attend(q[:, :30])
    with pytest.raises(ValueError, match="window"):
        cache.attend(q[:, :1], window=-1)
    torch = pytest.importorskip("torch")
    with pytest.raises(ValueError, match="no gradient"):
        cache.attend(torch.from_numpy(q[:, :1]).requires_grad_())
