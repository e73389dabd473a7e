/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* bf16.cu - pooling's gradients with rows in shared memory, for projections of bf16. */
#include "pool/sm90/long.cuh"
#include "pool/sm90/short.cuh"

quern_status pool_sm90_short_bf16(const pool_gradients_kernel &a, const pool_args *, cudaStream_t stream)
{
    return pool_sm90_short<bf16>(a, stream);
}

quern_status pool_sm90_long_bf16(const pool_gradients_kernel &a, const pool_args *args, cudaStream_t stream)
{
    return pool_sm90_long<bf16>(a, args, stream);
}
