/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* feed.cuh - the warpgroup that plans and gathers. Four lanes copy a row, so a thread has its part of two
 * rows of a tile. A warp's first 16 lanes each find one of its 16 rows, a tile ahead, ask for it in L2, and
 * hand the address to the lanes that copy. Rows of bytes are decoded on the way: a lane's bytes of eight rows
 * come into places of its own, so that no other lane has to be waited for, and from there into registers,
 * where they are decoded while those of the next eight come. Of a pair of blocks each decodes half of the
 * rows and copies them into the other's stage. */
#ifndef QUERN_CUDA_ATTEND_MQA_SM90_DECODE_FEED_CUH
#define QUERN_CUDA_ATTEND_MQA_SM90_DECODE_FEED_CUH

#include "attend_mqa/sm90_decode/shared.cuh"
#include "hopper/cluster.cuh"

namespace sm90_mqa_decode
{

enum { PLAN_BARRIER = 1, ROWS_A_THREAD = 2, ROW_LINES = 5 };

/* The block of a pair. */
__device__ __forceinline__ int pair_rank()
{
    return blockIdx.x % PAIR;
}

template <bool PAIRED> __device__ __forceinline__ int first_item()
{
    return PAIRED ? blockIdx.x / PAIR : blockIdx.x;
}

/* The row of a tile that this lane of 16 finds. */
__device__ __forceinline__ int found_row()
{
    return threadIdx.x % 16 / 8 * 32 + threadIdx.x / 32 * 8 + threadIdx.x % 8;
}
/* The thread's i-th row of elements, and who has found it: eight lanes that store together reach all banks
 * where their two rows are four apart. */
__device__ __forceinline__ int row_of_warp()
{
    const int i = threadIdx.x % 32 / 4;
    return i / 2 + i % 2 * 4;
}
__device__ __forceinline__ int copied_row(int i)
{
    return i * 32 + threadIdx.x / 32 * 8 + row_of_warp();
}
__device__ __forceinline__ const char *passed(const char *p, int lane)
{
    return (const char *)__shfl_sync(~0u, (unsigned long long)p, lane);
}
__device__ __forceinline__ const char *handed(const char *p, int i)
{
    return passed(p, i * 8 + row_of_warp());
}

/* Copies four panels of the thread's rows, from byte `column` on; a row without an address becomes zeros. */
template <typename T>
__device__ __forceinline__ void copy_rows(char *to, const char *found, int column, bool wide)
{
    const uint32_t tile = smem_address(to);
#pragma unroll 1
    for (int i = 0; i < ROWS_A_THREAD; i++) {
        const char *const row = handed(found, i), *const from = row + column + threadIdx.x % 4 * 16;
        const int at_row = copied_row(i);
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

/* A lane's part of a row: every fourth chunk of 16 bytes, seven of codes and two of bf16. */
enum { CODE_CHUNKS = 7, LANE_CHUNKS = 9 };

/* Asks for the lane's chunks of its row of a group; zeros where there is none, or it cannot be read so. */
template <typename T>
__device__ __forceinline__ void ask_rows(shared<T> &m, const row_place &found, int group, bool widest)
{
    const int lane = threadIdx.x % 32;
    const char *const row = passed(found.data, group * ROWS_AT_ONCE + lane / 4);
    const char *const from = row + lane % 4 * 16;
    const uint32_t to = smem_address(m.rows[threadIdx.x / 32][lane / 4]) + lane % 4 * 16;
#pragma unroll
    for (int j = 0; j < LANE_CHUNKS; j++) cp_async16(to + j * 64, from + j * 64, row != NULL && widest);
    cp_async_commit();
}

/* Of shared memory, in its place among other accesses. */
__device__ __forceinline__ uint4 load_sixteen(uint32_t at)
{
    uint4 x;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(at)
                 : "memory");
    return x;
}

/* The lane's chunks of its row of the group that has come. */
template <typename T> __device__ __forceinline__ void take_rows(uint4 (&x)[LANE_CHUNKS], shared<T> &m)
{
    const int lane = threadIdx.x % 32;
    const uint32_t from = smem_address(m.rows[threadIdx.x / 32][lane / 4]) + lane % 4 * 16;
#pragma unroll
    for (int j = 0; j < LANE_CHUNKS; j++) x[j] = load_sixteen(from + j * 64);
}

/* Whether one of the warp's codes is NaN, or a scale large. All of them have been loaded then. */
__device__ __forceinline__ bool some_odd(const uint4 (&x)[LANE_CHUNKS], const uint2 &scales)
{
    uint32_t nan_bits[4] = {scales.x, scales.y & 0x00ffffff}; /* four sums, none of which waits for another */
#pragma unroll
    for (int j = 0; j < CODE_CHUNKS; j++) {
        nan_bits[0] |= e4m3_nan_bits(x[j].x);
        nan_bits[1] |= e4m3_nan_bits(x[j].y);
        nan_bits[2] |= e4m3_nan_bits(x[j].z);
        nan_bits[3] |= e4m3_nan_bits(x[j].w);
    }
    return __any_sync(~0u, ((nan_bits[0] | nan_bits[1] | nan_bits[2] | nan_bits[3]) & 0x80808080) != 0);
}

/* Decodes the lane's chunks into row at_row of a tile. */
__device__ __forceinline__ void decode_rows(char *tile, int at_row, const uint4 (&x)[LANE_CHUNKS],
                                            const uint2 &scales)
{
    const int lane = threadIdx.x % 4;
    const uint32_t first = tile_at<64>(at_row, lane * 2), second = first ^ 16,
                   end = tile_at<64>(at_row, lane) + CODE_CHUNKS * PANEL_BYTES;
#pragma unroll
    for (int j = 0; j < CODE_CHUNKS; j++) {
        const uint32_t times = e8m0_for_finite(j < 4 ? scales.x : scales.y, j % 4);
        *(uint4 *)(tile + first + j * PANEL_BYTES) = e4m3_finite_bf16x8(x[j].x, x[j].y, times);
        *(uint4 *)(tile + second + j * PANEL_BYTES) = e4m3_finite_bf16x8(x[j].z, x[j].w, times);
    }
    *(uint4 *)(tile + end) = x[CODE_CHUNKS];
    *(uint4 *)(tile + (end ^ 64)) = x[CODE_CHUNKS + 1];
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

/* Finds a lane's rows of every STEP-th of a query's tiles in three steps, so that none waits for memory: its
 * key, the key's page, and what stands there. */
template <int STEP> struct row_finder {
    const mqa_kernel &a;
    const int32_t *list;
    int raw0, raw, entry0, entries, sequence, b; /* the query's */
    int raw_tiles, tiles, row;                   /* row: the lane's, of a tile */
    int key, page, key_in_page;                  /* of the tile after next, and of the next one */

    __device__ __forceinline__ row_finder(const mqa_kernel &a, const mqa::plan_room &room, int tiles, int row,
                                          int first)
        : a(a), list(room.list), raw0(room.query.raw0), raw(room.query.raw), entry0(room.query.entry0),
          entries(room.query.entries), sequence(room.query.sequence), b(room.query.b),
          raw_tiles((raw + KEYS - 1) / KEYS), tiles(tiles), row(row), page(0), key_in_page(0)
    {
        find_key(first);
    }
    __device__ __forceinline__ const row_source &source(int t) const
    {
        return t < raw_tiles ? a.raw : a.entries;
    }
    /* Which of the raw rows or entries; whether it is there. */
    __device__ __forceinline__ int index(int t) const
    {
        return (t < raw_tiles ? t : t - raw_tiles) * KEYS + row;
    }
    __device__ __forceinline__ bool here(int t) const
    {
        return t >= 0 && t < tiles && index(t) < (t < raw_tiles ? raw : entries);
    }
    __device__ __forceinline__ void find_key(int t)
    {
        key = index(t);
        if (list != NULL && t >= raw_tiles && here(t)) key = list[key];
    }
    /* The place in tile t; begins with those after it. Nothing that is loaded here is looked at before the
     * next call. The first one is of the tile before the first. */
    __device__ __forceinline__ row_place next(int t)
    {
        row_place found = {NULL, NULL};
        if (here(t)) found = row_in_page(source(t), page, key_in_page);
        key_in_page = key + (t + STEP < raw_tiles ? raw0 : entry0);
        if (here(t + STEP))
            page = row_page(source(t + STEP), source(t + STEP).table != NULL ? b : sequence, key_in_page);
        find_key(t + 2 * STEP);
        return found;
    }
    /* How many keys tile t has. */
    __device__ __forceinline__ int keys(int t) const
    {
        const int left = t < raw_tiles ? raw - t * KEYS : entries - (t - raw_tiles) * KEYS;
        return left < KEYS ? left : (int)KEYS;
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

/* Asks for the rows of a block's first tile while its query is planned: where they stand if the list is
 * clean. For two threads a row, which have nothing else to do. */
__device__ __forceinline__ void prefetch_first_rows(const decode_kernel &w, int item)
{
    const mqa_planner &a = w.plan;
    const int query = (uint32_t)item / (uint32_t)w.groups;
    if (a.of.cu_q != NULL || a.raw.table == NULL || a.list == NULL) return;
    const int b = quotient(query, a.n_q), token = query - b * (int)a.of.n_q,
              position = (int)(a.positions != NULL ? a.positions[b] : a.position) + token,
              raw = a.window <= position ? (int)a.window : position + 1, row = threadIdx.x % KEYS;
    const row_source &source = raw > 0 ? a.raw : a.entries;
    int i = position + 1 - raw + row;
    if (raw == 0) {
        if (row >= a.k) return;
        i = a.list[b * a.list_row[0] + token * a.list_row[1] + row];
    }
    if (i >= 0 && source.table != NULL && row_exists(source, b, i)) {
        const bool second = threadIdx.x % 128 >= KEYS;
        prefetch_row(row_at(source, b, i), second ? 3 : 0, second ? ROW_LINES - 3 : 3);
    }
}

/* The scales of a row of bytes; zeros where there is none, or they cannot be read so. */
__device__ __forceinline__ uint2 load_scales(const row_place &row, bool widest)
{
    return row.scales != NULL && widest ? __ldg((const uint2 *)row.scales) : make_uint2(0, 0);
}

/* What follows tile t of a query's; in_share: of its share's tiles, those before it. */
__device__ __forceinline__ int ends_of(int raw_tiles, int t, int tiles, int per, int &in_share)
{
    in_share++;
    const bool ends_share = in_share == per || t + 1 == tiles;
    if (ends_share) in_share = 0;
    return (t + 1 == raw_tiles ? ENDS_RAW : 0) | (t + 1 == tiles ? ENDS_ITEM : 0) |
           (per > 1 && ends_share ? ENDS_SHARE : 0) | (per > 1 && t >= per ? LATER_SHARE : 0);
}

/* The tiles of the query that m.room has, and its heads; info: the item's. Two turns before the
 * first tile find its rows. */
template <typename T>
__device__ __forceinline__ void feed_tiles(const decode_kernel &w, shared<T> &m, ring_place<STAGES> &at,
                                           ring_place<1> &heads, int tiles, tile_info info)
{
    const mqa_query &q = m.room.query;
    const int per = share_of(tiles);
    int in_share = 0;
    row_finder<1> rows(w.a, m.room, tiles, found_row(), 0);
    row_place here = {NULL, NULL};
#pragma unroll 1
    for (int t = -2; t < tiles; t++) {
        const row_place next = rows.next(t + 1);
        if (t >= 0) {
            info.keys = rows.keys(t);
            info.ends = ends_of(rows.raw_tiles, t, tiles, per, in_share);
#pragma unroll 1
            for (int half = 0; half < 2; half++) {
                m.keys.wait_free(at);
                copy_rows<T>((char *)m.k[at.stage], here.data, half * HALF * 128, rows.source(t).wide);
                if (threadIdx.x == 0) m.info[at.stage] = info;
                m.keys.give_copies(at);
                m.keys.give(at);
                at.advance();
            }
        } else if (t + 1 == 0) {
            feed_heads(w, m, heads, q, info.head0);
        }
        here = next;
    }
}

/* The same of rows of bytes. A warp's rows come in two groups; each is asked for when the one before it has
 * been taken into registers, where it is decoded while the next one comes. */
template <typename T>
__device__ __forceinline__ void feed_bytes(const decode_kernel &w, shared<T> &m, ring_place<STAGES> &at,
                                           ring_place<1> &heads, int tiles, tile_info info)
{
    const mqa_query &q = m.room.query;
    const int per = share_of(tiles), warp = threadIdx.x / 32;
    int in_share = 0;
    row_finder<1> rows(w.a, m.room, tiles, found_row(), 0);
    row_place here = {NULL, NULL};
    uint2 scales = make_uint2(0, 0);
#pragma unroll 1
    for (int t = -2; t < tiles; t++) {
        const row_place next = rows.next(t + 1);
        const bool next_widest = rows.source(t + 1).widest;
        if (threadIdx.x % 32 < 16) prefetch_row(next, 0, ROW_LINES);
        const uint2 next_scales = load_scales(next, next_widest);
        if (t + 1 == 0) {
            ask_rows(m, next, 0, next_widest);
            feed_heads(w, m, heads, q, info.head0);
        }
        if (t >= 0) {
            const row_source &source = rows.source(t);
            info.keys = rows.keys(t);
            info.ends = ends_of(rows.raw_tiles, t, tiles, per, in_share);
            char *const tile = (char *)m.k[at.stage];
#pragma unroll 1
            for (int group = 0; group < 2; group++) {
                const int finder = group * ROWS_AT_ONCE + threadIdx.x % 32 / 4,
                          at_row = group * 32 + warp * ROWS_AT_ONCE + threadIdx.x % 32 / 4;
                const uint2 by = {__shfl_sync(~0u, scales.x, finder), __shfl_sync(~0u, scales.y, finder)};
                uint4 x[LANE_CHUNKS];
                cp_async_wait<0>();
                take_rows(x, m);
                const bool odd = some_odd(x, by);
                if (group == 0) ask_rows(m, here, 1, source.widest);
                else if (t + 1 < tiles) ask_rows(m, next, 0, next_widest);
                if (group == 0) {
                    ring_place<STAGES> second = at;
                    second.advance();
                    m.keys.wait_free(at);
                    m.keys.wait_free(second);
                }
                decode_rows(tile, at_row, x, by);
                if (odd || !source.widest) {
                    const row_place row = {passed(here.data, finder), passed(here.scales, finder)};
#pragma unroll 1
                    for (int half = 0; half < 2; half++) {
                        __syncwarp(); /* a row's lanes have stored other chunks than they do now */
                        decode_narrow((char *)m.k[at.stage + half], row, at_row, half, source.wide);
                    }
                }
            }
            wg_show();
#pragma unroll
            for (int half = 0; half < 2; half++) {
                if (threadIdx.x == 0) m.info[at.stage] = info;
                m.keys.give(at);
                at.advance();
            }
        }
        here = next;
        scales = next_scales;
    }
}

/* Shows a warp's rows of a stage to the products of this block, and copies them into the other one's. */
template <typename T>
__device__ __forceinline__ void give_rows(shared<T> &m, const ring_place<STAGES> &at, int at_row)
{
    enum { BYTES = ROWS_AT_ONCE * 128 };
    const uint32_t other = (uint32_t)pair_rank() ^ 1, lane = threadIdx.x % 32,
                   full = smem_address(m.keys.full) + at.stage * 8;
    if (lane < HALF) {
        const uint32_t rows = stage_address(m.k, at.stage) + lane * PANEL_BYTES + at_row * 128;
        cluster_send(cluster_address(rows, other), rows, BYTES, cluster_address(full, other));
    }
    if (lane == 0) mbar_expect(full, HALF * BYTES);
}

/* The same by a block of a pair, which decodes 32 rows of each tile: a warp's eight come together. Those of
 * two tiles are found at once. */
template <typename T>
__device__ __forceinline__ void feed_half(const decode_kernel &w, shared<T> &m, ring_place<STAGES> &at,
                                          ring_place<1> &heads, int tiles, tile_info info)
{
    enum { FOUND = 2 };
    const mqa_query &q = m.room.query;
    const int per = share_of(tiles), lane = threadIdx.x % 32, found = lane % 16 / 8,
              row0 = pair_rank() * 32 + threadIdx.x / 32 * ROWS_AT_ONCE;
    int in_share = 0;
    row_finder<FOUND> rows(w.a, m.room, tiles, row0 + lane % 8, found);
    row_place here = {NULL, NULL};
    uint2 scales = make_uint2(0, 0);
#pragma unroll 1
    for (int t = -2 * FOUND; t < tiles; t += FOUND) {
        const row_place next = rows.next(t + FOUND + found);
        if (lane < 16) prefetch_row(next, 0, ROW_LINES);
        const uint2 next_scales = load_scales(next, rows.source(t + FOUND + found).widest);
        if (t + FOUND == 0) {
            ask_rows(m, next, 0, rows.source(0).widest);
            feed_heads(w, m, heads, q, info.head0);
        }
#pragma unroll 1
        for (int i = 0; i < FOUND && t >= 0 && t + i < tiles; i++) {
            const row_source &source = rows.source(t + i);
            const int finder = i * 8 + lane / 4, at_row = row0 + lane / 4;
            const uint2 by = {__shfl_sync(~0u, scales.x, finder), __shfl_sync(~0u, scales.y, finder)};
            uint4 x[LANE_CHUNKS];
            cp_async_wait<0>();
            take_rows(x, m);
            const bool odd = some_odd(x, by);
            if (t + i + 1 < tiles)
                ask_rows(m, i + 1 < FOUND ? here : next, (i + 1) % FOUND, rows.source(t + i + 1).widest);
            info.keys = rows.keys(t + i);
            info.ends = ends_of(rows.raw_tiles, t + i, tiles, per, in_share);
            ring_place<STAGES> second = at;
            second.advance();
            m.keys.wait_free(at);
            m.keys.wait_free(second);
            decode_rows((char *)m.k[at.stage], at_row, x, by);
            if (odd || !source.widest) {
                const row_place row = {passed(here.data, finder), passed(here.scales, finder)};
#pragma unroll 1
                for (int half = 0; half < 2; half++) {
                    __syncwarp(); /* a row's lanes have stored other chunks than they do now */
                    decode_narrow((char *)m.k[at.stage + half], row, at_row, half, source.wide);
                }
            }
            if (threadIdx.x == 0) m.info[at.stage] = m.info[second.stage] = info;
            wg_show();
            __syncwarp();
            give_rows(m, at, row0);
            give_rows(m, second, row0);
            second.advance();
            at = second;
        }
        here = next;
        scales = next_scales;
    }
}

/* The plan of a query, that another launch has made. */
__device__ __forceinline__ void take_plan(const mqa_kernel &a, mqa::plan_room &m, int query)
{
    mqa::planners_sync<PLAN_BARRIER>();
    if (threadIdx.x == 0) {
        m.query = a.queries[query];
        m.list = a.list != NULL ? a.list + query * a.list_row : NULL;
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

template <typename T, bool BYTES, bool PAIRED>
__device__ __forceinline__ void feed(const decode_kernel &w, shared<T> &m)
{
    ring_place<STAGES> at;
    ring_place<1> heads;
    if (threadIdx.x == 0) m.room.sorted = m.sorted;
    if (w.planned) wait_for_before();
#pragma unroll 1
    for (int item = first_item<PAIRED>(); item < w.items; item += gridDim.x / (PAIRED ? PAIR : 1)) {
        const int query = (uint32_t)item / (uint32_t)w.groups, head0 = (item - query * w.groups) * w.heads;
        if (w.planned) {
            take_plan(w.a, m.room, query);
        } else {
            prefetch_plan(w.plan, query);
            mqa::plan_query<PLAN_BARRIER>(w.plan, m.room, query);
        }
        const mqa_query &q = m.room.query;
        const int tiles = tiles_of(q.raw, q.entries);
        const tile_info info = {0, 0, q.sequence, q.row, q.position, head0};
        if constexpr (PAIRED) feed_half(w, m, at, heads, tiles, info);
        else if constexpr (BYTES) feed_bytes(w, m, at, heads, tiles, info);
        else feed_tiles(w, m, at, heads, tiles, info);
    }
#pragma unroll 1
    for (int half = 0; half < 2; half++) {
        m.keys.wait_free(at);
        if (threadIdx.x == 0) m.info[at.stage] = {0, NO_ITEM, 0, 0, 0, 0};
        if (!PAIRED || threadIdx.x % 32 == 0) m.keys.give(at);
        if (!BYTES) m.keys.give(at);
        at.advance();
    }
}

} // namespace sm90_mqa_decode

#endif
