/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* forward_f16_f32.cu - entries from rows in shared memory, of projections of f16, biases of f32. */
#include "pool/sm90/forward_few.cuh"
#include "pool/sm90/forward_short.cuh"

quern_status pool_sm90_forward_long_f16_f32(const pool_kernel &a, int64_t entries, int multiprocessors,
                                            cudaStream_t stream)
{
    return pool_sm90_forward_long<f16, float>(a, entries, multiprocessors, stream);
}

quern_status pool_sm90_forward_short_f16_f32(const pool_kernel &a, int64_t entries, int multiprocessors,
                                             cudaStream_t stream)
{
    return pool_sm90_forward_short<f16, float>(a, entries, multiprocessors, stream);
}
