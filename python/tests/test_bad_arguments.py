# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""Caches, states and what takes plain numbers: whatever comes in, they say what is wrong with it."""

import numpy as np
import pytest

import quern
from quern import dsv4

# Calls with arguments of the wrong kinds, shapes, signs and sizes.
ANY_ARGUMENTS = """
import random
import numpy as np
import quern
from quern import dsv4, moe, nvfp4

random.seed(1)
shapes = ((), (0,), (2,), (1, 3, 2, 8), (2, 3, 2, 8), (6, 2, 8), (2, 0, 2, 8), (2, 3, 16), (3, 64), (4, 16))
dtypes = (np.float32, np.float16, np.int32, np.uint8, np.float64)
rows, x = np.zeros((2, 3, 2, 8), np.float32), np.zeros((2, 3, 16), np.float32)
refused = 0


def array():
    return np.zeros(random.choice(shapes), random.choice(dtypes))


def any_of():
    return random.choice([None, array(), array(), array(), 3, "x", [1, 2], b"abc", object()])


faces = [quern.attention, quern.nsa, quern.nsa_compress, quern.nsa_select, quern.nsa_attend, quern.nsa_gate]
faces += [dsv4.compress, dsv4.index, dsv4.attention, dsv4.layer, moe.route, moe.layer]
faces += [getattr(nvfp4, name) for name in nvfp4.__all__ if name != "quantize_"]  # which takes modules
named = {"block_idx": quern.nsa_attend, "group_idx": quern.nsa_attend, "out": quern.attention}


def number():
    return random.choice([0, 1, 2, 5, 9, -1, 16, 64, 2**31, 2**62])


def batch():
    sequences = random.choice([None, [0], [0, 1], [-1], [5], [0, 0], [2**31], [], "a", 3])
    return {"sequences": sequences, "counts": random.choice([None, [3], [3, 3], [-1, 4], [2**62, 1], [1.5]])}


def call(function, *arguments, **named):
    global refused
    try:
        function(*arguments, **named)
    except (ValueError, TypeError, RuntimeError, MemoryError, NotImplementedError):
        refused += 1


for _ in range(200):
    paged = {"block_size": 4, "page": 64, "pages": 6}
    makers = (lambda: quern.NSACache(2, 16, block_size=4), lambda: quern.KVCache(2, 16))
    cache = random.choice([*makers, lambda: quern.NSACache(2, 64, **paged)])()
    if random.random() < 0.7:
        call(cache.append, rows, rows)
    call(cache.append, any_of(), any_of(), **batch())
    call(cache.attend, random.choice([rows, any_of()]), **batch())
    call(cache.rollback, number(), random.choice([None, number()]))
    call(cache.fork, number(), number())
    saved = bytearray(random.randbytes(random.randrange(300)))
    try:
        saved = bytearray(cache.save(0))
        saved[random.randrange(len(saved))] ^= random.randrange(256)
    except (ValueError, RuntimeError):
        pass
    call(cache.restore, number(), bytes(saved))
    kinds = (lambda: dsv4.Cache("swa", 2, 16, window=4), lambda: dsv4.Cache("hca", 2, 16, page=2, pages=3))
    cache = random.choice(kinds)()
    weights = {"kv_norm": random.choice([np.zeros(16, np.float32), any_of()]), "compressor_bias": x[0]}
    call(cache.open, random.choice([x, any_of()]), weights)
    call(cache.append, any_of(), any_of(), {"kv_norm": any_of(), "q_a": any_of()}, **batch())
    call(cache.pages, number())
    call(cache.restore, 0, bytes(saved))
    state = dsv4.State("csa", 16, ratio=4, ring=2)
    call(state.append, any_of(), any_of(), any_of())
    call(dsv4.append, [state, state], [1, number()], any_of(), any_of(), any_of())
    call(dsv4.store, any_of(), any_of(), any_of(), format=random.choice(["rows", "fp8", "z"]), page=number())
    call(dsv4.pack_weights, any_of(), any_of(), any_of())
    call(dsv4.pack_checkpoint, any_of(), any_of(), any_of())
    call(quern.convert_blocks, any_of(), number(), number(), number())
    call(nvfp4.unswizzle, any_of(), number(), number())
    call(nvfp4.unpack, any_of(), number(), number())
    call(nvfp4.dequantize, any_of(), any_of(), any_of(), columns=random.choice([None, number(), 1.5, "x"]))
    for face in faces:
        call(face, *(any_of() for _ in range(random.randrange(1, 5))))
    for name, face in named.items():
        call(face, *random.choice([(rows, rows, rows), (x, x, x)]), **{name: any_of()})
    call(dsv4.State, random.choice(["csa", "hca", 3]), random.choice([0, 5, -1, 2**62, 2**64, "16", 1.5]))
    call(dsv4.rope_table, number() % 1000, number() % 1000, base=any_of())
assert refused > 2000, refused
"""


def test_any_arguments_are_an_error(run_alone):
    done = run_alone(ANY_ARGUMENTS)
    assert done.returncode == 0, done.stderr[-2000:]


def test_sentences():
    """Python's own, where no call of the library comes to say it."""
    k = np.zeros((1, 3, 2, 8), np.float32)
    cache = quern.KVCache(1, 16)
    with pytest.raises(TypeError, match="v is a list"):
        cache.append(k, [1, 2])
    with pytest.raises(TypeError, match="k is None"):
        cache.append(None, k)
    with pytest.raises(ValueError, match="v has 2 dimensions, k has 4"):
        cache.append(k, k[0, 0])
    with pytest.raises(TypeError, match=r"counts is \[1.5, 1\]: a sequence of integers"):
        cache.append(k[0], k[0], counts=[1.5, 1])
    with pytest.raises(ValueError, match="sequences is .* 32 bits"):
        cache.append(k, k, sequences=[2**31])
    with pytest.raises(ValueError, match="rows have 4 dimensions: 4, or 3 with counts"):
        cache.append(k, k, counts=[3])
    assert cache.length() == 0
    cache.append(k, k, sequences=np.arange(1), counts=None)
    assert cache.length() == 3
    with pytest.raises(TypeError, match="neither proj nor x"):
        dsv4.State("csa", 16).append(None, k, k)
    with pytest.raises(ValueError, match="w_a_z has 4 dimensions"):
        dsv4.pack_weights(k[0, 0], k)
    with pytest.raises(TypeError, match="w_a_z is a NoneType"):
        dsv4.pack_weights(k[0, 0], None)
    with pytest.raises(TypeError, match="block_idx is a list"):
        quern.convert_blocks([1], 16, 16, 64)
    for states in ([], [None]):
        with pytest.raises(TypeError, match="states is"):
            dsv4.append(states, [1] * len(states), k[0, :, 0])
    with pytest.raises(ValueError, match="b_a is NULL"):
        dsv4.compress(k[0, :, 0])
    with pytest.raises(TypeError, match="integers of 64 bits"):
        quern.KVCache(1, 16.5).append(k, k)
    with pytest.raises(TypeError, match="numbers of f32"):
        dsv4.rope_table(4, 8, base="much")
