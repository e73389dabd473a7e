/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* feed.cuh - the warpgroup that gathers Q and keys (hopper/gather.cuh); a list is read a stage ahead. Rows of
 * bytes are decoded on the way. */
#ifndef QUERN_CUDA_ATTEND_MQA_SM90_FEED_CUH
#define QUERN_CUDA_ATTEND_MQA_SM90_FEED_CUH

#include "attend_mqa/sm90/shared.cuh"
#include "hopper/gather.cuh"

namespace sm90_mqa
{

using namespace gather;

/* Half `half` of the thread's rows of bytes: 448 e4m3 with a scale for each panel, then 64 bf16. */
__device__ __forceinline__ void decode_rows(char *stage, const row_place &found, int half, bool wide)
{
    const int c = threadIdx.x % 8;
#pragma unroll 1
    for (int i = 0; i < ROWS_A_THREAD; i++) {
        const row_place row = {passed(found.data, i), passed(found.scales, i)};
        char *to = stage + tile_at<64>(copied_row(i), c);
#pragma unroll 1
        for (int p = half * HALF; p < half * HALF + HALF; p++, to += PANEL_BYTES)
            *(uint4 *)to = row.data != NULL ? mqa_decode(row, p, c * 8, wide) : make_uint4(0, 0, 0, 0);
    }
}

/* Fills a stage for each half, of Q or keys, and publishes it. */
template <typename T, bool BYTES>
__device__ __forceinline__ void fill(shared<T> &m, ring_place<STAGES> &at, const row_place &found, bool wide,
                                     const stage_info &info)
{
    const char *from[ROWS_A_THREAD];
#pragma unroll
    for (int i = 0; i < ROWS_A_THREAD && !BYTES; i++) from[i] = passed(found.data, i);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        m.keys.wait_free(at);
        if constexpr (BYTES) decode_rows((char *)m.k[at.stage], found, half, wide);
        else copy_rows<T>((char *)m.k[at.stage], from, half, wide);
        if (threadIdx.x == 0) m.info[at.stage] = info;
        m.keys.give_copies(at);
        m.keys.give(at);
        at.advance();
    }
}

/* Q of an item's heads. */
template <typename T>
__device__ __forceinline__ void feed_heads(const mqa_kernel &a, shared<T> &m, ring_place<STAGES> &at,
                                           const mqa_query &q, int head0)
{
    const int head = head0 + found_row();
    const T *row = (const T *)a.q.p + q.sequence * a.q.s[0] + q.row * a.q.s[1] + head * a.q.s[2];
    fill<T, false>(m, at, {head < a.heads ? (const char *)row : NULL, NULL}, a.q_wide,
                   {QUERY, 0, 0, 0, q.sequence, q.row, q.position, head0});
}

template <typename T, bool BYTES>
__device__ __forceinline__ void feed(const mqa_kernel &a, shared<T> &m, int items, int groups)
{
    ring_place<STAGES> at;
    const int mine = found_row();
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
        const int query = item / groups, head0 = (item - query * groups) * HEADS;
        feed_heads(a, m, at, a.queries[query], head0);
        const mqa_query q = a.queries[query];
        const int raw_stages = (q.raw + KEYS - 1) / KEYS, some = raw_stages + (q.entries + KEYS - 1) / KEYS,
                  stages = some > 0 ? some : 1;
        int next = mqa_find_key(a, q, query, raw_stages > 0, mine);
        for (int s = 0; s < stages; s++) {
            const bool raw = s < raw_stages;
            const int here = next, ahead = s + 1 - (s + 1 < raw_stages ? 0 : raw_stages);
            next = mqa_find_key(a, q, query, s + 1 < raw_stages, ahead * KEYS + mine);
            const row_source &source = raw ? a.raw : a.entries;
            const row_place place = mqa_row_at(source, q, here);
            const int left = raw ? q.raw - s * KEYS : q.entries - (s - raw_stages) * KEYS;
            fill<T, BYTES>(m, at, place, source.wide,
                           {KEYS_HERE, left < KEYS ? left : (int)KEYS, s + 1 == stages,
                            raw && s + 1 == raw_stages, 0, 0, 0, 0});
        }
    }
    fill<T, false>(m, at, {NULL, NULL}, true, {END, 0, 0, 0, 0, 0, 0, 0});
}

} // namespace sm90_mqa

#endif
