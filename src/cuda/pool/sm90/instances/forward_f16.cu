/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* forward_f16.cu - entries from rows in shared memory, of projections of f16, biases of f16. */
#include "pool/sm90/forward_few.cuh"
#include "pool/sm90/forward_short.cuh"

quern_status pool_sm90_forward_long_f16(const pool_kernel &a, int64_t entries, int multiprocessors,
                                        cudaStream_t stream)
{
    return pool_sm90_forward_long<f16, f16>(a, entries, multiprocessors, stream);
}

quern_status pool_sm90_forward_short_f16(const pool_kernel &a, int64_t entries, int multiprocessors,
                                         cudaStream_t stream)
{
    return pool_sm90_forward_short<f16, f16>(a, entries, multiprocessors, stream);
}
