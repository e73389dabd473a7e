# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""MiniMax-M3's indexer in the transformers package: its queries and keys go to attention, which chooses the
blocks and attends them."""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch import Tensor
from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as m3

from ._blocks import Chooser


class Indexer(m3.MiniMaxM3VLIndexer):
    """Makes a Chooser in the place of lists."""

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        cache: Any,
        position_ids: Tensor,
    ) -> Chooser:
        heads = (*hidden_states.shape[:2], -1, self.head_dim)
        q = self.q_norm(self.q_proj(hidden_states).view(heads))
        k = self.k_norm(self.k_proj(hidden_states).view(heads))
        cos, sin = (t[..., : self.head_dim] for t in position_embeddings)
        q, k = m3.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)
        k = k.transpose(1, 2)
        if cache is not None:
            k = self._layer_of(cache).update_index(k)
        return Chooser(q, k[:, 0], self.block_size, self.topk_blocks, self.local_blocks)

    def _layer_of(self, cache: Any) -> Any:
        layer = cache.layers[self.layer_idx]
        if not hasattr(layer, "update_index"):
            raise ValueError(
                f"accelerate: {type(cache).__name__} has {type(layer).__name__}, which keeps no keys of an "
                "indexer: DynamicCache(config=model.config) is accepted"
            )
        return layer

    def build_block_mask(self, *given: Any, **named: Any) -> Tensor:
        raise ValueError(
            f"accelerate: attn_implementation is '{self.config._attn_implementation}': 'quern' is accepted"
        )


MADE = Indexer


def refusal(module: m3.MiniMaxM3VLIndexer) -> str | None:
    """Why an indexer cannot be replaced."""
    if type(module) is not m3.MiniMaxM3VLIndexer:
        return f"it is a {type(module).__name__}"
    config = module.config
    if module.num_heads != config.num_key_value_heads:
        return (
            f"index_n_heads is {module.num_heads}, num_key_value_heads {config.num_key_value_heads}: "
            "the same is accepted"
        )
    return None


def changer(model: torch.nn.Module) -> Callable[[torch.nn.Module], None]:
    """What replaces an indexer of this model."""

    def change(module: torch.nn.Module) -> None:
        module.__class__ = Indexer

    return change
