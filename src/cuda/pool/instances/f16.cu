/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* f16.cu - the pooling kernels for projections of f16, biases of f16. */
#include "pool/backward.cuh"
#include "pool/forward.cuh"

quern_status pool_forward_f16(const pool_kernel &a, int64_t entries, int multiprocessors, cudaStream_t stream)
{
    return pool_forward_of<f16, f16>(a, entries, multiprocessors, stream);
}

quern_status pool_backward_f16(const pool_kernel &a, int64_t entries, int, cudaStream_t stream)
{
    return pool_backward_of<f16, f16>(a, entries, stream);
}
