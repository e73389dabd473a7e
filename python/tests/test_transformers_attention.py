# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""attn_implementation="quern" in the transformers package: tiny random models of Llama, gpt-oss and
MiniMax-M3 against eager attention."""

import copy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.20")

from tiny_models import (  # noqa: E402
    MODELS,
    check_bf16,
    check_fine_tuning,
    check_greedy,
    check_packed,
    error,
    tokens,
)
from transformers import AutoModelForCausalLM  # noqa: E402

from quern.integrations import transformers as integration  # noqa: E402

KINDS = ("llama", "gpt_oss", "minimax_m3")

PADDED = ("llama", "gpt_oss")  # MiniMax-M3's blocks stand at slots: padding on the left moves them


def models(kind, dtype=torch.float32):
    """The model with eager attention, and with quern's."""
    torch.manual_seed(3)
    eager = MODELS[kind]().eval().to(dtype)
    eager.set_attn_implementation("eager")
    if kind != "llama":
        eager.set_experts_implementation("eager")  # PyTorch's grouped products take no float64
    quern = copy.deepcopy(eager)
    quern.set_attn_implementation("quern")
    return eager, quern


@pytest.mark.parametrize("kind", KINDS)
def test_logits(kind):
    eager, quern = models(kind)
    exact = copy.deepcopy(eager).double()
    with torch.no_grad():
        want = exact(tokens()).logits
        assert error(quern(tokens()).logits, want) < 5e-6
        check_bf16(kind, exact, eager, quern)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", PADDED)
def test_padding(kind, side):
    eager, quern = models(kind)
    mask = torch.ones(3, 40, dtype=torch.long)
    mask[0, :7] = mask[1, :1] = 0
    given = {"attention_mask": mask}
    if side == "left":
        given["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    else:
        given["attention_mask"] = mask.flip(-1)
    real = given["attention_mask"].bool()
    exact = eager.double()
    with torch.no_grad():
        want = torch.cat([exact(row[kept][None]).logits[0] for row, kept in zip(tokens(), real)])
        assert error(quern(tokens(), **given).logits[real], want) < 5e-6


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_generation(kind):
    check_greedy(*models(kind), (40, 33, 21) if kind in PADDED else (40, 40))


@pytest.mark.parametrize("kind", PADDED)
def test_beams(kind):
    eager, quern = models(kind)
    mask = torch.ones(3, 40, dtype=torch.long)
    mask[0, :9] = 0
    given = {"attention_mask": mask, "max_new_tokens": 20, "num_beams": 3, "do_sample": False}
    assert torch.equal(quern.generate(tokens(), **given), eager.generate(tokens(), **given))


@pytest.mark.parametrize("kind", PADDED)
def test_packed_sequences(kind):
    check_packed(*models(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_fine_tuning(kind):
    check_fine_tuning(*models(kind))


def test_compiled():
    eager, quern = models("llama")
    with torch.no_grad():
        compiled = torch.compile(quern, backend="aot_eager")
        assert error(compiled(tokens(), use_cache=False).logits, eager(tokens()).logits.double()) < 5e-6


def test_loading_by_name(tmp_path):
    eager, _ = models("gpt_oss")
    eager.save_pretrained(tmp_path)
    names = {"attn_implementation": "quern", "experts_implementation": "quern"}
    quern = AutoModelForCausalLM.from_pretrained(tmp_path, **names).eval()
    assert quern.config._attn_implementation == quern.config._experts_implementation == "quern"
    with torch.no_grad():
        assert error(quern(tokens()).logits, copy.deepcopy(eager).double()(tokens()).logits) < 5e-6


def test_importing_changes_no_bit():
    script = """
import hashlib, sys, torch
if "import" in sys.argv:
    import quern.integrations.transformers
from tiny_models import MODELS, tokens
torch.set_num_threads(1)  # with many threads PyTorch adds gpt-oss's gradients in any order
mask = torch.ones(3, 40, dtype=torch.long)
mask[0, :3] = 0
for kind, made in MODELS.items():
    torch.manual_seed(3)
    model = made().eval()
    logits = model(tokens(), attention_mask=mask).logits
    model.train()(tokens(), labels=tokens()).loss.backward()
    bits = [logits, *(t.grad for t in model.parameters() if t.grad is not None)]
    digest = hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in bits)).hexdigest()
    print(kind, model.config._attn_implementation, model.config._experts_implementation, digest)
"""
    given = {"capture_output": True, "text": True, "check": True, "cwd": Path(__file__).parent}
    made = [subprocess.run([sys.executable, "-c", script, *more], **given) for more in ((), ("import",))]
    assert made[0].stdout == made[1].stdout
    assert len(made[0].stdout.splitlines()) == len(MODELS)


def test_what_is_refused():
    module, q = SimpleNamespace(is_causal=True), torch.randn(1, 2, 5, 16)
    with pytest.raises(ValueError, match="a window of 8, .* one of 0"):
        integration.attend(module, q, q, q, integration.Lengths(8))
    with pytest.raises(ValueError, match="is not causal"):
        integration.attend(SimpleNamespace(is_causal=False), q, q, q, None)
    with pytest.raises(ValueError, match="has compressed keys"):
        integration.attend(SimpleNamespace(compressor=1), q, q, q, None)
    with pytest.raises(ValueError, match="the mask .* causal masks"):
        integration.lengths_of(1, 5, 5, mask_function=lambda b, h, q, k: q == k)
    _, sparse = models("minimax_m3")
    left = torch.ones(2, 40, dtype=torch.long)
    left[0, :3] = 0
    with pytest.raises(ValueError, match="block_indices with"):
        sparse(tokens(2), attention_mask=left)
