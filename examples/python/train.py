# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""Trains a byte-level language model of two layers with native sparse attention, and says its loss.

    python train.py [STEPS]
"""

import sys

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from quern.nn import NSAttention

WIDTH, HEADS, LENGTH, BATCH = 64, 4, 512, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_attend, self.norm_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        # A query sees 8 blocks of 16 tokens that it chooses, the last 64 tokens, and means of all blocks.
        self.attend = NSAttention(WIDTH, HEADS, kv_heads=2, block_size=16, num_selected=8, window=64)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        x = x + self.attend(self.norm_attend(x))
        return x + self.mlp(self.norm_mlp(x))


class Model(nn.Module):
    def __init__(self, layers=2):
        super().__init__()
        self.embed, self.head = nn.Embedding(256, WIDTH), nn.Linear(WIDTH, 256)
        self.position = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, tokens):
        x = self.embed(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)  # memory of one layer's insides at a time
        return self.head(x)


def main(steps=40):
    torch.manual_seed(0)
    text = torch.tensor(list(b"the quick brown fox jumps over the lazy dog, and sleeps. " * 200))
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    first = last = None
    for step in range(steps):
        starts = torch.randint(len(text) - LENGTH - 1, (BATCH,)).tolist()
        rows = torch.stack([text[i : i + LENGTH + 1] for i in starts])
        logits = model(rows[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        last = float(loss.detach())
        first = last if first is None else first
        if step % 10 == 0 or step == steps - 1:
            print(f"step {step}: {last:.3f} nats a byte")
    return first, last


if __name__ == "__main__":
    first, last = main(*map(int, sys.argv[1:2]))
    sys.exit(0 if last < first else 1)
