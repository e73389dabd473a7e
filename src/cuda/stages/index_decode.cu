/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* index_decode.cu - the variants of the block indexer of a step over pages. */
#include "variants.cuh"

extern const variant<index_decode_args> index_decode_any;

static const variant<index_decode_args> *const list[] = {&index_decode_any};
static const variants<index_decode_args> kernels(list);

static const stage_rows rows([](quern_backend &backend) {
    offer<index_decode_args, kernels>(backend.index_decode);
});
