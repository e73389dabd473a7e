# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""What decoding from paged caches must reach on one H200, for hopper.py: a token of each of many sequences,
whose keys and values stand in pages in random order. Of the bytes that must be read, what a copy would take
over what a step takes in a graph."""

import torch

from experts import copy_rate
from measure import act, attempt, empty, graph_us, line

F32, I32 = torch.float32, torch.int32
HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 64


def table_of(sequences, columns):
    return torch.randperm(sequences * columns, device="cuda").to(I32).view(sequences, columns)


def step_of(sequences, context, rows):
    """The tensors of a step of one token a sequence, its rows in the pages; rows: those of each, by name."""
    t = dict(q=act(sequences, HEADS, DIM), o=empty(sequences, HEADS, DIM))
    t |= dict(slots=torch.arange(sequences, dtype=I32, device="cuda"))
    t |= dict(positions=torch.full((sequences,), context - 1, dtype=I32, device="cuda"))
    t |= dict(cu=torch.arange(sequences + 1, dtype=I32, device="cuda"))
    for name, n in rows.items():
        table = table_of(sequences, (n + PAGE - 1) // PAGE)
        t |= {name: act(table.numel(), KV_HEADS, PAGE * 2 * DIM), name + "_table": table}
    return t


def dense(quern, sequences, context):
    t = step_of(sequences, context, dict(tokens=context))
    t |= dict(lse=empty(HEADS, sequences, dtype=F32))
    us = graph_us(quern.call("attention_decode_step", quern.params("attention-decode-step"), **t), 4)
    return sequences * context * KV_HEADS * 4 * DIM / us


def sparse(quern, sequences, context):
    p = quern.params("nsa-decode-step", gate="weights")
    t = step_of(sequences, context, dict(tokens=context, entries=context // 64))
    t |= dict(w_gate=act(HEADS, 3, DIM))
    us = graph_us(quern.call("nsa_decode_step", p, **t), 4)
    return sequences * (context // 64 + 16 * 64 + 512) * KV_HEADS * 4 * DIM / us


def accept(quern):
    copy = copy_rate() / 1e3  # bytes a microsecond
    for what, least, rate in (("dense", 0.85, dense), ("NSA", 0.7, sparse)):
        attempt(
            lambda: line(
                f"{what} decode, {HEADS}/{KV_HEADS}, 64 sequences of 32k, bf16 pages, over the copy rate",
                least,
                rate(quern, 64, 32768) / copy,
                "",
            )
        )
        torch.cuda.empty_cache()
