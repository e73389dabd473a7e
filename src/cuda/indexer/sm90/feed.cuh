/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* feed.cuh - the warps that copy: keys by bulk copies, a lane a page or part of one; queries by loads, their
 * channels in the order of the products. */
#ifndef QUERN_CUDA_INDEXER_SM90_FEED_CUH
#define QUERN_CUDA_INDEXER_SM90_FEED_CUH

#include "indexer/sm90/shared.cuh"

namespace sm90_indexer
{

/*
 * Stores eight channels of a query from c on, a multiple of 8. A thread's 32 codes of a key are channels
 * 32 j ... 32 j + 31 of lane j of four; in a step of 16 channels it has two at 2 j and two at 8 + 2 j. Those
 * are, in the order in which codes are widened: FP8, four in a row; FP4, of eight, 0 and 4, 1 and 5; in the
 * next step 2 and 6, 3 and 7.
 */
template <key_kind KIND, int TILE>
__device__ __forceinline__ void store_channels(char *tile, int row, int c, uint4 x)
{
    if constexpr (KIND == ROWS) {
        *(uint4 *)(tile + tile_at<TILE>(row, c / 8)) = x;
    } else {
        const int lane = c / 32, step = c % 32 / 4;
        const uint32_t pair[4] = {KIND == FP8 ? x.x : __byte_perm(x.x, x.z, 0x5410),
                                  KIND == FP8 ? x.y : __byte_perm(x.x, x.z, 0x7632),
                                  KIND == FP8 ? x.z : __byte_perm(x.y, x.w, 0x5410),
                                  KIND == FP8 ? x.w : __byte_perm(x.y, x.w, 0x7632)};
#pragma unroll
        for (int i = 0; i < 4; i++)
            *(uint32_t *)(tile + tile_at<TILE>(row, (step + i / 2) * 2 + i % 2) + lane * 4) = pair[i];
    }
}

/* The same of a head whose factors are f16; returns what the weight takes. 16 lanes have a head; row -1: none
 * that is stored. */
template <int TILE> __device__ __forceinline__ float store_halves(char *tile, int row, int c, uint4 x)
{
    const uint32_t words[4] = {x.x, x.y, x.z, x.w};
    uint32_t most = 0, halves[4]; /* most: of the finite, the bits of bf16 */
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const uint32_t size = words[i / 2] >> i % 2 * 16 & 0x7fff;
        if (size < 0x7f80) most = max(most, size);
    }
#pragma unroll
    for (int by = 1; by < 16; by *= 2) most = max(most, __shfl_xor_sync(~0u, most, by));
    const uint32_t up = min(268 - (most >> 7), 253u); /* 141 - exponent, biased by 127 */
    if (row < 0) return 0.0f;
    const float times = __uint_as_float(up << 23);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float low = __uint_as_float(words[i] << 16) * times,
                    high = __uint_as_float(words[i] & 0xffff0000) * times;
        const __half2 two = __floats2half2_rn(low, high);
        halves[i] = *(const uint32_t *)&two;
    }
    store_channels<FP8, TILE>(tile, row, c, make_uint4(halves[0], halves[1], halves[2], halves[3]));
    return __uint_as_float((254 - up) << 23);
}

/* The same of a query that is rounded: its codes, whose scale the head's weight takes. In a step of 32
 * channels lane l of four has those at 4 l and at 16 + 4 l: eight of its 32. */
template <int TILE>
__device__ __forceinline__ float store_codes(const index_kernel &a, char *tile, int row, int c, uint4 x)
{
    const uint32_t words[4] = {x.x, x.y, x.z, x.w};
    float v[8], most = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        v[i] = index_finite(a, __uint_as_float(i % 2 ? words[i / 2] & 0xffff0000 : words[i / 2] << 16));
        most = fmaxf(most, fabsf(v[i]));
    }
#pragma unroll
    for (int by = 1; by < 16; by *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, by));
    const float scale = index_round_scale(most);
    if (row < 0) return scale;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float *y = v + half * 4;
        const uint32_t codes = two_e4m3(__fdiv_rn(y[0], scale), __fdiv_rn(y[1], scale)) |
                               (uint32_t)two_e4m3(__fdiv_rn(y[2], scale), __fdiv_rn(y[3], scale)) << 16;
        *(uint32_t *)(tile + tile_at<TILE>(row, c % 32 / 8 * 2 + half) + c / 32 * 4) = codes;
    }
    return scale;
}

template <typename T> __device__ __forceinline__ uint4 load_channels(const T *from, bool here, bool wide)
{
    uint4 x = make_uint4(0, 0, 0, 0);
    if (here && wide) x = __ldg((const uint4 *)from);
    else if (here)
        for (int i = 0; i < 8; i++) ((T *)&x)[i] = from[i];
    return x;
}

/* By Q_FILLERS threads, this one number t. */
template <typename T, key_kind KIND, int Q, int STAGES>
__device__ __forceinline__ void feed_queries(const index_kernel &a, const key_feed &f,
                                             fed<T, KIND, Q, STAGES> &m, int items, int t)
{
    typedef fed<T, KIND, Q, STAGES> S;
    enum { CHUNKS = WIDTH / 8, ROWS_AT_ONCE = Q_FILLERS / CHUNKS, AT_ONCE = 4 };
    const int c = t % CHUNKS * 8;
    ring_place<S::ROUNDS> at;
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
        const item_of x = item_at<Q>(a, f, item);
        if (x.stages == 0) continue;
        m.queries.wait_free(at);
        const T *const first = (const T *)a.q.p + x.b * a.q.s[0] + x.query * a.q.s[1] + c;
        for (int row0 = t / CHUNKS; row0 < Q * HEADS; row0 += AT_ONCE * ROWS_AT_ONCE) {
            uint4 held[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                const int row = row0 + i * ROWS_AT_ONCE, query = row / HEADS;
                held[i] = load_channels(first + query * a.q.s[1] + row % HEADS * a.q.s[2],
                                        row < Q * HEADS && x.query + query < a.queries, a.q_wide);
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                const int row = row0 + i * ROWS_AT_ONCE;
                if constexpr (KIND == CODES || KIND == FP8) {
                    const bool is_row = row < Q * HEADS;
                    char *const tile = (char *)m.q[at.stage][is_row ? row / S::TILE : 0];
                    const int to = is_row ? row % S::TILE : -1, query = row / HEADS;
                    const float scale = KIND == FP8 ? store_halves<S::TILE>(tile, to, c, held[i])
                                                    : store_codes<S::TILE>(a, tile, to, c, held[i]);
                    if (is_row && c == 0)
                        m.w[at.stage][query][row % HEADS] =
                            x.query + query < a.queries
                                ? index_weight(a, x.b, x.query + query, row % HEADS) * scale
                                : 0.0f;
                } else if (row < Q * HEADS)
                    store_channels<KIND, S::TILE>((char *)m.q[at.stage][row / S::TILE], row % S::TILE, c,
                                                  held[i]);
            }
        }
        for (int i = t; KIND != CODES && KIND != FP8 && i < Q * HEADS; i += Q_FILLERS) {
            const int query = x.query + i / HEADS;
            m.w[at.stage][i / HEADS][i % HEADS] =
                query < a.queries ? index_weight(a, x.b, query, i % HEADS) : 0.0f;
        }
        async_fence();
        m.queries.give(at);
        at.advance();
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

/* Keys that stand in a row, from `key` on, whose bytes begin at `from`; by one thread. */
template <typename T, key_kind KIND, int Q, int STAGES>
__device__ __forceinline__ void copy_run(const index_kernel &a, const CUtensorMap &map,
                                         fed<T, KIND, Q, STAGES> &m, const ring_place<STAGES> &at, int b,
                                         int key, const char *from)
{
    const uint32_t to = stage_address(m.k, at.stage);
    m.here[at.stage] = 1;
    if constexpr (KIND == ROWS) {
        const uint32_t bar = m.keys.expect(at, stage_bytes(ROWS));
#pragma unroll
        for (int p = 0; p < PANELS; p++) tma_load(to + p * PANEL_BYTES, map, bar, 0, key, p, b);
    } else {
        uint32_t bytes = stage_bytes(KIND);
        if (key + KEYS > a.entries)
            bytes =
                copy_rest(m.k[at.stage], from, (uint32_t)(a.entries - key) * (codes_of(KIND) + SCALE_BYTES));
        const uint32_t bar = m.keys.expect(at, bytes);
        if (bytes > 0) bulk_load(to, from, bytes, bar);
    }
}

/* Keys in pages, `from` the one of this lane's run on; by one warp. A run that the table does not name
 * (`here`) leaves what is there; its scores become NaN. */
template <typename T, key_kind KIND, int Q, int STAGES>
__device__ __forceinline__ void copy_pages(const index_kernel &a, const key_feed &f, const CUtensorMap &map,
                                           fed<T, KIND, Q, STAGES> &m, const ring_place<STAGES> &at, int key,
                                           bool here, int page)
{
    const int lane = threadIdx.x % 32, rows = 1 << f.run_shift;
    const unsigned named = __ballot_sync(~0u, here);
    if (lane == 0) {
        m.here[at.stage] = named;
        m.keys.expect(at, (uint32_t)(__popc(named) << f.run_shift) * (stage_bytes(KIND) / KEYS));
    }
    __syncwarp();
    if (!here) return;
    const uint32_t to = stage_address(m.k, at.stage), bar = m.keys.barrier(at);
    if constexpr (KIND == ROWS) {
        const int row = (int)(key - quotient(key, a.keys.slots) * a.keys.slots.d);
#pragma unroll
        for (int p = 0; p < PANELS; p++)
            tma_load(to + lane * rows * 128 + p * PANEL_BYTES, map, bar, 0, row, p, page);
    } else {
        const row_place from = row_in_page(a.keys, page, key);
        const uint32_t bytes = (uint32_t)rows * (f.planar ? codes_of(KIND) : codes_of(KIND) + SCALE_BYTES);
        bulk_load(to + lane * bytes, from.data, bytes, bar);
        if (f.planar)
            bulk_load(to + KEYS * codes_of(KIND) + lane * rows * SCALE_BYTES, from.scales,
                      (uint32_t)(rows * SCALE_BYTES), bar);
    }
}

/* By one warp. */
template <typename T, key_kind KIND, int Q, int STAGES>
__device__ __forceinline__ void feed_keys(const index_kernel &a, const key_feed &f, const CUtensorMap &map,
                                          fed<T, KIND, Q, STAGES> &m, int items)
{
    const int lane = threadIdx.x % 32;
    ring_place<STAGES> at;
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
        const item_of x = item_at<Q>(a, f, item);
        const int sequence = index_sequence(a, x.b);
        const char *const first = a.keys.p + x.b * a.keys.page + x.key * a.keys.row;
        for (int s = 0; s < x.stages; s++) {
            if (a.keys.table == NULL) {
                if (lane > 0) break;
                m.keys.wait_free(at);
                copy_run(a, map, m, at, x.b, x.key + s * KEYS, first + s * KEYS * a.keys.row);
            } else {
                const int key = x.key + s * KEYS + (lane << f.run_shift);
                const bool here =
                    lane < KEYS >> f.run_shift && key < a.entries && row_exists(a.keys, sequence, key);
                const int page = here ? row_page(a.keys, sequence, key) : 0;
                m.keys.wait_free(at);
                copy_pages(a, f, map, m, at, key, here, page);
            }
            at.advance();
        }
        __syncwarp();
    }
}

} // namespace sm90_indexer

#endif
