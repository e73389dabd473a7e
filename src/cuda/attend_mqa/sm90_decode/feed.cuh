/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* feed.cuh - the warpgroup that plans and gathers. Four lanes copy a row, so a thread has its part of two
 * rows of a tile. A warp's first 16 lanes each find one of its 16 rows, a tile ahead, ask for it in L2, and
 * hand the address to the lanes that copy. Rows of bytes are decoded on the way. */
#ifndef QUERN_CUDA_ATTEND_MQA_SM90_DECODE_FEED_CUH
#define QUERN_CUDA_ATTEND_MQA_SM90_DECODE_FEED_CUH

#include "attend_mqa/sm90_decode/shared.cuh"

namespace sm90_mqa_decode
{

enum { PLAN_BARRIER = 1, ROWS_A_THREAD = 2 };

/* The row of a tile that this lane of 16 finds; the thread's i-th row, and who has found it. Eight lanes that
 * store together reach all banks: of rows of bytes two follow one another, of others they are four apart. */
__device__ __forceinline__ int found_row()
{
    return threadIdx.x % 16 / 8 * 32 + threadIdx.x / 32 * 8 + threadIdx.x % 8;
}
template <bool BYTES> __device__ __forceinline__ int row_of_warp()
{
    const int i = threadIdx.x % 32 / 4;
    return BYTES ? i : i / 2 + i % 2 * 4;
}
template <bool BYTES> __device__ __forceinline__ int copied_row(int i)
{
    return i * 32 + threadIdx.x / 32 * 8 + row_of_warp<BYTES>();
}
template <bool BYTES> __device__ __forceinline__ const char *handed(const char *p, int i)
{
    return (const char *)__shfl_sync(~0u, (unsigned long long)p, i * 8 + row_of_warp<BYTES>());
}

/* Copies four panels of the thread's rows, from byte `column` on; a row without an address becomes zeros. */
template <typename T>
__device__ __forceinline__ void copy_rows(char *to, const char *found, int column, bool wide)
{
    const uint32_t tile = smem_address(to);
#pragma unroll 1
    for (int i = 0; i < ROWS_A_THREAD; i++) {
        const char *const row = handed<false>(found, i), *const from = row + column + threadIdx.x % 4 * 16;
        const int at_row = copied_row<false>(i);
        if (wide) {
            const uint32_t at[2] = {tile + tile_at<64>(at_row, threadIdx.x % 4),
                                    tile + tile_at<64>(at_row, threadIdx.x % 4 + 4)};
#pragma unroll
            for (int j = 0; j < HALF * 2; j++)
                cp_async16(at[j % 2] + j / 2 * PANEL_BYTES, from + j * 64, row != NULL);
        } else {
#pragma unroll 1
            for (int j = 0; j < HALF * 2; j++)
                load_chunk16<T>(tile, to, tile_at<64>(at_row, threadIdx.x % 4 + j * 4),
                                (const T *)(from + j * 64), row != NULL, false);
        }
    }
}

/* Decodes a half of a row, eight channels at a time; a row without an address becomes zeros. */
__device__ __forceinline__ void decode_narrow(char *to, const row_place &row, int at_row, int half, bool wide)
{
#pragma unroll 1
    for (int chunk = threadIdx.x % 4; chunk < HALF * 8; chunk += 4)
        *(uint4 *)(to + tile_at<64>(at_row, chunk)) =
            row.data != NULL ? mqa_decode(row, half * HALF + chunk / 8, chunk % 8 * 8, wide)
                             : make_uint4(0, 0, 0, 0);
}

/* A tile's rows of bytes are four parts of each warp: in each half twice eight rows. A part is asked for two
 * parts before it is decoded; a row has four lanes, and a lane every fourth of its chunks of 16 bytes. */
enum { PARTS = 4 };
__device__ __forceinline__ void ask_for_part(raw_rows *raw, const char *data, const char *scales, int part)
{
    raw_rows &to = raw[part % 2];
    const int row = threadIdx.x % 32 / 4, lane = threadIdx.x % 4, half = part / 2;
    const uint32_t at = smem_address(to.data[row]) + lane * 16;
    const char *const from = data + half * 256 + lane * 16;
#pragma unroll
    for (int j = 0; j < HALF; j++) cp_async16(at + j * 64, from + j * 64, data != NULL);
    if (half == 1) cp_async16(at + HALF * 64, from + HALF * 64, data != NULL);
    if (lane == 0)
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(smem_address(&to.scales[row])),
                     "l"(scales + half * 4), "r"(data != NULL ? 4 : 0));
}

/* Decodes a part of this lane's row; what is bf16 stays. `row`: for those that cannot be copied so. */
__device__ __forceinline__ void store_part(char *to, const raw_rows &raw, const row_place &row, int part,
                                           bool wide, bool widest)
{
    const int half = part / 2, at_row = copied_row<true>(part % 2), lane = threadIdx.x % 4;
    const uint4 *const from = (const uint4 *)raw.data[threadIdx.x % 32 / 4] + lane;
    const uint32_t scales = raw.scales[threadIdx.x % 32 / 4];
    uint4 codes[HALF];
#pragma unroll
    for (int j = 0; j < HALF; j++) codes[j] = from[j * 4];
    uint32_t nan_bits = scales | e4m3_nan_bits(codes[0]) | e4m3_nan_bits(codes[1]) | e4m3_nan_bits(codes[2]);
    if (half == 0) nan_bits |= e4m3_nan_bits(codes[HALF - 1]);
    if (!widest || __any_sync(~0u, (nan_bits & 0x80808080) != 0)) { /* all lanes of a row go the same way */
        decode_narrow(to, row, at_row, half, wide);
        return;
    }
    char *const at[2] = {to + tile_at<64>(at_row, lane * 2), to + tile_at<64>(at_row, lane * 2 + 1)};
#pragma unroll
    for (int j = 0; j < HALF; j++) {
        const uint32_t scale = scales >> j * 8 & 255;
        if (j == HALF - 1 && half == 1) break;
        *(uint4 *)(at[0] + j * PANEL_BYTES) = e4m3_finite_bf16x8(make_uint2(codes[j].x, codes[j].y), scale);
        *(uint4 *)(at[1] + j * PANEL_BYTES) = e4m3_finite_bf16x8(make_uint2(codes[j].z, codes[j].w), scale);
    }
    if (half == 0) return;
    *(uint4 *)(to + tile_at<64>(at_row, (HALF - 1) * 8 + lane)) = codes[HALF - 1];
    *(uint4 *)(to + tile_at<64>(at_row, (HALF - 1) * 8 + lane + 4)) = from[HALF * 4];
}

template <typename T>
__device__ __forceinline__ void feed_heads(const decode_kernel &w, shared<T> &m, ring_place<1> &at,
                                           const mqa_query &q, int head0)
{
    const mqa_kernel &a = w.a;
    const int row = found_row(), head = head0 + row;
    const T *const from = (const T *)a.q.p + q.sequence * a.q.s[0] + q.row * a.q.s[1] + head * a.q.s[2];
    m.queries.wait_free(at);
#pragma unroll 1
    for (int half = 0; half < 2; half++)
        copy_rows<T>((char *)m.q[half * HALF], row < w.heads && head < a.heads ? (const char *)from : NULL,
                     half * HALF * 128, a.q_wide);
    m.queries.give_copies(at);
    m.queries.give(at);
    at.advance();
}

/* Finds a lane's rows of a query's tiles in three steps, so that none waits for memory: its key, the key's
 * page, and what stands there. */
struct row_finder {
    const mqa_kernel &a;
    const mqa_query &q;
    const int32_t *list;
    int raw_tiles, first, last;
    int key, page, key_in_page; /* of the tile after next, and of the next one */

    __device__ __forceinline__ const row_source &source(int t) const
    {
        return t < raw_tiles ? a.raw : a.entries;
    }
    /* Which of the raw rows or entries; whether it is there. */
    __device__ __forceinline__ int index(int t) const
    {
        return (t < raw_tiles ? t : t - raw_tiles) * KEYS + found_row();
    }
    __device__ __forceinline__ bool here(int t) const
    {
        return t >= first && t < last && index(t) < (t < raw_tiles ? q.raw : q.entries);
    }
    /* The place in tile t; begins with those after it. Nothing that is loaded here is looked at before the
     * next call. */
    __device__ __forceinline__ row_place next(int t)
    {
        row_place found = {NULL, NULL};
        if (here(t)) found = row_in_page(source(t), page, key_in_page);
        key_in_page = key + (t + 1 < raw_tiles ? q.raw0 : q.entry0);
        if (here(t + 1))
            page = row_page(source(t + 1), source(t + 1).table != NULL ? q.b : q.sequence, key_in_page);
        key = index(t + 2);
        if (list != NULL && t + 2 >= raw_tiles && here(t + 2)) key = list[key];
        return found;
    }
};

/* Asks for a row of bytes in L2. */
__device__ __forceinline__ void prefetch_row(const row_place &row)
{
    if (row.data == NULL || threadIdx.x % 32 >= 16) return;
#pragma unroll
    for (int i = 0; i < MQA_CODES; i += 128) asm volatile("prefetch.global.L2 [%0];" ::"l"(row.data + i));
}

/* Publishes a stage that has been filled; with BYTES by ordinary stores: copies under way are of other
 * rows. */
template <typename T, bool BYTES>
__device__ __forceinline__ void publish(shared<T> &m, ring_place<STAGES> &at, const tile_info &info)
{
    if (threadIdx.x == 0) m.info[at.stage] = info;
    if constexpr (BYTES) m.keys.give(at);
    else m.keys.give_copies(at);
    m.keys.give(at);
    at.advance();
}

/* Tiles [first, last) of the query that m.room has; info: the item's. Two turns before the first tile find
 * its rows, a third one asks for its first parts. */
template <typename T, bool BYTES>
__device__ __forceinline__ void feed_tiles(const decode_kernel &w, shared<T> &m, ring_place<STAGES> &at,
                                           int first, int last, int tiles, tile_info info)
{
    const mqa_query &q = m.room.query;
    const int raw_tiles = (q.raw + KEYS - 1) / KEYS, per = share_of(tiles);
    row_finder rows = {w.a, q, m.room.list, raw_tiles, first, last, 0, 0, 0};
    raw_rows *const ring = m.raw[threadIdx.x / 32];
    row_place here = {NULL, NULL};
#pragma unroll 1
    for (int t = first - 3; t < last; t++) {
        const row_place next = rows.next(t + 1);
        const bool raw = t < raw_tiles, some = t >= first;
        const row_source &source = raw ? w.a.raw : w.a.entries;
        if constexpr (BYTES) prefetch_row(next);
        if (t + 1 < first) continue;
        if (some) {
            const int left = raw ? q.raw - t * KEYS : q.entries - (t - raw_tiles) * KEYS;
            info.keys = left < KEYS ? left : (int)KEYS;
            info.ends = (raw && (t + 1 == raw_tiles || t + 1 == last) ? ENDS_RAW : 0) |
                        (t + 1 == last ? ENDS_ITEM : 0) |
                        (w.whole && per > 1 && ((t + 1) % per == 0 || t + 1 == tiles) ? ENDS_SHARE : 0) |
                        (w.whole && per > 1 && t >= per ? LATER_SHARE : 0);
        }
        if constexpr (BYTES) {
#pragma unroll 1
            for (int i = some ? 0 : PARTS - 2; i < PARTS; i++) {
                const bool ahead = i + 2 >= PARTS, widest = rows.source(ahead ? t + 1 : t).widest;
                const row_place now = {handed<true>(here.data, i % 2), handed<true>(here.scales, i % 2)};
                const char *const data = handed<true>(ahead ? next.data : here.data, i % 2),
                                  *const scales = handed<true>(ahead ? next.scales : here.scales, i % 2);
                if (some) {
                    cp_async_wait<1>();
                    __syncwarp();
                    if (i % 2 == 0) m.keys.wait_free(at);
                    store_part((char *)m.k[at.stage], ring[i % 2], now, i, source.wide, source.widest);
                    if (i % 2 == 1) publish<T, BYTES>(m, at, info);
                    __syncwarp();
                }
                if (!ahead || t + 1 < last) ask_for_part(ring, widest ? data : NULL, scales, (i + 2) % PARTS);
                cp_async_commit();
            }
        } else {
#pragma unroll 1
            for (int half = 0; half < 2 && some; half++) {
                m.keys.wait_free(at);
                copy_rows<T>((char *)m.k[at.stage], here.data, half * HALF * 128, source.wide);
                publish<T, BYTES>(m, at, info);
            }
        }
        here = next;
    }
}

/* The plan of a query, that another launch has made. */
template <typename T> __device__ __forceinline__ void take_plan(const mqa_kernel &a, shared<T> &m, int query)
{
    mqa::planners_sync<PLAN_BARRIER>();
    if (threadIdx.x == 0) {
        m.room.query = a.queries[query];
        m.room.list = a.list != NULL ? a.list + query * a.list_row : NULL;
    }
    mqa::planners_sync<PLAN_BARRIER>();
}

/* Asks for a query's list and its sequence's pages of entries in L1: its plan reads them in turn. */
__device__ __forceinline__ void prefetch_plan(const mqa_planner &a, int query)
{
    if (a.of.cu_q != NULL) return;
    const int b = (uint32_t)query / (uint32_t)a.of.n_q, line = threadIdx.x * 32;
    if (a.list != NULL && line < a.k)
        asm volatile("prefetch.global.L1 [%0];" ::"l"(a.list + b * a.list_row[0] +
                                                      (query - b * a.of.n_q) * a.list_row[1] + line));
    if (a.entries.table != NULL && line < a.entries.columns)
        asm volatile("prefetch.global.L1 [%0];" ::"l"(a.entries.table + b * a.entries.table_row + line));
}

template <typename T, bool BYTES> __device__ __forceinline__ void feed(const decode_kernel &w, shared<T> &m)
{
    ring_place<STAGES> at;
    ring_place<1> heads;
    if (threadIdx.x == 0) m.room.sorted = m.sorted;
    if (w.planned) wait_for_before();
#pragma unroll 1
    for (int item = blockIdx.x; item < w.items; item += gridDim.x) {
        const int all = w.a.rows * w.groups, share = w.whole ? 0 : item / all, rest = item - share * all,
                  query = rest / w.groups, head0 = (rest - query * w.groups) * w.heads;
        if (w.planned) {
            take_plan(w.a, m, query);
        } else {
            prefetch_plan(w.plan, query);
            mqa::plan_query<PLAN_BARRIER>(w.plan, m.room, query);
        }
        const mqa_query &q = m.room.query;
        const int tiles = tiles_of(q.raw, q.entries), per = share_of(tiles),
                  first = w.whole ? 0 : share * per,
                  last = w.whole || tiles - first < per ? tiles : first + per;
        if (first >= last) continue;
        feed_heads(w, m, heads, q, head0);
        feed_tiles<T, BYTES>(
            w, m, at, first, last, tiles,
            {0, 0, q.sequence, q.row, q.position, head0, rest * w.shares + share, (tiles + per - 1) / per});
    }
#pragma unroll 1
    for (int half = 0; half < 2; half++) {
        m.keys.wait_free(at);
        if (threadIdx.x == 0) m.info[at.stage] = {0, NO_ITEM, 0, 0, 0, 0, 0, 0};
        m.keys.give(at);
        m.keys.give(at);
        at.advance();
    }
}

} // namespace sm90_mqa_decode

#endif
