/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* widen_blocks.cu - FP8 weights with scales of blocks to floats. */
#include "variants.cuh"

extern const variant<widen_blocks_args> widen_blocks_any;

static const variant<widen_blocks_args> *const list[] = {&widen_blocks_any};
static const variants<widen_blocks_args> kernels(list);

static const stage_rows rows([](quern_backend &backend) {
    offer<widen_blocks_args, kernels>(backend.widen_blocks);
});
