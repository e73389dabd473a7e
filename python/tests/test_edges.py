# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""Tensors without data, autocast, forward mode, gradients that are not computed, and what is no plain tensor
or number: right, or a sentence that names the argument and what to do."""

import inspect
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import quern  # noqa: E402
from quern import dsv4, moe, nn, nvfp4, reference  # noqa: E402

torch.manual_seed(2)
Q, K, V = (torch.randn(2, 40, heads, 32) for heads in (4, 2, 2))
SPARSE = {"block_size": 8, "num_selected": 4, "window": 8}
SHAPE = {"heads": 4, "head_dim": 32, "q_lora": 24, "groups": 2, "o_lora": 16, "window": 8}


def csa():
    return nn.CompressedSparseAttention(64, index_heads=16, index_dim=16, top_k=4, **SHAPE)


def table():
    return dsv4.rope_table(64, 8, like=torch.empty(0))


# ---- the device meta ----

ON_META = {
    "attention": lambda: quern.attention(Q.to("meta"), K.to("meta"), V.to("meta")),
    "attention out": lambda: quern.attention(*(t.to("meta") for t in (Q, K, V)), out=Q.to("meta")),
    "nsa": lambda: nn.NSAttention(64, 4, **SPARSE)(torch.randn(2, 40, 64)),
    "CSA": lambda: csa()(torch.randn(2, 40, 64), table()),
    "experts": lambda: (
        nn.NVFP4Experts(64, inner=32, experts=8, top_k=2)
        .quantize_(torch.randn(8, 64, 64), torch.randn(8, 64, 32))
        .repack()(torch.randn(3, 64))
    ),
    "rope_table": table,
    "pack_weights": lambda: dsv4.pack_weights(torch.randn(16, 8), torch.randn(16, 8)),
    "pack_checkpoint": lambda: dsv4.pack_checkpoint(*(torch.randn(16, 8),) * 2, torch.randn(4, 16))[0],
    "from_mxfp4": lambda: nvfp4.from_mxfp4(torch.zeros(4, 32).byte(), torch.full((4, 2), 127).byte())[0],
    "swizzle": lambda: nvfp4.swizzle(
        torch.zeros(100, 4, dtype=torch.uint8), tokens_per_expert=torch.zeros(3, dtype=torch.int32)
    )[0],
}


@pytest.mark.parametrize("name", ON_META)
def test_meta(name):
    want = ON_META[name]()
    with torch.device("meta"):
        made = ON_META[name]()
    assert made.is_meta and made.dtype == want.dtype and made.dim() == want.dim()
    assert name == "swizzle" or made.shape == want.shape  # whose bytes follow from counts


def test_meta_trains():
    leaves = [t.to("meta").requires_grad_() for t in (Q, K, V)]
    quern.nsa(*leaves, **SPARSE).sum().backward()
    assert all(t.grad.shape == t.shape and t.grad.is_meta for t in leaves)


def test_meta_where_data_is_needed():
    k, v = (t.to("meta") for t in (K, V))
    with pytest.raises(TypeError, match="k is on the device meta: tensors with data are accepted"):
        quern.KVCache(2, 64).append(k, v)
    with pytest.raises(TypeError, match="x is on the device meta"):
        dsv4.store(torch.randn(4, 8, device="meta"), torch.zeros(4, dtype=torch.int32), torch.zeros(8, 8))
    with pytest.raises(
        ValueError, match="k is on the device meta, v is not|q is on the device meta, v is not"
    ):
        quern.attention(Q.to("meta"), k, V)


# ---- autocast ----


def test_autocast_with_a_cache():
    x = torch.randn(2, 40, 64)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for layer, more in ((csa(), (table(),)), (nn.NSAttention(64, 4, **SPARSE), ())):
            whole = layer(x, *more)
            cached = layer(x, *more, cache=layer.make_cache(2, 64))
            assert whole.dtype == cached.dtype == torch.bfloat16
            torch.testing.assert_close(cached, whole, atol=0.05, rtol=0.05)
        for cache, given in ((quern.KVCache(2, 64), {}), (quern.NSACache(2, 64, block_size=8), SPARSE)):
            cache.append(K, V)
            assert cache.attend(Q, **given).dtype == torch.bfloat16
        state = dsv4.State("hca", 8, ratio=4)
        entries = state.append(torch.randn(9, 16), torch.randn(4, 8))
        assert entries.dtype == torch.bfloat16 == dsv4.compress(torch.randn(9, 16), torch.randn(4, 8)).dtype


# ---- gradients ----


def test_gradients_that_are_not_computed():
    """They would be missing without a word."""
    hidden, router = torch.randn(5, 32), torch.randn(4, 32, requires_grad=True)
    floats = {"gate_up": torch.randn(4, 48, 32), "down": torch.randn(4, 32, 24)}
    moe.layer(hidden, router, bias=torch.zeros(4, requires_grad=True), **floats, top_k=2).sum().backward()
    assert router.grad is not None
    shared = dict(zip(("shared_gate", "shared_up", "shared_down"), torch.randn(3, 32, 32)))
    for name in shared:
        given = {**floats, **shared, name: shared[name].clone().requires_grad_()}
        with pytest.raises(ValueError, match=f"{name} requires a gradient.*{name}.detach.*accepted"):
            moe.layer(hidden, router, **given, top_k=2)
        with torch.no_grad():
            moe.layer(hidden, router, **given, top_k=2)
    codes, scales, one = nvfp4.quantize(torch.randn(4, 32, 48), weight=True, global_per="expert")
    ends, bias = torch.tensor([1, 2, 3, 5], dtype=torch.int32), torch.zeros(4, 48, requires_grad=True)
    with pytest.raises(ValueError, match="bias requires a gradient"):
        nvfp4.grouped_mm(hidden, codes, scales, ends, bias=bias)
    with pytest.raises(ValueError, match="b_global requires a gradient"):
        nvfp4.grouped_mm(hidden, codes, scales, ends, b_global=one.requires_grad_())
    with pytest.raises(ValueError, match="x requires a gradient"):
        nvfp4.interleave(torch.randn(3, 32, requires_grad=True))


@pytest.mark.parametrize("attend", [quern.attention, lambda *t: quern.nsa(*t, **SPARSE)])
def test_calls_without_gradients_hide_nothing(attend):
    """They go past torch.ops, unless something looks on or changes what a call means."""

    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            names.append(str(function))
            return function(*args, **(kwargs or {}))

    names: list[str] = []
    with torch.no_grad():
        want = attend(Q, K, V)
        with Seen():
            assert torch.equal(attend(Q, K, V), want)
        assert any(name.startswith("quern.") for name in names)
        with torch.autocast("cpu", torch.bfloat16):
            assert attend(Q, K, V).dtype == torch.bfloat16
        traced, other = torch.jit.trace(lambda q: attend(q, K, V), (Q,)), torch.randn_like(Q)
        assert torch.equal(traced(other), attend(other, K, V))
        turned = [t.transpose(-1, -2).contiguous().transpose(-1, -2) for t in (Q, K, V)]
        assert torch.equal(attend(*turned), want)
        with pytest.raises(ValueError, match="v"):
            attend(Q, K, V[:, :-1])
    trained = attend(Q.clone().requires_grad_(), K, V)
    assert trained.requires_grad and torch.equal(trained.detach(), want)


def test_forward_mode():
    """Tangents would come out as zeros."""
    with pytest.raises(NotImplementedError, match="q has a tangent: reverse mode.*accepted"):
        torch.func.jvp(lambda q: quern.attention(q, K, V), (Q,), (Q,))
    with pytest.raises(NotImplementedError, match="v has a tangent"):
        torch.func.jvp(lambda v: quern.nsa(Q, K, v, **SPARSE), (V,), (V,))
    with pytest.raises(NotImplementedError, match="x has a tangent"):
        torch.func.jvp(lambda x: nvfp4.interleave(x), (torch.randn(3, 32),), (torch.randn(3, 32),))


# ---- modules ----


def test_settings_become_parameters():
    w_k, w_v = (torch.nn.Parameter(torch.randn(2, 16, 16)) for _ in range(2))
    layer = nn.NSAttention(64, 4, 2, w_k=w_k, w_v=w_v, **SPARSE)
    assert {"w_k", "w_v"} <= dict(layer.named_parameters()).keys() & layer.state_dict().keys()
    x = torch.randn(2, 40, 64)
    whole = layer(x)
    whole.sum().backward()
    assert w_k.grad is not None and w_v.grad is not None
    with torch.no_grad():
        cached = layer(x, cache=layer.make_cache(2, 64))
    torch.testing.assert_close(cached, whole, atol=1e-5, rtol=1e-5)
    bias, ones = torch.nn.Parameter(torch.zeros(8, 64)), torch.ones(8)
    experts = nn.NVFP4Experts(64, 32, 8, 2, gate_up_bias=bias, gate_up_input_global=ones, a4=True, limit=7.0)
    experts.quantize_(torch.randn(8, 64, 64), torch.randn(8, 64, 32))
    assert {"gate_up_bias", "gate_up_input_global"} <= experts.state_dict().keys()
    assert "gate_up_bias" in dict(experts.named_parameters())
    experts(torch.randn(3, 64)).sum().backward()
    assert experts.gate_up_bias.grad is not None
    assert experts.to(torch.bfloat16).gate_up_input_global.dtype == torch.float32


def test_settings_that_there_are_not():
    with pytest.raises(TypeError, match="NSAttention has no setting blocksize: .*block_size.* accepted"):
        nn.NSAttention(64, 4, blocksize=8)
    with pytest.raises(TypeError, match="NSAttention has no setting gates"):
        nn.NSAttention(64, 4, gates=torch.zeros(1))
    with pytest.raises(TypeError, match="NVFP4Experts has no setting topk"):
        nn.NVFP4Experts(64, 32, 8, 2, topk=3)
    with pytest.raises(ValueError, match="'mode' for compress"):
        nn.NSAttention(64, 4, compress="mode")
    with pytest.raises(ValueError, match="'tanh' for score"):
        nn.NVFP4Experts(64, 32, 8, 2, score="tanh")


def test_settings_that_do_not_decode():
    for given in ({"preset": "tile256"}, {"tile": 16}):
        with pytest.raises(ValueError, match="tile is .*: NSAttention, which decodes, accepts 1"):
            nn.NSAttention(64, 4, **given)
    nn.NSAttention(64, 4, preset="tile256", tile=1, compressed_visibility="complete").make_cache(1, 64)
    with pytest.raises(ValueError, match="causal is False: a layer that decodes has True"):
        nn.NSAttention(64, 4, causal=False).make_cache(1, 64)


def test_modules_load_on_first_use():
    assert quern.nn.NSAttention is nn.NSAttention
    assert quern.compat.mslk.nsa and quern.reference.nsa
    assert {"nn", "compat", "reference"} <= set(dir(quern))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        quern.nothing


def test_defaults_of_the_reference():
    """nsa's where quern.nsa leaves them to the library, by the headers."""
    library = {"tile": 1, "scope": "group", "metric": "softmax", "forced_first": 1, "forced_local": 2}
    pairs = (
        (quern.nsa, reference.nsa),
        (quern.nsa_select, reference.select),
        (quern.nsa_attend, reference.attend),
    )
    more = ((quern.attention, reference.attention), (dsv4.attention, reference.dsv4.attention))
    for function, described in (*pairs, *more):
        here, there = (inspect.signature(f).parameters for f in (function, described))
        for name in here.keys() & there.keys():
            if inspect.Parameter.empty not in (here[name].default, there[name].default):
                want = library.get(name) if here[name].default is None else here[name].default
                assert there[name].default == want, (described, name)
    given = [t.double() for t in (Q, K, V)]
    got, want = quern.nsa(Q, K, V, **SPARSE), reference.nsa(*given, **SPARSE)
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


# ---- what is no plain tensor or number ----


def test_read_only_results():
    q, k, v = (t.numpy() for t in (Q, K, V))
    out = np.zeros_like(q)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="o is read-only: an array that can be written.*accepted"):
        quern.attention(q, k, v, out=out)
    cache = np.zeros((8, 8), np.float32)
    cache.flags.writeable = False
    with pytest.raises(ValueError, match="cache is read-only"):
        dsv4.store(np.zeros((1, 8), np.float32), np.zeros(1, np.int32), cache)
    assert not out.any()


def test_other_byte_orders():
    q, k, v = (t.numpy() for t in (Q, K, V))
    with pytest.raises(TypeError, match="k is in the other byte order: astype.*is accepted"):
        quern.attention(q, k.astype(">f4"), v)
    with pytest.raises(TypeError, match="v is in the other byte order"):
        quern.KVCache(2, 64).append(k, v.astype(">f4"))


def as_ml(tensor):
    return tensor.float().numpy().astype(sys.modules["ml_dtypes"].bfloat16)


def test_bfloat16_of_ml_dtypes():
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    wide = [t.bfloat16() for t in (Q, K, V)]
    want = quern.attention(*wide).float().numpy()
    q, k, v = (t.float().numpy().astype(bfloat16) for t in wide)
    k.flags.writeable = False
    got = quern.attention(q, k, v)
    assert got.dtype == bfloat16 and np.array_equal(got.astype(np.float32), want)
    out = np.zeros_like(q)
    assert quern.attention(q, k, v, out=out) is out
    assert np.array_equal(out.astype(np.float32), want)
    cache = quern.KVCache(2, 64)
    cache.append(k, v)
    cached = cache.attend(q)
    assert cached.dtype == bfloat16
    np.testing.assert_allclose(cached.astype(np.float32), want, atol=0.02)
    weights = {name: t.detach().bfloat16() for name, t in csa().named_parameters()}
    x, by_position = torch.randn(2, 40, 64).bfloat16(), table()
    layers = [
        dsv4.Cache("csa", 2, 64, window=8, top_k=4).append(*given)
        for given in (
            (x, by_position, weights),
            (as_ml(x), by_position.numpy(), {name: as_ml(t) for name, t in weights.items()}),
        )
    ]
    assert np.array_equal(layers[1].astype(np.float32), layers[0].float().numpy())
    proj, bias = torch.randn(9, 16).bfloat16(), torch.randn(4, 8).bfloat16()
    got = dsv4.State("hca", 8, ratio=4).append(as_ml(proj), as_ml(bias))
    assert got.dtype == bfloat16
    assert np.array_equal(got.astype(np.float32), dsv4.compress(proj, bias).float().numpy())


def test_nested_and_sparse_tensors():
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor([torch.randn(n, 2, 32) for n in (3, 5)], layout=layout)
        with pytest.raises(TypeError, match="k is a nested tensor: .*cu_seqlens.* accepted"):
            quern.attention(Q, nested, V)
        with pytest.raises(TypeError, match="k is a nested tensor"):
            quern.KVCache(2, 64).append(nested, V)
    with pytest.raises(TypeError, match="v is sparse: to_dense.* is accepted"):
        quern.attention(Q, K, V.to_sparse())


@pytest.mark.parametrize("numpy", [False, True])
def test_numbers(numpy):
    q, k, v = (t.numpy() if numpy else t for t in (Q, K, V))
    for scale in (torch.tensor(0.1), np.array(0.1)):
        with pytest.raises(TypeError, match="scale is a .*: a number, such as its item.*is accepted"):
            quern.attention(q, k, v, scale=scale)
        with pytest.raises(TypeError, match="scale is a "):
            quern.nsa(q, k, v, scale=scale, **SPARSE)
        with pytest.raises(TypeError, match="scale is a "):
            quern.attention(q, k, v, scale=scale, out=q.copy() if numpy else q.clone())
    for window in ((128, 0), [128, 0]):
        with pytest.raises(TypeError, match=r"window is .*: one number.*accepted.*left \+ 1"):
            quern.attention(q, k, v, window=window)
    same = quern.attention(q, k, v, scale=0.25, window=4)
    got = quern.attention(q, k, v, scale=np.float32(0.25), window=np.int64(4))
    assert (got == same).all()


def test_integers_of_64_bits():
    """As torch makes them: converted, and named where 32 bits do not hold them, by a graph, too."""
    q, k, v = (t[0] for t in (Q, K, V))
    ends, far = torch.tensor([0, 7, 40]), torch.tensor([0, 2**32 + 40, 40])

    def attend(ends, out=None):
        return quern.attention(q, k, v, cu_seqlens_q=ends, out=out)

    want = attend(ends.int())
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for call in (attend, lambda ends: attend(ends, out=torch.empty_like(q)), compiled):
        assert torch.equal(call(ends), want)
        with pytest.raises(ValueError, match=r"cu_seqlens_q\[1\] is 4294967336: integers of 32 bits are"):
            call(far)


def test_numbers_of_caches():
    dense, sparse = quern.KVCache(2, 64), quern.NSACache(2, 64, block_size=8)
    dense.append(K, V)
    sparse.append(K, V)
    layer = csa()
    with torch.no_grad():
        whole = layer.make_cache(2, 64, ring=4)
        layer(torch.randn(2, 40, 64), table(), cache=whole)
    for cache in (dense, sparse, whole):
        with pytest.raises(TypeError, match=r"n is \[1, 2\]: an integer is accepted; sequence="):
            cache.rollback([1, 2])
        for call in (cache.length, cache.reset, cache.save):
            with pytest.raises(TypeError, match=r"sequence is \[0\]: an integer is accepted"):
                call([0])
        with pytest.raises(TypeError, match=r"to is \[1\]: an integer is accepted"):
            cache.fork(0, [1])
        cache.rollback(torch.tensor(1))
        assert cache.length(1) == 39
    state = dsv4.State("hca", 8, ratio=4, ring=2)
    with pytest.raises(TypeError, match=r"n is \[1\]: an integer is accepted"):
        state.rollback([1])
