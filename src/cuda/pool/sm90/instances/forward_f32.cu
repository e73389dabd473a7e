/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* forward_f32.cu - entries from rows in shared memory, of projections of f32, biases of f32. */
#include "pool/sm90/forward_few.cuh"

quern_status pool_sm90_forward_long_f32(const pool_kernel &a, int64_t entries, int multiprocessors,
                                        cudaStream_t stream)
{
    return pool_sm90_forward_long<float, float>(a, entries, multiprocessors, stream);
}
