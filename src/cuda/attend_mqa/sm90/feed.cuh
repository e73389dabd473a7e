/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* feed.cuh - the warpgroup that gathers Q and keys. Eight lanes copy a row, 16 bytes of each panel a lane, so
 * a thread has its part of four rows of a stage. A warp's first 16 lanes each find one of its 16 rows, a
 * stage ahead what a list says, and hand the address to the lanes that copy. Rows of bytes are decoded on the
 * way. */
#ifndef QUERN_CUDA_ATTEND_MQA_SM90_FEED_CUH
#define QUERN_CUDA_ATTEND_MQA_SM90_FEED_CUH

#include "attend_mqa/sm90/shared.cuh"

namespace sm90_mqa
{

enum { ROWS_A_THREAD = 4 };

/* The thread's i-th row of a stage, and the row that this lane of 16 finds. */
__device__ __forceinline__ int copied_row(int i)
{
    return i * 16 + threadIdx.x / 8;
}
__device__ __forceinline__ int found_row()
{
    return threadIdx.x % 16 / 4 * 16 + threadIdx.x / 32 * 4 + threadIdx.x % 4;
}

/* The address that the finder of the thread's i-th row has. */
__device__ __forceinline__ const char *handed(const char *p, int i)
{
    return (const char *)__shfl_sync(~0u, (unsigned long long)p, i * 4 + threadIdx.x % 32 / 8);
}

/* Copies half `half` of the thread's rows of 512 elements; a row without an address becomes zeros. */
template <typename T>
__device__ __forceinline__ void copy_rows(char *stage, const char *const (&from)[ROWS_A_THREAD], int half,
                                          bool wide)
{
    const uint32_t to = smem_address(stage), at = tile_at<64>(copied_row(0), threadIdx.x % 8),
                   column = (half * HALF * 64 + threadIdx.x % 8 * 8) * sizeof(T);
    if (wide) {
#pragma unroll
        for (int i = 0; i < ROWS_A_THREAD; i++)
#pragma unroll
            for (int p = 0; p < HALF; p++)
                cp_async16(to + at + i * 16 * 128 + p * PANEL_BYTES, from[i] + column + p * 128,
                           from[i] != NULL);
        return;
    }
#pragma unroll 1
    for (int p = 0; p < HALF; p++)
#pragma unroll
        for (int i = 0; i < ROWS_A_THREAD; i++)
            load_chunk16<T>(to, stage, at + i * 16 * 128 + p * PANEL_BYTES,
                            (const T *)(from[i] + column + p * 128), from[i] != NULL, false);
}

/* The same of rows of bytes: 448 e4m3 with a scale for each panel, then 64 bf16. */
__device__ __forceinline__ void decode_rows(char *stage, const row_place &found, int half, bool wide)
{
    const int c = threadIdx.x % 8;
#pragma unroll 1
    for (int i = 0; i < ROWS_A_THREAD; i++) {
        const row_place row = {handed(found.data, i), handed(found.scales, i)};
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
    for (int i = 0; i < ROWS_A_THREAD && !BYTES; i++) from[i] = handed(found.data, i);
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
