# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""quern.nsa: golden vectors, float64 gradients, torch.library, torch.compile, NumPy."""

import pytest

torch = pytest.importorskip("torch")

import quern  # noqa: E402
from quern import _operations as ops  # noqa: E402
from quern import _torch, reference  # noqa: E402

INPUTS = _torch.OPERATORS["nsa"].inputs

BOUND = 2e-6
GRADIENT = 1e-5
PAPER = {"block_size": 16, "num_selected": 6, "window": 48}


def paper(file):
    names = ("Q", "K", "V", "W_k", "W_v", "gate")
    return dict(zip(("q", "k", "v", "w_k", "w_v", "gate"), (t.requires_grad_() for t in file.torch(*names))))


@pytest.mark.parametrize("save_branches", [False, True])
def test_paper(golden, close, save_branches):
    file = golden("nsa_paper_b")
    given = paper(file)
    o = quern.nsa(**given, **PAPER, forced_first=1, forced_local=2, save_branches=save_branches)
    close(o, file.torch("O"), BOUND)
    o.backward(file.torch("dO"))
    for name, wanted in zip(given, ("dQ", "dK", "dV", "dW_k", "dW_v", "dgate")):
        close(given[name].grad, file.torch(wanted), GRADIENT)


def test_causal_tiles(golden, close):
    """The preset's selection, with visibility `complete` instead."""
    file = golden("nsa_small")
    given = paper(file)
    o = quern.nsa(
        **given,
        preset="tile256",
        block_size=32,
        num_selected=3,
        window=64,
        tile=64,
        compressed_visibility="complete",
        block_idx=file.torch("full.block_idx_sorted"),
    )
    close(o, file.torch("full.causal.O"), BOUND)


def random_inputs(n=130):
    torch.manual_seed(4)
    q, k, v = (torch.randn(2, n, heads, 16, requires_grad=True) for heads in (4, 2, 2))
    return {"q": q, "k": k, "v": v}


TILES = {
    "block_size": 16,
    "num_selected": 3,
    "window": 20,
    "tile": 8,
    "scope": "head",
    "metric": "mean_logit",
    "forced_first": 0,
    "forced_local": 0,
}


@pytest.mark.parametrize("causal", [True, False])
def test_against_float64(near, causal):
    given = random_inputs()
    wide = {name: t.detach().double().requires_grad_() for name, t in given.items()}
    o = quern.nsa(**given, **TILES, causal=causal)
    expected = reference.nsa(**wide, **TILES, causal=causal)
    near(o, expected, BOUND)
    d_o = torch.randn_like(o)
    wanted = torch.autograd.grad(expected, list(wide.values()), d_o.double())
    for got, want in zip(torch.autograd.grad(o, list(given.values()), d_o), wanted):
        near(got, want, GRADIENT)


@pytest.mark.parametrize("given_entries", [False, True])
def test_pairs_of_their_own_against_float64(near, given_entries):
    given = random_inputs()
    more = ("k_slc", "v_slc", "k_win", "v_win")
    given.update((name, torch.randn(2, 130, 2, 16, requires_grad=True)) for name in more)
    if given_entries:
        given.update((name, torch.randn(2, 8, 2, 16, requires_grad=True)) for name in ("k_cmp", "v_cmp"))
    wide = {name: t.detach().double().requires_grad_() for name, t in given.items()}
    settings = {"compress": "given"} if given_entries else {}
    o = quern.nsa(**given, **TILES, **settings)
    expected = reference.nsa(**wide, **TILES)
    near(o, expected, BOUND)
    d_o = torch.randn_like(o)
    used = {name for name in given if not (given_entries and name in ("k", "v"))}
    grads = torch.autograd.grad(expected, [wide[name] for name in used], d_o.double())
    for a, b in zip(torch.autograd.grad(o, [given[name] for name in used], d_o), grads):
        near(a, b, GRADIENT)


def test_groups_against_float64(near):
    """Four groups of 128 entries, of which a tile attends two."""
    torch.manual_seed(6)
    given = {
        name: torch.randn(1, 1000, h, 8, requires_grad=True) for name, h in (("q", 2), ("k", 1), ("v", 1))
    }
    settings = {**TILES, "block_size": 2, "tile": 16}
    entries = quern.nsa_compress(given["k"], given["v"], block_size=2)
    select = {name: value for name, value in settings.items() if name != "window"}
    idx, _, groups = quern.nsa_select(given["q"], entries[0], **select, max_compressed_groups=2)
    o = quern.nsa(**given, **settings, max_compressed_groups=2)
    wide = {name: t.detach().double().requires_grad_() for name, t in given.items()}
    lists = {"block_idx": idx, "group_idx": groups}
    expected = reference.nsa(**wide, block_size=2, num_selected=3, window=20, tile=16, **lists)
    near(o, expected, BOUND)
    assert (groups >= 0).sum(-1).max() == 2 and groups.max() == 3
    d_o = torch.randn_like(o)
    grads = torch.autograd.grad(expected, list(wide.values()), d_o.double())
    for a, b in zip(torch.autograd.grad(o, list(given.values()), d_o), grads):
        near(a, b, GRADIENT)


@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_one_gradient_alone(close, which):
    given = random_inputs()
    quern.nsa(**given, **TILES).sum().backward()
    alone = {name: t.detach().requires_grad_(name == which) for name, t in given.items()}
    quern.nsa(**alone, **TILES).sum().backward()
    assert torch.equal(alone[which].grad, given[which].grad)
    assert all(t.grad is None for name, t in alone.items() if name != which)


@pytest.mark.parametrize("branches", ["cmp", "slc", "win", "cmp,win", "slc,win"])
def test_branches_alone(close, branches):
    """A branch that is off is one whose gate is 0."""
    given = random_inputs()
    gates = torch.full((2, 130, 4, 3), 1 / 3)
    for i, name in enumerate(("cmp", "slc", "win")):
        gates[..., i] *= name in branches.split(",")
    o, want = quern.nsa(**given, **TILES, branches=branches), quern.nsa(**given, **TILES, gates=gates)
    close(o, want, BOUND)
    for a, b in zip(
        *(torch.autograd.grad(t.sin().sum(), list(given.values()), allow_unused=True) for t in (o, want))
    ):
        close(a, b, GRADIENT)


RESULTS = {
    "inference": "o",
    "training": "o lse_cmp lse_slc lse_win gates k_cmp v_cmp block_idx",
    "branches": "o lse_cmp lse_slc lse_win gates k_cmp v_cmp block_idx o_cmp o_slc o_win",
}


def operator_arguments(**more):
    given = {**random_inputs(40), "w_gate": torch.randn(4, 3, 16, requires_grad=True)}
    settings = ops.lines(tuple({"gate": "weights", **TILES, **more}.items()))
    return (*(given.get(name) for name in INPUTS), settings)


@pytest.mark.parametrize("results", RESULTS)
@pytest.mark.parametrize("groups", [0, 2])
def test_opcheck(results, groups):
    training = results != "inference"
    utils = ("test_schema", "test_faketensor") + (("test_aot_dispatch_dynamic",) if training else ())
    arguments = operator_arguments(max_compressed_groups=groups)
    names = RESULTS[results] + (" group_idx" if groups and training else "")
    torch.library.opcheck(torch.ops.quern.nsa.default, (*arguments, names), test_utils=utils)


def test_opcheck_varlen():
    *given, settings = operator_arguments()
    given = [t if t is None or t.dim() < 4 else t.detach()[0].requires_grad_() for t in given]
    given[INPUTS.index("cu_seqlens")] = torch.tensor([0, 7, 7, 40], dtype=torch.int32)
    names = RESULTS["branches"] + " cu_seqlens_cmp"
    torch.library.opcheck(torch.ops.quern.nsa.default, (*given, settings, names))


def test_compile(close):
    given = random_inputs()
    compiled = torch.compile(lambda t: quern.nsa(**t, **TILES).sin(), fullgraph=True, backend="aot_eager")
    got, want = compiled(given), quern.nsa(**given, **TILES).sin()
    close(got, want, BOUND)
    leaves = list(given.values())
    for a, b in zip(torch.autograd.grad(got.sum(), leaves), torch.autograd.grad(want.sum(), leaves)):
        close(a, b, BOUND)


def test_checkpoint(close):
    from torch.utils.checkpoint import checkpoint

    given = random_inputs()
    leaves = list(given.values())
    want = torch.autograd.grad(quern.nsa(**given, **TILES).sum(), leaves)
    o = checkpoint(lambda *t: quern.nsa(*t, **TILES), *leaves, use_reentrant=False)
    for a, b in zip(torch.autograd.grad(o.sum(), leaves), want):
        assert torch.equal(a, b)


def test_numpy(close):
    given = {name: t.detach() for name, t in random_inputs().items()}
    plain = quern.nsa(**{name: t.numpy() for name, t in given.items()}, **TILES)
    close(plain, quern.nsa(**given, **TILES), 0)


def test_weights_of_half_precision(close):
    given = {name: t.detach().bfloat16() for name, t in random_inputs().items()}
    gate = torch.randn(4, 3, 16).bfloat16().requires_grad_()
    quern.nsa(**given, gate=gate, **TILES).sum().backward()
    assert gate.grad.dtype == torch.bfloat16


def test_sentences():
    given = {name: t.detach() for name, t in random_inputs().items()}
    with pytest.raises(ValueError, match="num_selected"):
        quern.nsa(**given, num_selected=1)
    with pytest.raises(ValueError, match="tile512"):
        quern.nsa(**given, preset="tile512")
    with pytest.raises(ValueError, match="gate and gates"):
        quern.nsa(**given, gate=given["q"], gates=given["q"])
    with pytest.raises(TypeError, match="v is a ndarray"):
        quern.nsa(given["q"], given["k"], given["v"].numpy())


@pytest.mark.parametrize("given", (False, True))
def test_msa(given):
    """Preset msa against dense attention over the reference's choice, forward and backward."""
    torch.manual_seed(6)
    q, k, v = (torch.randn(2, 90, h, 16, requires_grad=True) for h in (4, 2, 2))
    q_index, k_index = torch.randn(2, 90, 2, 8), torch.randn(2, 90, 8)
    settings = {"select_block": 8, "num_selected": 3}
    chosen, _ = reference.index(q_index.double(), k_index.double(), **settings)
    lists = {"q_index": q_index, "k_index": k_index}
    if given:
        lists = {"block_idx": reference.listed(chosen, 3)[0]}
    o = quern.nsa(q, k, v, preset="msa", **settings, **lists)
    seen = chosen.repeat_interleave(8, -1)[..., :90].repeat_interleave(2, 1).tril()
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    heads = [x.repeat_interleave(4 // x.shape[2], 2).transpose(1, 2) for x in wide]
    want = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=seen).transpose(1, 2)
    d_o = torch.randn_like(o)
    o.backward(d_o)
    want.backward(d_o.double())
    for a, b, bound in ((o, want, 2e-6), *((x.grad, y.grad, 1e-5) for x, y in zip((q, k, v), wide))):
        assert (a - b).norm() <= bound * b.norm()
    with pytest.raises(ValueError, match="q_index and k_index"):
        quern.nsa(q, k, v, preset="msa")
