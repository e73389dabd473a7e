/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* pool_append.cu - a step's tokens into the states of DeepSeek-V4's compressors. */
#include "variants.cuh"

extern const variant<pool_append_args> pool_append_one, pool_append_any;

static const variant<pool_append_args> *const list[] = {&pool_append_one, &pool_append_any};
static const variants<pool_append_args> kernels(list);

static const stage_rows rows([](quern_backend &backend) {
    offer<pool_append_args, kernels>(backend.pool_append);
});
