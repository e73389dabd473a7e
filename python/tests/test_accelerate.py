# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""quern.integrations.transformers.accelerate: tiny random models of MiniMax-M3 and DeepSeek-V4 against eager
attention."""

import copy
import inspect

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.20")

from tiny_models import (  # noqa: E402
    MODELS,
    check_bf16,
    check_fine_tuning,
    check_greedy,
    check_packed,
    error,
    minimax,
    tokens,
)

from quern.integrations.transformers import accelerate  # noqa: E402

KINDS = ("minimax_m3", "deepseek_v4")


def models(kind, dtype=torch.float32):
    """The model with eager attention, and accelerated."""
    torch.manual_seed(3)
    eager = MODELS[kind]().eval().to(dtype)
    eager.set_attn_implementation("eager")
    eager.set_experts_implementation("eager")
    return eager, accelerate(copy.deepcopy(eager))


def made_cache(model):
    return transformers.DynamicCache(config=model.config)


def step(model, ids, cache, **given):
    """Logits of tokens that follow those of a cache, whose name in the library has changed."""
    named = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    with torch.no_grad():
        return model(ids, **{named: cache}, **given).logits


@pytest.mark.parametrize("kind", KINDS)
def test_logits(kind):
    eager, quern = models(kind)
    exact = copy.deepcopy(eager).double()
    with torch.no_grad():
        want = exact(tokens()).logits
        assert error(quern(tokens()).logits, want) < 5e-6
        assert error(quern(tokens(), use_cache=False).logits, want) < 5e-6
        check_bf16(kind, exact, eager, quern)


@pytest.mark.parametrize("kind", KINDS)
def test_names_and_the_line(kind, capsys):
    eager, quern = models(kind)
    said = capsys.readouterr().out.splitlines()
    replaced = {
        "minimax_m3": [(1, "MiniMaxM3VLIndexer")],
        "deepseek_v4": [(3, "DeepseekV4Attention"), (3, "DeepseekV4DecoderLayer")],
    }[kind]
    assert said == [
        *(f"quern: {count} of {count} {name} replaced" for count, name in replaced),
        f"quern: attn_implementation of {type(eager).__name__} is quern",
        f"quern: experts_implementation of {type(eager).__name__} is quern; while their weights "
        "require gradients, eager",
    ]
    assert list(quern.state_dict()) == list(eager.state_dict())
    quern.load_state_dict(eager.state_dict())
    accelerate(quern)
    assert capsys.readouterr().out.splitlines() == said[len(replaced) :]


def test_plain_models():
    eager, quern = (MODELS["llama"]().eval() for _ in range(2))
    quern.load_state_dict(eager.state_dict())
    accelerate(quern)
    with torch.no_grad():
        assert error(quern(tokens()).logits, eager(tokens()).logits.double()) < 5e-6


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_padding(kind, side, cached):
    eager, quern = models(kind)
    mask = torch.ones(3, 40, dtype=torch.long)
    mask[0, :7] = mask[1, :1] = 0
    given = {"attention_mask": mask if side == "left" else mask.flip(-1)}
    if side == "left":
        given["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    real = given["attention_mask"].bool()
    exact = eager.double()
    with torch.no_grad():
        want = torch.cat([exact(row[kept][None]).logits[0] for row, kept in zip(tokens(), real)])
        assert error(quern(tokens(), use_cache=cached, **given).logits[real], want) < 5e-6


@pytest.mark.parametrize("pieces", [[20, 12, 8], [31, 1, 1, 1, 1, 1, 4], [3, 5, 32]])
@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_prefill_and_decode(kind, left, pieces):
    eager, quern = models(kind)
    mask = torch.ones(3, 40, dtype=torch.long)
    if left:
        mask[0, :7] = mask[1, :1] = 0
    positions, real = (mask.cumsum(-1) - 1).clamp(min=0), mask.bool()
    cache, made, at = made_cache(quern), [], 0
    for ids in tokens().split(pieces, 1):
        end = at + ids.shape[1]
        given = {"attention_mask": mask[:, :end], "position_ids": positions[:, at:end]}
        made.append(step(quern, ids, cache, **given))
        at = end
    exact = eager.double()
    with torch.no_grad():
        want = torch.cat([exact(row[kept][None]).logits[0] for row, kept in zip(tokens(), real)])
    assert error(torch.cat(made, 1)[real], want) < 5e-6


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_generation(kind):
    check_greedy(*models(kind), (40, 33, 21))


@pytest.mark.parametrize("kind", KINDS)
def test_beams(kind):
    eager, quern = models(kind)
    given = {"max_new_tokens": 20, "num_beams": 3, "do_sample": False}
    given["attention_mask"] = torch.ones(3, 40, dtype=torch.long)
    want = eager.generate(tokens(), use_cache=False, **given)  # the library's cache of V4 mixes beams up
    assert torch.equal(quern.generate(tokens(), **given), want)
    assert torch.equal(quern.generate(tokens(), use_cache=False, **given), want)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences(kind):
    check_packed(*models(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_fine_tuning(kind):
    check_fine_tuning(*models(kind))


@pytest.mark.parametrize("kind", MODELS)
def test_compiled(kind):
    eager = MODELS[kind]().eval()
    quern = accelerate(copy.deepcopy(eager))
    positions = torch.cat([torch.arange(n) for n in (5, 20, 15)])[None].expand(3, -1)
    with torch.no_grad():
        compiled = torch.compile(quern, backend="aot_eager", fullgraph=kind != "deepseek_v4")
        for given in ({}, {"position_ids": positions}):
            want = quern(tokens(), use_cache=False, **given).logits.double()
            assert error(compiled(tokens(), use_cache=False, **given).logits, want) < 5e-6


@pytest.mark.parametrize("kind", MODELS)
def test_compiled_generation(kind):
    """The same tokens, with caches that grow and padding."""
    quern = accelerate(MODELS[kind]().eval())
    mask = torch.ones(3, 40, dtype=torch.long)
    mask[0, :9] = 0
    given = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False}
    want = quern.generate(tokens(), **given)
    torch.compiler.reset()  # graphs of the models before count against a limit
    quern.forward = torch.compile(quern.forward, backend="aot_eager")
    assert torch.equal(quern.generate(tokens(), **given), want)


def test_compiled_prompts_fill_the_cache_of_deepseek_v4():
    """A graph's mask always says where sequences begin, also where each row is one."""
    quern = accelerate(MODELS["deepseek_v4"]().eval())
    given = {"max_new_tokens": 2, "do_sample": False}
    want = quern.generate(tokens(), **given)
    torch.compiler.reset()
    quern.forward = torch.compile(quern.forward, backend="aot_eager", dynamic=True)
    assert torch.equal(quern.generate(tokens(), **given), want)


@pytest.mark.parametrize("kind", ("llama", "gpt_oss", "minimax_m3"))
def test_assisted_generation(kind):
    """Tokens that are guessed and taken back."""
    eager = MODELS[kind]().eval()
    quern = accelerate(copy.deepcopy(eager))
    row, given = tokens(1), {"max_new_tokens": 12, "do_sample": False}
    want = eager.generate(row, **given)
    assert torch.equal(quern.generate(row, prompt_lookup_num_tokens=3, **given), want)
    assert torch.equal(quern.generate(row, assistant_model=eager, **given), want)


def test_masks_of_graphs():
    """What a graph computes of a mask, and that it fails where a mask is another."""
    from transformers import masking_utils

    from quern.integrations import _masks

    numbers = torch.tensor([[0] * 5 + [1] * 7 + [2] * 8, [3] * 20])
    packed = masking_utils.packed_sequence_mask_function(numbers)
    windowed = masking_utils.sliding_window_causal_mask_function(4)
    found = _masks._traced(masking_utils.and_masks(windowed, packed), 2, 20, 4)
    assert torch.equal(found.diff(), numbers.diff())
    chunked = masking_utils.chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.int))
    assert torch.equal(_masks._traced(chunked, 2, 20, 4)[1].diff(), (torch.arange(1, 20) % 4 == 0).long())
    blocks = masking_utils.or_masks(masking_utils.causal_mask_function, packed)
    for mask, window in ((windowed, 0), (windowed, 5), (blocks, 0)):
        with pytest.raises(RuntimeError, match="the mask is not causal"):
            _masks._traced(mask, 2, 20, window)


def test_cache_operations(monkeypatch):
    from quern.integrations import _deepseek_v4

    monkeypatch.setattr(_deepseek_v4, "LEAST", 8)  # it grows
    _, quern = models("deepseek_v4")
    ids = tokens(2)
    whole = step(quern, ids, None, use_cache=False)
    cache = made_cache(quern)
    step(quern, ids[:, :25], cache)
    assert cache.get_seq_length() == 25
    copied = copy.deepcopy(cache)
    cache.reorder_cache(torch.tensor([1, 0]))
    assert error(step(quern, ids.flip(0)[:, 25:], cache), whole.flip(0)[:, 25:].double()) < 5e-6
    copied.batch_repeat_interleave(2)
    copied.batch_select_indices(torch.tensor([3, 0]))
    assert error(step(quern, ids.flip(0)[:, 25:], copied), whole.flip(0)[:, 25:].double()) < 5e-6
    cache.reset()
    assert error(step(quern, ids, cache), whole.double()) < 5e-6
    with pytest.raises(ValueError, match="tokens are taken back"):
        cache.crop(-1)
    with pytest.raises(ValueError, match="the cache has 2 sequences, the input 1"):
        step(quern, ids[:1], cache)


def test_what_is_refused():
    _, quern = models("deepseek_v4")
    ids = tokens(2)
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[0, :3] = 0
    leaping = {"attention_mask": mask, "position_ids": torch.arange(40)[None] * 2}
    with pytest.raises(ValueError, match="position_ids leap"):
        step(quern, ids, made_cache(quern), **leaping)
    cache = made_cache(quern)
    step(quern, ids, cache)
    with pytest.raises(ValueError, match="position_ids leap between calls"):
        step(quern, ids[:, :1], cache, position_ids=torch.tensor([[50]]))
    made = quern(ids, use_cache=True)  # with gradients
    with pytest.raises(ValueError, match="filled with gradients"):
        step(quern, ids[:, :1], made["cache"] if "cache" in made else made["past_key_values"])
    with pytest.raises(ValueError, match="experts is 'int4'"):
        accelerate(quern, experts="int4")
    _, sparse = models("minimax_m3")
    sparse.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="attn_implementation is 'eager'"):
        sparse(ids)


def test_what_cannot_be_replaced(capsys):
    torch.manual_seed(3)
    model = MODELS["deepseek_v4"]()
    model.model.layers[1].self_attn.kv_proj = torch.nn.Sequential(model.model.layers[1].self_attn.kv_proj)
    accelerate(model)
    said = "quern: 0 of 3 DeepseekV4Attention replaced; 1 not: kv_proj is a Sequential: Linear is accepted"
    assert capsys.readouterr().out.splitlines()[0] == said
    assert model.config._attn_implementation == "eager"


def test_index_heads_unlike_the_lists(capsys):
    model = accelerate(minimax(index_heads=4).eval())
    said = "0 of 1 MiniMaxM3VLIndexer replaced; 1 not: index_n_heads is 4, num_key_value_heads 2: the same is"
    assert said in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"block_idx.shape\[1\] is 4: 2 is accepted"):
        model(tokens())


def with_experts(kind, experts):
    """A model whose experts alone are another's, with routers that tell tokens apart."""
    torch.manual_seed(3)
    model = MODELS[kind]().eval()
    for name, t in model.named_parameters():
        if "experts" in name or name.endswith("gate.weight"):
            torch.nn.init.normal_(t, std=t.shape[-1] ** -0.5 * 2)
    model.set_attn_implementation("eager")
    model.set_experts_implementation(experts)
    return model


@pytest.mark.parametrize("kind", (*KINDS, "gpt_oss"))
def test_experts(kind):
    eager, quern = (with_experts(kind, name) for name in ("eager", "quern"))
    with torch.no_grad():
        want = copy.deepcopy(eager).double()
        want.set_experts_implementation("eager")
        assert error(quern(tokens()).logits, want(tokens()).logits) < 5e-6
    # In training their own forward computes them.
    assert torch.equal(quern(tokens()).logits, eager(tokens()).logits)
    for model in (eager, quern):
        for name, t in model.named_parameters():
            t.requires_grad_("experts." not in name)
        model(tokens(), labels=tokens()).loss.backward()
    for (name, a), b in zip(quern.named_parameters(), eager.parameters()):
        if b.grad is not None and float(b.grad.norm()) > 0:
            assert error(a.grad, b.grad.double()) < 1e-4, name


def test_experts_that_are_refused(capsys):
    model = with_experts("gpt_oss", "quern")
    for layer in model.model.layers:
        layer.mlp.experts.is_concatenated = True  # which they are not
    with torch.no_grad(), pytest.raises(ValueError, match="GptOssExperts: their gate is none of"):
        model(tokens())
    model = with_experts("deepseek_v4", "quern")
    for layer in model.model.layers:
        layer.mlp.experts.act_fn = torch.nn.GELU()
    with torch.no_grad(), pytest.raises(ValueError, match="their gate is none of"):
        model(tokens())
    model.set_experts_implementation("eager")
    capsys.readouterr()
    accelerate(model)
    said = capsys.readouterr().out.splitlines()[-1]
    assert "experts_implementation of DeepseekV4ForCausalLM is eager; DeepseekV4Experts: their gate" in said


def test_experts_laid_out_anew(capsys):
    """A copy follows its weights."""
    model = with_experts("gpt_oss", "eager")
    quern = accelerate(copy.deepcopy(model))
    assert capsys.readouterr().out.splitlines()[-1].endswith("; else by a copy of them, laid out anew")
    with torch.no_grad():
        for change in (1.0, 1.5, -1.0):
            for one in (model, quern):
                for layer in one.model.layers:
                    layer.mlp.experts.gate_up_proj.mul_(change)
            assert error(quern(tokens()).logits, copy.deepcopy(model).double()(tokens()).logits) < 5e-6
    assert list(quern.state_dict()) == list(model.state_dict())


@pytest.mark.parametrize("kind", (*KINDS, "gpt_oss"))
def test_experts_in_nvfp4(kind):
    from quern import nvfp4

    model = with_experts(kind, "eager")
    quern = accelerate(copy.deepcopy(model), experts="nvfp4")
    saved = quern.state_dict()
    for name, module in model.named_modules():
        if not name.endswith(".experts"):
            continue
        for part, weight in (("gate_up", module.gate_up_proj), ("down", module.down_proj)):
            codes, scales, one = (saved[f"{name}.{part}_{kind}"] for kind in ("codes", "scales", "global"))
            floats = torch.stack(
                [nvfp4.dequantize(c, s, g, weight=True) for c, s, g in zip(codes, scales, one)]
            )
            if part == "gate_up":
                floats = nvfp4.interleave(floats, inverse=True)
            if kind == "gpt_oss" and part == "gate_up":  # pairs
                floats = torch.stack(floats.chunk(2, -1), -1).flatten(-2)
            floats = floats if kind == "gpt_oss" else floats.transpose(1, 2)
            assert 0 < error(floats, weight.detach().double()) < 0.2
            weight.data.copy_(floats)
    with torch.no_grad():
        assert error(quern(tokens()).logits, model.double()(tokens()).logits) < 5e-6
        again = accelerate(with_experts(kind, "eager"), experts="nvfp4")
        for t in again.parameters():
            t.zero_()
        again.load_state_dict(saved)
        assert torch.equal(again(tokens()).logits, quern(tokens()).logits)
        assert quern.bfloat16()(tokens()).logits.isfinite().all()
        assert all(t.dtype == torch.float32 for name, t in quern.named_buffers() if name.endswith("_global"))
