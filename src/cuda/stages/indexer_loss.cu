/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* indexer_loss.cu - the variants of the indexer's loss. */
#include "variants.cuh"

extern const variant<indexer_loss_args> indexer_loss_sm90, indexer_loss_any;

/* indexer_loss_sm90 runs where a caller names it (stage_exec.variant): a GPU has yet to prove it. */
static const variant<indexer_loss_args> *const list[] = {
    &indexer_loss_any,
#ifdef QUERN_SM90
    &indexer_loss_sm90,
#endif
};
static const variants<indexer_loss_args> kernels(list);

static const stage_rows rows([](quern_backend &backend) {
    offer<indexer_loss_args, kernels>(backend.indexer_loss);
});
