/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* f32.cu - the pooling kernels for projections of f32, biases of f32. */
#include "pool/backward.cuh"
#include "pool/forward.cuh"

quern_status pool_forward_f32(const pool_kernel &a, int64_t entries, int multiprocessors, cudaStream_t stream)
{
    return pool_forward_of<float, float>(a, entries, multiprocessors, stream);
}

quern_status pool_backward_f32(const pool_kernel &a, int64_t entries, int, cudaStream_t stream)
{
    return pool_backward_of<float, float>(a, entries, stream);
}
