/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* params.cuh - pooling's gradients with rows in shared memory: sizes, and what kernels take beside a call's
 * arguments. */
#ifndef QUERN_CUDA_POOL_SM90_PARAMS_CUH
#define QUERN_CUDA_POOL_SM90_PARAMS_CUH

#include "pool/params.cuh"

/* Channels of an entry; rows of a thread; blocks that a GPU of 132 multiprocessors holds: each keeps sums
 * over its entries. */
enum { WIDTH = 512, ROWS = 8, SHORT_RATIO = 4, SHORT_RUNS = 132 };

struct pool_gradients_kernel {
    pool_kernel pool;
    any_floats bias_a, bias_b;
    int64_t entries;
    bool stores; /* there is d_proj */
};

typedef quern_status pool_sm90_launch(const pool_gradients_kernel &a, cudaStream_t stream);
extern pool_sm90_launch pool_sm90_short_bf16, pool_sm90_short_f16;
/* Bytes of shared memory of the largest. */
enum { POOL_SM90_SHARED = 226 * 1024 };

#endif
