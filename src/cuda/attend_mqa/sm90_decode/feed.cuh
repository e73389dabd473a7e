/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* feed.cuh - the warpgroup that plans and gathers. Four lanes copy a row, so a thread has its part of two
 * rows of a tile. A warp's first 16 lanes each find one of its 16 rows, a tile ahead, ask for it in L2, and
 * hand the address to the lanes that copy. Rows of bytes are decoded on the way: a lane's codes come into
 * places of its own, so that no other lane has to be waited for. */
#ifndef QUERN_CUDA_ATTEND_MQA_SM90_DECODE_FEED_CUH
#define QUERN_CUDA_ATTEND_MQA_SM90_DECODE_FEED_CUH

#include "attend_mqa/sm90_decode/shared.cuh"

namespace sm90_mqa_decode
{

enum { PLAN_BARRIER = 1, ROWS_A_THREAD = 2, ROW_LINES = 5 };

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

/* This lane's parts of its two rows of bytes: every fourth chunk of 16 bytes. `there` false: zeros in their
 * place, also of rows that cannot be read so. */
struct lane_rows {
    const char *from[ROWS_A_THREAD];
    bool there[ROWS_A_THREAD];
};
__device__ __forceinline__ lane_rows rows_of_lane(const char *found, bool widest)
{
    lane_rows rows;
#pragma unroll
    for (int i = 0; i < ROWS_A_THREAD; i++) {
        const char *const data = handed<true>(found, i);
        rows.from[i] = data + threadIdx.x % 4 * 16;
        rows.there[i] = data != NULL && widest;
    }
    return rows;
}

/* Asks for the lane's codes of the first half of columns. */
template <typename T> __device__ __forceinline__ void ask_first_half(shared<T> &m, const lane_rows &rows)
{
    const uint32_t to = smem_address(&m.codes[0][threadIdx.x]);
#pragma unroll
    for (int i = 0; i < ROWS_A_THREAD; i++)
#pragma unroll
        for (int j = 0; j < HALF; j++)
            cp_async16(to + (i * HALF + j) * (uint32_t)sizeof m.codes[0], rows.from[i] + j * 64,
                       rows.there[i]);
}

/* And for what it has of the second one, where it is used: 16 codes stand in the first of the two chunks that
 * the lane makes of them, bf16 where they belong. */
__device__ __forceinline__ void ask_second_half(char *stage, const lane_rows &rows)
{
    const int lane = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < ROWS_A_THREAD; i++) {
        const char *const from = rows.from[i] + HALF * 64;
        const uint32_t to = smem_address(stage), last = to + (HALF - 1) * PANEL_BYTES,
                       at = to + tile_at<64>(copied_row<true>(i), lane * 2);
#pragma unroll
        for (int j = 0; j < HALF - 1; j++) cp_async16(at + j * PANEL_BYTES, from + j * 64, rows.there[i]);
#pragma unroll
        for (int j = 0; j < 2; j++)
            cp_async16(last + tile_at<64>(copied_row<true>(i), lane + j * 4), from + (HALF - 1 + j) * 64,
                       rows.there[i]);
    }
}

/* Of shared memory, in its place among other accesses. */
__device__ __forceinline__ uint4 load_sixteen(const char *p)
{
    uint4 x;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(smem_address(p))
                 : "memory");
    return x;
}

/* Decodes a half of the lane's rows, once their codes have come; scales: of each row and four panels. A half
 * with NaN or large scales, and rows that cannot be read so, are decoded anew. `here`: the finder's. */
template <typename T>
__device__ __forceinline__ void decode_half(shared<T> &m, char *to, int half,
                                            const uint32_t (&scales)[ROWS_A_THREAD], const row_place &here,
                                            bool wide, bool widest)
{
    const int lane = threadIdx.x % 4;
    uint32_t nan_bits = 0;
#pragma unroll
    for (int i = 0; i < ROWS_A_THREAD; i++) {
        const int at_row = copied_row<true>(i);
        char *const at[2] = {to + tile_at<64>(at_row, lane * 2), to + tile_at<64>(at_row, lane * 2 + 1)};
        const char *const from = half == 0 ? (const char *)&m.codes[i * HALF][threadIdx.x] : at[0];
        const int apart = half == 0 ? (int)sizeof m.codes[0] : (int)PANEL_BYTES;
        const uint32_t by = i == 0 ? scales[0] : scales[1];
        uint4 x[HALF]; /* all of them before anything is stored, so that none waits for a store */
#pragma unroll
        for (int j = 0; j < HALF; j++)
            if (j < HALF - 1 || half == 0) x[j] = load_sixteen(from + j * apart);
        nan_bits |= by;
#pragma unroll
        for (int j = 0; j < HALF; j++) {
            if (j == HALF - 1 && half == 1) continue;
            const uint32_t scale = by >> j * 8 & 255;
            nan_bits |= e4m3_nan_bits(x[j]);
            *(uint4 *)(at[0] + j * PANEL_BYTES) = e4m3_finite_bf16x8(make_uint2(x[j].x, x[j].y), scale);
            *(uint4 *)(at[1] + j * PANEL_BYTES) = e4m3_finite_bf16x8(make_uint2(x[j].z, x[j].w), scale);
        }
    }
    if (!widest || __any_sync(~0u, (nan_bits & 0x80808080) != 0)) {
#pragma unroll 1
        for (int i = 0; i < ROWS_A_THREAD; i++) {
            const row_place row = {handed<true>(here.data, i), handed<true>(here.scales, i)};
            __syncwarp(); /* a row's lanes have stored other chunks than they do now */
            decode_narrow(to, row, copied_row<true>(i), half, wide);
        }
    }
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

/* Asks for a row of bytes in L2: for lines [line, line + lines) of its 128 bytes. */
__device__ __forceinline__ void prefetch_row(const row_place &row, int line, int lines)
{
    if (row.data == NULL) return;
#pragma unroll
    for (int i = 0; i < lines; i++)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(row.data + (line + i) * 128));
}

/* Which query and heads an item is of, and which of its shares. */
struct item_place {
    int share, rest, query, head0;
};
__device__ __forceinline__ item_place place_of_item(const decode_kernel &w, int item)
{
    const int all = w.a.rows * w.groups, share = w.whole ? 0 : item / all, rest = item - share * all,
              query = rest / w.groups;
    return {share, rest, query, (rest - query * w.groups) * w.heads};
}

/* Asks for the rows of a block's first tile while its query is planned: where they stand if the list is
 * clean and a share has one tile. For two threads a row, which have nothing else to do. */
__device__ __forceinline__ void prefetch_first_rows(const decode_kernel &w)
{
    const mqa_planner &a = w.plan;
    const item_place item = place_of_item(w, blockIdx.x);
    if (a.of.cu_q != NULL || a.raw.table == NULL || a.list == NULL) return;
    const int b = (uint32_t)item.query / (uint32_t)a.of.n_q, token = item.query - b * (int)a.of.n_q,
              position = (int)(a.positions != NULL ? a.positions[b] : a.position) + token,
              raw = a.window <= position ? (int)a.window : position + 1,
              later = item.share - (raw + KEYS - 1) / KEYS, row = threadIdx.x % KEYS;
    const row_source &source = later < 0 ? a.raw : a.entries;
    int i = position + 1 - raw + item.share * KEYS + row;
    if (later >= 0) {
        if (later * KEYS + row >= a.k) return;
        i = a.list[b * a.list_row[0] + token * a.list_row[1] + later * KEYS + row];
    }
    if (i >= 0 && source.table != NULL && row_exists(source, b, i)) {
        const bool second = threadIdx.x % 128 >= KEYS;
        prefetch_row(row_at(source, b, i), second ? 3 : 0, second ? ROW_LINES - 3 : 3);
    }
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

/* The scales of a row of bytes; zeros where there is none, or they cannot be read so. */
__device__ __forceinline__ uint2 load_scales(const row_place &row, bool widest)
{
    return row.scales != NULL && widest ? __ldg((const uint2 *)row.scales) : make_uint2(0, 0);
}

/* Tiles [first, last) of the query that m.room has, and its heads; info: the item's. Two turns before the
 * first tile find its rows, a third one asks for its first part. */
template <typename T, bool BYTES>
__device__ __forceinline__ void feed_tiles(const decode_kernel &w, shared<T> &m, ring_place<STAGES> &at,
                                           ring_place<1> &heads, int first, int last, int tiles,
                                           tile_info info)
{
    const mqa_query &q = m.room.query;
    const int raw_tiles = (q.raw + KEYS - 1) / KEYS, per = share_of(tiles);
    int in_share = 0;
    row_finder rows = {w.a, q, m.room.list, raw_tiles, first, last, 0, 0, 0};
    lane_rows lane = {};
    uint2 scales = make_uint2(0, 0);
    row_place here = {NULL, NULL};
#pragma unroll 1
    for (int t = first - 3; t < last; t++) {
        const row_place next = rows.next(t + 1);
        const bool raw = t < raw_tiles, some = t >= first, next_widest = rows.source(t + 1).widest;
        const row_source &source = raw ? w.a.raw : w.a.entries;
        uint2 next_scales;
        if constexpr (BYTES) {
            if (threadIdx.x % 32 < 16) prefetch_row(next, 0, ROW_LINES);
            next_scales = load_scales(next, next_widest);
        }
        if (t + 1 < first) continue;
        if (some) {
            const int left = raw ? q.raw - t * KEYS : q.entries - (t - raw_tiles) * KEYS;
            info.keys = left < KEYS ? left : (int)KEYS;
            in_share++;
            const bool ends_share = in_share == per || t + 1 == tiles;
            if (ends_share) in_share = 0;
            info.ends = (raw && (t + 1 == raw_tiles || t + 1 == last) ? ENDS_RAW : 0) |
                        (t + 1 == last ? ENDS_ITEM : 0) |
                        (w.whole && per > 1 && ends_share ? ENDS_SHARE : 0) |
                        (w.whole && per > 1 && t >= per ? LATER_SHARE : 0);
        }
        if constexpr (BYTES) {
            if (!some) {
                lane = rows_of_lane(next.data, next_widest);
                ask_first_half(m, lane);
                cp_async_commit();
            }
#pragma unroll 1
            for (int half = 0; half < 2 && some; half++) {
                uint32_t by[ROWS_A_THREAD];
#pragma unroll
                for (int i = 0; i < ROWS_A_THREAD; i++)
                    by[i] = __shfl_sync(~0u, half == 0 ? scales.x : scales.y, i * 8 + row_of_warp<true>());
                if (half == 0) {
                    ring_place<STAGES> second = at;
                    second.advance();
                    m.keys.wait_free(at);
                    m.keys.wait_free(second);
                    ask_second_half((char *)m.k[second.stage], lane);
                } else {
                    lane = rows_of_lane(next.data, next_widest);
                    if (t + 1 < last) ask_first_half(m, lane);
                }
                cp_async_commit();
                cp_async_wait<1>();
                decode_half(m, (char *)m.k[at.stage], half, by, here, source.wide, source.widest);
                publish<T, BYTES>(m, at, info);
            }
            scales = next_scales;
        } else {
#pragma unroll 1
            for (int half = 0; half < 2 && some; half++) {
                m.keys.wait_free(at);
                copy_rows<T>((char *)m.k[at.stage], here.data, half * HALF * 128, source.wide);
                publish<T, BYTES>(m, at, info);
            }
        }
        if (!some) feed_heads(w, m, heads, q, info.head0);
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
        const auto [share, rest, query, head0] = place_of_item(w, item);
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
        feed_tiles<T, BYTES>(
            w, m, at, heads, first, last, tiles,
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
