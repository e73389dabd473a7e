/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * kernel.cuh - the block of some rows of a sequence and a share of its blocks of keys.
 *
 * 16 bits: 16 rows on the tensor cores, 16 keys a step, in the prefill's order of sums. Each warp walks
 * blocks of its own through a ring of its own, filled by cp.async, so warps never wait for each other: 4 KB a
 * step at D 128, five stages, four warps and two blocks keep 128 KB a multiprocessor on their way. f32: a key
 * a lane on the f32 cores, columns in their order, as the prefill's. Limit: the read rate on the keys.
 */
#ifndef QUERN_CUDA_INDEX_DECODE_KERNEL_CUH
#define QUERN_CUDA_INDEX_DECODE_KERNEL_CUH

#include "index_decode/params.cuh"

namespace index_decode
{

/* What a block knows of its rows, in shared memory. */
struct row_facts {
    int32_t seen[ROWS];  /* keys */
    uint32_t place[ROWS]; /* its row of scores */
};

/* The keys of a warp: those of [lo, hi) of a head of sequence b. */
struct warp_keys {
    int b, head;
    int64_t lo, hi;
};

/* Columns [from, to) of the step of keys that begins at `base` belong to one block. */
struct step_part {
    int64_t base;
    int from, to;
};

/* 16 rows on the tensor cores. */
template <typename T, int DP> struct tensor_scores {
    typedef T element;
    enum {
        COLUMNS = DP,
        KEYS = 16,
        CHUNKS = DP / 8,
        STAGES = DP <= 64 ? 8 : DP <= 128 ? 5 : 2,
        BLOCKS = DP <= 128 ? 2 : 3 /* of a multiprocessor */
    };
    struct memory {
        alignas(128) T q[ROWS * DP];
        T k[WARPS][STAGES][KEYS * DP];
        row_facts rows;
    };

    float s[2][4], most[2];
    int seen[2];

    static __device__ __forceinline__ void load(memory &m, int row, int chunk, const T *from, bool here,
                                                bool wide)
    {
        load_chunk16<T>(smem_address(m.q), (char *)m.q, tile_at<ROWS>(row, chunk), from, here, wide);
    }

    __device__ __forceinline__ void open(const memory &m)
    {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            most[h] = -INFINITY;
            seen[h] = m.rows.seen[threadIdx.x % 32 / 4 + h * 8];
        }
    }

    __device__ __forceinline__ void raise(const memory &, int, const step_part &part)
    {
        const int column = threadIdx.x % 4 * 2;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int h = i % 4 / 2, at = i / 4 * 8 + column + i % 2;
            if (at >= part.from && at < part.to && part.base + at < seen[h])
                most[h] = index_most(most[h], s[i / 4][i % 4]);
        }
    }

    __device__ __forceinline__ void close(const memory &m, const index_kernel &a, int rows, int64_t block)
    {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = threadIdx.x % 32 / 4 + h * 8;
            float x = most[h];
            x = index_most(x, __shfl_xor_sync(~0u, x, 1));
            x = index_most(x, __shfl_xor_sync(~0u, x, 2));
            if (threadIdx.x % 4 == 0 && row < rows) a.scores[m.rows.place[row] * a.width + block] = x;
            most[h] = -INFINITY;
        }
    }

    /* take(base) after each step of keys from `base` on, whose scores are in s. */
    template <typename Take>
    __device__ __forceinline__ void walk(const index_kernel &a, memory &m, const warp_keys &w, int,
                                         const Take &take)
    {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const int64_t first = w.lo / KEYS * KEYS;
        const int steps = (int)((w.hi - first + KEYS - 1) / KEYS);
        const char *next = plane_block(a.plane, w.b, w.head, first / CACHE_BLOCK, a.status);
        uint32_t fq[DP / 16][4], there = 0; /* there: a bit a stage */
#pragma unroll
        for (int i = 0; i < DP / 16; i++) load_a<ROWS>(fq[i], smem_address(m.q), 0, i * 16, lane);
        const auto ask = [&](int step, int stage) {
            const int64_t base = first + (int64_t)step * KEYS;
            if (step < steps) {
                const char *const from = next != NULL ? next + base % CACHE_BLOCK * a.plane.key : NULL;
                const int64_t left = w.hi - base;
                const uint32_t to = smem_address(m.k[warp][stage]);
                there = (there & ~(1u << stage)) | (uint32_t)(from != NULL) << stage;
#pragma unroll
                for (int j = 0; j < KEYS * CHUNKS / 32; j++) {
                    const int i = j * 32 + lane, r = i / CHUNKS, at = i % CHUNKS * 16;
                    load_chunk16<T>(to, (char *)m.k[warp][stage], tile_at<KEYS>(r, i % CHUNKS),
                                    (const T *)(from + r * a.plane.key + at),
                                    from != NULL && r < left && at < a.plane.key, a.wide);
                }
                if (step + 1 < steps)
                    next = plane_block(a.plane, w.b, w.head, (base + KEYS) / CACHE_BLOCK, a.status);
            }
            cp_async_commit();
        };
        for (int i = 0; i < STAGES - 1; i++) ask(i, i);
        for (int step = 0, stage = 0; step < steps; step++) {
            cp_async_wait<STAGES - 2>();
            __syncwarp();
            ask(step + STAGES - 1, stage == 0 ? STAGES - 1 : stage - 1);
#pragma unroll
            for (int i = 0; i < 8; i++) s[i / 4][i % 4] = 0.0f;
            product_nt_held<T, DP, 2, KEYS>(s, fq, smem_address(m.k[warp][stage]), 0, lane);
            if (!(there >> stage & 1)) {
#pragma unroll
                for (int i = 0; i < 8; i++) s[i / 4][i % 4] = -INFINITY;
            }
            take(first + (int64_t)step * KEYS);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        }
        cp_async_wait<0>();
    }
};

/* A key a lane on the f32 cores. */
struct plain_scores {
    typedef float element;
    enum { COLUMNS = 256, KEYS = 32, BLOCKS = 2 };
    struct memory {
        alignas(16) float q[ROWS][COLUMNS];
        row_facts rows;
    };

    float s[ROWS], most[ROWS];

    static __device__ __forceinline__ void load(memory &m, int row, int chunk, const float *from, bool here,
                                                bool)
    {
        for (int e = 0; e < 8; e++) m.q[row][chunk * 8 + e] = here ? from[e] : 0.0f;
    }

    __device__ __forceinline__ void open(const memory &)
    {
#pragma unroll
        for (int r = 0; r < ROWS; r++) most[r] = -INFINITY;
    }

    __device__ __forceinline__ void raise(const memory &m, int rows, const step_part &part)
    {
        const int at = threadIdx.x % 32;
        if (at < part.from || at >= part.to) return;
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            if (r < rows && part.base + at < m.rows.seen[r]) most[r] = index_most(most[r], s[r]);
    }

    __device__ __forceinline__ void close(const memory &m, const index_kernel &a, int rows, int64_t block)
    {
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            if (r >= rows) break;
            float x = most[r];
#pragma unroll
            for (int by = 16; by > 0; by /= 2) x = index_most(x, __shfl_xor_sync(~0u, x, by));
            if (threadIdx.x % 32 == 0) a.scores[m.rows.place[r] * a.width + block] = x;
            most[r] = -INFINITY;
        }
    }

    /* Sums rows' products with the key at `key`, four columns at a time. */
    __device__ __forceinline__ void multiply(const index_kernel &a, const memory &m, int rows,
                                             const float *key)
    {
#pragma unroll
        for (int r = 0; r < ROWS; r++) s[r] = 0.0f;
        for (int c = 0; c < a.plane.dim; c += 4) {
            const float4 k = a.wide ? __ldg((const float4 *)(key + c))
                                    : make_float4(key[c], key[c + 1], key[c + 2], key[c + 3]);
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                if (r >= rows) break;
                const float4 x = *(const float4 *)&m.q[r][c];
                s[r] = fmaf(x.w, k.w, fmaf(x.z, k.z, fmaf(x.y, k.y, fmaf(x.x, k.x, s[r]))));
            }
        }
    }

    template <typename Take>
    __device__ __forceinline__ void walk(const index_kernel &a, memory &m, const warp_keys &w, int rows,
                                         const Take &take)
    {
        for (int64_t base = w.lo / KEYS * KEYS; base < w.hi; base += KEYS) {
            const char *const page = plane_block(a.plane, w.b, w.head, base / CACHE_BLOCK, a.status);
            const int64_t key = base + (int)threadIdx.x % 32;
            if (page != NULL && key < w.hi) {
                multiply(a, m, rows, (const float *)(page + key % CACHE_BLOCK * a.plane.key));
            } else {
#pragma unroll
                for (int r = 0; r < ROWS; r++) s[r] = -INFINITY;
            }
            take(base);
        }
    }
};

/* A warp's blocks [block, end). */
template <class S>
__device__ __forceinline__ void score_blocks(const index_kernel &a, typename S::memory &m, int rows, int b,
                                             int head, int64_t block, int64_t end, int64_t seen)
{
    const int64_t size = a.list.block_size, all = end * size;
    const warp_keys w = {b, head, block * size, all < seen ? all : seen};
    int64_t at = w.lo, whole = w.lo + size; /* the next key; where its block ends */
    S of;
    of.open(m);
    of.walk(a, m, w, rows, [&](int64_t base) {
        const int64_t last = base + S::KEYS < w.hi ? base + S::KEYS : w.hi;
        while (at < last) {
            const int64_t to = whole < last ? whole : last;
            of.raise(m, rows, {base, (int)(at - base), (int)(to - base)});
            at = to;
            if (at != whole && at != w.hi) continue;
            of.close(m, a, rows, block++);
            whole += size;
        }
    });
}

/* The rows of a block: those of `count` tokens from row t of the call on, and of the unit's heads from
 * head0 on. */
template <class S>
__device__ __forceinline__ void load_rows(const index_kernel &a, typename S::memory &m, const index_query &q,
                                          int64_t t, int head0, int rows, int heads)
{
    typedef typename S::element T;
    constexpr int CHUNKS = S::COLUMNS / 8;
    const int64_t lists = (int64_t)a.list.units * a.list.hs;
    for (int i = threadIdx.x; i < ROWS * CHUNKS; i += THREADS) {
        const int row = i / CHUNKS, chunk = i % CHUNKS, token = row / heads;
        const T *const from = (const T *)a.q.p + (t + token) * a.q.s[1] +
                              (head0 + row - token * heads) * a.q.s[2] + chunk * 8;
        S::load(m, row, chunk, from, row < rows && chunk * 8 < a.plane.dim, a.q_wide);
    }
    if (threadIdx.x < ROWS) {
        const int row = threadIdx.x, token = row / heads;
        m.rows.seen[row] = row < rows ? (int32_t)(q.position + token + 1) : 0;
        m.rows.place[row] = (uint32_t)((t - a.first + token) * lists + head0 + row - token * heads);
    }
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
}

/* A block's part of a call. */
template <class S> __device__ __forceinline__ void take_share(const index_kernel &a, typename S::memory &m)
{
    uint32_t rest = blockIdx.x;
    const int share = (int)(rest % (uint32_t)a.shares);
    rest /= (uint32_t)a.shares;
    const int chunk = (int)(rest % (uint32_t)a.chunks);
    rest /= (uint32_t)a.chunks;
    const int unit = (int)(rest % (uint32_t)a.list.units);
    const int64_t t = a.first + rest / (uint32_t)a.list.units;
    let_next_start();
    if (blockIdx.x == 0 && a.first == 0) step_check(a.step, a.status);
    index_query q;
    if (!find_query(a, t, &q) || q.position < 0 || q.before % a.tokens != 0) return;
    const int tokens = (int)(q.left < a.tokens ? q.left : a.tokens), head0 = chunk * ROWS,
              heads = a.list.hs - head0 < a.heads ? a.list.hs - head0 : a.heads;
    const int64_t seen = q.position + tokens;
    const index_contest newest = contest_at(a, seen - 1);
    if (newest.candidates <= a.list.k) return; /* all find room */
    const int64_t wanted = (seen + SHARE_KEYS - 1) / SHARE_KEYS,
                  shares = wanted < a.shares ? wanted : a.shares,
                  each = (newest.candidates + shares * WARPS - 1) / (shares * WARPS);
    if (share * WARPS * each >= newest.candidates) return;
    load_rows<S>(a, m, q, t, unit * a.list.hs + head0, tokens * heads, heads);
    const int64_t block = (share * WARPS + (int)threadIdx.x / 32) * each,
                  end = block + each < newest.candidates ? block + each : newest.candidates;
    if (block < end) score_blocks<S>(a, m, tokens * heads, q.b, unit, block, end, seen);
}

template <typename T, int DP>
__global__ void __launch_bounds__(THREADS, tensor_scores<T, DP>::BLOCKS)
    index_tensor(const __grid_constant__ index_kernel a)
{
    extern __shared__ __align__(128) char memory[];
    take_share<tensor_scores<T, DP>>(a, *(typename tensor_scores<T, DP>::memory *)memory);
}

template <typename T>
__global__ void __launch_bounds__(THREADS, plain_scores::BLOCKS)
    index_plain(const __grid_constant__ index_kernel a)
{
    extern __shared__ __align__(128) char memory[];
    take_share<plain_scores>(a, *(plain_scores::memory *)memory);
}

template <class S>
static quern_status launch(void (*kernel)(index_kernel), const index_kernel &a, const launcher &to)
{
    const int64_t blocks = a.rows * a.list.units * a.chunks * a.shares;
    return launch_shared(to, kernel, dim3((unsigned)blocks), THREADS, sizeof(typename S::memory),
                         "the block indexer of a step over pages", a);
}

} // namespace index_decode

#endif
