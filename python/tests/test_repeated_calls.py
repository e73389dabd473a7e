# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""A call that repeats runs a plan of its thread: its results and its errors stay those of a first call."""

import os
import threading

import numpy as np
import pytest

import quern
from quern import _operations as ops

SPARSE = {"block_size": 8, "num_selected": 4, "window": 9}


def inputs(seed, n=40, offset=0):
    """Arrays whose addresses are `offset` floats past an allocation's."""
    random = np.random.default_rng(seed)
    made = []
    for heads in (4, 2, 2):
        room = np.empty(n * heads * 16 + offset, np.float32)
        made.append(room[offset:].reshape(1, n, heads, 16))
        made[-1][...] = random.standard_normal(made[-1].shape)
    return made


def alone(function):
    """What a thread that has made no call gets."""
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


@pytest.mark.parametrize("attend", [quern.attention, lambda *t: quern.nsa(*t, **SPARSE)])
def test_other_data_and_addresses(attend):
    for seed in range(8):
        given = inputs(seed, offset=seed % 4)
        assert np.array_equal(attend(*given), alone(lambda: attend(*given)))


def test_other_strides_dtypes_and_parameters():
    for round in range(6):
        q, k, v = inputs(round)
        turned = [np.ascontiguousarray(t.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3) for t in (q, k, v)]
        want = quern.attention(q, k, v)
        assert np.array_equal(quern.attention(*turned), want)
        half = quern.attention(*(t.astype(np.float16) for t in (q, k, v)))
        assert half.dtype == np.float16 and np.abs(half - want).max() < 1e-2
        near = quern.attention(q, k, v, window=1)
        assert np.allclose(near, np.repeat(v, 2, 2), atol=1e-6)
        o, lse = quern.attention(q, k, v, return_lse=True)
        assert np.array_equal(o, want) and lse.shape == (1, 4, 40)


def test_many_lengths():
    """More than a thread keeps plans of."""
    given = {n: inputs(n, n) for n in range(1, 160)}
    first = {n: quern.attention(*t) for n, t in given.items()}
    for _ in range(2):
        for n, t in given.items():
            assert np.array_equal(quern.attention(*t), first[n])


def test_results_that_share_memory_remain_an_error():
    q, k, v = inputs(0)
    for _ in range(4):
        quern.attention(q, k, v, out=np.empty_like(q))
    wide = np.empty((1, 80, 4, 16), np.float32)
    wide[:, :40] = q
    for o in (wide[:, :40], wide[:, 20:60], wide[:, 39:79], wide[:, 39::-1]):
        for _ in range(3):
            with pytest.raises(ValueError, match="memory"):
                quern.attention(wide[:, :40], k, v, out=o)
    assert np.array_equal(quern.attention(wide[:, :40], k, v, out=wide[:, 40:]), quern.attention(q, k, v))


def test_lengths_that_are_wrong_remain_an_error():
    q, k, v = (t[0] for t in inputs(0))
    good, bad = (np.array([0, n, 40], np.int32) for n in (20, 50))
    for _ in range(4):
        quern.attention(q, k, v, cu_seqlens_q=good)
        with pytest.raises(ValueError, match="cu_seqlens"):
            quern.attention(q, k, v, cu_seqlens_q=bad)


def test_absent_tensors():
    q, k, v = inputs(0)
    params = ops.params("attention")
    for _ in range(4):
        ops.call("attention", params, {"q": q, "k": k, "v": v}, ("o",))
        with pytest.raises(ValueError, match=r"\bv\b"):
            ops.call("attention", params, {"q": q, "k": k, "o": np.empty_like(q)}, ("o",))


def test_a_child_process():
    given = inputs(3)
    for _ in range(3):
        want = quern.nsa(*given, **SPARSE)
    child = os.fork()
    if child == 0:
        os._exit(0 if np.array_equal(quern.nsa(*given, **SPARSE), want) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_threads():
    given = [inputs(seed) for seed in range(3)]
    want = [quern.nsa(*t, **SPARSE) for t in given]
    same = []

    def work():
        same.extend(np.array_equal(quern.nsa(*given[i % 3], **SPARSE), want[i % 3]) for i in range(30))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(same) == 120 and all(same)
