/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * share.cuh - a share of a query's keys by a block whose warps all do each step: of few sequences there is
 * nothing to do beside a tile, so what counts is how long one takes. Eight lanes find a row and load it into
 * registers, as the list and the tables say; then the last warpgroup computes the scores, and all four the
 * values, 128 columns each. Beside the first scores the first warpgroup makes the plan. Where that finds
 * other keys, as the list is not clean or a page is missing, the block begins again.
 *
 * Shared memory: K and Q 64 KB each, P 8 KB, a list that is sorted 4 KB. Registers: O 64, a piece 32, of 128.
 * Limit: loads that follow one another (position, list, page, row), and the products, 2048 clocks a tile.
 */
#ifndef QUERN_CUDA_ATTEND_MQA_SM90_DECODE_SHARE_CUH
#define QUERN_CUDA_ATTEND_MQA_SM90_DECODE_SHARE_CUH

#include "attend_mqa/sm90_decode/kernel.cuh"

namespace sm90_mqa_decode
{

enum {
    ROW_LANES = 8,
    LANE_CODES = 5, /* chunks of a row of bytes that a lane has at most */
    SHARE_PANELS = PANELS / 4,
    SCORER = 3 /* the warpgroup that computes scores; the first one plans */
};

template <typename T> struct share_room {
    T k[PANELS][64][64];
    T q[PANELS][64][64];
    T p[64][64];
    fold_factors tile[HEADS];
    int32_t touched[THREADS];
    mqa::plan_room room;
    int32_t sorted[SORTED_MOST];
};
static_assert(THREADS == KEYS * ROW_LANES, "each thread has a part of a tile's row");

/* Which query and heads an item is of, and which of its shares. */
struct item_place {
    int share, rest, query, head0;
};
__device__ __forceinline__ item_place place_of_item(const decode_kernel &w, int item)
{
    const int all = w.a.rows * w.groups, share = item / all, rest = item - share * all,
              query = rest / w.groups;
    return {share, rest, query, (rest - query * w.groups) * w.heads};
}

/* Which keys a query sees, and its row of its sequence. */
struct seen_keys {
    int sequence, row, b, position, raw0, raw, entry0, entries;
    const int32_t *list; /* of its entries; NULL: the first ones */
};

/* What row `row` of sequence b sees if its list is clean and no page is missing, without a look at either. */
__device__ __forceinline__ seen_keys guess_keys(const mqa_planner &a, int b, int row)
{
    const int position = (int)mqa::start_of(a, b) + row,
              raw = a.window <= position ? (int)a.window : position + 1;
    seen_keys s = {b, row, b, position, position + 1 - raw, raw, 0, 0, NULL};
    if (a.entries.p != NULL) s.entries = (int)quotient((uint32_t)(position + 1), a.ratio);
    if (a.list != NULL) {
        const int most = a.count != NULL ? min(a.k, a.count[b * a.count_row[0] + row * a.count_row[1]]) : a.k;
        s.list = a.list + b * a.list_row[0] + row * a.list_row[1];
        s.entries = min(s.entries, most);
    }
    return s;
}
/* The same as the plan says. */
template <typename T> __device__ __forceinline__ seen_keys planned_keys(const share_room<T> &m)
{
    const mqa_query &q = m.room.query;
    return {q.sequence, q.row, q.b, q.position, q.raw0, q.raw, q.entry0, q.entries, m.room.list};
}

/* Where row i of a source stands; no address where no page is named. */
__device__ __forceinline__ row_place row_if_there(const row_source &from, int sequence, int b, int i)
{
    if (from.table == NULL) return row_in_page(from, sequence, i);
    const uint32_t column = quotient(i, from.slots);
    if (column >= (uint32_t)from.columns) return {NULL, NULL};
    const int page = __ldg(from.table + b * from.table_row + column);
    if ((uint32_t)page >= (uint32_t)from.pages) return {NULL, NULL};
    return row_in_page(from, page, i);
}

/* This thread's row of tile t. */
__device__ __forceinline__ row_place find_row(const mqa_kernel &a, const seen_keys &s, int t)
{
    const int raw_tiles = (s.raw + KEYS - 1) / KEYS;
    int i = t * KEYS + threadIdx.x / ROW_LANES;
    if (t < raw_tiles)
        return i < s.raw ? row_if_there(a.raw, s.sequence, s.b, s.raw0 + i) : row_place{NULL, NULL};
    i -= raw_tiles * KEYS;
    if (i >= s.entries) return {NULL, NULL};
    if (s.list != NULL) i = s.list[i];
    return i < 0 ? row_place{NULL, NULL} : row_if_there(a.entries, s.sequence, s.b, s.entry0 + i);
}

/* A lane's part of a row of bytes: every fourth chunk of 16 bytes, four of codes for the first four lanes,
 * three of codes and two of bf16 for the others; and its scales. */
struct lane_codes {
    uint4 x[LANE_CODES];
    uint32_t scales;
};
__device__ __forceinline__ void load_codes(lane_codes &c, const row_place &row, bool widest)
{
    const int half = threadIdx.x / 4 % 2;
    const bool here = row.data != NULL && widest;
    const uint4 *const from = (const uint4 *)(row.data + threadIdx.x % 4 * 16 + half * 256);
#pragma unroll
    for (int j = 0; j < LANE_CODES; j++)
        c.x[j] = here && j < 4 + half ? __ldg(from + j * 4) : make_uint4(0, 0, 0, 0);
    c.scales = here ? __ldg((const uint32_t *)row.scales + half) : 0;
}

/* Decodes them into the thread's row of a tile, or what it is to be read otherwise. */
template <typename T>
__device__ __forceinline__ void decode_codes(share_room<T> &m, const lane_codes &c, const row_place &row,
                                             const row_source &from)
{
    const int at_row = threadIdx.x / ROW_LANES, lane = threadIdx.x % 4, half = threadIdx.x / 4 % 2;
    const uint32_t scales = half == 0 ? c.scales : c.scales & 0x00ffffff;
    uint32_t bits = scales;
    char *const tile = (char *)m.k + half * HALF * PANEL_BYTES;
#pragma unroll
    for (int j = 0; j < 4; j++)
        if (j < 3 || half == 0)
            bits |= e4m3_nan_bits(c.x[j].x) | e4m3_nan_bits(c.x[j].y) | e4m3_nan_bits(c.x[j].z) |
                    e4m3_nan_bits(c.x[j].w);
    const bool odd = __any_sync(~0u, (bits & 0x80808080) != 0);
    /* Half of the lanes store the second eight codes first, so that a row's lanes reach all banks. */
    const uint32_t first = tile_at<64>(at_row, lane * 2 + half), second = first ^ 16;
#pragma unroll
    for (int j = 0; j < 3; j++) {
        const uint32_t times = e8m0_for_finite(scales, j);
        const uint4 &x = c.x[j];
        *(uint4 *)(tile + first + j * PANEL_BYTES) =
            e4m3_finite_bf16x8(half == 0 ? x.x : x.z, half == 0 ? x.y : x.w, times);
        *(uint4 *)(tile + second + j * PANEL_BYTES) =
            e4m3_finite_bf16x8(half == 0 ? x.z : x.x, half == 0 ? x.w : x.y, times);
    }
    const uint32_t times = e8m0_for_finite(scales, 3), end = tile_at<64>(at_row, lane);
    const uint4 low = e4m3_finite_bf16x8(c.x[3].x, c.x[3].y, times),
                high = e4m3_finite_bf16x8(c.x[3].z, c.x[3].w, times);
    *(uint4 *)(tile + 3 * PANEL_BYTES + (half == 0 ? first : end)) = half == 0 ? low : c.x[3];
    *(uint4 *)(tile + 3 * PANEL_BYTES + (half == 0 ? second : end ^ 64)) = half == 0 ? high : c.x[4];
    if (odd || !from.widest) {
        __syncwarp(); /* a row's lanes have stored other chunks than they do now */
        decode_narrow(tile, row, at_row, half, from.wide);
    }
}

/* Copies rows of 16-bit elements: the thread's chunks of a row of a tile; zeros where there is no address. */
template <typename T>
__device__ __forceinline__ void copy_row(char *tile, const char *row, int at_row, bool wide)
{
    const char *const from = row + threadIdx.x % ROW_LANES * 16;
    const uint32_t to = smem_address(tile), at = tile_at<64>(at_row, threadIdx.x % ROW_LANES);
    if (wide) {
#pragma unroll
        for (int j = 0; j < PANELS; j++) cp_async16(to + at + j * PANEL_BYTES, from + j * 128, row != NULL);
    } else {
#pragma unroll 1
        for (int j = 0; j < PANELS; j++)
            load_chunk16<T>(to, tile, at + j * PANEL_BYTES, (const T *)(from + j * 128), row != NULL, false);
    }
}

/* Copies the heads' rows of q. */
template <typename T>
__device__ __forceinline__ void copy_heads(const decode_kernel &w, share_room<T> &m, int sequence, int query,
                                           int head0)
{
    const int row = threadIdx.x / ROW_LANES, head = head0 + row;
    const T *const from = (const T *)w.a.q.p + sequence * w.a.q.s[0] + query * w.a.q.s[1] + head * w.a.q.s[2];
    if (row < w.heads)
        copy_row<T>((char *)m.q, head < w.a.heads ? (const char *)from : NULL, row, w.a.q_wide);
}

/* S = Q K^T of a tile. */
template <typename T> __device__ __forceinline__ void multiply_tile(float (&s)[KEYS / 8][4], share_room<T> &m)
{
    const uint64_t heads = wg_fresh(wg_tile(smem_address(m.q), 0)),
                   keys = wg_fresh(wg_tile(smem_address(m.k), 0));
    wg_start();
#pragma unroll
    for (int j = 0; j < PANELS * 4; j++) {
        const uint32_t further = j / 4 * PANEL_BYTES + j % 4 * 32;
        if (j == 0) wgmma_ss<T, KEYS, false, false>(s, heads, keys);
        else wgmma_ss<T, KEYS, true, false>(s, wg_further(heads, further), wg_further(keys, further));
    }
    wg_commit();
    wg_wait<0>(s);
}

template <typename T>
__device__ __forceinline__ void score_tile(const decode_kernel &w, share_room<T> &m, const tile_info &info,
                                           int part, item_sums &x)
{
    const int lane = threadIdx.x % 32, row0 = threadIdx.x / 32 % 4 * 16;
    float s[KEYS / 8][4];
    row_sums tile[2];
    multiply_tile(s, m);
    softmax(s, tile, info.keys, w.a.scale2);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const fold_factors f = fold_sums(x.share[h], tile[h]);
        if (lane % 4 == 0) m.tile[row0 + lane / 4 + h * 8] = f;
    }
#pragma unroll
    for (int i = 0; i < KEYS / 8; i += 2) store_columns<T, 64>(smem_address(m.p), s[i], s[i + 1], row0, i);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        if (info.ends & ENDS_RAW) {
            x.raw[h] = x.all[h];
            (void)fold_sums(x.raw[h], x.share[h]);
        }
        if (!(info.ends & ENDS_ITEM)) continue;
        (void)fold_sums(x.all[h], x.share[h]);
        if (lane % 4 == 0)
            w.sums[(int64_t)part * HEADS + row0 + lane / 4 + h * 8] =
                make_float4(x.all[h].top, x.all[h].sum, x.raw[h].top, x.raw[h].sum);
    }
}

/* Folds the values of a tile into the warpgroup's columns. */
template <typename T>
__device__ __forceinline__ void add_columns(float (&o)[SHARE_PANELS * 8][4], share_room<T> &m, int row0)
{
    const fold_factors f[2] = {m.tile[row0], m.tile[row0 + 8]};
    const uint64_t p = wg_fresh(wg_tile(smem_address(m.p), 0)),
                   v = wg_fresh(wg_tile(smem_address(m.k[threadIdx.x / 128 * SHARE_PANELS]), PANEL_BYTES));
#pragma unroll
    for (int panel = 0; panel < SHARE_PANELS; panel++) {
        float come[8][4];
        multiply_panel<T>(come, p, wg_further(v, panel * PANEL_BYTES));
#pragma unroll
        for (int i = 0; i < 8; i++)
#pragma unroll
            for (int c = 0; c < 4; c++)
                o[panel * 8 + i][c] =
                    fmaf(come[i][c], f[c / 2].come, __fmul_rn(o[panel * 8 + i][c], f[c / 2].held));
    }
}

/* Stores them as they are, for combine.cu. */
__device__ __forceinline__ void store_columns_of_share(const decode_kernel &w, int head0, int part,
                                                       const float (&o)[SHARE_PANELS * 8][4])
{
    const int row = threadIdx.x / 32 % 4 * 16;
    float4 *const to = (float4 *)(w.values + (int64_t)part * HEADS * MQA_DIM) +
                       threadIdx.x / 128 * (SHARE_PIECES / 4) * 128 + threadIdx.x % 128;
    if (row >= w.heads || head0 + row >= w.a.heads) return;
#pragma unroll
    for (int i = 0; i < SHARE_PANELS * 8; i++) to[i * 128] = make_float4(o[i][0], o[i][1], o[i][2], o[i][3]);
}

template <typename T, bool BYTES>
__device__ __forceinline__ void load_tile(const decode_kernel &w, share_room<T> &m, const seen_keys &s, int t)
{
    const row_place row = find_row(w.a, s, t);
    const bool raw = t * KEYS < s.raw;
    if constexpr (BYTES) {
        lane_codes codes;
        load_codes(codes, row, raw ? w.a.raw.widest : w.a.entries.widest);
        decode_codes(m, codes, row, raw ? w.a.raw : w.a.entries);
    } else {
        copy_row<T>((char *)m.k, row.data, threadIdx.x / ROW_LANES, raw ? w.a.raw.wide : w.a.entries.wide);
    }
}

/* All warps: what this thread has copied and stored is there for the products of all. */
__device__ __forceinline__ void show_all()
{
    cp_async_commit();
    cp_async_wait<0>();
    wg_show();
    __syncthreads();
}

/* Copies a word of each line of a query's list and of its sequence's pages to nowhere: L1 has them when the
 * position has come, from which rows are found. */
template <typename T>
__device__ __forceinline__ void touch_tables(const mqa_planner &a, int b, int row, share_room<T> &m)
{
    const int line = threadIdx.x % 128 * 32, which = threadIdx.x / 128;
    const int32_t *from = NULL;
    int n = 0;
    if (which == 0 && a.list != NULL) {
        from = a.list + b * a.list_row[0] + row * a.list_row[1];
        n = a.k;
    } else if (which == 1 && a.entries.table != NULL) {
        from = a.entries.table + b * a.entries.table_row;
        n = a.entries.columns;
    } else if (which == 2) {
        from = a.raw.table + b * a.raw.table_row;
        n = a.raw.columns;
    }
    if (line < n)
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(smem_address(&m.touched[threadIdx.x])),
                     "l"(from + line)
                     : "memory");
}

/* The tiles of a share, and what goes to combine.cu; false: the plan, which is made meanwhile if the keys are
 * guessed, has found others. */
template <typename T, bool BYTES>
__device__ __forceinline__ bool take_share(const decode_kernel &w, share_room<T> &m, const item_place &item,
                                           const seen_keys &s, bool guess)
{
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0), tiles = tiles_of(s.raw, s.entries),
              per = share_of(tiles), first = item.share * per, last = min(tiles, first + per),
              raw_tiles = (s.raw + KEYS - 1) / KEYS, row0 = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    const int part = item.rest * w.shares + item.share;
    tile_info info = {};
    item_sums x;
#pragma unroll
    for (int h = 0; h < 2; h++) x.share[h] = x.all[h] = x.raw[h] = {-INFINITY, 0.0f};
    float o[SHARE_PANELS * 8][4];
    clear_sums(o);
#pragma unroll 1
    for (int t = first; t < last || (guess && t == first); t++) {
        if (t > first) __syncthreads(); /* the tile before has been used */
        load_tile<T, BYTES>(w, m, s, t);
        show_all();
        if (group == SCORER) {
            info.keys = min((int)KEYS, t < raw_tiles ? s.raw - t * KEYS : s.entries - (t - raw_tiles) * KEYS);
            info.ends = (t < raw_tiles && (t + 1 == raw_tiles || t + 1 == last) ? ENDS_RAW : 0) |
                        (t + 1 == last ? ENDS_ITEM : 0);
            score_tile(w, m, info, part, x);
            wg_show();
        } else if (group == 0 && guess && t == first) {
            mqa::plan_query<PLAN_BARRIER>(w.plan, m.room, item.query);
        }
        __syncthreads();
        if (guess && t == first && !(m.room.as_given && m.room.query.entries == s.entries)) return false;
        if (t < last) add_columns(o, m, row0);
    }
    if (first < last) store_columns_of_share(w, item.head0, part, o);
    if (item.share == 0 && threadIdx.x == 0)
        w.places[item.rest] = make_int4(s.sequence, s.row, s.position, (tiles + per - 1) / per);
    return true;
}

template <typename T, bool BYTES>
__global__ void __launch_bounds__(THREADS, 1) attend_mqa_sm90_share(const __grid_constant__ decode_kernel w)
{
#ifdef QUERN_WGMMA
    extern __shared__ __align__(1024) char memory[];
    share_room<T> &m = *(share_room<T> *)memory;
    const item_place item = place_of_item(w, blockIdx.x);
    const int b = quotient(item.query, w.plan.n_q), row = item.query - b * (int)w.plan.n_q.d;
    bool guess = w.guess;
    if (threadIdx.x == 0) m.room.sorted = m.sorted;
    wait_for_before();
    let_next_start();
    if (guess) {
        touch_tables(w.plan, b, row, m);
    } else {
        if (threadIdx.x < mqa::PLANNERS) {
            if (w.planned) take_plan(w.a, m.room, item.query);
            else mqa::plan_query<PLAN_BARRIER>(w.plan, m.room, item.query);
        }
        __syncthreads();
    }
#pragma unroll 1
    for (bool again = false;; again = true) {
        const seen_keys s = guess ? guess_keys(w.plan, b, row) : planned_keys(m);
        if (!again) copy_heads(w, m, s.sequence, s.row, item.head0);
        if (take_share<T, BYTES>(w, m, item, s, guess)) return;
        guess = false;
    }
#endif
}

template <typename T, bool BYTES>
static quern_status launch_shares(const stage_exec *exec, const decode_kernel &w)
{
    return launch_behind((cudaStream_t)exec->stream, attend_mqa_sm90_share<T, BYTES>, dim3((unsigned)w.items),
                         THREADS, sizeof(share_room<T>), "shares of attention", w);
}

template <typename T, bool BYTES> static quern_status launch(const stage_exec *exec, const decode_kernel &w)
{
    return w.whole ? launch_whole<T, BYTES>(exec, w) : launch_shares<T, BYTES>(exec, w);
}

} // namespace sm90_mqa_decode

#endif
