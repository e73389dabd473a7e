/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * choose_by_mean.cuh - a list by mean logits: up to 128 entries, each a block, and lists by head. A warpgroup
 * that computes makes the sums of the tile's rows by products with ones, while it waits for its turn: of the
 * piece's rows, and of those of the tile's other piece, which the copy engine brings to the place of the sums
 * of the piece's O. A warp that feeds makes the list: its lanes share the columns; eight entries' products at
 * a time are added by halving; the least score that enters is found bit by bit. The pieces of a tile make the
 * same list, each for itself.
 */
#ifndef QUERN_CUDA_ATTEND_GATE_SM90_CHOOSE_BY_MEAN_CUH
#define QUERN_CUDA_ATTEND_GATE_SM90_CHOOSE_BY_MEAN_CUH

#include "select/contest.cuh"
#include "common/mma.cuh"
#include "attend/sm90/rows.cuh"
#include "attend_gate/sm90/params.cuh"
#include "common/fold.cuh"

namespace sm90_gate
{

using namespace attend_parts;

enum { AT_ONCE = 8, WORDS = SM90_MASK_WORDS };

/* A lane's columns of a row. */
template <typename T, int COLUMNS> struct alignas(2 * COLUMNS) row_part {
    T x[COLUMNS];
};

/* The same as words; 0 where there is no such row. */
template <int WORDS_OF>
__device__ __forceinline__ void load_part(uint32_t (&x)[WORDS_OF], const void *from, bool in)
{
    uint2 two = make_uint2(0, 0);
    uint32_t one = 0;
    if (WORDS_OF == 2 && in) two = *(const uint2 *)from;
    if (WORDS_OF == 1 && in) one = *(const uint32_t *)from;
    x[0] = WORDS_OF == 2 ? two.x : one;
    if (WORDS_OF == 2) x[WORDS_OF - 1] = two.y;
}

/* The queries [first, end) of a piece's tile, which has two pieces at most. */
struct tile_rows {
    int first, end;
};
__device__ __forceinline__ tile_rows tile_of(const attend_kernel &a, const work &w)
{
    const int first = (int)quotient((uint32_t)w.query, a.by_tile_rows) * a.tile;
    return {first, first + a.tile < w.nq ? first + a.tile : w.nq};
}

/* The first query of the tile's other piece; -1: there is none. M: rows of a piece. */
template <int M> __device__ __forceinline__ int other_piece(const tile_rows &tile, const work &w)
{
    return w.query > tile.first ? tile.first : tile.first + M < tile.end ? tile.first + M : -1;
}

/* sum += the first `rows` rows of a tile of M in shared memory, in each row of 64. */
template <typename T, int D, int M>
__device__ __forceinline__ void sum_rows(float (&sum)[D / 8][4], uint32_t tile, int rows)
{
    uint64_t from = wg_fresh(wg_tile(tile, M * 128));
    if (rows == M) { /* one factor, so that the products wait for each other alone */
        const uint32_t one = pack2<T>(1.0f, 1.0f), ones[4] = {one, one, one, one};
        wg_start();
#pragma unroll
        for (int n = 0; n < M; n += 16) wg_rs_wide<T, D, true, true>(sum, ones, wg_further(from, n * 128));
        wg_commit();
        wg_wait<0>(sum);
        return;
    }
#pragma unroll 1
    for (int n = 0; n < rows; n += 16) {
        const int left = rows - n - (int)(threadIdx.x & 3) * 2;
        const uint32_t low = pack2<T>(left > 0, left > 1), high = pack2<T>(left > 8, left > 9);
        const uint32_t ones[4] = {low, low, high, high};
        wg_start();
        wg_rs_wide<T, D, true, true>(sum, ones, from);
        wg_commit();
        wg_wait<0>(sum);
        from = wg_further(from, 16 * 128);
    }
}

/* A lane's columns of the sums of a tile's rows. A factor of 0 makes NaN of what is not finite behind the
 * rows: then they are added one by one. */
template <typename T, int D>
__device__ __forceinline__ void read_sums(const attend_kernel &a, const work &w, const float *sums,
                                          float (&sum)[D / 32])
{
    constexpr int COLUMNS = D / 32;
    const int col = (threadIdx.x & 31) * COLUMNS;
    float zero = 0.0f;
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
        sum[c] = sums[col + c];
        zero = fmaf(sum[c], 0.0f, zero);
    }
    if (!__any_sync(~0u, zero != 0.0f)) return;
    const tile_rows tile = tile_of(a, w);
    const T *row = (const T *)a.q.p + w.view * a.q.s[0] + (int64_t)(w.q0 + tile.first) * a.q.s[1] +
                   w.head0 * a.q.s[2] + col;
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
        sum[c] = 0.0f;
#pragma unroll 1
        for (int n = 0; n < tile.end - tile.first && col < a.dim_k; n++)
            sum[c] += to_float<T>(row[n * a.q.s[1] + c]);
    }
}

/* This lane's score, of entry e0 + lane of [e0, end): `row` is the lane's columns of the first. */
template <typename T, int COLUMNS>
__device__ __forceinline__ float score_of_lane(const T *row, int64_t stride, bool in, int end, float scale,
                                               const float (&mean)[COLUMNS])
{
    const int lane = threadIdx.x & 31;
    float mine = -INFINITY;
#pragma unroll 1
    for (int e0 = 0; e0 < end; e0 += AT_ONCE) {
        float x[AT_ONCE];
        uint32_t k[AT_ONCE][COLUMNS / 2];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            load_part<COLUMNS / 2>(k[i], row, in && e0 + i < end);
            row += stride;
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            x[i] = 0.0f;
#pragma unroll
            for (int c = 0; c < COLUMNS; c += 2) {
                const float2 two = unpack2<T>(k[i][c / 2]);
                x[i] = fmaf(mean[c + 1], two.y, fmaf(mean[c], two.x, x[i]));
            }
        }
        fold<8>(x, 16); /* lanes end with one entry each */
        fold<4>(x, 8);
        fold<2>(x, 4);
        x[0] += __shfl_xor_sync(~0u, x[0], 2);
        x[0] += __shfl_xor_sync(~0u, x[0], 1);
        const float own = __shfl_sync(~0u, x[0], lane % AT_ONCE * (32 / AT_ONCE));
        if (lane / AT_ONCE == e0 / AT_ONCE && lane < end) mine = own * scale;
    }
    return mine;
}

/* This lane's scores, of entries 32 i + lane: those of [0, seen); -inf behind. */
template <typename T, int COLUMNS>
__device__ __forceinline__ void score_entries(const attend_kernel &a, const work &w, int32_t k0, int kvh,
                                              float scale, const float (&mean)[COLUMNS], int seen,
                                              float (&score)[WORDS])
{
    const int col = (threadIdx.x & 31) * COLUMNS;
    const T *row = (const T *)a.k.p + w.view * a.k.s[0] + (int64_t)k0 * a.k.s[1] + kvh * a.k.s[2] + col;
#pragma unroll
    for (int i = 0; i < WORDS; i++) {
        const int left = seen - i * 32, end = left < 32 ? left : 32;
        score[i] =
            score_of_lane<T, COLUMNS>(row + i * 32 * a.k.s[1], a.k.s[1], col < a.dim_k, end, scale, mean);
    }
}

/* The blocks that enter a list, this lane's 32 i + lane. */
__device__ __forceinline__ void choose_keys(const uint32_t (&key)[WORDS], int size, bool (&enters)[WORDS])
{
    uint32_t least = 0;
    int count = 0, above = 0;
    auto reach = [&](uint32_t bound) {
        int n = 0;
#pragma unroll
        for (int i = 0; i < WORDS; i++) n += __popc(__ballot_sync(~0u, key[i] >= bound));
        return n;
    };
    if (size > 0 && reach(1) > size)
        for (int bit = 31; bit >= 0 && count != size; bit--) {
            const int n = reach(least | 1u << bit);
            if (n < size) continue;
            least |= 1u << bit;
            count = n;
        }
    if (least != 0 && count != size) above = least == ~0u ? 0 : reach(least + 1);
    int left = least == 0      ? 32 * WORDS
               : count == size ? 32 * WORDS
                               : size - above; /* of those that equal it */
#pragma unroll
    for (int i = 0; i < WORDS; i++) {
        const bool equal = size > 0 && key[i] != 0 && key[i] == least;
        const uint32_t all = __ballot_sync(~0u, equal);
        const int before = __popc(all & ((1u << (threadIdx.x & 31)) - 1));
        enters[i] = size > 0 && (key[i] > least || (equal && before < left));
        left -= __popc(all) < left ? __popc(all) : left;
    }
}

/* The list of a piece's tile, of whose rows a lane has the sums of its columns, into `clean`, ascending,
 * without blocks that the piece does not see; returns how many they are. The tile's first piece writes the
 * list. All lanes of the warp call. */
template <typename T, int D>
__device__ __forceinline__ int choose_by_mean(const float (&sum)[D / 32], const sm90_choice &c,
                                              const attend_kernel &entries, const attend_kernel &a,
                                              const work &w, int32_t k0, int32_t nk, int32_t *clean)
{
    constexpr int COLUMNS = D / 32;
    const int lane = threadIdx.x & 31;
    const auto [first, end] = tile_of(a, w);
    float mean[COLUMNS], score[WORDS];
    uint32_t key[WORDS];
    bool enters[WORDS];
#pragma unroll
    for (int i = 0; i < COLUMNS; i++) mean[i] = sum[i] / (float)(end - first);
    wait_for_before();
    int lo, seen;
    row_keys(entries, {0, w.view, w.q0, w.nq, k0, nk}, end - 1, &lo, &seen);
    score_entries<T, COLUMNS>(entries, w, k0, w.kvh, c.scale, mean, seen, score);
    const contest in = contest_of(c, a, w.nq, first);
    const int past = in.g0 < in.g1 ? in.g0 : in.candidates;
#pragma unroll
    for (int i = 0; i < WORDS; i++) {
        const int block = i * 32 + lane;
        key[i] = block >= in.f0 && block < past ? order_of(score[i]) : 0;
    }
    choose_keys(key, in.size, enters);
    int32_t *to = c.blocks == NULL || w.query != first
                      ? NULL
                      : c.blocks + w.view * c.stride[0] + w.unit * c.stride[1] + w.list_row * c.stride[2];
    int total = 0, kept = 0;
#pragma unroll
    for (int i = 0; i < WORDS; i++) {
        const int block = i * 32 + lane;
        const bool chosen = enters[i] || block < in.f0 || (block >= in.g0 && block < in.g1);
        const bool visible = (int64_t)block * a.list_block < w.end;
        const uint32_t all = __ballot_sync(~0u, chosen);
        const int at = total + __popc(all & ((1u << lane) - 1));
        if (chosen && visible) clean[at] = block;
        if (chosen && to != NULL) to[at] = block;
        total += __popc(all);
        kept += __popc(__ballot_sync(~0u, chosen && visible));
    }
    if (to != NULL)
        for (int i = total + lane; i < c.rule.k; i += 32) to[i] = -1;
    if (to != NULL && c.count != NULL && lane == 0)
        c.count[w.view * c.count_stride[0] + w.unit * c.count_stride[1] + w.list_row * c.count_stride[2]] =
            total;
    __syncwarp();
    return kept;
}

} // namespace sm90_gate

#endif
