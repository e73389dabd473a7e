/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * bytes.cuh - keys that are rows of bytes, codes and then scales: how they are copied, and how a thread reads
 * its part. A warp has 16 rows, a thread two of them, lane / 4 and that + 8, and of each 32 channels, read 4
 * or 16 bytes at a time without bank conflicts. The types of keys widen them: fp8.cuh, fp4.cuh, codes.cuh.
 */
#ifndef QUERN_CUDA_INDEXER_SM90_CODES_BYTES_CUH
#define QUERN_CUDA_INDEXER_SM90_CODES_BYTES_CUH

#include "indexer/sm90/feed.cuh"

namespace sm90_indexer
{

__device__ __forceinline__ uint32_t shared_word(uint32_t address)
{
    uint32_t x;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
    return x;
}
__device__ __forceinline__ void shared_words(uint32_t (&x)[4], uint32_t address)
{
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address)
                 : "memory");
}

/* Of a thread's two rows: the codes' words, the scales' bits, and whether the row is there. */
template <entry_format FORMAT> struct key_words {
    uint32_t code[2][codes_of(FORMAT) / 16], scale[2];
};

template <entry_format FORMAT>
__device__ __forceinline__ void read_words(key_words<FORMAT> &x, uint32_t tile, int row0, bool planar)
{
    constexpr int CODES = codes_of(FORMAT), WORDS = CODES / 16;
    const int lane = threadIdx.x % 32, row = row0 + lane / 4, own = lane % 4 * WORDS * 4;
    if (planar) {
        const bool swapped = codes_of(FORMAT) == WIDTH && (lane / 4 & 1) != 0; /* halves of an odd row */
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const uint32_t at = tile + (row + h * 8) * CODES + own;
            uint32_t half[WORDS / 4][4];
#pragma unroll
            for (int i = 0; i < WORDS / 4; i++) shared_words(half[i], at + (i ^ (int)swapped) * 16);
#pragma unroll
            for (int i = 0; i < WORDS; i++)
                x.code[h][i] = swapped ? half[(WORDS / 4 - 1) ^ i / 4][i % 4] : half[i / 4][i % 4];
            x.scale[h] = shared_word(tile + KEYS * CODES + (row + h * 8) * SCALE_BYTES);
        }
    } else {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const uint32_t at = tile + (row + h * 8) * (CODES + SCALE_BYTES);
#pragma unroll
            for (int i = 0; i < WORDS; i++) x.code[h][i] = shared_word(at + own + i * 4);
            x.scale[h] = shared_word(at + CODES);
        }
    }
}

/* The last words of rows of bytes whose number is no multiple of 16; what was before is copied. */
__device__ __forceinline__ uint32_t copy_rest(char *to, const char *from, uint32_t bytes)
{
    const uint32_t whole = bytes & ~15u;
    for (uint32_t i = whole; i < bytes; i += 4) *(uint32_t *)(to + i) = __ldg((const uint32_t *)(from + i));
    async_fence();
    return whole;
}

/* What the types of keys of bytes have in common. */
template <typename K, entry_format FORMAT> struct bytes {
    typedef bf16 query;
    enum { ROW_BYTES = codes_of(FORMAT) + SCALE_BYTES, STAGE_BYTES = KEYS * ROW_BYTES };
    enum { STAGES = 3, SLOTS = 12, ROOM = 2624, LONG_STAGES = STAGES, LONG_ROOM = ROOM };

    /* Keys that stand in a row, from `key` on, whose bytes begin at `from`; by one thread. */
    template <int Q, int N>
    static __device__ __forceinline__ void copy_run(const plan &p, fed<K, Q, N> &m, const ring_place<N> &at,
                                                    int, int key, const char *from)
    {
        const uint32_t to = stage_address(m.k, at.stage);
        m.here[at.stage] = 1;
        uint32_t bytes = STAGE_BYTES;
        if (key + KEYS > p.a.entries)
            bytes = copy_rest(m.k[at.stage], from, (uint32_t)(p.a.entries - key) * ROW_BYTES);
        const uint32_t bar = m.keys.expect(at, bytes);
        if (bytes > 0) bulk_load(to, from, bytes, bar);
    }

    /* This lane's run in a page. */
    template <int Q, int N>
    static __device__ __forceinline__ void copy_page(const plan &p, fed<K, Q, N> &m, const ring_place<N> &at,
                                                     int key, int page)
    {
        const int lane = threadIdx.x % 32, run = 1 << p.cut.run_shift;
        const uint32_t to = stage_address(m.k, at.stage), bar = m.keys.barrier(at);
        const row_place from = row_in_page(p.a.keys, page, key);
        const uint32_t bytes = (uint32_t)run * (p.cut.planar ? codes_of(FORMAT) : ROW_BYTES);
        bulk_load(to + lane * bytes, from.data, bytes, bar);
        if (p.cut.planar)
            bulk_load(to + KEYS * codes_of(FORMAT) + lane * run * SCALE_BYTES, from.scales,
                      (uint32_t)(run * SCALE_BYTES), bar);
    }

    template <int N>
    static __device__ __forceinline__ void read(uint32_t (&to)[N][4], float (&scale)[2], const key_cut &f,
                                                uint32_t tile, int row0)
    {
        key_words<FORMAT> x;
        read_words(x, tile, row0, f.planar);
        K::widen(to, scale, x);
    }
};

/* Of types of keys K that scale a head as they store it, and its weight: K::store() returns by what. */
template <typename K> struct scaled_queries {
    /* Of one query: its heads stand in shared memory until a loop stores them. The loop's code, unrolled,
     * would run once, and take some 5 us to come from L2. */
    template <int N>
    static __device__ __forceinline__ void fill_one(const index_kernel &a, fed<K, 1, N> &m, int stage,
                                                    const item_of &x, int t)
    {
        const int c = t % CHUNKS * 8, row0 = t / CHUNKS;
        const float weight = load_weight<1>(a, x, row0, t);
        load_heads<bf16, 1>(a, x, row0, c, [&](int i, int, uint4 x) { m.raw.of[i][t] = x; });
#pragma unroll 1
        for (int i = 0, row = row0; i < at_once<1>(); i++, row += ROWS_AT_ONCE) {
            const bool is_row = row < HEADS;
            const float scale =
                K::template store<HEADS>(a, (char *)m.q[stage][0], is_row ? row : -1, c, m.raw.of[i][t]);
            if (is_row && t % CHUNKS == i) m.w[stage][0][row] = weight * scale;
        }
    }

    /* A tile's, by Q_FILLERS threads, this one number t; 16 lanes have a head. */
    template <int Q, int N>
    static __device__ __forceinline__ void fill_queries(const index_kernel &a, fed<K, Q, N> &m, int stage,
                                                        const item_of &x, int t)
    {
        enum { TILE = fed<K, Q, N>::TILE };
        const int c = t % CHUNKS * 8;
        if constexpr (Q == 1)
            fill_one(a, m, stage, x, t);
        else
            for (int row0 = t / CHUNKS; row0 < Q * HEADS; row0 += at_once<Q>() * ROWS_AT_ONCE) {
                const float weight = load_weight<Q>(a, x, row0, t);
                load_heads<bf16, Q>(a, x, row0, c, [&](int i, int row, uint4 x) {
                    const bool is_row = row < Q * HEADS;
                    char *const tile = (char *)m.q[stage][is_row ? row / TILE : 0];
                    const float scale = K::template store<TILE>(a, tile, is_row ? row % TILE : -1, c, x);
                    if (is_row && t % CHUNKS == i) m.w[stage][row / HEADS][row % HEADS] = weight * scale;
                });
            }
    }
};

} // namespace sm90_indexer

#endif
