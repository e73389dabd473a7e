# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""quern on NumPy's arrays, without a framework."""

import os
import threading

import numpy as np
import pytest

import quern


def expected(q, k, v):
    k, v = (np.repeat(t, q.shape[2] // t.shape[2], 2) for t in (k, v))
    scores = np.einsum("bnhd,bshd->bhns", q, k) / np.sqrt(q.shape[3])
    scores = np.where(np.tri(q.shape[1], k.shape[1], dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bhns,bshd->bnhd", weights / weights.sum(-1, keepdims=True), v)


def inputs(n=50, dtype=np.float32):
    random = np.random.default_rng(0)
    return [random.standard_normal((2, n, heads, 16)).astype(dtype) for heads in (4, 2, 2)]


@pytest.mark.parametrize("dtype,bound", [(np.float32, 1e-6), (np.float16, 2e-3)])
def test_attention(close, dtype, bound):
    given = inputs(dtype=dtype)
    o, lse = quern.attention(*given, return_lse=True)
    assert o.dtype == dtype and lse.dtype == np.float32 and lse.shape == (2, 4, 50)
    close(o, expected(*(t.astype(np.float64) for t in given)), bound)


def test_views_are_taken_as_they_stand(close):
    given = inputs()
    wide = [np.zeros((2, 50, t.shape[2], 24), np.float32) for t in given]
    for to, t in zip(wide, given):
        to[:, ::-1, :, 3:19] = t
    views = [t[:, ::-1, :, 3:19] for t in wide]
    assert np.array_equal(quern.attention(*views), quern.attention(*given))


def test_arrays_without_elements():
    """NumPy gives them strides of 0."""
    for batch, n in ((0, 50), (2, 0)):
        q, k, v = (np.zeros((batch, n, heads, 16), np.float32) for heads in (4, 2, 2))
        assert quern.attention(q, k, v).shape == q.shape
        assert quern.nsa(q, k, v, block_size=8, num_selected=4).shape == q.shape
    x, weights = np.zeros((0, 64), np.float32), np.ones((2, 64, 32), np.float32)
    codes, scales, one = quern.nvfp4.quantize(x)
    assert codes.shape == (0, 32) and quern.nvfp4.dequantize(codes, scales, one).shape == x.shape
    made = quern.nvfp4.quantize(weights, weight=True)
    assert quern.nvfp4.grouped_mm(x, *made[:2], np.zeros(2, np.int32)).shape == (0, 32)
    swizzled, starts = quern.nvfp4.swizzle(scales, tokens_per_expert=np.zeros(2, np.int32))
    assert swizzled.shape == (0,) and not starts.any()


def test_integers_as_numpy_has_them():
    random = np.random.default_rng(1)
    q, k, v = (random.standard_normal((20, heads, 16)).astype(np.float32) for heads in (4, 2, 2))
    ends = np.array([0, 7, 20])
    assert ends.dtype == np.int64
    narrow = quern.attention(q, k, v, cu_seqlens_q=ends.astype(np.int32))
    assert np.array_equal(quern.attention(q, k, v, cu_seqlens_q=ends), narrow)
    ends[1] += 2**32
    for out in (None, np.empty_like(q)):
        with pytest.raises(ValueError, match=r"cu_seqlens_q\[1\] is 4294967303: integers of 32 bits are"):
            quern.attention(q, k, v, cu_seqlens_q=ends, out=out)
    given = np.random.default_rng(2).standard_normal((1, 16, 2, 16)).astype(np.float32)
    lists = np.full((1, 2, 16, 2), -1)
    lists[0, 1, 3, 0] = -(2**40)
    with pytest.raises(ValueError, match=r"block_idx\[0, 1, 3, 0\] is -1099511627776: integers of 32 bits"):
        quern.nsa(given, given, given, block_size=8, num_selected=2, block_idx=lists)
    logits, ids, table = np.zeros((2, 4), np.float32), np.array([0, 1]), np.array([[1, 0], [2, 3]])
    experts = quern.moe.route(logits, input_ids=ids, tid2eid=table, top_k=2)[0]
    assert np.array_equal(experts, table)
    with pytest.raises(ValueError, match=r"tid2eid\[1, 0\] is 4294967298"):
        quern.moe.route(logits, input_ids=ids, tid2eid=table + [[0, 0], [2**32, 0]], top_k=2)


def test_threads_at_once():
    given, results = inputs(300), [None] * 6
    want = quern.attention(*given)

    def work(i):
        results[i] = quern.attention(*given)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(np.array_equal(one, want) for one in results)


def test_fork():
    given = inputs()
    want = quern.attention(*given)
    child = os.fork()
    if child == 0:
        os._exit(0 if np.array_equal(quern.attention(*given), want) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_sentences():
    q, k, v = inputs()
    with pytest.raises(TypeError, match="k is a list"):
        quern.attention(q, k.tolist(), v)
    with pytest.raises(ValueError, match="last dimension|contiguous"):
        quern.attention(np.asfortranarray(q), k, v)
    with pytest.raises(ValueError, match="dtype|f64|float64"):
        quern.attention(q.astype(np.float64), k, v)
