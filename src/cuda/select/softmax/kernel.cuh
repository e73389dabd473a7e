/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * kernel.cuh - probabilities stream into top-k lists; no score matrix in memory.
 *
 * A block of eight warps owns LISTS lists (tiles x units) and walks the compressed entries 64 at a time.
 * Scorers put 64 scores per list into shared memory:
 *   bf16, f16: tensor cores; a list of <= 16 rows is one warp's m16 tile, a longer one is walked by all eight
 *     warps in chunks of 128 rows; p = exp(s - lse), summed over the rows in a fixed order;
 *   f32: f32 cores.
 * Then warp w maps entries to selection blocks for list w (each entry weighs as often as the spatial overlap
 * counts it) and inserts what beats the list's worst into a sorted list. Scores are compared as integers
 * whose order is: NaN < -inf < finite; ties keep the earlier, so the lower, index. Forced blocks skip the
 * contest.
 */
#ifndef QUERN_CUDA_SELECT_SOFTMAX_KERNEL_CUH
#define QUERN_CUDA_SELECT_SOFTMAX_KERNEL_CUH

#include "select/softmax/score.cuh"

/* Fills the lists of a run. All threads call. */
template <typename T, int DP, int MODE>
__device__ __forceinline__ void select_run_of(const select_kernel &s, const list_run<T> &run,
                                              select_memory<DP, MODE> &m, int64_t vb)
{
    using shape = select_shape<DP, MODE>;
    const attend_kernel &a = s.a;
    const int warp = threadIdx.x >> 5;
    const own_list x = open_list<T, DP, MODE>(s, run, m);
    __syncthreads();
    if (MODE == 2) load_list_rows<T, DP>(s, run, m.q());
    float lse2[2] = {0, 0};
    int hi[2] = {0, 0};
    if (MODE == 2 && x.mine) find_statistics<T>(s, run, x.q0, lse2, hi);
    const int64_t walk_end = find_walk_end<T>(s, run);
    const uint32_t aq = smem_address(m.q()), ak0 = smem_address(m.k(s));
    uint32_t ak = ak0;
    if (shape::CORES) load_entries<T, DP>(s, run, 0, m.k(s));
    for (int64_t e0 = 0; e0 < walk_end; e0 += KEYS) {
        if (shape::CORES) cp_async_wait<0>();
        __syncthreads();
        const bool any = e0 < run.seq.nk;
        if (shape::CORES) {
            load_entries<T, DP>(s, run, e0 + KEYS, m.k(s));
            ak = ak0 + (uint32_t)(e0 / KEYS & 1) * KEYS * DP * 2;
        } else if (any) {
            widen_entries<T>(s, run, e0, (float *)m.k(s), m.row_bytes(s) / 4);
        }
        if (!shape::CORES) __syncthreads();
        float *out = m.history[shape::LISTS > 1 ? warp : 0] + MAX_HISTORY;
        if constexpr (MODE == 2) {
            if (any && x.mine) score_rows<T, DP>(a, aq, ak, e0, lse2, hi, out);
            else if (x.mine)
                for (int j = threadIdx.x & 31; j < KEYS; j += 32) out[j] = 0.0f;
        } else {
            score_list<T, DP, MODE>(s, run, m, any, e0, ak);
        }
        __syncwarp();
        if (!x.mine) continue;
        close_blocks(s, x.in, x.best, (int)e0, KEYS, out);
        keep_scores(out, s.history);
    }
    if (shape::CORES) cp_async_wait<0>();
    if (x.mine) write_blocks(s, x.in, x.best, vb, run.unit, run.row_begin + warp);
    __syncthreads();
}

/* A block owns LISTS consecutive list rows. Of varlen tensors they may lie in several sequences; those of
 * each sequence are filled in turn. */
template <typename T, int DP, int MODE>
__global__ void __launch_bounds__(THREADS, DP <= 128 ? 2 : 1)
    select_blocks(const __grid_constant__ select_kernel s)
{
    constexpr int LISTS = select_shape<DP, MODE>::LISTS;
    extern __shared__ __align__(128) char smem[];
    select_memory<DP, MODE> &m = *(select_memory<DP, MODE> *)smem;
    const int64_t vb = blockIdx.z, row0 = (int64_t)blockIdx.x * LISTS;
    for (int done = 0; done < LISTS;) {
        list_run<T> run;
        if (row0 + done >= s.list_rows) return;
        if (!find_run<T>(s, vb, row0 + done, LISTS - done, &run)) { /* varlen: rows past the last tile */
            if (threadIdx.x < 32) pad_lists(s, vb, blockIdx.y, row0 + done, row0 + LISTS);
            return;
        }
        select_run_of<T, DP, MODE>(s, run, m, vb);
        done += run.lists;
    }
}

template <typename T, int DP, int MODE>
static quern_status launch(const select_kernel &s, int64_t views, const launcher &to)
{
    constexpr int LISTS = select_shape<DP, MODE>::LISTS;
    const dim3 grid((unsigned)((s.list_rows + LISTS - 1) / LISTS), (unsigned)s.a.units, (unsigned)views);
    return launch_shared(to, select_blocks<T, DP, MODE>, grid, THREADS, select_memory<DP, MODE>::bytes(s),
                         "select", s);
}

/* Softmax on the tensor cores, whose fragments are unrolled for the head dim. */
template <typename T, int DP>
static quern_status select_softmax(const select_kernel &s, int64_t views, const launcher &to)
{
    return few_rows(s.a) ? launch<T, DP, 2>(s, views, to) : launch<T, DP, 3>(s, views, to);
}

#endif
