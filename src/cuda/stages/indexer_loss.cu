/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* indexer_loss.cu - the variants of the indexer's loss. */
#include "variants.cuh"

extern const variant<indexer_loss_args> indexer_loss_sm90, indexer_loss_any;

static const variant<indexer_loss_args> *const list[] = {
#ifdef QUERN_SM90
    &indexer_loss_sm90,
#endif
    &indexer_loss_any,
};
static const variants<indexer_loss_args> kernels(list);

static const stage_rows rows([](quern_backend &backend) {
    offer<indexer_loss_args, kernels>(backend.indexer_loss);
});
