# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""What MiniMax-M3's attention must reach on one H200, for hopper.py: the block indexer of 4 x 128, attention
of its lists (64/4 heads, blocks of 128, top-16), the indexer's loss over them, the layer of indexer and
attention beside cuDNN's dense attention, and its decode from pages: of the bytes of index keys and chosen
blocks, what a copy would take over what a step takes in a graph. Operations of the indexer: 2 Hs D_I a pair
of query and key that see each other."""

import torch

from experts import copy_rate
from measure import act, attempt, empty, graph_us, line, ms, smooth
from pages import PAGE, table_of

F32, I32 = torch.float32, torch.int32
N, HEADS, GROUPS, DIM, TOP, BLOCK = 1 << 16, 64, 4, 128, 16, 128


def params(quern, selection):
    return quern.nsa_params("msa", selection=selection)


class Layer:
    def __init__(self, quern, make):
        self.quern = quern
        self.q, self.k, self.v = make(HEADS), make(GROUPS), make(GROUPS)
        self.q_index, self.k_index = make(GROUPS), make(1)[:, :, 0].contiguous()
        self.lists = empty(1, GROUPS, N, TOP, dtype=I32)
        self.o, self.lse = empty(1, N, HEADS, DIM), empty(1, HEADS, N, dtype=F32)

    def index_ms(self):
        call = self.quern.call(
            "nsa_index",
            self.quern.params("nsa-index"),
            q_index=self.q_index,
            k_index=self.k_index,
            block_idx=self.lists,
        )
        return ms(call, 9, 2)

    def attend_ms(self):
        """Milliseconds of the selected branch over the lists: forward, backward."""
        p = params(self.quern, 1)
        given = dict(q=self.q, k=self.k, v=self.v, block_idx=self.lists, lse_slc=self.lse)
        forward = ms(self.quern.call("nsa_forward", p, o=self.o, **given), 7, 2)
        given |= {f"d_{name}": torch.empty_like(given[name]) for name in ("q", "k", "v")}
        do = act(1, N, HEADS, DIM)
        backward = ms(self.quern.call("nsa_backward", p, o=self.o, d_o=do, **given), 7, 2)
        return forward, backward

    def loss_ms(self):
        """Of the indexer's loss and its gradients over the lists, attention's lse handed in."""
        call = self.quern.call(
            "nsa_index_loss",
            self.quern.params("nsa-index-loss"),
            q_index=self.q_index,
            k_index=self.k_index,
            q=self.q,
            k=self.k,
            block_idx=self.lists,
            lse_slc=self.lse,
            loss=empty((), dtype=F32),
            d_q_index=torch.empty_like(self.q_index),
            d_k_index=torch.empty_like(self.k_index),
        )
        return ms(call, 7, 2)

    def layer_ms(self):
        """Of the forward with the indexer."""
        call = self.quern.call(
            "nsa_forward",
            params(self.quern, 2),
            q=self.q,
            k=self.k,
            v=self.v,
            q_index=self.q_index,
            k_index=self.k_index,
            o=self.o,
            lse_slc=self.lse,
            block_idx=self.lists,
        )
        return ms(call, 7, 2)


def measured(quern, what, make, attend, over_dense, dense_of):
    layer = Layer(quern, make)
    index = layer.index_ms()
    if what == "noise":
        rate = 2e-9 * GROUPS * DIM * N * (N + 1) / 2
        line("MSA indexer 4 x 128, 64k, top-16", 550, rate / index, "TFLOP/s")
    forward, backward = layer.attend_ms()
    line(f"MSA selected, 64/4, 64k, {what}: forward", attend[0], forward, "ms", True)
    line(f"MSA selected, 64/4, 64k, {what}: backward", attend[1], backward, "ms", True)
    line(
        f"MSA indexer's loss, 64/4, 64k, {what}: over the selected branch's forward and backward",
        1.5,
        layer.loss_ms() / (forward + backward),
        "x",
        True,
    )
    whole = layer.layer_ms()
    del layer
    torch.cuda.empty_cache()
    peer = dense_of(N, HEADS, GROUPS, True)
    print(
        f"    MSA 64/4, 64k, {what}: index {index:.2f}, layer {whole:.2f}, backward {backward:.2f} ms; "
        f"cuDNN {peer[0]:.1f}, with backward {peer[1]:.1f} ms",
        flush=True,
    )
    line(f"MSA layer, 64/4, 64k, {what}: forward over cuDNN dense", over_dense[0], peer[0] / whole, "x")
    line(
        f"MSA layer, 64/4, 64k, {what}: forward and backward over cuDNN dense",
        over_dense[1],
        peer[1] / (whole + backward),
        "x",
    )


def decode(quern, sequences, context):
    """Bytes a microsecond of a step of one token a sequence."""
    table = table_of(sequences, context // PAGE)
    t = dict(q=act(sequences, HEADS, DIM), o=empty(sequences, HEADS, DIM))
    t |= dict(q_index=act(sequences, GROUPS, DIM))
    t |= dict(slots=torch.arange(sequences, dtype=I32, device="cuda"))
    t |= dict(positions=torch.full((sequences,), context - 1, dtype=I32, device="cuda"))
    t |= dict(cu=torch.arange(sequences + 1, dtype=I32, device="cuda"))
    t |= dict(tokens=act(table.numel(), GROUPS, PAGE * 2 * DIM), tokens_table=table)
    t |= dict(index=act(table.numel(), 1, PAGE * DIM))
    p = quern.params(
        "nsa-decode-step",
        **dict(block_size=BLOCK, num_selected=TOP, forced_first=0, forced_local=1),
        **dict(branches="slc", ungated=True, selection="indexed"),
    )
    us = graph_us(quern.call("nsa_decode_step", p, **t), 4)
    return sequences * 2 * DIM * (context + 2 * GROUPS * TOP * BLOCK) / us


def accept(quern, dense_of):
    noise = ("noise", lambda heads: act(1, N, heads, DIM), (23, 55), (4, 5))
    slow = ("smooth", lambda heads: smooth(N, heads, DIM), (12, 30), (7, 9))
    for case in (noise, slow):
        attempt(measured, quern, *case, dense_of)
    torch.cuda.empty_cache()
    copy = copy_rate() / 1e3  # bytes a microsecond
    attempt(
        lambda: line(
            "MSA decode, 64/4, 64 sequences of 128k, bf16 pages, over the copy rate",
            0.75,
            decode(quern, 64, 1 << 17) / copy,
            "",
        )
    )
