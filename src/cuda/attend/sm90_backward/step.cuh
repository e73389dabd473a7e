/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* step.cuh - what the warpgroups of kernel.cuh do with a step's dS and dQ, and with
 * K that is not finite. AT is the kernel's layout of shared memory. */
#ifndef QUERN_CUDA_ATTEND_SM90_BACKWARD_STEP_CUH
#define QUERN_CUDA_ATTEND_SM90_BACKWARD_STEP_CUH

#include "attend/sm90_backward/parts.cuh"

namespace sm90_backward
{

enum { KEYS = 64 * GROUPS, ROWS = MOST_ROWS };

/* Both computing warpgroups: whether something in K is not finite. */
template <typename T, int DK>
__device__ __forceinline__ bool search_keys(const char *keys, int32_t *nonfinite)
{
    uint32_t most = 0;
    for (int i = (int)(threadIdx.x - 128) * 16; i < KEYS * DK * 2; i += 4096) {
        most = largest_bits(most, *(const uint4 *)(keys + i));
    }
    if (is_nonfinite<T>(most)) atomicOr(nonfinite, 1);
    named_sync(CLEANING, 256);
    return *nonfinite != 0;
}

/* The THREADS threads that make dQ, around its product: K becomes finite; K as it was. */
template <typename T, int DK, int THREADS> __device__ __forceinline__ void clean_keys(char *keys)
{
    named_sync(CLEANING, THREADS); /* nobody multiplies with it */
#pragma unroll 1
    for (int i = (int)(threadIdx.x - 128) % THREADS * 2; i < KEYS * DK * 2; i += THREADS * 2) {
        clear_nonfinite<T>((uint16_t *)(keys + i));
    }
    async_fence();
    named_sync(CLEANING, THREADS);
}

template <typename T, int DK, int THREADS>
__device__ __forceinline__ void restore_keys(const attend_kernel &a, const key_block &b, char *keys)
{
    named_sync(CLEANING, THREADS);
#pragma unroll 1
    for (int i = (int)(threadIdx.x - 128) % THREADS; i < KEYS * DK / 8; i += THREADS) {
        const int row = i / (DK / 8), chunk = i - row * (DK / 8), first = key_of(b, row), key = b.k0 + first;
        uint4 x = make_uint4(0, 0, 0, 0);
        if (first < b.nk && chunk * 8 < a.dim_k)
            x = *(const uint4 *)((const T *)a.k.p + b.view * a.k.s[0] + key * a.k.s[1] + b.kvh * a.k.s[2] +
                                 chunk * 8);
        *(uint4 *)(keys + tile_at<KEYS>(row, chunk)) = x;
    }
    async_fence();
    named_sync(CLEANING, THREADS);
}

/* dQ of the rows that see what is not finite in K becomes NaN, in NQ columns from eight `first` on. */
template <typename T, int NQ>
__device__ __forceinline__ void poison_rows(float (&dq)[NQ / 8][4], const attend_kernel &a,
                                            const key_block &b, const char *keys, int query, int head,
                                            int first)
{
    int lo[2] = {0, 0}, hi[2] = {0, 0};
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int n = query + (threadIdx.x >> 5 & 3) * 16 + (threadIdx.x >> 2 & 7) + h * 8;
        float lse2, delta, row_scale;
        if (n >= b.nq) continue;
        row_statistics(a, sequence_of(b), b.q0 + n, head, &lse2, &delta, &row_scale);
        if (lse2 != INFINITY) row_keys(a, sequence_of(b), n, &lo[h], &hi[h]);
    }
#pragma unroll 1
    for (int j = 0; j < KEYS; j++) {
        const int key = key_of(b, j);
        const bool s0 = key >= lo[0] && key < hi[0], s1 = key >= lo[1] && key < hi[1];
        if (!s0 && !s1) continue;
#pragma unroll
        for (int i = 0; i < NQ / 8; i++) {
            const T *p = (const T *)(keys + tile_at<KEYS>(j, first + i)) + (threadIdx.x & 3) * 2;
#pragma unroll
            for (int c = 0; c < 2; c++) {
                const bool nonfinite = !isfinite(to_float<T>(p[c]));
                if (nonfinite && s0) dq[i][c] = NAN;
                if (nonfinite && s1) dq[i][2 + c] = NAN;
            }
        }
    }
}

/* dq = dS, in shared memory transposed, times NQ columns of K. */
template <typename T, int NQ>
__device__ __forceinline__ void columns_of_rows(float (&dq)[NQ / 8][4], uint32_t ds, uint32_t columns)
{
    const uint64_t x0 = wg_fresh(wg_tile(ds, KEYS * 128)), y0 = wg_fresh(wg_tile(columns, KEYS * 128));
    wg_start();
#pragma unroll
    for (int c = 0; c < KEYS; c += 16) {
        const uint64_t x = wg_further(x0, c * 128), y = wg_further(y0, c * 128);
        if (c == 0) wg_rows<T, NQ, false>(dq, x, y);
        else wg_rows<T, NQ, true>(dq, x, y);
    }
    wg_commit();
}

/* Puts scale dq where TMA takes it from, in panels of 32 columns; `to`: this lane's first two columns. */
template <int ROWS, int NQ>
__device__ __forceinline__ void write_rows(const float (&dq)[NQ / 8][4], uint32_t to, float scale)
{
#pragma unroll
    for (int i = 0; i < NQ / 8; i++)
#pragma unroll
        for (int h = 0; h < 2; h++)
            store_shared((to ^ (i & 3) << 5) + (i >> 2) * (ROWS * 128) + h * 1024, dq[i][h * 2] * scale,
                         dq[i][h * 2 + 1] * scale);
}

/* The same as dQ's sums lie in workspace; `to`: this thread's first four values. */
template <int NQ>
__device__ __forceinline__ void write_held(const float (&dq)[NQ / 8][4], uint32_t to, float scale)
{
#pragma unroll
    for (int i = 0; i < NQ / 8; i++)
        store_shared4(to + held_at(i) * 4, dq[i][0] * scale, dq[i][1] * scale, dq[i][2] * scale,
                      dq[i][3] * scale);
}

/* A warpgroup that makes dS^T, or columns of dQ, or both. */
template <typename T, typename AT> struct computing {
    static constexpr int NT = ROWS / 8;
    const attend_kernel &a;
    const sm90_backward_plan &plan;
    key_block &b;
    char *smem;
    uint32_t base;
    int group, steps;
    uint32_t own_ds; /* a lane's part of the first stmatrix of dS^T: rows of 64 queries, one for each key */
    bool nonfinite;  /* something in K is not finite */

    __device__ __forceinline__ computing(const attend_kernel &kernel, const sm90_backward_plan &shared,
                                         key_block &block, char *memory, uint32_t address, int which)
        : a(kernel), plan(shared), b(block), smem(memory), base(address), group(which), nonfinite(false)
    {
        const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3;
        steps = b.tiles * a.hs;
        own_ds = base + AT::DS + tile_at<KEYS>(group * 64 + warp * 16 + (lane & 15), lane >> 4);
    }

    __device__ __forceinline__ const statistics *statistics_of(int t) const
    {
        return (const statistics *)(smem + AT::STAT) + t % AT::STAGES;
    }

    /* What is not finite in step t's Q and dO goes to the keys that see it, and becomes 0. Both warpgroups
     * call. */
    template <int OK, int OV>
    __device__ __forceinline__ void clean(int t, const key_rows &rows, float (&dk)[OK][4],
                                          float (&dv)[OV][4]) const
    {
        const statistics *st = statistics_of(t);
        clean_rows<T, ROWS, AT::DIM_K, AT::DIM_V>(
            smem + AT::Q + t % AT::STAGES * AT::Q_BYTES, smem + AT::DO + t % AT::STAGES * AT::DO_BYTES,
            AT::clean::barrier(base, {}), [&](const char *q, const char *g) {
                spread_rows<T, ROWS>(dk, q, st, rows, true);
                spread_rows<T, ROWS>(dv, g, st, rows, false);
            });
    }

    /* Whether step t's dS^T may go where dQ's products read it. */
    __device__ __forceinline__ bool may_put_ds(int t) const
    {
        return AT::ds_free::test_before(base, AT::ds_free::place::of(t));
    }

    __device__ __forceinline__ void wait_to_put_ds(int t) const
    {
        AT::ds_free::wait_before(base, AT::ds_free::place::of(t));
    }

    __device__ __forceinline__ void put_ds(const uint32_t (&f)[NT / 2][4], int t) const
    {
#pragma unroll
        for (int i = 0; i < NT / 2; i++)
            stmatrix4((own_ds + t % AT::DS_BUFFERS * AT::DS_BYTES) ^ i << 5, f[i]);
    }

    /* Whether step t's dQ may go where the copy engine takes it from. */
    __device__ __forceinline__ bool may_put_dq(int t) const
    {
        return AT::dq_free::test_before(base, AT::dq_free::place::of(t));
    }

    __device__ __forceinline__ void wait_to_put_dq(int t) const
    {
        AT::dq_free::wait_before(base, AT::dq_free::place::of(t));
    }

    /* Step t's dQ is there. */
    __device__ __forceinline__ void show_dq(int t) const
    {
        async_fence();
        named_arrive(DQ_FULL + t % ADDERS, AT::DQ_THREADS + 32);
    }
};

/* NQ columns of dQ, from `first` on, that a warpgroup makes of all keys. */
template <typename T, typename AT, int NQ> struct dq_columns {
    const computing<T, AT> &w;
    int first;
    /* A lane's part of the first store of dQ (panels of 32 columns), and what the product reads. */
    uint32_t own_dq, all_ds, columns;

    __device__ __forceinline__ dq_columns(const computing<T, AT> &warpgroup, int column)
        : w(warpgroup), first(column)
    {
        const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3;
        all_ds = w.base + AT::DS;
        own_dq = w.base + AT::DQ + first / 32 * (ROWS * 128) +
                 tile_at<ROWS>(warp * 16 + (lane >> 2), lane >> 1 & 1) + (lane & 1) * 8;
        columns = w.base + AT::K + first / 64 * (KEYS * 128) + first % 64 * 2;
    }

    /* Those of step t. unclean: something in K is not finite, and not all rows see all keys. read: called
     * when dS has been read. All threads that make dQ call. */
    template <typename F>
    __device__ __forceinline__ void make(float (&dq)[NQ / 8][4], int t, bool unclean, F read) const
    {
        char *const keys = w.smem + AT::K;
        if (unclean) clean_keys<T, AT::DIM_K, AT::DQ_THREADS>(keys);
        columns_of_rows<T, NQ>(dq, all_ds + t % AT::DS_BUFFERS * AT::DS_BYTES, columns);
        wg_wait<0>(dq);
        read();
        if (unclean) {
            restore_keys<T, AT::DIM_K, AT::DQ_THREADS>(w.a, w.b, keys);
            int head;
            const int tile = tile_at_step(w.a, w.plan, w.b, t, &head);
            poison_rows<T, NQ>(dq, w.a, w.b, keys, tile * ROWS, head, first / 8);
        }
    }

    /* Puts them where the copy engine takes them from. */
    __device__ __forceinline__ void put(float (&dq)[NQ / 8][4], int t) const
    {
        const uint32_t buffer = t % AT::DQ_BUFFERS * AT::DQ_BYTES;
        if (w.plan.sums != NULL)
            write_held<NQ>(dq, w.base + AT::DQ + buffer + held_at(first / 8) * 4 + (threadIdx.x & 127) * 16,
                           w.a.scale);
        else write_rows<ROWS, NQ>(dq, own_dq + buffer, w.a.scale);
    }
};

} // namespace sm90_backward

#endif
