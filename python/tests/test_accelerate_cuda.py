# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""quern.integrations.transformers on a GPU: tiny random models against eager ones there, in f32; DeepSeek-V4,
whose layers have 16 bits on GPUs, in bf16."""

import copy
import inspect
import re

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.20")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from tiny_models import (  # noqa: E402
    MODELS,
    check_bf16,
    check_fine_tuning,
    check_greedy,
    check_packed,
    error,
    tokens,
)

import quern  # noqa: E402
from quern.integrations.transformers import accelerate  # noqa: E402

try:
    quern.attention(*(torch.zeros(1, 1, 1, 64, device="cuda") for _ in range(3)))
except NotImplementedError as reason:
    pytest.skip(f"the package has no GPU backend: {reason}", allow_module_level=True)

KINDS = ("llama", "gpt_oss", "minimax_m3")
PIECES = [[20, 12, 8], [31, 1, 1, 1, 1, 1, 4], [3, 5, 32]]


def models(kind, dtype=torch.float32, seed=3):
    """The model with eager attention and experts, and accelerated."""
    torch.manual_seed(seed)
    eager = MODELS[kind]().eval().cuda().to(dtype)
    eager.set_attn_implementation("eager")
    if kind != "llama":
        eager.set_experts_implementation("eager")
    return eager, accelerate(copy.deepcopy(eager))


def ids(n=40):
    return tokens(n=n, device="cuda")


def padded(n=40):
    mask = torch.ones(3, n, dtype=torch.long, device="cuda")
    mask[0, :7] = mask[1, :1] = 0
    return mask


def exact(eager):
    return copy.deepcopy(eager).double()


def in_pieces(model, pieces, given, n=40):
    """Logits by a cache that grows."""
    named = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    cache, made, at = transformers.DynamicCache(config=model.config), [], 0
    for part in ids(n).split(pieces, 1):
        end = at + part.shape[1]
        more = {"attention_mask": given["attention_mask"][:, :end]} if given else {}
        if given:
            more["position_ids"] = given["position_ids"][:, at:end]
        made.append(model(part, **{named: cache}, **more).logits)
        at = end
    return torch.cat(made, 1)


def alone(model, mask, n=40):
    """Logits of each row's tokens on their own, in a row."""
    return torch.cat([model(row[kept][None]).logits[0] for row, kept in zip(ids(n), mask.bool())])


def positions(mask):
    return (mask.cumsum(-1) - 1).clamp(min=0)


@pytest.mark.parametrize("kind", KINDS)
def test_logits(kind):
    eager, quern = models(kind)
    with torch.no_grad():
        want = exact(eager)(ids()).logits
        assert error(quern(ids()).logits, want) < 5e-6
        check_bf16(kind, exact(eager), eager, quern)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", KINDS)
def test_padding(kind, side):
    eager, quern = models(kind)
    mask = padded() if side == "left" else padded().flip(-1)
    given = {"attention_mask": mask}
    if side == "left":
        given["position_ids"] = positions(mask)
    with torch.no_grad():
        got = quern(ids(), **given).logits[mask.bool()]
        assert error(got, alone(exact(eager), mask)) < 5e-6


@pytest.mark.parametrize("pieces", PIECES)
@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_prefill_and_decode(kind, left, pieces):
    eager, quern = models(kind)
    mask = padded() if left else torch.ones_like(padded())
    given = {"attention_mask": mask, "position_ids": positions(mask)}
    with torch.no_grad():
        got = in_pieces(quern, pieces, given)[mask.bool()]
        assert error(got, alone(exact(eager), mask)) < 5e-6


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_generation(kind):
    check_greedy(*models(kind), (40, 33, 21))


@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences(kind):
    check_packed(*models(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_fine_tuning(kind):
    check_fine_tuning(*models(kind))


@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize("nvfp4", [False, True])
def test_experts(kind, nvfp4):
    torch.manual_seed(3)
    model = MODELS[kind]().eval().requires_grad_(False)
    for name, t in model.named_parameters():
        if "experts" in name or name.endswith("gate.weight"):
            torch.nn.init.normal_(t, std=t.shape[-1] ** -0.5 * 2)
    model.set_attn_implementation("eager")
    here = accelerate(copy.deepcopy(model), experts="nvfp4" if nvfp4 else None)
    there = accelerate(model.cuda(), experts="nvfp4" if nvfp4 else None)
    with torch.no_grad():
        want = here(tokens()).logits.double()
        assert error(there(ids()).logits.cpu(), want) < 5e-6
        if nvfp4:
            saved = here.state_dict()
            assert all(torch.equal(t.cpu(), saved[name]) for name, t in there.state_dict().items())
            assert error(here.cuda()(ids()).logits.cpu(), want) < 5e-6
            assert error(there.cpu()(tokens()).logits, want) < 5e-6


# ---- DeepSeek-V4, so few tokens that rounding chooses no other entries ----

FEW, NEW = 24, 24


def near(got, eager, want):
    """Within what the library's own modules are off by in bf16."""
    with torch.no_grad():
        assert error(got, want) <= 1.5 * error(eager(ids(FEW)).logits, exact(eager)(ids(FEW)).logits)


def test_v4_is_replaced_in_16_bits_alone(capsys):
    models("deepseek_v4")
    said = capsys.readouterr().out.splitlines()[0]
    assert said == (
        "quern: 0 of 3 DeepseekV4Attention replaced; 3 not: it is in torch.float32 on a GPU: bfloat16 and "
        "float16 are accepted there"
    )


def test_v4_logits():
    eager, quern = models("deepseek_v4", torch.bfloat16)
    with torch.no_grad():
        want = exact(eager)(ids(FEW)).logits
        near(quern(ids(FEW)).logits, eager, want)
        near(quern(ids(FEW), use_cache=False).logits, eager, want)


@pytest.mark.parametrize("pieces", [[12, 8, 4], [17, 1, 1, 1, 4], [3, 5, 16]])
@pytest.mark.parametrize("left", [False, True])
def test_v4_prefill_and_decode(left, pieces):
    eager, quern = models("deepseek_v4", torch.bfloat16)
    mask = padded(FEW) if left else torch.ones_like(padded(FEW))
    given = {"attention_mask": mask, "position_ids": positions(mask)}
    with torch.no_grad():
        want = alone(exact(eager), mask, FEW)
        near(in_pieces(quern, pieces, given, FEW)[mask.bool()], eager, want)
        near(quern(ids(FEW), use_cache=False, **given).logits[mask.bool()], eager, want)


def test_v4_generates_each_row_as_alone():
    """Each token is the best that float64 finds for the row alone, up to the library's own error in bf16."""
    eager, quern = models("deepseek_v4", torch.bfloat16)
    mask, wide = padded(FEW), exact(eager)
    made = quern.generate(ids(FEW), attention_mask=mask, max_new_tokens=NEW, do_sample=False)
    decided = 0
    for row, kept in zip(made, mask):
        whole = row[FEW - int(kept.sum()) :][None]
        with torch.no_grad():
            want, low = (model(whole).logits[0, -NEW - 1 : -1].double() for model in (wide, eager))
        best, second = want.topk(2).values.unbind(-1)
        bound = 2 * 1.5 * (low - want).abs().amax(-1)
        assert bool((best - want.gather(-1, row[-NEW:, None])[:, 0] <= bound).all())
        decided += int((best - second > bound).sum())
    assert decided > 3 * NEW // 2


def test_v4_cache_operations(monkeypatch):
    from quern.integrations import _deepseek_v4

    monkeypatch.setattr(_deepseek_v4, "LEAST", 8)  # it grows
    eager, quern = models("deepseek_v4", torch.bfloat16)
    named = "cache" if "cache" in inspect.signature(quern.forward).parameters else "past_key_values"
    row = ids(FEW)[:2]
    with torch.no_grad():
        whole = quern(row, use_cache=False).logits
        cache = transformers.DynamicCache(config=quern.config)
        quern(row[:, :15], **{named: cache})
        copied = copy.deepcopy(cache)
        cache.reorder_cache(torch.tensor([1, 0], device="cuda"))
        flipped = whole.flip(0)[:, 15:].double()
        assert error(quern(row.flip(0)[:, 15:], **{named: cache}).logits, flipped) < 0.05
        copied.batch_repeat_interleave(2)
        copied.batch_select_indices(torch.tensor([3, 0], device="cuda"))
        assert error(quern(row.flip(0)[:, 15:], **{named: copied}).logits, flipped) < 0.05


def test_v4_fine_tuning():
    check_fine_tuning(*models("deepseek_v4", torch.bfloat16))


def test_v4_gradients():
    """Within what the library's own are off by in bf16. Those of a kind are one, over layers and models: of a
    scale's three numbers a model's are by chance several times as far off, eager's as often as ours."""
    sums = {}
    for seed in range(6):
        eager, quern = models("deepseek_v4", torch.bfloat16, seed)
        every = (quern, eager, exact(eager))
        losses = [model.train()(ids(FEW), labels=ids(FEW)).loss for model in every]
        for loss in losses:
            loss.backward()
        assert abs(float(losses[0]) - float(losses[1])) < 0.01 * float(losses[1])
        for (name, ours), theirs, t in zip(quern.named_parameters(), *(m.parameters() for m in every[1:])):
            if t.grad is not None:
                squares = [(p.grad.double() - t.grad).square().sum() for p in (ours, theirs)]
                kind = re.sub(r"layers\.\d+\.", "", name)
                sums[kind] = sums.get(kind, 0) + torch.stack([*squares, t.grad.square().sum()])
    for kind, (ours, theirs, whole) in sums.items():
        if whole > 0:
            assert ours.sqrt() <= max(0.06 * whole.sqrt(), 1.5 * theirs.sqrt()), kind
