# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""examples/v4 against the transformers package, which computes the same small model in f64: logits in one
shot, in chunks and token by token; greedy tokens, in batches that fork, and resumed from a session."""

import json
import os
import pathlib
import shutil
import subprocess

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")

from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402
from v4_folder import VOCABULARY, Folder  # noqa: E402

ROOT = pathlib.Path(__file__).parents[2]
V4 = os.environ.get("QUERN_V4", str(ROOT / "build" / "release" / "v4"))
BOUND = 1e-4
TOKENS, NEW = 90, 12

pytestmark = pytest.mark.skipif(shutil.which(V4) is None, reason="examples/v4 is not built")


def v4(*arguments):
    done = subprocess.run([V4, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module", params=[False, True], ids=["fp4", "fp8"])
def made(request, tmp_path_factory):
    """The folder, and transformers' model of the same values."""
    folder = tmp_path_factory.mktemp("v4")
    model = Folder(3, fp8_experts=request.param)
    model.write(folder / "model")
    model.write_values(folder / "values")
    options = {"dtype": torch.float64, "attn_implementation": "eager", "experts_implementation": "eager"}
    return folder, AutoModelForCausalLM.from_pretrained(folder / "values", **options)


def prompt(folder, name, count, seed=1):
    tokens = torch.randint(
        VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32
    )
    save_file({"tokens": tokens}, folder / name)
    return tokens


def expected(model, tokens):
    with torch.no_grad():
        return model(tokens[None].long(), use_cache=False).logits[0]


def check_greedy(model, tokens, new):
    """Every new token is the likeliest, wherever the two likeliest differ by more than the bound."""
    logits = expected(model, torch.cat([tokens, torch.tensor(new, dtype=torch.int32)]))
    for i, token in enumerate(new):
        row = logits[len(tokens) - 1 + i]
        best = row.topk(2)
        if best.values[0] - best.values[1] > BOUND * row.abs().max():
            assert token == best.indices[0], i


@pytest.mark.parametrize("chunk", [512, 7, 1])
def test_logits(made, chunk):
    folder, model = made
    tokens = prompt(folder, "tokens", TOKENS)
    v4("logits", folder / "model", folder / "tokens", folder / "logits", "--chunk", chunk)
    logits, right = load_file(folder / "logits")["logits"].double(), expected(model, tokens)
    assert ((logits - right).norm(dim=1) <= BOUND * right.norm(dim=1)).all()


def test_greedy_and_session(made, tmp_path):
    folder, model = made
    tokens = prompt(folder, "tokens", TOKENS)
    save_file({"tokens": tokens[:40].clone()}, folder / "begin")
    options = ("--max-new", NEW, "--greedy", "--json", "--cache", tmp_path / "experts")
    new = json.loads(v4("generate", folder / "model", "--tokens", folder / "tokens", *options))["tokens"]
    check_greedy(model, tokens, new)
    options += ("--session", tmp_path / "session")
    v4("generate", folder / "model", "--tokens", folder / "begin", *options)
    assert (
        json.loads(v4("generate", folder / "model", "--tokens", folder / "tokens", *options))["tokens"] == new
    )


def test_batch(made):
    folder, model = made
    lengths = torch.tensor([35, 60, 48], dtype=torch.int32)
    tokens = torch.stack([prompt(folder, "row", 64, seed) for seed in range(3)])
    tokens[:, :35] = tokens[0, :35]
    save_file({"tokens": tokens, "lengths": lengths}, folder / "batch")
    options = ("--max-new", NEW, "--greedy", "--json", "--chunk", 16)
    rows = json.loads(v4("generate", folder / "model", "--batch", folder / "batch", *options))["tokens"]
    for row, length, new in zip(tokens, lengths, rows):
        check_greedy(model, row[:length], new)
