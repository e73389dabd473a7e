/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* shared.cuh - a block's shape, its shared memory, and the list that each of its warps fills. */
#ifndef QUERN_CUDA_SELECT_SOFTMAX_SHARED_CUH
#define QUERN_CUDA_SELECT_SOFTMAX_SHARED_CUH

#include "select/lists.cuh"

/* MODE 1: on f32 cores; 2: on tensor cores, <= 16 rows a list; 3: the same, any number of rows. */
template <int DP, int MODE> struct select_shape {
    static constexpr bool CORES = MODE >= 2;
    static constexpr int LISTS = MODE == 2 ? WARPS : 1; /* of a block */
    static constexpr int SCORES = MAX_HISTORY + KEYS;
    static constexpr int Q_ROWS = CORES ? 128 : 64, K_ROWS = CORES ? 2 * KEYS : KEYS;
};

/* A block's shared memory. The rows of queries and keys stand behind it, on f32 cores as long as the call has
 * them, and the lists behind those. */
template <int DP, int MODE> struct __align__(128) select_memory
{
    using shape = select_shape<DP, MODE>;
    float history[shape::LISTS][shape::SCORES], partial[WARPS][KEYS];

    /* Rows of f32 have an odd length, free of bank conflicts. */
    __host__ __device__ __forceinline__ static int row_bytes(const select_kernel &s)
    {
        return shape::CORES ? DP * 2 : (s.a.dim_k + 1) * 4;
    }
    __device__ __forceinline__ char *q()
    {
        return (char *)(this + 1);
    }
    __device__ __forceinline__ char *k(const select_kernel &s)
    {
        return q() + shape::Q_ROWS * row_bytes(s);
    }
    __device__ __forceinline__ list_tail<shape::LISTS> lists(const select_kernel &s)
    {
        return {k(s) + shape::K_ROWS * row_bytes(s), s.rule.k};
    }
    static size_t bytes(const select_kernel &s)
    {
        return sizeof(select_memory) + (size_t)(shape::Q_ROWS + shape::K_ROWS) * row_bytes(s) +
               list_tail<shape::LISTS>::bytes(s.rule.k);
    }
};

/* One warp's list as it is filled. */
struct own_list {
    bool mine;
    int64_t q0; /* the first query */
    contest in;
    best_list best;
};

/* This warp's list of a run, empty. */
template <typename T, int DP, int MODE>
__device__ __forceinline__ own_list open_list(const select_kernel &s, const list_run<T> &run,
                                              select_memory<DP, MODE> &m)
{
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    own_list x;
    x.q0 = run.q_first + (int64_t)warp * s.a.tile;
    x.mine = warp < run.lists;
    x.in = find_contest(s, run.seq.nq, x.q0);
    x.best = m.lists(s).list(warp, 0, x.in.size);
    if (x.mine) {
        for (int i = lane; i < s.rule.k; i += 32) x.best.key[i] = 0;
        for (int i = lane; i < select_shape<DP, MODE>::SCORES; i += 32) m.history[warp][i] = 0.0f;
    }
    return x;
}

#endif
