# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""Prefill and token-by-token decoding from a cache, beside one pass over the whole sequence.

    python decode.py
"""

import sys

import torch
from torch import nn

from quern.nn import NSAttention

WIDTH, PROMPT, NEW = 64, 200, 24


def rotary(x, positions):
    """Rotates pairs of channels of [.., tokens, heads, channels] by their positions."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * 10000.0 ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[:, None].to(x), angles.sin()[:, None].to(x)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def main():
    torch.manual_seed(0)
    embed, head = nn.Embedding(256, WIDTH), nn.Linear(WIDTH, 256)
    settings = {"block_size": 16, "num_selected": 4, "window": 32}
    attend = NSAttention(WIDTH, 4, kv_heads=2, rotary=rotary, **settings)
    nn.init.normal_(attend.gate, std=0.3)

    def logits(tokens, cache=None):
        x = embed(tokens)
        return head(x + attend(x, cache=cache))

    with torch.no_grad():
        tokens = torch.randint(256, (2, PROMPT))  # two sequences
        cache = attend.make_cache(sequences=2, capacity=PROMPT + NEW)
        last = logits(tokens, cache)[:, -1:]  # prefill: every token of the prompt in one call
        for _ in range(NEW - 1):
            token = last.argmax(-1)
            tokens = torch.cat([tokens, token], 1)
            last = logits(token, cache)  # a step: one token a sequence, against what the cache holds
        whole = logits(tokens)[:, -1:]
    error = float((whole - last).norm() / whole.norm())
    print(f"{cache.length(0)} tokens a sequence; the last logits differ from one pass by {error:.1e}")
    return error


if __name__ == "__main__":
    sys.exit(0 if main() < 1e-5 else 1)
