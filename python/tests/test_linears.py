# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""Linear layers of accelerated models: a few rows of bf16 by the library, all others by PyTorch."""

import copy
import pickle

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.20")
if not torch.cpu._is_avx512_bf16_supported():
    pytest.skip("the processor multiplies no bf16", allow_module_level=True)

from quern.integrations import _linears  # noqa: E402
from quern.integrations.transformers import accelerate  # noqa: E402


def pair(bias=True, dtype=torch.bfloat16):
    """A layer of PyTorch's, and the same one replaced."""
    torch.manual_seed(0)
    plain = torch.nn.Linear(1030, 1100, bias=bias, dtype=dtype)
    ours = copy.deepcopy(plain)
    _linears.replace(ours)
    assert type(ours) is _linears.Linear
    return plain, ours


def count_calls(monkeypatch):
    calls = []
    real = _linears.linear
    monkeypatch.setattr(_linears, "linear", lambda *given: calls.append(1) or real(*given))
    return calls


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1,), (3,), (2, 4), (8, 1), (1, 1, 1), ()])
def test_few_rows(monkeypatch, shape, bias):
    calls = count_calls(monkeypatch)
    plain, ours = pair(bias)
    with torch.no_grad():
        x = torch.randn(*shape, 1030).bfloat16()
        want = copy.deepcopy(plain).double()(x.double())
        made = ours(x)
        assert made.dtype == torch.bfloat16 and made.shape == want.shape and len(calls) == 1
        assert (made - want).norm() <= 1.05 * (plain(x) - want).norm()
        wide = torch.randn(*shape, 1030, 2).bfloat16()[..., 0]
        assert torch.equal(ours(wide), ours(wide.contiguous()))


def test_rows_do_not_know_each_other():
    _, ours = pair()
    with torch.no_grad():
        x = torch.randn(8, 1030).bfloat16()
        assert torch.equal(ours(x), torch.cat([ours(row[None]) for row in x]))


def test_the_others_are_pytorchs(monkeypatch):
    calls = count_calls(monkeypatch)
    plain, ours = pair()
    x = torch.randn(2, 1030).bfloat16()
    assert torch.equal(ours(x), plain(x)) and ours(x).requires_grad  # its weights want a gradient
    with torch.no_grad():
        many, none = torch.randn(9, 1030).bfloat16(), torch.empty(0, 1030).bfloat16()
        assert torch.equal(ours(many), plain(many)) and ours(none).shape == (0, 1100)
        with torch.autocast("cpu"):
            assert torch.equal(ours(x), plain(x))
        assert torch.equal(torch.compile(ours, backend="eager", fullgraph=True)(x), plain(x))
        plain, ours = pair(dtype=torch.float32)
        assert torch.equal(ours(x.float()), plain(x.float()))
    assert not calls
    ours.requires_grad_(False).bfloat16()
    ours(x)
    assert calls


def test_what_is_replaced(capsys):
    model = torch.nn.Sequential(*(torch.nn.Linear(n, 1024) for n in (1023, 1024, 1025)))
    keys = list(model.state_dict())
    _linears.replace(model)
    assert [type(m) is _linears.Linear for m in model] == [False, True, True]
    assert capsys.readouterr().out == "quern: 2 Linear replaced, for up to 8 rows of bfloat16\n"
    _linears.replace(model)
    assert capsys.readouterr().out == ""
    assert list(model.state_dict()) == keys
    assert type(pickle.loads(pickle.dumps(model))[1]) is _linears.Linear


def test_a_model(monkeypatch):
    """Steps of a Llama whose layers are all replaced."""
    from tiny_models import MODELS, tokens

    monkeypatch.setattr(_linears, "WEIGHTS_MIN", 1)
    calls = count_calls(monkeypatch)
    torch.manual_seed(0)
    eager = MODELS["llama"]().eval()
    exact = copy.deepcopy(eager).double()
    eager.bfloat16()
    quern = accelerate(copy.deepcopy(eager))
    ids = tokens()[:2]
    with torch.no_grad():
        cache = quern(ids[:, :-1], use_cache=True).past_key_values
        assert not calls
        made = quern(ids[:, -1:], past_key_values=cache).logits[:, 0]
        assert len(calls) == sum(type(m) is _linears.Linear for m in quern.modules())
        want = exact(ids).logits[:, -1]
        assert (made - want).norm() <= 1.5 * (eager(ids).logits[:, -1] - want).norm()
