# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""What models of the transformers package may ask for that Quern does not do: each is one sentence, whichever
way the model was given Quern's attention, and none is computed in another way in silence."""

import ast
import inspect
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.20")

from tiny_models import MODELS, SIZES, tokens  # noqa: E402

from quern.integrations import transformers as integration  # noqa: E402

WAYS = [(kind, True) for kind in MODELS] + [(kind, False) for kind in MODELS if kind != "deepseek_v4"]


@pytest.fixture(params=WAYS, ids=lambda way: f"{way[0]}-{'accelerated' if way[1] else 'named'}")
def model(request):
    kind, accelerated = request.param
    made = MODELS[kind]().eval()
    if accelerated:
        return integration.accelerate(made)
    made.set_attn_implementation("quern")
    return made


def with_cache(model, cache):
    named = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    return model(tokens(2), **{named: cache})


def test_static_caches(model):
    with pytest.raises(ValueError, match="StaticCache.* accepted"):
        with_cache(model, transformers.StaticCache(config=model.config, max_cache_len=64))
    with pytest.raises(ValueError, match="StaticCache.* accepted"):
        model.generate(tokens(2), cache_implementation="static", max_new_tokens=2)


def test_continuous_batching(model):
    settings = transformers.GenerationConfig(max_new_tokens=2)
    with pytest.raises(ValueError, match="quern is not supported for continuous batching"):
        model.generate_batch(tokens(2).tolist(), generation_config=settings)


def test_attention_weights(model):
    with pytest.raises(ValueError, match="output_attentions"):
        model(tokens(2), output_attentions=True)
    with pytest.raises(ValueError, match="output_attentions"):
        model.generate(tokens(2), output_attentions=True, return_dict_in_generate=True, max_new_tokens=2)
    model.config._output_attentions = True  # as it is where eager attention was asked for them
    with pytest.raises(ValueError, match="output_attentions is set"):
        model(tokens(2))


def test_dropout(model):
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.1
    model(tokens(2))
    with pytest.raises(ValueError, match="dropout is 0.1: 0 is accepted"):
        model.train()(tokens(2))


def test_masks(model):
    with pytest.raises(ValueError, match="the mask is a Tensor: "):
        model(tokens(2), attention_mask=torch.zeros(2, 1, 40, 40))
    holes = torch.ones(2, 40, dtype=torch.long)
    holes[0, 20] = 0
    with pytest.raises(ValueError, match="zeros between ones: "):
        model(tokens(2), attention_mask=holes)


def test_guessed_tokens_of_deepseek_v4():
    """Its caches take no token back, also where it guesses for another model."""
    model = integration.accelerate(MODELS["deepseek_v4"]().eval())
    with pytest.raises(ValueError, match="assisted generation is not supported"):
        model.generate(tokens(1), prompt_lookup_num_tokens=3)
    with pytest.raises(ValueError, match="tokens are taken back: "):
        MODELS["llama"]().eval().generate(tokens(1), assistant_model=model, max_new_tokens=12)


@pytest.mark.parametrize("kind", ("minimax_m3", "deepseek_v4"))
def test_caches_of_other_layers(kind):
    model = integration.accelerate(MODELS[kind]().eval())
    with pytest.raises(ValueError, match=r"DynamicCache has .*: DynamicCache\(config=model.config\)"):
        with_cache(model, transformers.DynamicCache())


def small(config, model, **more):
    return model(config(**SIZES, **more)).eval()


def test_softcap():
    model = small(transformers.Gemma2Config, transformers.Gemma2ForCausalLM, query_pre_attn_scalar=16)
    model.set_attn_implementation("quern")
    with pytest.raises(ValueError, match="softcap is given: attention without it is accepted"):
        model(tokens(2))


def test_masks_that_are_not_causal():
    from transformers import masking_utils

    given = {"config": None, "mask_function": masking_utils.chunked_causal_mask_function(4, torch.zeros(2))}
    with pytest.raises(ValueError, match="the mask .* is given: causal masks"):
        integration.lengths_of(2, 8, 8, **given)


@pytest.mark.parametrize("name", integration._REFUSED)
def test_what_changes_the_result(name):
    q = torch.randn(1, 2, 5, 16)
    with pytest.raises(ValueError, match=f"{name} is given: attention without it is accepted"):
        integration.attend(SimpleNamespace(is_causal=True), q, q, q, None, **{name: q})


def test_every_argument_is_known():
    """The library's models hand nothing to an attention function that this one does not read or refuse."""
    known = {*inspect.signature(integration.attend).parameters, *integration._REFUSED}
    known |= {"block_indices", "cu_seq_lens_q", "cu_seq_lens_k", "position_ids", "output_attentions"}
    known |= {"max_length_q", "max_length_k"}  # which cu_seq_lens say
    known |= {"deterministic"}  # as all of Quern is
    seen = {}
    for file in Path(transformers.__file__).parent.glob("models/*/modeling_*.py"):
        for call in calls_of(file.read_text(), "attention_interface"):
            seen |= {word.arg: file.name for word in call.keywords if word.arg not in (None, *known)}
    assert not seen


def calls_of(text, name):
    """The calls of a function in a program's text, without parsing all of it."""
    at = text.find(f"{name}(")
    while at >= 0:
        depth, end = 1, at + len(name) + 1
        while depth:
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        yield ast.parse(text[at:end], mode="eval").body
        at = text.find(f"{name}(", end)
