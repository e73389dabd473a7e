# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""Trains a small hybrid on text: layers with a window, CSA and HCA, each with experts, and CSA's indexer by
its own loss. Prints the indexer's recall, before and after: of the entries that attention itself weighs most,
how many the indexer chooses.

    python hybrid.py [--steps N] [--device cpu|cuda]
"""

import argparse
import pathlib
import sys
import sysconfig

import torch
from quern import dsv4, moe, rms_norm, rope
from torch import nn
from torch.nn import functional

WIDTH, HEADS, DIM, ROPE, WINDOW, TOP, LENGTH, BATCH = 64, 4, 32, 16, 16, 8, 256, 4
INDEX_HEADS, INDEX_DIM, EXPERTS, INNER, CSA, HCA = 16, 16, 8, 64, 4, 32


class Attention(nn.Module):
    """One key of all heads, which is value too; with a ratio compressed entries, with CSA's an indexer."""

    def __init__(self, ratio):
        super().__init__()
        self.ratio, series = ratio, 2 if ratio == CSA else 1
        self.q, self.kv = nn.Linear(WIDTH, HEADS * DIM, False), nn.Linear(WIDTH, DIM, False)
        self.out, self.sink = nn.Linear(HEADS * DIM, WIDTH, False), nn.Parameter(torch.zeros(HEADS))
        self.norm = nn.Parameter(torch.ones(DIM))
        if ratio:
            self.cmp = nn.Linear(WIDTH, 2 * series * DIM, False)
            self.bias = nn.Parameter(torch.zeros(series, ratio, DIM))
        if ratio == CSA:
            self.index_q = nn.Linear(WIDTH, INDEX_HEADS * INDEX_DIM, False)
            self.index_w = nn.Linear(WIDTH, INDEX_HEADS, False)
            self.index_cmp = nn.Linear(WIDTH, 4 * INDEX_DIM, False)
            self.index_bias = nn.Parameter(torch.zeros(2, CSA, INDEX_DIM))

    def index(self, x, table):
        """Queries, keys and heads' weights of the indexer; x carries no gradient to the layer."""
        tokens = x.shape[:2]
        q = self.index_q(x).view(-1, INDEX_HEADS, INDEX_DIM)
        q = rope(
            q, table, positions=torch.arange(tokens[1], dtype=torch.int32, device=x.device).repeat(tokens[0])
        )
        k = dsv4.compress(self.index_cmp(x), *self.index_bias, cos_sin=table, ratio=CSA)
        return q.view(*tokens, INDEX_HEADS, INDEX_DIM), k, self.index_w(x)

    def forward(self, x, table):
        batch, length, _ = x.shape
        at = torch.arange(length, dtype=torch.int32, device=x.device).repeat(batch)
        q = rope(rms_norm(self.q(x).view(-1, DIM)).view(-1, HEADS, DIM), table, positions=at)
        kv = rope(rms_norm(self.kv(x).view(-1, DIM), self.norm).view(-1, 1, DIM), table, positions=at)
        q, kv = q.view(batch, length, HEADS, DIM), kv.view(batch, length, DIM)
        loss, recall, more = x.new_zeros(()), None, {}
        if self.ratio:
            more = {
                "kv_cmp": dsv4.compress(
                    self.cmp(x), *self.bias, norm_weight=self.norm, cos_sin=table, ratio=self.ratio
                )
            }
            more["ratio"] = self.ratio
        if self.ratio == CSA:
            index = self.index(x.detach(), table)
            more["idx"], more["count"] = dsv4.index(*(t.detach() for t in index), ratio=CSA, top_k=TOP)
        o, lse_win = dsv4.attention(
            q, kv, sink=self.sink, cos_sin=table, window=WINDOW, return_lse_win=True, **more
        )
        if self.ratio == CSA:
            taught = (q.detach(), more["kv_cmp"].detach(), lse_win)
            loss = dsv4.index_loss(*index, *taught, sink=self.sink.detach(), ratio=CSA)
            recall = self.recall(*taught, more["idx"])
        return self.out(o.flatten(2)), loss, recall

    def recall(self, q, entries, lse_win, idx):
        """Of the TOP entries with the most attention, how many are chosen, where there are more than TOP."""
        scores = torch.einsum("bthd,bsd->bths", q, entries) * DIM**-0.5
        seen = (torch.arange(q.shape[1], device=q.device) + 1) // CSA
        hidden = torch.arange(entries.shape[1], device=q.device) >= seen[:, None]
        scores = scores.masked_fill(hidden[:, None], -torch.inf)
        rest = torch.logaddexp(lse_win, self.sink.detach()[:, None]).transpose(1, 2)[..., None]
        weight = (scores - torch.logaddexp(scores.logsumexp(-1, True), rest)).exp().sum(2)
        best = weight[:, seen > TOP].topk(TOP).indices
        chosen = idx[:, seen > TOP].long()
        return (best[..., None] == chosen[..., None, :]).any(-1).float().mean()


class Layer(nn.Module):
    def __init__(self, ratio):
        super().__init__()
        self.attend = Attention(ratio)
        self.norms = nn.Parameter(torch.ones(2, WIDTH))
        self.router = nn.Parameter(torch.randn(EXPERTS, WIDTH) * WIDTH**-0.5)
        self.gate_up = nn.Parameter(torch.randn(EXPERTS, 2 * INNER, WIDTH) * WIDTH**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) * INNER**-0.5)

    def forward(self, x, table):
        y, loss, recall = self.attend(rms_norm(x.flatten(0, 1), self.norms[0]).view_as(x), table)
        x = x + y
        h = rms_norm(x.flatten(0, 1), self.norms[1])
        y = moe.layer(
            h,
            self.router,
            gate_up=self.gate_up,
            down=self.down,
            top_k=2,
            score="sqrtsoftplus",
            renormalize=True,
        )
        return x + y.view_as(x), loss, recall


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(256, WIDTH), nn.Linear(WIDTH, 256)
        self.layers = nn.ModuleList(Layer(ratio) for ratio in (0, CSA, HCA, CSA))
        self.register_buffer("table", dsv4.rope_table(LENGTH, ROPE, like=torch.zeros(1)))

    def forward(self, tokens):
        x, losses, recalls = self.embed(tokens), 0.0, []
        for layer in self.layers:
            x, loss, recall = layer(x, self.table)
            losses = losses + loss
            recalls += [] if recall is None else [recall]
        return self.head(x), losses, torch.stack(recalls).mean()


def main(steps, device):
    torch.manual_seed(0)
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    text = b"".join((folder / f"{name}.py").read_bytes() for name in ("argparse", "ast", "inspect", "typing"))
    text = torch.tensor(list(text))
    model = Model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    held = torch.stack([text[i * LENGTH : (i + 1) * LENGTH] for i in range(BATCH)]).to(device)
    text = text[BATCH * LENGTH :]
    before = model(held)[2].item()
    for step in range(steps):
        starts = torch.randint(len(text) - LENGTH - 1, (BATCH,)).tolist()
        rows = torch.stack([text[i : i + LENGTH + 1] for i in starts]).to(device)
        logits, index_loss, recall = model(rows[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        (loss + index_loss).backward()
        optimizer.step()
        if step % 20 == 0 or step == steps - 1:
            print(f"step {step}: {loss.item():.3f} nats a byte, the indexers' loss {index_loss.item():.3f}")
    after = model(held)[2].item()
    print(f"recall of attention's best {TOP} entries: {before:.3f} before, {after:.3f} after")
    return before, after


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    before, after = main(**vars(parser.parse_args()))
    sys.exit(0 if after > before else 1)
