# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""A model's linear layers in NVFP4: 4.5 bits a weight, in place, saved and loaded.

    python nvfp4.py
"""

import os
import sys
import tempfile

import torch
from torch import nn

import quern
from quern.nn import NVFP4Linear


def make():
    """Two layers of a transformer's MLP and a head, which is left in floats below."""
    layers = [nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(2)]
    return nn.ModuleDict({"mlp": nn.Sequential(*layers), "head": nn.Linear(256, 128)})


def run(model, x):
    return model["head"](model["mlp"](x))


def size(model):
    return sum(t.numel() * t.element_size() for t in model.state_dict().values())


def main():
    torch.manual_seed(0)
    model, x = make().eval(), torch.randn(4, 256)
    before = size(model)
    with torch.no_grad():
        want = run(model, x)
        # As torchao's quantize_: which layers, by module and name. Without a filter, all that NVFP4 can hold.
        quern.nvfp4.quantize_(model, lambda layer, name: name != "head", scales="four-over-six")
        got = run(model, x)
        error = float((got - want).norm() / want.norm())

        # A state_dict has codes, scales and globals; a model of the same structure loads them.
        other = make().eval()
        for at, layer in enumerate(other["mlp"]):
            for place in (0, 2):
                inner, outer = layer[place].in_features, layer[place].out_features
                other["mlp"][at][place] = NVFP4Linear(inner, outer)
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "model.pt")
            torch.save(model.state_dict(), path)
            other.load_state_dict(torch.load(path))
        same = torch.equal(run(other, x), got)
    print(f"{before / 1e6:.2f} to {size(model) / 1e6:.2f} MB, outputs differ by {error:.3f}, loaded: {same}")
    return same and error < 0.2


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
