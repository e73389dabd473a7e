# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""The golden vectors on NumPy's arrays: `make test` runs these without any framework."""

import numpy as np
import pytest

import quern
from quern import _operations as ops
from quern import dsv4, moe, nvfp4

NSA, COMPRESSOR, V4 = 2e-6, 1e-6, 5e-6  # bounds of tests/vectors/INDEX.md
GRADIENT = 1e-5
TILES = {"preset": "tile256", "block_size": 32, "num_selected": 3, "window": 64, "tile": 64}
PAPER = {"block_size": 16, "num_selected": 6, "forced_first": 1, "forced_local": 2}


def nsa_inputs(file, case="full"):
    given = {name.lower(): file[name] for name in ("Q", "K", "V")}
    if case != "noproj":
        given.update(w_k=file["W_k"], w_v=file["W_v"])
    return given if case == "nogate" else {**given, "gate": file["gate"]}


@pytest.mark.parametrize("rules", ["mslk", "causal"])
@pytest.mark.parametrize("case", ["full", "nogate", "noproj", "noncausal"])
def test_nsa_of_tiles(golden, close, case, rules):
    file = golden("nsa_small")
    if f"{case}.{rules}.O" not in file.names():
        assert (case, rules) == ("noncausal", "causal")
        return
    visibility = "started" if rules == "mslk" else "complete"
    idx = file[f"{case}.block_idx_sorted"].astype(np.int32)
    o = quern.nsa(
        **nsa_inputs(file, case),
        **TILES,
        causal=case != "noncausal",
        compressed_visibility=visibility,
        block_idx=np.ascontiguousarray(idx),
    )
    close(o, file[f"{case}.{rules}.O"], NSA)


def test_nsa_of_tokens(golden, close):
    file = golden("nsa_paper_b")
    given = nsa_inputs(file)
    close(quern.nsa(**given, **PAPER, window=48), file["O"], NSA)
    q, k, v, w_k, w_v, gate = (given[name] for name in ("q", "k", "v", "w_k", "w_v", "gate"))
    k_cmp, v_cmp = quern.nsa_compress(k, v, block_size=16, w_k=w_k, w_v=w_v)
    idx, count = quern.nsa_select(q, k_cmp, **PAPER)
    assert np.array_equal(idx, file["sel_idx"]) and np.array_equal(count, (idx >= 0).sum(-1))
    made = quern.nsa_attend(q, k, v, k_cmp, v_cmp, idx, block_size=16, window=48, return_lse=True)
    rows = file["branch_rows"]
    for o, lse, name in zip(made[:3], made[3:], ("cmp", "slc", "sld")):
        close(o[:, rows], file[f"O_{name}.rows"], NSA)
        close(lse, file[f"lse_{name}"], NSA)
    close(quern.nsa_gate(q, *made[:3], gate=gate)[0], file["O"], NSA)


def test_nsa_backward(golden, close):
    file = golden("nsa_paper_b")
    given = nsa_inputs(file)
    given["w_gate"] = given.pop("gate")
    params = ops.params("nsa", **PAPER, window=48, gate="weights")
    kept = ("o", "o_cmp", "o_slc", "o_win", "lse_cmp", "lse_slc", "lse_win", "gates", "k_cmp", "v_cmp")
    kept += ("block_idx", "block_count")
    made = dict(zip(kept, ops.call("nsa", params, given, kept)))
    del made["o"]
    grads = ("d_q", "d_k", "d_v", "d_w_k", "d_w_v", "d_w_gate")
    found = ops.call("nsa", params, {**given, **made, "d_o": file["dO"]}, grads, backward=True)
    for got, name in zip(found, ("dQ", "dK", "dV", "dW_k", "dW_v", "dgate")):
        close(got, file[name], GRADIENT)


def test_gates(golden, close):
    file = golden("nsa_gating")
    given = [file[name] for name in ("Q", "O_cmp", "O_slc", "O_sld")]
    o, gates = quern.nsa_gate(*given, gate=file["W"])
    close(o, file["out"], NSA)
    close(gates, file["gates"], NSA)
    close(quern.nsa_gate(*given)[0], file["out_nogate"], NSA)
    close(quern.nsa_gate(*given, gates=file["gates"])[0], file["out"], NSA)


@pytest.mark.parametrize("case", ["proj", "noproj"])
def test_compress_varlen(golden, close, case):
    file = golden("nsa_compress_varlen")
    weights = {"w_k": file["W_k"], "w_v": file["W_v"]} if case == "proj" else {}
    made = quern.nsa_compress(file["K"], file["V"], block_size=32, cu_seqlens=file["cu_seqlens"], **weights)
    cu = made[2]
    assert np.array_equal(np.diff(cu), file["n_cmp"])
    for got, name in zip(made, ("K_cmp", "V_cmp")):
        want = np.concatenate([file[f"{case}.{name}"][b, :n] for b, n in enumerate(file["n_cmp"])])
        close(got[: cu[-1]], want, NSA)
        assert not got[cu[-1] :].any()


# What is read, blocks, start_token, start_abs_pos, whether there is a block before.
CSA = {"fresh": ("f", 6, 0, 0, False), "cont": ("c", 5, 2, 100, True), "offset_noprev": ("c", 4, 3, 8, False)}
HCA = {"fresh": (2, 0, 0), "cont": (2, 5, 384)}


@pytest.mark.parametrize("part", ["main", "idx"])
@pytest.mark.parametrize("case", CSA)
def test_csa_compressor(golden, close, case, part):
    file = golden("raw_csa")
    which, n, start, position, prev = CSA[case]
    out = dsv4.compress(
        *(file[f"{part}.{name}"] for name in (f"proj_{which}", "Ba", "Bb")),
        prev_b=file[f"{part}.prev"] if prev else None,
        cos_sin=file["cos_sin"] if part == "main" else None,
        n_blocks=n,
        start_token=start,
        start_abs_pos=position,
        rope_at="last",
    )
    close(out, file[f"{case}.{part}.out"], COMPRESSOR)


@pytest.mark.parametrize("case", HCA)
def test_hca_compressor(golden, close, case):
    file = golden("raw_hca")
    n, start, position = HCA[case]
    more = {"n_blocks": n, "start_token": start, "start_abs_pos": position, "rope_at": "last"}
    out = dsv4.compress(file["proj"], file["B"], cos_sin=file["cos_sin"], **more)
    close(out, file[f"{case}.out"], COMPRESSOR)


@pytest.mark.parametrize("kind", ["csa", "hca", "swa"])
def test_dsv4_layer(golden, close, kind):
    file = golden(f"v4_tiny_{kind}")
    weights = {name.removeprefix("w."): file[name] for name in file.names() if name.startswith("w.")}
    rope = "rope.main" if kind == "swa" else "rope.compress"
    table = np.concatenate((file[f"{rope}.cos"], file[f"{rope}.sin"]), -1)
    settings = {"kind": kind, "window": 8, "top_k": file["idx.topk"].shape[-1] if kind == "csa" else 512}
    hidden = file["hidden"]
    out, core = dsv4.layer(hidden, table, weights, **settings, results=("core",))
    close(out, file["out"], V4)
    close(core, file["core"], V4)
    cache = dsv4.Cache(**settings, sequences=2, capacity=64)
    pieces = [cache.append(part, table, weights) for part in np.split(hidden, [20, 21, 22], 1)]
    close(np.concatenate(pieces, 1), file["out"], V4)


@pytest.mark.parametrize("kind", ["topk", "hash"])
def test_moe_layer(golden, close, kind):
    file = golden("v4_moe")
    names = {"weight": "gate.weight", "gate_up": "experts.gate_up_proj", "down": "experts.down_proj"}
    names.update((f"shared_{n}", f"shared_experts.{n}_proj.weight") for n in ("gate", "up", "down"))
    given = {field: file[f"{kind}.w.{name}"] for field, name in names.items()}
    if kind == "hash":
        given.update(input_ids=file["input_ids"], tid2eid=file["hash.w.gate.tid2eid"])
    else:
        given.update(bias=file["topk.w.gate.e_score_correction_bias"])
    settings = {"top_k": 3, "score": "sqrtsoftplus", "renormalize": True}
    scale = float(file[f"{kind}.weights"].sum(-1)[0])  # renormalised weights sum to it
    out, experts, weights = moe.layer(
        file["hidden"], **given, **settings, route_scale=scale, limit=10.0, return_routing=True
    )
    order = "" if kind == "hash" else "_sorted"
    close(out, file[f"{kind}.out"], V4)
    assert np.array_equal(experts, file[f"{kind}.indices{order}"])
    close(weights, file[f"{kind}.weights{order}"], V4)


PROFILES = {"seed": "halfstep", "rne": "rne", "modelopt": "modelopt", "ct": "compressed_tensors"}


@pytest.mark.parametrize("profile", PROFILES)
def test_quantize(golden, profile):
    file = golden("nvfp4_quant")
    names = [name.removeprefix("in.") for name in file.names() if name.startswith("in.")]
    assert len(names) == 16
    for name in names:
        if f"{profile}.codes.{name}" not in file.names():
            assert profile == "modelopt" and "all_" in name  # it divides 0 by 0 there
            continue
        codes, scales, one = nvfp4.quantize(file[f"in.{name}"], profile=PROFILES[profile])
        assert np.array_equal(codes, file[f"{profile}.codes.{name}"]), name
        assert np.array_equal(scales, file[f"{profile}.scales.{name}"]), name
        assert one == file[f"{profile}.gscale.{name}"], name
        if profile == "seed":
            flat = scales.reshape(-1, scales.shape[-1])
            assert np.array_equal(nvfp4.swizzle(flat), file[f"seed.scales_swizzled.{name}"]), name


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("name", ["w1", "w2"])
def test_quantize_weights(golden, name, profile):
    file = golden("nvfp4_weights_scales")
    made = nvfp4.quantize(file[f"in.{name}"], profile=PROFILES[profile], weight=True)
    for got, kind in zip(made, ("codes", "scales", "gscale")):
        assert np.array_equal(got, file[f"{profile}.{kind}.{name}"])
