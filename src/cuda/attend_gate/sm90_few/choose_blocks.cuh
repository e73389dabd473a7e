/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * choose_blocks.cuh - lists by probability, made by the warps that have the exponentials of all compressed
 * entries of their 16 rows in registers: up to 128 entries, each a block, and lists of 4, 8 or 16 rows.
 *
 * The sums over four rows are made by halving, so that of each four rows 16 lanes have eight scores each. The
 * least score that a list takes is found bit by bit: a lane counts how many of its scores reach a candidate,
 * and one addition over the warp, with eight bits for each of its four lists, says how many do. It ends once
 * as many reach it as there are places; of equal scores the lowest blocks are taken. A list of 8 or 16 rows
 * is found twice or four times.
 */
#ifndef QUERN_CUDA_ATTEND_GATE_SM90_FEW_CHOOSE_BLOCKS_CUH
#define QUERN_CUDA_ATTEND_GATE_SM90_FEW_CHOOSE_BLOCKS_CUH

#include "select/lists.cuh"
#include "attend/sm90/rows.cuh"
#include "attend_gate/sm90/params.cuh"
#include "common/fold.cuh"

namespace sm90_gate
{

enum { OWN_SCORES = 8 }; /* of a lane, for each of two lists */

/* The block of a lane's i-th score; blocks of a word of a mask are those of four lanes. */
__device__ __forceinline__ int block_of_score(int i)
{
    const int lane = threadIdx.x & 31;
    return (lane >> 2 & 3) * 32 + (i >> 1) * 8 + (lane & 3) * 2 + (i & 1);
}

/* The scores of the lists with rows 8 h + 4 (lane / 16) ... of the warp. */
template <int NT>
__device__ __forceinline__ void sum_lists(const float (&s)[NT][4], const row_state &r, int rows,
                                          float (&score)[2][OWN_SCORES])
{
    static_assert(NT == 16, "a tile of 128 entries");
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float sum = r.sum[h], x[32];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        const float by = sum == 0.0f ? 0.0f : 1.0f / sum;
        const int end = r.hi[h] - (int)(threadIdx.x & 3) * 2;
#pragma unroll
        for (int i = 0; i < 32; i++) x[i] = i / 2 * 8 + i % 2 < end ? s[i / 2][h * 2 + i % 2] * by : 0.0f;
        fold<32>(x, 8);
        fold<16>(x, 4);
#pragma unroll
        for (int i = 0; i < OWN_SCORES; i++)
            score[h][i] = rows >= 8 ? x[i] + __shfl_xor_sync(~0u, x[i], 16) : x[i];
    }
    if (rows < 16) return;
#pragma unroll
    for (int i = 0; i < OWN_SCORES; i++) score[0][i] = score[1][i] = score[0][i] + score[1][i];
}

/* How many of each list's scores `reaches(h, i)` holds for. */
template <typename F> __device__ __forceinline__ void count_scores(const F &reaches, int (&count)[2])
{
    const int half = threadIdx.x >> 4 & 1;
    uint32_t all = 0;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        uint32_t n = 0;
#pragma unroll
        for (int i = 0; i < OWN_SCORES; i++) n += reaches(h, i);
        all |= n << (h * 16 + half * 8);
    }
    all = __reduce_add_sync(~0u, all);
#pragma unroll
    for (int h = 0; h < 2; h++) count[h] = (int)(all >> (h * 16 + half * 8) & 255);
}

/* What enters a list: keys above `least`, and those that equal it of blocks before `end`. */
struct entry_bound {
    uint32_t least;
    int end;
};

/* The bounds that let in[h].size keys enter, or all but 0 where there are fewer. */
__device__ __forceinline__ void find_bounds(const uint32_t (&key)[2][OWN_SCORES], const contest (&in)[2],
                                            entry_bound (&bound)[2])
{
    bool done[2];
    int count[2];
    uint32_t t[2], most = 0, least = ~0u; /* of the keys that are none of 0 */
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
        for (int i = 0; i < OWN_SCORES; i++) {
            most = max(most, key[h][i]);
            least = min(least, key[h][i] - 1);
        }
    most = __reduce_max_sync(~0u, most);
    least = __reduce_min_sync(~0u, least) + 1;
    const int bits = 32 - __clz((int)(most ^ least)); /* the last ones, which tell keys apart */
    const uint32_t prefix = bits < 32 ? most >> bits << bits : 0;
    count_scores([&](int h, int i) { return key[h][i] != 0; }, count);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        done[h] = count[h] <= in[h].size || in[h].size == 0;
        t[h] = count[h] <= in[h].size ? 1 : in[h].size == 0 ? ~0u : prefix;
        bound[h].end = done[h] ? SM90_MASK_WORDS * 32 : 0;
    }
    for (int bit = bits - 1; bit >= 0 && !__all_sync(~0u, done[0] && done[1]); bit--) {
        const uint32_t more[2] = {t[0] | 1u << bit, t[1] | 1u << bit};
        count_scores([&](int h, int i) { return key[h][i] >= more[h]; }, count);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            if (done[h] || count[h] < in[h].size) continue;
            t[h] = more[h];
            done[h] = count[h] == in[h].size;
            if (done[h]) bound[h].end = SM90_MASK_WORDS * 32;
        }
    }
    bound[0].least = t[0];
    bound[1].least = t[1];
    if (__all_sync(~0u, done[0] && done[1])) return;
    int left[2];
    count_scores([&](int h, int i) { return key[h][i] > t[h]; }, left);
    for (int bit = SM90_MASK_WORDS * 16; bit > 0; bit /= 2) {
        const int more[2] = {bound[0].end | bit, bound[1].end | bit};
        count_scores([&](int h, int i) { return key[h][i] == t[h] && block_of_score(i) < more[h]; }, count);
#pragma unroll
        for (int h = 0; h < 2; h++)
            if (!done[h] && count[h] <= in[h].size - left[h]) bound[h].end = more[h];
    }
}

/* Bits [from, to) of a mask, those of word `at`. */
__device__ __forceinline__ uint32_t bits_of_word(int from, int to, int at)
{
    const int lo = from - at * 32 > 0 ? from - at * 32 : 0, hi = to - at * 32 < 32 ? to - at * 32 : 32;
    return hi > lo ? (~0u >> (32 - (hi - lo))) << lo : 0u;
}

/* Writes a list, of which each lane knows its word of the mask. `row`: -1: no such list. */
__device__ __forceinline__ void write_mask(const sm90_choice &c, uint32_t word, int32_t view, int32_t unit,
                                           int32_t row)
{
    const int lane = threadIdx.x & 31, own = lane >> 2 & 3;
    int before = 0, total = 0;
#pragma unroll
    for (int i = 0; i < SM90_MASK_WORDS; i++) {
        const int n = __popc(__shfl_sync(~0u, word, (lane & 16) + i * 4));
        before += i < own ? n : 0;
        total += n;
    }
    if (row < 0) return;
    int32_t *to = c.blocks + view * c.stride[0] + unit * c.stride[1] + row * c.stride[2];
#pragma unroll
    for (int i = 0; i < OWN_SCORES; i++) {
        const int block = block_of_score(i), bit = block & 31;
        if (word >> bit & 1) to[before + __popc(word & ((1u << bit) - 1))] = block;
    }
    for (int i = total + (lane & 15); i < c.rule.k; i += 16) to[i] = -1;
    if (c.count != NULL && (lane & 15) == 0)
        c.count[view * c.count_stride[0] + unit * c.count_stride[1] + row * c.count_stride[2]] = total;
}

/* The masks of a warp's rows, one for each four rows. s, r: exponentials and statistics of all entries that
 * the rows see, r.hi of them. */
template <int NT>
__device__ __forceinline__ void choose_blocks_of(const float (&s)[NT][4], const sm90_choice &c,
                                                 const attend_kernel &a, const work &w, const row_state &r,
                                                 uint32_t *masks)
{
    const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) - 4, rows = a.tile * a.hs,
              own = lane >> 2 & 3;
    float score[2][OWN_SCORES];
    uint32_t key[2][OWN_SCORES];
    contest in[2];
    entry_bound bound[2];
    int32_t list[2];
    sum_lists(s, r, rows, score);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        list[h] = (int)quotient((uint32_t)(warp * 16 + h * 8 + (lane >> 4) * 4), a.by_tile_rows);
        const int query = list[h] * a.tile;
        in[h] = {0, 0, 0, 0, 0};
        if (query < w.queries) in[h] = contest_of(c, a, w.nq, w.query + query);
        else list[h] = -1;
        const int past = in[h].g0 < in[h].g1 ? in[h].g0 : in[h].candidates;
#pragma unroll
        for (int i = 0; i < OWN_SCORES; i++) {
            const int block = block_of_score(i);
            key[h][i] = block >= in[h].f0 && block < past ? order_of_sum(score[h][i]) : 0;
        }
    }
    find_bounds(key, in, bound);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        uint32_t word = 0;
#pragma unroll
        for (int i = 0; i < OWN_SCORES; i++) {
            const int block = block_of_score(i);
            const bool enters = key[h][i] > bound[h].least ||
                                (key[h][i] == bound[h].least && block < bound[h].end && key[h][i] != 0);
            word |= (uint32_t)enters << (block & 31);
        }
        word |= __shfl_xor_sync(~0u, word, 1);
        word |= __shfl_xor_sync(~0u, word, 2);
        word |= bits_of_word(0, in[h].f0, own) | bits_of_word(in[h].g0, in[h].g1, own);
        if ((lane & 3) == 0) masks[(warp * 4 + h * 2 + (lane >> 4)) * SM90_MASK_WORDS + own] = word;
        const bool writes = rows == 4 || (rows == 8 && lane < 16) || (h == 0 && lane < 16);
        if (c.blocks != NULL)
            write_mask(c, word, w.view, w.unit, writes && list[h] >= 0 ? w.list_row + list[h] : -1);
    }
    __syncwarp();
}

} // namespace sm90_gate

#endif
