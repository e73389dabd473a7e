/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* rowdot.cu - the rowdot stage. Limit: bytes moved over the copy rate. */
#include "common/chunk.cuh"
#include "common/launch.cuh"
#include "stages.cuh"

enum { THREADS = 256 };

struct rowdot_kernel {
    view4 a, b;
    view3 out;
    int64_t n, heads, dim, rows;
    const int32_t *cu;
    int64_t last;
    bool vec;
};

template <typename T, int LPR>
__global__ void __launch_bounds__(THREADS) rowdot(const __grid_constant__ rowdot_kernel a)
{
    const int64_t i = ((int64_t)blockIdx.x * THREADS + threadIdx.x) / LPR;
    const int c = threadIdx.x % LPR * CHUNK;
    const int64_t row = i < a.rows ? i : a.rows - 1, h = row % a.heads, n = row / a.heads % a.n,
                  b = row / a.heads / a.n;
    float dot = 0.0f;
    if (c < a.dim && (a.cu == NULL || n < cu_seqlens_at(a.cu, a.last, a.n))) {
        const chunk x = load_chunk((const T *)a.a.p + b * a.a.s[0] + n * a.a.s[1] + h * a.a.s[2] + c, a.vec);
        const chunk y = load_chunk((const T *)a.b.p + b * a.b.s[0] + n * a.b.s[1] + h * a.b.s[2] + c, a.vec);
#pragma unroll
        for (int e = 0; e < CHUNK; e++) dot = fmaf(x.x[e], y.x[e], dot);
    }
    for (int w = LPR / 2; w > 0; w /= 2) dot += __shfl_xor_sync(~0u, dot, w);
    if (c == 0 && i < a.rows) a.out.p[b * a.out.s[0] + h * a.out.s[1] + n * a.out.s[2]] = dot;
}

template <typename T> static quern_status rowdot_of(const rowdot_kernel &a, cudaStream_t stream)
{
    if (a.rows == 0) return QUERN_OK;
    if (a.dim <= 64) rowdot<T, 8><<<blocks_for(a.rows * 8, THREADS), THREADS, 0, stream>>>(a);
    else if (a.dim <= 128) rowdot<T, 16><<<blocks_for(a.rows * 16, THREADS), THREADS, 0, stream>>>(a);
    else rowdot<T, 32><<<blocks_for(a.rows * 32, THREADS), THREADS, 0, stream>>>(a);
    return LAUNCHED("rowdot");
}

quern_status rowdot_run(const stage_exec *exec, const rowdot_args *args, void *)
{
    const quern_tensor &t = args->a;
    const rowdot_kernel a = {view4_of(t),
                             view4_of(args->b),
                             view3_of(args->out),
                             t.shape[1],
                             t.shape[2],
                             t.shape[3],
                             t.shape[0] * t.shape[1] * t.shape[2],
                             (const int32_t *)args->seqs.cu_q.data,
                             args->seqs.batch,
                             rows_aligned16(t) && rows_aligned16(args->b)};
    cudaStream_t stream = (cudaStream_t)exec->stream;
    if (t.dtype == QUERN_F32) return rowdot_of<float>(a, stream);
    return t.dtype == QUERN_BF16 ? rowdot_of<bf16>(a, stream) : rowdot_of<f16>(a, stream);
}
