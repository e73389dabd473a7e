/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* score.cuh - the scorers of the select stage: KEYS scores a list and step, in shared memory. */
#ifndef QUERN_CUDA_SELECT_SOFTMAX_SCORE_CUH
#define QUERN_CUDA_SELECT_SOFTMAX_SCORE_CUH

#include "select/softmax/shared.cuh"

/* Chunk `chunk` of row `row` of a tile, or zeros where src is NULL; `any` is an address to name then. */
template <typename T, int ROWS>
__device__ __forceinline__ void load_row(const void *any, uint32_t tile, char *tile_ptr, int row, int chunk,
                                         const T *src, int dim, bool vec)
{
    const bool valid = src != NULL && chunk * 8 < dim;
    load_chunk16<T>(tile, tile_ptr, tile_at<ROWS>(row, chunk), valid ? src + chunk * 8 : (const T *)any,
                    valid, vec);
}

/* Mode 2: the rows of all lists, 16 a list. */
template <typename T, int DP>
__device__ __forceinline__ void load_list_rows(const select_kernel &s, const list_run<T> &run, char *sq)
{
    const attend_kernel &a = s.a;
    constexpr int CHUNKS = DP / 8;
    const uint32_t aq = smem_address(sq);
    for (int i = threadIdx.x; i < 128 * CHUNKS; i += THREADS) {
        const int r = i / CHUNKS, list = r / 16, row = r % 16;
        const int64_t query = run.q_first + (int64_t)list * a.tile + row / a.hs;
        const bool in = list < run.lists && row < a.tile * a.hs && query < run.seq.nq;
        load_row<T, 128>(a.q.p, aq, sq, r, i % CHUNKS,
                         in ? run.q + query * a.q.s[1] + row % a.hs * a.q.s[2] : NULL, a.dim_k, a.vec_q);
    }
    cp_async_commit();
}

__device__ __forceinline__ float lse_at(const attend_kernel &a, const sequence &seq, int64_t head,
                                        int64_t query)
{
    return a.lse.p[seq.view_b * a.lse.s[0] + head * a.lse.s[1] + (seq.q0 + query) * a.lse.s[2]];
}

/* Mode 2: the statistics of this lane's two rows of the warp's list. */
template <typename T>
__device__ __forceinline__ void find_statistics(const select_kernel &s, const list_run<T> &run, int64_t q0,
                                                float (&lse2)[2], int (&hi)[2])
{
    const attend_kernel &a = s.a;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int row = h * 8 + ((threadIdx.x & 31) >> 2);
        const int64_t query = q0 + row / a.hs;
        int ignore;
        if (row >= a.tile * a.hs || query >= run.seq.nq) continue;
        row_keys(a, run.seq, query, &ignore, &hi[h]);
        lse2[h] = lse_at(a, run.seq, run.head0 + row % a.hs, query) * 1.4426950408889634f;
    }
}

/* The entries to walk: all that any list of the run may see, then on until every block is closed. */
template <typename T>
__device__ __forceinline__ int64_t find_walk_end(const select_kernel &s, const list_run<T> &run)
{
    const int64_t after = run.q_first + (int64_t)run.lists * s.a.tile - 1;
    const int64_t tail_q = after < run.seq.nq ? after : run.seq.nq - 1;
    return mask_blocks_seen(s.a.causal != 0, run.seq.nq, tail_q, s.select_block) * s.s_over_d;
}

/* Tensor cores: asks for the KEYS entries from `from` on, into one of two tiles. */
template <typename T, int DP>
__device__ __forceinline__ void load_entries(const select_kernel &s, const list_run<T> &run, int64_t from,
                                             char *sk)
{
    constexpr int CHUNKS = DP / 8;
    const uint32_t to = (uint32_t)(from / KEYS & 1) * KEYS * DP * 2, ak = smem_address(sk);
    for (int i = threadIdx.x; from < run.seq.nk && i < KEYS * CHUNKS; i += THREADS) {
        const int64_t key = from + i / CHUNKS;
        load_row<T, KEYS>(s.a.k.p, ak + to, sk + to, i / CHUNKS, i % CHUNKS,
                          key < run.seq.nk ? run.k + key * s.a.k.s[1] : NULL, s.a.dim_k, s.a.vec_k);
    }
    cp_async_commit();
}

/* f32 cores: the KEYS entries from e0 on, as f32. */
template <typename T>
__device__ __forceinline__ void widen_entries(const select_kernel &s, const list_run<T> &run, int64_t e0,
                                              float *kt, int ld)
{
    const attend_kernel &a = s.a;
    for (int i = threadIdx.x; i < KEYS * a.dim_k; i += THREADS) {
        const int64_t key = e0 + i / a.dim_k;
        kt[i / a.dim_k * ld + i % a.dim_k] =
            key < run.seq.nk ? to_float<T>(run.k[key * a.k.s[1] + i % a.dim_k]) : 0.0f;
    }
}

/* The warp's 16 rows by KEYS entries on the tensor cores. */
template <typename T, int DP>
__device__ __forceinline__ void multiply_rows(float (&acc)[KEYS / 8][4], uint32_t aq, uint32_t ak)
{
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
    for (int k0 = 0; k0 < DP; k0 += 16) {
        uint32_t fa[4];
        load_a<128>(fa, aq, warp * 16, k0, lane);
#pragma unroll
        for (int n = 0; n < KEYS / 8; n += 2) {
            uint32_t fb[4];
            load_b<KEYS>(fb, ak, n * 8, k0, lane);
            mma16816<T>(acc[n], fa, fb[0], fb[1]);
            mma16816<T>(acc[n + 1], fa, fb[2], fb[3]);
        }
    }
}

/* The sum over the eight row groups of a warp, in lanes 0 ... 3. */
__device__ __forceinline__ float sum_groups(float sum)
{
    sum += __shfl_xor_sync(~0u, sum, 4);
    sum += __shfl_xor_sync(~0u, sum, 8);
    sum += __shfl_xor_sync(~0u, sum, 16);
    return sum;
}

/* Mode 2: scores of a step by one warp. */
template <typename T, int DP>
__device__ __forceinline__ void score_rows(const attend_kernel &a, uint32_t aq, uint32_t ak, int64_t e0,
                                           const float (&lse2)[2], const int (&hi)[2], float *out)
{
    const int lane = threadIdx.x & 31;
    float acc[KEYS / 8][4] = {};
    multiply_rows<T, DP>(acc, aq, ak);
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const int j = n * 8 + (lane & 3) * 2 + c;
            float sum = 0.0f;
#pragma unroll
            for (int h = 0; h < 2; h++)
                if (e0 + j < hi[h]) sum += exp2_fast(fmaf(acc[n][h * 2 + c], a.scale_log2, -lse2[h]));
            sum = sum_groups(sum);
            if (lane < 4) out[j] = sum;
        }
}

/* Mode 3: 128 rows of the list from r0 on, as tensor cores read them. */
template <typename T, int DP>
__device__ __forceinline__ void load_row_chunk(const select_kernel &s, const list_run<T> &run, int64_t r0,
                                               int64_t rows, char *sq)
{
    const attend_kernel &a = s.a;
    constexpr int CHUNKS = DP / 8;
    const uint32_t aq = smem_address(sq);
    for (int i = threadIdx.x; i < 128 * CHUNKS; i += THREADS) {
        const int64_t row = r0 + i / CHUNKS;
        load_row<T, 128>(a.q.p, aq, sq, i / CHUNKS, i % CHUNKS,
                         row < rows ? run.q + (run.q_first + row / a.hs) * a.q.s[1] + row % a.hs * a.q.s[2]
                                    : NULL,
                         a.dim_k, a.vec_q);
    }
    cp_async_commit();
    cp_async_wait<0>();
}

/* Mode 3: adds the probabilities of this lane's two rows of the chunk to its columns. */
template <typename T, int DP>
__device__ __forceinline__ void add_row_chunk(const select_kernel &s, const list_run<T> &run, int64_t r0,
                                              int64_t rows, int64_t e0, uint32_t aq, uint32_t ak,
                                              float (&column)[KEYS / 8][2])
{
    const attend_kernel &a = s.a;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    float acc[KEYS / 8][4] = {};
    multiply_rows<T, DP>(acc, aq, ak);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int64_t row = r0 + warp * 16 + h * 8 + (lane >> 2);
        if (row >= rows) continue;
        const int64_t query = run.q_first + row / a.hs;
        int low, high;
        row_keys(a, run.seq, query, &low, &high);
        const float l2 = lse_at(a, run.seq, run.head0 + row % a.hs, query) * 1.4426950408889634f;
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (int c = 0; c < 2; c++)
                if (e0 + n * 8 + (lane & 3) * 2 + c < high)
                    column[n][c] += exp2_fast(fmaf(acc[n][h * 2 + c], a.scale_log2, -l2));
    }
}

/* Mode 1: the probabilities of 64 rows of the list from r0 on, of this thread's share of a column; 4 threads
 * share one. */
template <typename T>
__device__ __forceinline__ float add_f32_rows(const select_kernel &s, const list_run<T> &run, int64_t r0,
                                              int64_t rows, int64_t e0, float *qt, const float *entries,
                                              int ld, float scalar)
{
    const attend_kernel &a = s.a;
    for (int i = threadIdx.x; i < 64 * a.dim_k; i += THREADS) {
        const int64_t row = r0 + i / a.dim_k;
        qt[i / a.dim_k * ld + i % a.dim_k] =
            row < rows
                ? to_float<T>(
                      run.q[(run.q_first + row / a.hs) * a.q.s[1] + row % a.hs * a.q.s[2] + i % a.dim_k])
                : 0.0f;
    }
    __syncthreads();
    const int j = threadIdx.x % KEYS, part = threadIdx.x / KEYS;
    for (int r = part; r < 64 && r0 + r < rows; r += THREADS / KEYS) {
        const int64_t query = run.q_first + (r0 + r) / a.hs;
        int low, high;
        row_keys(a, run.seq, query, &low, &high);
        if (e0 + j >= high) continue;
        const float *m = qt + r * ld, *kt = entries + j * ld;
        float dot = 0.0f;
        for (int c = 0; c < a.dim_k; c++) dot = fmaf(m[c], kt[c], dot);
        scalar += expf(dot * a.scale - lse_at(a, run.seq, run.head0 + (r0 + r) % a.hs, query));
    }
    return scalar;
}

/* Modes 1 and 3: scores of a step by all warps, which share one list and take its rows in chunks. All threads
 * call. */
template <typename T, int DP, int MODE>
__device__ __forceinline__ void score_list(const select_kernel &s, const list_run<T> &run,
                                           select_memory<DP, MODE> &m, bool any, int64_t e0, uint32_t ak)
{
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int64_t rows = (q_end_of(run.q_first, s.a.tile, run.seq.nq) - run.q_first) * s.a.hs;
    float column[KEYS / 8][2] = {};
    float scalar = 0.0f;
    for (int64_t r0 = 0; any && r0 < rows; r0 += MODE == 3 ? 128 : 64) {
        __syncthreads();
        if constexpr (MODE == 3) {
            load_row_chunk<T, DP>(s, run, r0, rows, m.q());
            __syncthreads();
            add_row_chunk<T, DP>(s, run, r0, rows, e0, smem_address(m.q()), ak, column);
        } else {
            scalar = add_f32_rows<T>(s, run, r0, rows, e0, (float *)m.q(), (const float *)m.k(s),
                                     m.row_bytes(s) / 4, scalar);
        }
    }
    if (MODE == 3) {
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (int c = 0; c < 2; c++) {
                const float sum = sum_groups(column[n][c]);
                if (lane < 4) m.partial[warp][n * 8 + lane * 2 + c] = sum;
            }
    } else {
        m.partial[threadIdx.x / KEYS][threadIdx.x % KEYS] = scalar;
    }
    __syncthreads();
    if (threadIdx.x < KEYS) {
        float sum = 0.0f;
        for (int w = 0; w < (MODE == 3 ? WARPS : THREADS / KEYS); w++) sum += m.partial[w][threadIdx.x];
        m.history[0][MAX_HISTORY + threadIdx.x] = sum;
    }
    __syncthreads();
}

#endif
