# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""quern.load_nvfp4: tensors as they are stored, and experts that the layer takes, without a framework."""

import gc
import json
import struct

import numpy as np
import pytest

import quern

E, D, INNER = 3, 64, 32
CODES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
PARTS = {"gate_proj": (INNER, D), "up_proj": (INNER, D), "down_proj": (D, INNER)}


def save(path, tensors):
    """A safetensors file of (dtype, shape, bytes)."""
    header, data = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def e4m3(byte):
    exponent, mantissa = byte >> 3, byte & 7
    return np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent.astype(float) - 10))


def made(compressed=False):
    """Experts of layer 0 in ModelOpt's or compressed-tensors' NVFP4, and their values."""
    random = np.random.default_rng(1)
    tensors, values = {}, {}
    for e in range(E):
        for part, (n, k) in PARTS.items():
            module = f"model.layers.0.mlp.experts.{e}.{part}"
            codes = random.integers(0, 256, (n, k // 2), np.uint8)
            scales = random.integers(0x50, 0x78, (n, k // 16), np.uint8)
            g = np.float32(2.0 ** -(10 + e))
            suffix = ".weight_packed" if compressed else ".weight"
            tensors[module + suffix] = "U8", [n, k // 2], codes.tobytes()
            tensors[module + ".weight_scale"] = "F8_E4M3", [n, k // 16], scales.tobytes()
            if compressed:
                tensors[module + ".weight_global_scale"] = "F32", [1], (1 / g).tobytes()
            else:
                tensors[module + ".weight_scale_2"] = "F32", [], g.tobytes()
                tensors[module + ".input_scale"] = "F32", [], np.float32(0.01).tobytes()
            nibbles = np.stack([codes & 15, codes >> 4], -1).reshape(n, k)
            values[e, part] = CODES[nibbles] * np.repeat(e4m3(scales), 16, 1) * g
    router = random.standard_normal((E, D)).astype(np.float32)
    tensors["model.layers.0.mlp.gate.weight"] = "F32", [E, D], router.tobytes()
    tensors["model.embed_tokens.weight"] = "BF16", [2, 3], np.arange(6, dtype=np.uint16).tobytes()
    return tensors, values, router


def layer_of(hidden, values, router):
    """The layer in float64: top 2 of the softmax, renormalised."""
    logits = hidden @ router.T.astype(float)
    scores = np.exp(logits - logits.max(1, keepdims=True))
    scores /= scores.sum(1, keepdims=True)
    out = np.zeros(hidden.shape)
    for t, row in enumerate(hidden):
        best = np.argsort(-scores[t], kind="stable")[:2]
        for e in best:
            gate, up = values[e, "gate_proj"] @ row, values[e, "up_proj"] @ row
            inner = gate / (1 + np.exp(-gate)) * up
            out[t] += scores[t, e] / scores[t, best].sum() * (values[e, "down_proj"] @ inner)
    return out


@pytest.mark.parametrize("compressed", [False, True])
def test_experts_compute_what_the_file_means(tmp_path, compressed):
    tensors, values, router = made(compressed)
    save(tmp_path / "model.safetensors", tensors)
    checkpoint = quern.load_nvfp4(tmp_path)
    hidden = np.random.default_rng(2).standard_normal((5, D)).astype(np.float32)
    experts = checkpoint.experts(0)
    assert experts["gate_up_codes"].shape == (E, D // 2, 2 * INNER)
    assert experts["gate_up_global"].shape == (E, 2)
    out = quern.moe.layer(hidden, **experts, top_k=2, renormalize=True)
    expected = layer_of(hidden.astype(float), values, router)
    assert np.abs(out - expected).max() <= 1e-5 * np.abs(expected).max()
    repacked = quern.moe.layer(hidden, **checkpoint.experts(0, repacked=True), top_k=2, renormalize=True)
    assert np.array_equal(out, repacked)


def test_the_shared_expert_is_added(tmp_path):
    tensors, values, router = made()
    rng = np.random.default_rng(3)
    shared = {part: rng.standard_normal(shape) / 8 for part, shape in PARTS.items()}
    for part, weight in shared.items():
        name = f"model.layers.0.mlp.shared_expert.{part}.weight"
        tensors[name] = "F32", weight.shape, weight.astype(np.float32).tobytes()
    save(tmp_path / "model.safetensors", tensors)
    hidden = rng.standard_normal((5, D)).astype(np.float32)
    experts = quern.load_nvfp4(tmp_path).experts(0)
    out = quern.moe.layer(hidden, **experts, top_k=2, renormalize=True)
    gate = hidden @ shared["gate_proj"].T
    added = (gate / (1 + np.exp(-gate)) * (hidden @ shared["up_proj"].T)) @ shared["down_proj"].T
    expected = layer_of(hidden.astype(float), values, router) + added
    assert np.abs(out - expected).max() <= 1e-5 * np.abs(expected).max()
    # one whose output a gate scales is left out
    tensors["model.layers.0.mlp.shared_expert_gate.weight"] = "F32", (1, D), bytes(4 * D)
    save(tmp_path / "model.safetensors", tensors)
    assert "shared_gate" not in quern.load_nvfp4(tmp_path).experts(0)


def test_tensors_are_views_that_outlive_the_checkpoint(tmp_path):
    tensors, _, router = made()
    save(tmp_path / "model.safetensors", tensors)
    checkpoint = quern.load_nvfp4(str(tmp_path / "model.safetensors"))
    assert len(checkpoint) == len(tensors) and set(checkpoint) == set(tensors)
    name = "model.layers.0.mlp.experts.2.up_proj.weight"
    assert checkpoint.format(name) == "nvfp4 modelopt" and checkpoint.dtype(name) == "U8"
    assert checkpoint.format(name + "_scale") == "scales" and checkpoint.shard(name) == "model.safetensors"
    for key, (_, shape, content) in tensors.items():
        assert checkpoint[key].shape == tuple(shape) and checkpoint[key].tobytes() == content
        assert not checkpoint[key].flags.writeable
    embedding, weight = checkpoint["model.embed_tokens.weight"], checkpoint["model.layers.0.mlp.gate.weight"]
    assert embedding.dtype == np.uint16 and weight.dtype == np.float32
    del checkpoint
    gc.collect()
    assert np.array_equal(weight, router) and embedding[1, 2] == 5


def test_activations_are_quantised_by_the_files_scales(tmp_path):
    tensors, _, _ = made()
    save(tmp_path / "model.safetensors", tensors)
    checkpoint = quern.load_nvfp4(tmp_path)
    experts = checkpoint.experts(0, a4=True)
    assert np.allclose(experts["gate_up_input_global"], 0.01) and experts["a4"] is True
    assert "gate_up_input_global" not in checkpoint.experts(0)
    hidden = np.random.default_rng(2).standard_normal((5, D)).astype(np.float32)
    assert np.isfinite(quern.moe.layer(hidden, **experts, top_k=2)).all()
    tensors, _, _ = made(True)
    save(tmp_path / "model.safetensors", tensors)
    with pytest.raises(ValueError, match="layer 0 has no input scales"):
        quern.load_nvfp4(tmp_path).experts(0, a4=True)


def test_what_is_wrong_is_said(tmp_path):
    with pytest.raises(OSError, match="nothing-here"):
        quern.load_nvfp4(tmp_path / "nothing-here")
    (tmp_path / "text").write_text("no checkpoint")
    with pytest.raises(ValueError, match="text"):
        quern.load_nvfp4(tmp_path / "text")
    tensors, _, _ = made()
    del tensors["model.layers.0.mlp.experts.1.up_proj.weight_scale"]
    save(tmp_path / "model.safetensors", tensors)
    checkpoint = quern.load_nvfp4(tmp_path)
    with pytest.raises(ValueError, match="1.up_proj.weight_scale' is missing"):
        checkpoint.experts(0)
    with pytest.raises(ValueError, match="layer 7"):
        checkpoint.experts(7)
    with pytest.raises(KeyError):
        checkpoint["no.such.tensor"]
    with pytest.raises(TypeError, match="neither copied nor pickled"):
        checkpoint.__reduce__()
    index = {"weight_map": {"a": "model.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="index"):
        quern.load_nvfp4(tmp_path)
