# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""quern.attention and quern.nsa on a GPU: the CPU's numbers, gradients, streams, CUDA graphs,
torch.compile."""

import subprocess
import sys
import threading

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

import quern  # noqa: E402
import quern.nn  # noqa: E402
from quern import _operations as ops  # noqa: E402
from quern import _torch  # noqa: E402

try:
    quern.attention(*(torch.zeros(1, 1, 1, 64, device="cuda") for _ in range(3)))
except NotImplementedError as error:
    pytest.skip(f"the package has no GPU backend: {error}", allow_module_level=True)

# Relative L2 errors of outputs and gradients, against float64 or the CPU's f32.
BOUNDS = {torch.bfloat16: (4e-3, 1e-2), torch.float16: (1e-3, 2.5e-3)}
SPARSE = {"block_size": 64, "num_selected": 4, "window": 128}
TILE = {"preset": "tile256", **SPARSE}


def inputs(dtype=torch.bfloat16, n=700, heads=(4, 2, 2), lead=(2,)):
    torch.manual_seed(0)
    made = [torch.randn(*lead, n, h, 64).to(dtype).cuda().requires_grad_() for h in heads]
    gate = torch.randn(heads[0], 3, 64).to(dtype).cuda().requires_grad_()
    return [*made, gate]


def dense(q, k, v, gate):
    return quern.attention(q, k, v, window=200)


def sparse(q, k, v, gate):
    return quern.nsa(q, k, v, gate=gate, **SPARSE)


def tiled(q, k, v, gate):
    return quern.nsa(q, k, v, gate=gate, **TILE)


LAYERS = {"dense": dense, "sparse": sparse, "tiled": tiled}


def used(name, given):
    return given[:3] if name == "dense" else given


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("name", ["dense", "tiled"])
def test_against_the_cpu(near, name, dtype):
    given = inputs(dtype)
    wide = [t.detach().cpu().float().requires_grad_() for t in given]
    got, want = LAYERS[name](*given), LAYERS[name](*wide)
    assert got.dtype == dtype and got.is_cuda
    near(got.cpu(), want, 2 * BOUNDS[dtype][0])
    d_o = torch.randn_like(want).to(dtype)
    grads = torch.autograd.grad(want, used(name, wide), d_o.float())
    for a, b in zip(torch.autograd.grad(got, used(name, given), d_o.cuda()), grads):
        near(a.cpu(), b, 2 * BOUNDS[dtype][1])


def test_frozen_selection_per_token(near):
    """With the lists of the CPU handed in, so that rounding chooses nothing else."""
    *given, gate = inputs()
    wide = [t.detach().cpu().float().requires_grad_() for t in (*given, gate)]
    k_cmp = quern.nsa_compress(*wide[1:3], block_size=64)[0]
    idx = quern.nsa_select(wide[0], k_cmp, block_size=64, num_selected=4)[0]
    want = quern.nsa(*wide[:3], gate=wide[3], **SPARSE, block_idx=idx)
    got = quern.nsa(*given, gate=gate, **SPARSE, block_idx=idx.cuda())
    near(got.cpu(), want, 8e-3)
    d_o = torch.randn_like(want).bfloat16()
    grads = torch.autograd.grad(want, wide, d_o.float())
    for a, b in zip(torch.autograd.grad(got, [*given, gate], d_o.cuda()), grads):
        near(a.cpu(), b, 2e-2)


@pytest.mark.parametrize("name", LAYERS)
def test_bits_repeat(name):
    given = inputs()
    runs = [torch.autograd.grad(LAYERS[name](*given).sum(), used(name, given)) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs))


def test_varlen():
    cu = torch.tensor([0, 300, 300, 700], dtype=torch.int32, device="cuda")
    q, k, v, gate = inputs(lead=())
    o = quern.nsa(q, k, v, gate=gate, **TILE, cu_seqlens=cu)
    alone = quern.nsa(*(t[None, 300:] for t in (q, k, v)), gate=gate, **TILE)[0]
    assert torch.allclose(o[300:].float(), alone.float(), atol=2e-2, rtol=2e-2)
    dense_o = quern.attention(q, k, v, cu_seqlens_q=cu)
    alone = quern.attention(*(t[None, 300:] for t in (q, k, v)))[0]
    assert torch.allclose(dense_o[300:].float(), alone.float(), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("name", LAYERS)
def test_graphed_training(name):
    """make_graphed_callables captures forward and backward; replays give the same bits."""
    given = inputs()
    want = torch.autograd.grad(LAYERS[name](*given).sum(), used(name, given))

    class Layer(torch.nn.Module):
        def forward(self, *tensors):
            return LAYERS[name](*tensors)

    sample = tuple(t.detach().clone().requires_grad_() for t in given)
    graphed = torch.cuda.make_graphed_callables(Layer(), sample, allow_unused_input=True)
    for _ in range(2):
        fresh = [t.detach().clone().requires_grad_() for t in given]
        o = graphed(*fresh)
        assert torch.equal(o, LAYERS[name](*given))
        o.sum().backward()
        for a, b in zip(used(name, fresh), want):
            assert torch.equal(a.grad, b)


def test_graph_of_a_forward():
    q, k, v, gate = (t.detach() for t in inputs())
    o = torch.empty_like(q)
    quern.attention(q, k, v, out=o)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        quern.attention(q, k, v, out=o)
    q.copy_(torch.randn_like(q))
    graph.replay()
    assert torch.equal(o, quern.attention(q, k, v))


def test_a_stream_of_its_own():
    given = [t.detach() for t in inputs(n=4096)]
    want = sparse(*given)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        late = [t + 0 for t in given]
        got = sparse(*late)
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(got, want)


def alone(function):
    """What a thread that has made no call gets, on a stream of its own."""
    results = []

    def work():
        with torch.cuda.stream(torch.cuda.Stream()):
            results.append(function())
            torch.cuda.current_stream().synchronize()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return results[0]


@pytest.mark.parametrize("name", LAYERS)
def test_repeated_calls(name):
    """Plans of repeated calls, at other addresses and on two streams."""
    given = [t.detach() for t in inputs()]
    streams = torch.cuda.current_stream(), torch.cuda.Stream()
    held = []
    for i in range(8):
        fresh = [t + i / 8 for t in given]
        torch.cuda.synchronize()
        with torch.cuda.stream(streams[i // 2 % 2]):
            got = LAYERS[name](*fresh)
        torch.cuda.synchronize()
        assert torch.equal(got, alone(lambda: LAYERS[name](*fresh)))
        held.append((fresh, got))


def test_threads_at_once():
    given = [t.detach() for t in inputs()]
    want = [torch.stack([sparse(*given), tiled(*given)]) for _ in range(2)][1]
    torch.cuda.synchronize()
    same = []

    def work():
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                got = torch.stack([sparse(*given), tiled(*given)])
                torch.cuda.current_stream().synchronize()
                same.append(torch.equal(got, want))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(same) == 60 and all(same)


ENDS = """
import torch, quern
made = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
given = [torch.randn(1, 300, 2, 64, **made) for _ in range(3)]
for _ in range(4):
    quern.nsa(*given, num_selected=4).sum().backward()
torch.cuda.synchronize()
"""


def test_a_program_ends():
    """The threads of autograd, which have plans, end after Python."""
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


def test_cupy():
    """On CuPy's current stream, in its memory."""
    cupy = pytest.importorskip("cupy")
    given = [t.detach().half() for t in inputs()]
    for stream in (cupy.cuda.Stream.null, cupy.cuda.Stream(non_blocking=True)):
        with stream:
            plain = [cupy.asarray(t) for t in given]
            for name in ("dense", "tiled", "tiled"):
                got = LAYERS[name](*plain)
                assert isinstance(got, cupy.ndarray) and got.dtype == cupy.float16
                stream.synchronize()
                assert torch.equal(torch.as_tensor(got, device="cuda"), LAYERS[name](*given))


def test_opcheck():
    q, k, v, gate = inputs(n=130)
    tensors = {"q": q, "k": k, "v": v, "w_gate": gate}
    operator = _torch.OPERATORS["nsa"]
    settings = ops.lines(tuple({**TILE, "gate": "weights"}.items()))
    names = "o lse_cmp lse_slc lse_win gates k_cmp v_cmp block_idx"
    arguments = [tensors.get(field) for field in operator.inputs]
    utils = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(operator.call, (*arguments, settings, names), test_utils=utils)


def test_compile(near):
    given = inputs()
    compiled = torch.compile(lambda *t: tiled(*t).sin(), fullgraph=True, backend="aot_eager")
    got, want = compiled(*given), tiled(*given).sin()
    near(got, want, 1e-6)
    for a, b in zip(torch.autograd.grad(got.sum(), given), torch.autograd.grad(want.sum(), given)):
        near(a, b, 1e-6)


def test_autocast():
    given = [t.detach().float().requires_grad_() for t in inputs()]
    with torch.autocast("cuda", torch.bfloat16):
        o = tiled(*given)
    assert o.dtype == torch.bfloat16
    o.sum().backward()
    assert all(t.grad.dtype == torch.float32 and t.grad.isfinite().all() for t in given)


def test_mixed_devices_are_an_error():
    q, k, v, _ = (t.detach() for t in inputs())
    with pytest.raises((ValueError, NotImplementedError), match="device|cuda|cpu"):
        quern.attention(q, k.cpu(), v, out=torch.empty_like(q))
    with pytest.raises((ValueError, NotImplementedError, RuntimeError)):
        quern.attention(q.cpu(), k, v)


def test_batches_without_elements():
    for batch, n in ((0, 300), (2, 0)):
        for name, layer in LAYERS.items():
            given = inputs(n=n, lead=(batch,))
            o = layer(*given)
            assert o.shape == given[0].shape
            o.sum().backward()
            assert all(t.grad.shape == t.shape and not t.grad.any() for t in used(name, given))


def test_varlen_layer(near):
    """Positions are those of sequences, where these are known to the GPU alone."""
    layer = quern.nn.NSAttention(64, 2, head_dim=64, **SPARSE, device="cuda", dtype=torch.bfloat16)
    layer.rotary = lambda x, positions: (
        x * torch.linspace(0.5, 2, 500, device="cuda")[positions, None, None].to(x)
    )
    x = torch.randn(700, 64, device="cuda", dtype=torch.bfloat16)
    cu = torch.tensor([0, 300, 300, 700], dtype=torch.int32, device="cuda")
    want = torch.cat((layer(x[None, :300]), layer(x[None, 300:])), 1)[0]
    near(layer(x, cu), want, 1e-2)


def test_what_the_gpu_lacks_is_a_sentence():
    with pytest.raises(NotImplementedError, match="cuda"):
        quern.dsv4.index(
            *(torch.zeros(shape, device="cuda") for shape in ((1, 8, 16, 32), (1, 2, 32), (1, 8, 16)))
        )
    k = torch.zeros(1, 3, 2, 8, device="cuda")
    for call in (
        lambda: quern.KVCache(1, 8).append(k, k),
        lambda: quern.NSACache(1, 8, block_size=4).append(k, k),
        lambda: quern.dsv4.State("csa", 16, ratio=4, like=k),
        lambda: quern.dsv4.State("csa", 2, ratio=2).append(k[0, :, 0], k[0, :2, 0, :2], k[0, :2, 0, :2]),
        lambda: quern.dsv4.pack_weights(k[0, :, 0], k[0, :, 0]),
        lambda: quern.dsv4.rope_table(8, 4, like=k),
    ):
        with pytest.raises((NotImplementedError, ValueError), match="cpu|cuda|device"):
            call()
