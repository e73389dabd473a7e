# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""What MiniMax-M3's attention must reach on one H200, for hopper.py: the block indexer of 4 x 128, attention
of its lists (64/4 heads, blocks of 128, top-16), and the layer of both beside cuDNN's dense attention.
Operations of the indexer: 2 Hs D_I a pair of query and key that see each other."""

import torch

from measure import act, attempt, empty, line, ms, smooth

F32, I32 = torch.float32, torch.int32
N, HEADS, GROUPS, DIM, TOP = 1 << 16, 64, 4, 128, 16


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


def accept(quern, dense_of):
    noise = ("noise", lambda heads: act(1, N, heads, DIM), (23, 55), (4, 5))
    slow = ("smooth", lambda heads: smooth(N, heads, DIM), (12, 30), (7, 9))
    for case in (noise, slow):
        attempt(measured, quern, *case, dense_of)
