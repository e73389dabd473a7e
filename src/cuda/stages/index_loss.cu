/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* index_loss.cu - the variants of the block indexer's loss. */
#include "variants.cuh"

extern const variant<index_loss_args> index_loss_any, index_loss_plain;

static const variant<index_loss_args> *const list[] = {&index_loss_any, &index_loss_plain};
static const variants<index_loss_args> kernels(list);

static const stage_rows rows([](quern_backend &backend) {
    offer<index_loss_args, kernels>(backend.index_loss);
});
