/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* indexer.cu - the indexer's variants. */
#include "variants.cuh"

extern const variant<indexer_args> indexer_sm90_one, indexer_sm90, indexer_any;

static const variant<indexer_args> *const list[] = {
#ifdef QUERN_SM90
    &indexer_sm90_one,
    &indexer_sm90,
#endif
    &indexer_any,
};
static const variants<indexer_args> kernels(list);

static const stage_rows rows([](quern_backend &backend) { offer<indexer_args, kernels>(backend.indexer); });
