/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * walk.cuh - 16 rows on the tensor cores, 16 keys a step. Each warp has a ring of its own, filled by
 * cp.async, so warps never wait for each other. 8 KB a step at D 128; three stages of four warps and two
 * blocks keep 128 KB a multiprocessor on their way. Limit: the read rate on keys and values; the products of
 * 16 rows, of which a group of four heads fills a quarter, take a sixth of the time.
 */
#ifndef QUERN_CUDA_DECODE_TENSOR_WALK_CUH
#define QUERN_CUDA_DECODE_TENSOR_WALK_CUH

#include "decode/walk.cuh"

namespace decode_walk
{

/* Asks for a step's keys and values; a row that is not there becomes zeros. `there`: a bit a row. Most often
 * all rows lie in one page, one behind the other: then no lane needs the others' addresses. */
template <typename T, int KEYS, int CHUNKS>
__device__ __forceinline__ void ask_for_rows(const plane_view &v, const plane_row &row, uint32_t there, T *k,
                                             T *values)
{
    enum { AT_ONCE = 32 / CHUNKS > 0 ? 32 / CHUNKS : 1, TURNS = KEYS * CHUNKS / 32 };
    const int lane = threadIdx.x % 32, at = lane % CHUNKS * 16;
    const uint32_t to_k = smem_address(k), to_v = smem_address(values);
    const char *const first = (const char *)__shfl_sync(~0u, (unsigned long long)row.key, 0);
    const bool follows = row.key == first + lane % KEYS * v.key;
    if (there == (1u << KEYS) - 1 && __all_sync(~0u, follows)) {
        const char *from = first + lane / CHUNKS * v.key + at,
                   *from_v = first + __shfl_sync(~0u, row.value, 0) + lane / CHUNKS * v.value + at;
#pragma unroll
        for (int j = 0; j < TURNS; j++) {
            const uint32_t to = tile_at<KEYS>(j * AT_ONCE + lane / CHUNKS, lane % CHUNKS);
            cp_async16(to_k + to, from, at < v.key);
            if (values != NULL) cp_async16(to_v + to, from_v, at < v.value);
            from += AT_ONCE * v.key;
            from_v += AT_ONCE * v.value;
        }
        return;
    }
#pragma unroll 1
    for (int j = 0; j < TURNS; j++) {
        const int i = j * 32 + lane, r = i / CHUNKS;
        const char *const from = (const char *)__shfl_sync(~0u, (unsigned long long)row.key, r);
        const int further = __shfl_sync(~0u, row.value, r);
        const uint32_t to = tile_at<KEYS>(r, i % CHUNKS);
        cp_async16(to_k + to, from + at, from != NULL && at < v.key);
        if (values != NULL) cp_async16(to_v + to, from + further + at, from != NULL && at < v.value);
    }
}

/* A step's scores that no key has given. */
__device__ __forceinline__ void mask_scores(float (&s)[2][4], uint32_t there)
{
    const int column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (!(there >> (i / 4 * 8 + column + i % 2) & 1)) s[i / 4][i % 4] = -INFINITY;
}

template <typename T, int DP> struct tensor_walk {
    typedef T element;
    enum { ROWS = 16, KEYS = 16, DIM = DP, CHUNKS = DP / 8, STAGES = DP == 64 ? 4 : 3, HELD = DP <= 128 };
    struct queries {
        alignas(128) T x[ROWS * DP];
    };
    struct ring {
        alignas(128) T k[STAGES][KEYS * DP];
        T v[STAGES][KEYS * DP];
    };

    float o[DP / 8][4], top[2], sum[2];

    static bool takes(const plane_view &v) { return v.dim <= DP && v.dim_v <= DP && plane_aligned(v, 16); }

    static __device__ __forceinline__ void load(queries &m, const query_rows<T> &from)
    {
        for (int i = threadIdx.x; i < ROWS * CHUNKS; i += THREADS) {
            const int row = i / CHUNKS, chunk = i % CHUNKS;
            load_chunk16<T>(smem_address(m.x), (char *)m.x, tile_at<ROWS>(row, chunk),
                            from.q + row * from.stride + chunk * 8, row < from.rows && chunk * 8 < from.dim,
                            from.wide);
        }
        cp_async_commit();
        cp_async_wait<0>();
    }

    __device__ __forceinline__ void open()
    {
#pragma unroll
        for (int i = 0; i < DP / 8; i++)
#pragma unroll
            for (int c = 0; c < 4; c++) o[i][c] = 0.0f;
        top[0] = top[1] = -INFINITY;
        sum[0] = sum[1] = 0.0f;
    }

    /* S of a step, before the scale. */
    static __device__ __forceinline__ void
    multiply(float (&s)[2][4], const uint32_t (&fq)[HELD ? DP / 16 : 1][4], uint32_t q, uint32_t k)
    {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int c = 0; c < 4; c++) s[n][c] = 0.0f;
        if constexpr (HELD) product_nt_held<T, DP, 2, KEYS>(s, fq, k, 0, lane);
        else warp_products::nt<T, DP, 2, ROWS, KEYS>(s, q, 0, k, 0, lane);
    }

    /* Turns a step's scores into P, and adds P V. */
    __device__ __forceinline__ void add(float (&s)[2][4], float scale2, uint32_t there, uint32_t v,
                                        bool values)
    {
        const int lane = threadIdx.x % 32;
        float held[2];
        if (there != (1u << KEYS) - 1) mask_scores(s, there);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float most = fmaxf(fmaxf(s[0][h * 2], s[0][h * 2 + 1]), fmaxf(s[1][h * 2], s[1][h * 2 + 1]));
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
            top[h] = raise_top(top[h], most * scale2, &held[h]);
            const float base = base_of(top[h]);
            float own = 0.0f;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float &x = s[i / 2][h * 2 + i % 2];
                x = exp2_fast(fmaf(x, scale2, -base));
                own += x;
            }
            sum[h] = fmaf(sum[h], held[h], own);
        }
        if (!values) return;
        if (__any_sync(~0u, held[0] != 1.0f || held[1] != 1.0f)) {
#pragma unroll
            for (int i = 0; i < DP / 8; i++)
#pragma unroll
                for (int c = 0; c < 4; c++) o[i][c] *= held[c / 2];
        }
        const uint32_t p[4] = {pack2<T>(s[0][0], s[0][1]), pack2<T>(s[0][2], s[0][3]),
                               pack2<T>(s[1][0], s[1][1]), pack2<T>(s[1][2], s[1][3])};
        warp_products::nn<T, DP, KEYS>(o, p, v, 0, lane);
    }

    /* All lanes of the block's warps call. values: of this walk; scores(slot, row, q k) takes each score. */
    template <class Keys, class Scores>
    __device__ __forceinline__ void run(const walk_source &from, const Keys &keys, int n, const queries &q,
                                        ring &m, float scale2, bool values, const Scores &scores)
    {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, steps = (n + KEYS - 1) / KEYS;
        const uint32_t q_tile = smem_address(q.x);
        uint32_t fq[HELD ? DP / 16 : 1][4];
        if constexpr (HELD) {
#pragma unroll
            for (int i = 0; i < DP / 16; i++) load_a<ROWS>(fq[i], q_tile, 0, i * 16, lane);
        }
        walk_source::place next = from.find(keys, warp * KEYS + lane % KEYS, n);
        uint64_t seen = 0; /* 16 bits a step: which of its keys are there */
        int into = 0;      /* the stage of the step that is asked for */
        /* Each turn asks for a step and takes the one STAGES - 1 turns before. One text serves all stages, as
         * code that does not fit into the instruction cache is slow. */
#pragma unroll 1
        for (int step = warp - (STAGES - 1) * WARPS; step < steps; step += WARPS) {
            const int asked = step + (STAGES - 1) * WARPS, now = into + 1 == STAGES ? 0 : into + 1;
            cp_async_wait<STAGES - 2>();
            __syncwarp();
            seen <<= KEYS;
            if (asked < steps) {
                const plane_row row = from.row(next);
                next = from.find(keys, (asked + WARPS) * KEYS + lane % KEYS, n);
                const uint32_t there = __ballot_sync(~0u, row.key != NULL) & ((1u << KEYS) - 1);
                ask_for_rows<T, KEYS, CHUNKS>(from.plane, row, there, m.k[into], values ? m.v[into] : NULL);
                seen |= there;
            }
            cp_async_commit();
            into = now;
            if (step < 0) continue;
            float s[2][4];
            multiply(s, fq, q_tile, smem_address(m.k[now]));
            if (scores.wanted()) {
#pragma unroll
                for (int e = 0; e < 8; e++)
                    scores(step * KEYS + e / 4 * 8 + lane % 4 * 2 + e % 2, lane / 4 + e % 4 / 2 * 8,
                           s[e / 4][e % 4]);
            }
            add(s, scale2, (uint32_t)(seen >> (STAGES - 1) * KEYS) & ((1u << KEYS) - 1),
                smem_address(m.v[now]), values);
        }
        cp_async_wait<0>();
    }

    /* The warp's sums of the first `rows` rows; no warp walks any more. */
    __device__ __forceinline__ void store_sums(block_memory<tensor_walk> &m, int rows) const
    {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = lane / 4 + h * 8;
            float all = sum[h];
            all += __shfl_xor_sync(~0u, all, 1);
            all += __shfl_xor_sync(~0u, all, 2);
            if (row >= rows) continue;
            if (lane % 4 == 0) {
                m.top[warp][row] = top[h];
                m.sum[warp][row] = all;
            }
#pragma unroll
            for (int i = 0; i < DP / 8; i++)
                *(float2 *)&m.o[warp][row][i * 8 + lane % 4 * 2] = make_float2(o[i][h * 2], o[i][h * 2 + 1]);
        }
    }
};

} // namespace decode_walk

#endif
