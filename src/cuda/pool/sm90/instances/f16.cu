/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* f16.cu - pooling's gradients with rows in shared memory, for projections of f16. */
#include "pool/sm90/long.cuh"
#include "pool/sm90/short.cuh"

quern_status pool_sm90_short_f16(const pool_gradients_kernel &a, const pool_args *, cudaStream_t stream)
{
    return pool_sm90_short<f16>(a, stream);
}

quern_status pool_sm90_long_f16(const pool_gradients_kernel &a, const pool_args *args, cudaStream_t stream)
{
    return pool_sm90_long<f16>(a, args, stream);
}
