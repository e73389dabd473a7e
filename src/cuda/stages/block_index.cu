/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* block_index.cu - the block indexer's variants. */
#include "variants.cuh"

extern const variant<block_index_args> block_index_sm90, block_index_any;

static const variant<block_index_args> *const list[] = {
#ifdef QUERN_SM90
    &block_index_sm90,
#endif
    &block_index_any,
};
static const variants<block_index_args> kernels(list);

static const stage_rows rows([](quern_backend &backend) {
    offer<block_index_args, kernels>(backend.block_index);
});
