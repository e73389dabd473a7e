/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* rowdot.cu - the rowdot stage. Limit: bytes moved over the copy rate. */
#include "common/chunk.cuh"
#include "common/launch.cuh"
#include "variants.cuh"

enum { THREADS = 256, MOST_BATCH = 65535 };

struct rowdot_kernel {
    view4 a, b;
    view3 out;
    int32_t batch, dim;
    uint32_t rows; /* of a batch view: tokens from `first` on and their heads, < 2^31 */
    int64_t first, n;
    const int32_t *cu;
    int64_t last;
    fast_div by_heads;
    bool vec;
};

template <typename T, int LPR>
__global__ void __launch_bounds__(THREADS) rowdot(const __grid_constant__ rowdot_kernel a)
{
    const uint32_t i = blockIdx.x * (THREADS / LPR) + threadIdx.x / LPR, row = i < a.rows ? i : a.rows - 1,
                   token = quotient(row, a.by_heads), h = row - token * a.by_heads.d;
    const int c = threadIdx.x % LPR * CHUNK;
    const int64_t n = a.first + token;
    const bool there = c < a.dim && (a.cu == NULL || n < cu_seqlens_at(a.cu, a.last, a.n));
    for (int b = blockIdx.y; b < a.batch; b += gridDim.y) {
        float dot = 0.0f;
        if (there) {
            const T *const p = (const T *)a.a.p + b * a.a.s[0] + n * a.a.s[1] + h * a.a.s[2] + c;
            const T *const q = (const T *)a.b.p + b * a.b.s[0] + n * a.b.s[1] + h * a.b.s[2] + c;
            /* One branch for both: they are loaded together. */
            dot = a.vec ? dot_of(load_chunk(p, true), load_chunk(q, true))
                        : dot_of(load_chunk(p, false), load_chunk(q, false));
        }
        for (int w = LPR / 2; w > 0; w /= 2) dot += __shfl_xor_sync(~0u, dot, w);
        if (c == 0 && i < a.rows) a.out.p[b * a.out.s[0] + h * a.out.s[1] + n * a.out.s[2]] = dot;
    }
}

template <typename T> static quern_status rowdot_of(const rowdot_kernel &a, cudaStream_t stream)
{
    const unsigned batch = (unsigned)(a.batch < MOST_BATCH ? a.batch : (int32_t)MOST_BATCH);
    const int lanes = a.dim <= 64 ? 8 : a.dim <= 128 ? 16 : 32;
    const dim3 grid(blocks_for((int64_t)a.rows * lanes, THREADS), batch);
    if (lanes == 8) rowdot<T, 8><<<grid, THREADS, 0, stream>>>(a);
    else if (lanes == 16) rowdot<T, 16><<<grid, THREADS, 0, stream>>>(a);
    else rowdot<T, 32><<<grid, THREADS, 0, stream>>>(a);
    return LAUNCHED("rowdot");
}

static quern_status rowdot_run(const stage_exec *exec, const rowdot_args *args, void *)
{
    const quern_tensor &t = args->a;
    const int64_t heads = t.shape[2], n = t.shape[1];
    if (t.shape[0] == 0 || heads == 0) return QUERN_OK;
    rowdot_kernel a = {};
    a.a = view4_of(t);
    a.b = view4_of(args->b);
    a.out = view3_of(args->out);
    a.batch = (int32_t)t.shape[0];
    a.dim = (int32_t)t.shape[3];
    a.n = n;
    a.cu = (const int32_t *)args->seqs.cu_q.data;
    a.last = args->seqs.batch;
    a.vec = rows_aligned16(t) && rows_aligned16(args->b);
    a.by_heads = fast_div_by((uint32_t)heads);
    cudaStream_t stream = (cudaStream_t)exec->stream;
    quern_status status = QUERN_OK;
    const int64_t most = INT32_MAX / heads; /* tokens of a launch */
    for (; a.first < n && status == QUERN_OK; a.first += most) {
        a.rows = (uint32_t)((n - a.first < most ? n - a.first : most) * heads);
        if (t.dtype == QUERN_F32) status = rowdot_of<float>(a, stream);
        else status = t.dtype == QUERN_BF16 ? rowdot_of<bf16>(a, stream) : rowdot_of<f16>(a, stream);
    }
    return status;
}

extern const variant<rowdot_args> rowdot_any = {"rowdot_any", NULL, NULL, rowdot_run};
