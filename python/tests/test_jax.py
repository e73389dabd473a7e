# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""quern on JAX's arrays, on the CPU: NumPy's bits."""

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import quern  # noqa: E402
from quern import dsv4, nvfp4  # noqa: E402

SPARSE = {"block_size": 8, "num_selected": 4, "window": 9}


def inputs(dtype="float32"):
    random = np.random.default_rng(0)
    plain = [random.standard_normal((2, 40, heads, 16)).astype(np.float32) for heads in (4, 2, 2)]
    return plain, [jax.numpy.asarray(t, dtype) for t in plain]


def same(got, want):
    assert isinstance(got, jax.Array) and str(got.dtype) == str(want.dtype)
    assert np.array_equal(np.asarray(got), want)


def test_attention():
    plain, given = inputs()
    for got, want in zip(*(quern.attention(*t, window=7, return_lse=True) for t in (given, plain))):
        same(got, want)
    for got, t in zip(given, plain):
        assert np.array_equal(np.asarray(got), t)
    assert not jax.numpy.zeros((2, 40, 4, 16)).any()


def test_bfloat16():
    plain, given = inputs("bfloat16")
    o = quern.attention(*given)
    assert o.dtype == jax.numpy.bfloat16
    error = np.asarray(o, np.float32) - quern.attention(*plain)
    assert np.linalg.norm(error) < 1e-2 * np.linalg.norm(np.asarray(o, np.float32))


def test_arrays_that_jax_has_not_computed_yet():
    plain, given = inputs()
    slow = jax.jit(lambda t: jax.lax.fori_loop(0, 300, lambda i, x: x * (1 + 1e-9 * (i % 2)), t) * 2)
    for _ in range(5):
        same(quern.nsa(*map(slow, given), **SPARSE), quern.nsa(*(np.array(slow(t)) for t in given), **SPARSE))


def test_other_operations():
    plain, given = inputs()
    for got, want in zip(nvfp4.quantize(given[0]), nvfp4.quantize(plain[0])):
        same(got, want)
    for got, want in zip(*(quern.nsa_compress(*t[1:], block_size=8) for t in (given, plain))):
        same(got, want)
    rows = np.random.default_rng(1).standard_normal((20, 64)).astype(np.float32)
    bias = rows[:4, :16].copy()
    same(dsv4.compress(*map(jax.numpy.asarray, (rows, bias, bias))), dsv4.compress(rows, bias, bias))
    cache, other = quern.KVCache(2, 40), quern.KVCache(2, 40)
    cache.append(*given[1:])
    other.append(*plain[1:])
    same(cache.attend(given[0]), other.attend(plain[0]))


def test_sentences():
    plain, given = inputs()
    with pytest.raises(TypeError, match="one framework"):
        quern.attention(given[0], *plain[1:])
    with pytest.raises(ValueError, match="k.shape"):
        quern.attention(given[0], given[1][..., :8], given[2])
    with pytest.raises(TypeError, match="__dlpack__"):
        jax.jit(quern.attention)(*given)
