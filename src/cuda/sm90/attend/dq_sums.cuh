/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* dq_sums.cuh - dQ's f32 sums in workspace: one tile of SM90_BACKWARD_ROWS queries after another, and of each
 * tile one head after another. A tile lies there as 128 threads hold it in wgmma's accumulators: for every
 * eight columns four values a thread, thread after thread. So they write it to shared memory 16 bytes at a
 * time without bank conflicts, and one bulk copy adds it. */
#ifndef QUERN_CUDA_SM90_ATTEND_DQ_SUMS_CUH
#define QUERN_CUDA_SM90_ATTEND_DQ_SUMS_CUH

#include "sm90/attend/attend.cuh"

namespace sm90_backward
{

/* The first tile of a sequence. */
__device__ __forceinline__ int first_tile(const seqs &s, const sequence &seq)
{
    if (s.cu_q != NULL) return (int)(seq.q0 / SM90_BACKWARD_ROWS + seq.b);
    return (int)(seq.b * ((s.n_q + SM90_BACKWARD_ROWS - 1) / SM90_BACKWARD_ROWS));
}

/* Where the sums of a tile and head begin; dim: padded. */
__device__ __forceinline__ int64_t sums_at(int tile, int head, int heads, int dim)
{
    return ((int64_t)tile * heads + head) * (SM90_BACKWARD_ROWS * dim);
}

/* Where in a tile the values of columns 8 i to 8 i + 7 begin. */
__device__ __forceinline__ int held_at(int i)
{
    return i * (128 * 4);
}

} // namespace sm90_backward

#endif
