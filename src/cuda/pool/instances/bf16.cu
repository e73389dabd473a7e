/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* bf16.cu - the pooling kernels for projections of bf16, biases of bf16. */
#include "pool/backward.cuh"
#include "pool/forward.cuh"

quern_status pool_forward_bf16(const pool_kernel &a, int64_t entries, int multiprocessors,
                               cudaStream_t stream)
{
    return pool_forward_of<bf16, bf16>(a, entries, multiprocessors, stream);
}

quern_status pool_backward_bf16(const pool_kernel &a, int64_t entries, int, cudaStream_t stream)
{
    return pool_backward_of<bf16, bf16>(a, entries, stream);
}
