/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* pool.cu - the variants of DeepSeek-V4's compressors. */
#include "variants.cuh"

extern const variant<pool_args> pool_forward_any, pool_backward_sm90, pool_backward_any;

static const variant<pool_args> *const forward_list[] = {&pool_forward_any};
static const variants<pool_args> forward(forward_list);
static const variant<pool_args> *const backward_list[] = {
#ifdef QUERN_SM90
    &pool_backward_sm90,
#endif
    &pool_backward_any,
};
static const variants<pool_args> backward(backward_list);

static const stage_rows rows([](quern_backend &backend) {
    offer<pool_args, forward>(backend.pool_forward);
    offer<pool_args, backward>(backend.pool_backward);
});
