# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""Whatever comes in, an error or a right result goes out: frameworks, devices, layouts, freed memory,
threads, forks."""

import ctypes
import threading

import numpy as np
import pytest

import quern
from quern import _operations as ops

# Every operation with some of its tensors, of some shapes and dtypes, whatever they are for.
ANY_TENSORS = """
import random, sys
import numpy as np
from quern import _operations as ops

random.seed(int(sys.argv[1]))
dtypes = (np.float32, np.float32, np.float16, np.int32, np.uint8, np.int64)
shapes = ((), (0,), (1,), (16,), (2, 16), (16, 32), (2, 3, 16), (1, 4, 2, 16), (2, 0, 2, 16), (1,) * 6)
refused = run = 0
for name, operation in ops.OPERATIONS.items():
    for backward in (False, True):
        for share in (0.1, 0.5, 0.9, 1.0):
            for _ in range(6):
                tensors = {
                    field: np.zeros(random.choice(shapes), random.choice(dtypes))
                    for field in operation.fields
                    if random.random() < share
                }
                named = [field for field, t in operation.fields.items() if t.results[backward]]
                try:
                    ops.call(name, ops.params(name), tensors, named[:2], backward=backward)
                    run += 1
                except (ValueError, TypeError, NotImplementedError):
                    refused += 1
assert refused > 100 * (run + 1), (refused, run)
"""


@pytest.mark.parametrize("seed", range(2))
def test_any_tensors_are_an_error(run_alone, seed):
    done = run_alone(ANY_TENSORS, str(seed))
    assert done.returncode == 0, done.stderr[-2000:]


def attention_inputs(n=40):
    random = np.random.default_rng(0)
    return [random.standard_normal((1, n, heads, 16)).astype(np.float32) for heads in (4, 2, 2)]


class DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("dtype", ctypes.c_uint8 * 4),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


class OnDevice:
    """A tensor of f32, or of another kind and bits, that says that it is on another device."""

    def __init__(self, device, *shape, dtype=(2, 32)):
        self.device, self.extents = device, (ctypes.c_int64 * len(shape))(*shape)
        self.memory, self.dtype = ctypes.create_string_buffer(4 * int(np.prod(shape))), (*dtype, 1, 0)

    def __dlpack_device__(self):
        return self.device, 0

    def __dlpack__(self, **_):
        self.tensor = DLTensor(
            ctypes.addressof(self.memory), (self.device, 0), len(self.extents), self.dtype, self.extents
        )
        make = ctypes.pythonapi.PyCapsule_New
        make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return make(ctypes.addressof(self.tensor), b"dltensor", None)


def test_devices_without_a_backend():
    """A GPU that is not there, or has no package for it; and a device that the library does not know."""
    shape = (1, 4, 1, 16)
    params = ops.params("nvfp4-interleave")
    with pytest.raises(NotImplementedError, match="cuda"):
        ops.call("nvfp4-interleave", params, {"x": OnDevice(2, 4, 16), "out": OnDevice(2, 4, 16)}, ("out",))
    rocm = {name: OnDevice(10, *shape) for name in ("q", "k", "v", "o")}
    with pytest.raises(ValueError, match="device"):
        ops.call("attention", ops.params("attention"), rocm, ("o",))
    mixed = {"q": OnDevice(2, *shape), **{name: OnDevice(1, *shape) for name in ("k", "v", "o")}}
    with pytest.raises(ValueError, match="device|cpu|cuda"):
        ops.call("attention", ops.params("attention"), mixed, ("o",))


def test_states_are_in_the_memory_of_the_cpu():
    with pytest.raises(NotImplementedError, match="cpu"):
        quern.dsv4.State("csa", 16, ratio=4, like=OnDevice(2, 4, 16))


def test_one_missing_tensor_is_an_error():
    """Dropping any needed tensor of an accepted call names it, and the results stay as they were."""
    q, k, v = attention_inputs()
    whole = {"q": q, "k": k, "v": v}
    for missing in whole:
        o = np.full(q.shape, 7, np.float32)
        given = {**{name: t for name, t in whole.items() if name != missing}, "o": o}
        with pytest.raises(ValueError, match=rf"\b{missing}\b"):
            ops.call("attention", ops.params("attention"), given, ("o",))
        assert (o == 7).all()


def test_objects_that_are_no_tensors():
    q, k, v = attention_inputs()
    for bad in (3, "k", [1.0], object(), memoryview(b"12345678")):
        with pytest.raises(TypeError, match="k is"):
            quern.attention(q, bad, v)
    with pytest.raises(TypeError, match="without a mask"):
        quern.attention(q, np.ma.masked_array(k, mask=k > 0), v)
    with pytest.raises(TypeError):
        quern.attention(None, None, None)


def test_results_that_overlap_inputs():
    q, k, v = attention_inputs()
    with pytest.raises(ValueError, match="memory"):
        quern.attention(q, k, v, out=q)


def test_read_only_and_byte_swapped_arrays():
    q, k, v = attention_inputs()
    want = quern.attention(q, k, v)
    swapped = k.astype(k.dtype.newbyteorder())
    with pytest.raises((TypeError, ValueError, BufferError)):
        quern.attention(q, swapped, v)
    for t in (q, k, v):
        t.flags.writeable = False
    assert np.array_equal(quern.attention(q, k, v), want)
    assert np.array_equal(quern.attention(q[:, ::-1], k, v), quern.attention(q[:, ::-1].copy(), k, v))
    o = np.full_like(q, 7)
    o.flags.writeable = False
    with pytest.raises((TypeError, ValueError, BufferError)):
        quern.attention(q, k, v, out=o)
    assert (o == 7).all()


def test_numbers_of_numpy_as_settings():
    given = attention_inputs()
    scale = 1 / np.sqrt(np.float64(17))
    made = quern.attention(*given, scale=scale, window=np.int64(8), causal=np.True_)
    assert np.array_equal(made, quern.attention(*given, scale=float(scale), window=8))
    made = quern.attention(*given, scale=np.float32(0.375), causal=np.False_)
    assert np.array_equal(made, quern.attention(*given, scale=0.375, causal=False))


def test_a_refused_setting_leaves_the_next_alone():
    """Settings that are equal to Python are not to the library."""
    given = attention_inputs()
    for bad, good in ((23.0, 23), (True, 1)):
        with pytest.raises(ValueError, match="window"):
            quern.attention(*given, window=bad)
        assert quern.attention(*given, window=good).shape == given[0].shape


def test_settings_that_do_not_exist():
    with pytest.raises(ValueError, match="no parameter"):
        ops.params("attention", windows=3)
    with pytest.raises(ValueError, match="window"):
        ops.params("attention", window="wide")
    with pytest.raises(ValueError, match="one line"):
        ops.params("attention", window="3\nscale=2")


class TestTorch:
    @pytest.fixture(autouse=True)
    def _torch(self):
        self.torch = pytest.importorskip("torch")

    def inputs(self):
        return [self.torch.from_numpy(t) for t in attention_inputs()]

    def test_mixed_devices(self):
        q, k, v = self.inputs()
        with pytest.raises((TypeError, ValueError, NotImplementedError, RuntimeError)):
            quern.attention(q.to("meta"), k.to("meta"), v)
        with pytest.raises((ValueError, RuntimeError), match="meta"):
            quern.attention(q, k.to("meta"), v, out=self.torch.empty_like(q))

    def test_integers_have_no_gradient(self):
        with pytest.raises(RuntimeError, match="floating"):
            self.torch.zeros(3, dtype=self.torch.int32).requires_grad_()
        q, k, v = self.inputs()
        q.requires_grad_()
        idx = quern.nsa_select(q, quern.nsa_compress(k, v, block_size=8)[0], block_size=8, num_selected=4)[0]
        assert not idx.requires_grad
        o = quern.nsa(q, k, v, block_size=8, num_selected=4, block_idx=idx)
        o.sum().backward()
        assert q.grad.isfinite().all()

    def test_freed_memory(self):
        q, k, v = self.inputs()
        k = k.clone()
        k.untyped_storage().resize_(0)
        with pytest.raises((ValueError, RuntimeError)):
            quern.attention(q, k, v)

    def test_batches_without_elements(self):
        """Gradients of sums have strides of 0."""
        torch = self.torch
        for batch, n in ((0, 40), (2, 0)):
            given = [torch.randn(batch, n, heads, 16, requires_grad=True) for heads in (4, 2, 2)]
            gate = torch.randn(4, 3, 16, requires_grad=True)
            for o in (
                quern.attention(*given),
                quern.nsa(*given, gate=gate, block_size=8, num_selected=4),
                quern.nsa_gate(given[0], *(given[0] * i for i in range(3)), gate=gate)[0],
            ):
                assert o.shape == given[0].shape
                o.sum().backward()
            assert not gate.grad.any()
        hidden, weight = torch.randn(0, 64, requires_grad=True), torch.randn(4, 64, requires_grad=True)
        codes = {"gate_up": torch.randn(4, 64, 64), "down": torch.randn(4, 64, 32)}
        quern.moe.layer(hidden, weight, **codes, top_k=2).sum().backward()
        assert hidden.grad.shape == (0, 64) and not weight.grad.any()
        b = quern.nvfp4.quantize(torch.randn(2, 64, 32), weight=True)
        offsets = torch.zeros(2, dtype=torch.int32)
        quern.nvfp4.grouped_mm(hidden, *b[:2], offsets).sum().backward()
        proj, bias = torch.randn(0, 64, requires_grad=True), torch.randn(4, 16, requires_grad=True)
        quern.dsv4.compress(proj, bias, bias).sum().backward()
        assert not bias.grad.any()
        from quern.nn import HeavilyCompressedAttention

        sizes = {"q_lora": 24, "groups": 2, "o_lora": 16, "ratio": 8, "window": 8}
        layer, table = HeavilyCompressedAttention(64, 4, 32, **sizes), quern.dsv4.rope_table(64, 8, like=proj)
        for batch, n in ((0, 40), (2, 0)):
            layer(torch.randn(batch, n, 64, requires_grad=True), table).sum().backward()
            assert not any(t.grad.any() for t in layer.parameters())

    def test_sparse_and_conjugate_tensors(self):
        q, k, v = self.inputs()
        with pytest.raises((TypeError, ValueError, RuntimeError, BufferError, NotImplementedError)):
            quern.attention(q, k.to_sparse(), v)
        with pytest.raises((TypeError, ValueError, RuntimeError, BufferError)):
            quern.attention(q, k.to(self.torch.complex64).conj(), v)

    def test_threads_that_train(self):
        torch, results = self.torch, [None] * 4

        def work(i):
            given = [t.clone().requires_grad_() for t in self.inputs()]
            quern.nsa(*given, block_size=8, num_selected=4, window=9).sum().backward()
            results[i] = torch.cat([t.grad.flatten() for t in given])

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(torch.equal(one, results[0]) for one in results)

    def test_other_threads_run_meanwhile(self):
        """The interpreter's lock is free while a call computes."""
        q, k, v = (self.torch.randn(1, 3000, 8, 64) for _ in range(3))
        ticks, done = [0], threading.Event()

        def tick():
            while not done.is_set():
                ticks[0] += 1

        thread = threading.Thread(target=tick)
        thread.start()
        before = ticks[0]
        quern.attention(q, k, v)
        during = ticks[0] - before
        done.set()
        thread.join()
        assert during > 100
