# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""quern.NSACache: every row is the one of quern.nsa over the whole sequence."""

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
    cache = quern.NSACache(2, 128, block_size=16, page=64, pages=6)
    table = None
    for first, last in ((0, 50), (50, 70)):
        rows = slice(first, last)
        if table is None:
            table = np.array([[5, 0, 1], [2, 3, 4]], np.int32)  # tokens, tokens, entries
        cache.append(k[:, rows], v[:, rows], table=table)
        near(cache.attend(q[:, rows], table=table, num_selected=4, window=24), want[:, rows])
    assert cache.table_columns()["columns"] == 3 and cache.table_columns(70)["tokens"] == 2


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
