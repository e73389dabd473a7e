/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * lists.cuh - `pairs` of lists of up to 512 entries and up to 128 channels. Blocks are persistent and take a
 * query at a time:
 *
 *   feed      one warpgroup gathers its keys, then its keys_index, each once; of the next query it is ahead
 *             by as many tiles as stages are free
 *   compute   two warpgroups, each with every second tile of 128 entries. Attention's scores stay in
 *             registers until the normalisers of heads are known, 128 a thread; keys_index stays in stages
 *             from the indexer's scores until u is made, of which each has 64 channels.
 *
 * The bits of which z are positive, and the gradients g, stand in shared memory: for keys_index's gradient
 * they are read with entries as rows. Four products a pair, and rows of partials. Limit: the tensor cores,
 * the exponentials, and 256 KB a query from L2.
 */
#ifndef QUERN_CUDA_INDEXER_LOSS_SM90_LISTS_CUH
#define QUERN_CUDA_INDEXER_LOSS_SM90_LISTS_CUH

#include "indexer_loss/sm90/kernel.cuh"

namespace sm90_loss
{

enum {
    LIST_MOST = 512,
    GROUPS = 2,
    GROUP_TILES = LIST_MOST / TILE / GROUPS, /* at most, of a warpgroup */
    LIST_TILES = GROUPS * GROUP_TILES,
    LIST_STAGES = 5,
    COMPUTING = GROUPS * 128,
    LISTS_THREADS = FEEDERS + COMPUTING,
    HALF_TILES = COLUMN_TILES / 2
};

struct lists_shared {
    bf16 stages[LIST_STAGES][WIDTH / 64][TILE][64];
    bf16 q[WIDTH / 64][HEADS][64], q_index[WIDTH / 64][HEADS][64];
    uint64_t positive[LIST_TILES][TILE];
    float sums[GROUPS][GROUP_TILES][SUM_KINDS][4][TILE]; /* over a warp's heads */
    float g[LIST_TILES][TILE];
    int32_t row[LIST_TILES][TILE]; /* of partials, or -1 */
    int32_t chosen[LIST_MOST];     /* the feed's; -1 past the last */
    bf16 gradient[LIST_TILES][TILE];
    float2 heads[GROUPS][HEADS]; /* the largest score of a warpgroup's entries, and the sum */
    float mass[HEADS], d_w[HEADS];
    float2 student[GROUPS][4];
    float loss[GROUPS][4];
    ring<LIST_STAGES> entries;
    ring<1> of_q, of_index;
};
static_assert(sizeof(lists_shared) <= 227 * 1024, "a block has room");

/* ---- feed ---- */

__device__ __forceinline__ void copy_chosen(char *to, const rows_of &from, const int32_t *chosen)
{
    const int column = threadIdx.x % 16, row0 = threadIdx.x / 16 % 8, at = column * 8;
#pragma unroll 4
    for (int i = 0; i < TILE / 8; i++) {
        const int row = row0 + i * 8, entry = chosen[row];
        const bool there = entry >= 0 && at < from.channels;
        load_chunk16<bf16>(smem_address(to), to, tile_at<TILE>(row, column),
                           from.base + (there ? entry * from.stride + at : 0), there, from.wide);
    }
}

__device__ __forceinline__ void feed_tiles(lists_shared &m, ring_place<LIST_STAGES> &at, const rows_of &from,
                                           int tiles)
{
    for (int tile = 0; tile < tiles; tile++) {
        m.entries.wait_free(at);
        copy_chosen((char *)m.stages[at.stage], from, m.chosen + tile * TILE);
        m.entries.give_copies(at);
        m.entries.give(at);
        at.advance();
    }
}

__device__ __forceinline__ void feed_heads(ring<1> &ring, const ring_place<1> &at, char *to,
                                           const rows_of &from, int heads)
{
    ring.wait_free(at);
    copy_heads(to, from, heads, 0);
    ring.give_copies(at);
    ring.give(at);
}

__device__ __forceinline__ void feed_lists(const slice &s, lists_shared &m, int tiles)
{
    const loss_params &p = s.of;
    const rows_of keys = {(const bf16 *)p.keys.p + s.b * p.keys.s[0], p.keys.s[1], p.dim, p.keys_wide},
                  index = {(const bf16 *)p.keys_index.p + s.b * p.keys_index.s[0], p.keys_index.s[1], p.width,
                           p.keys_index_wide};
    ring_place<LIST_STAGES> at;
    ring_place<1> heads;
    for (int64_t i = blockIdx.x; i < s.count; i += gridDim.x) {
        const int64_t query = s.first + i;
        const int32_t *const chosen = chosen_of(s, i);
        const int count = entries_of(s, i);
        const rows_of q = {(const bf16 *)p.q.p + s.b * p.q.s[0] + query * p.q.s[1], p.q.s[2], p.dim,
                           p.q_wide},
                      q_index = {(const bf16 *)p.q_index.p + s.b * p.q_index.s[0] + query * p.q_index.s[1],
                                 p.q_index.s[2], p.width, p.q_index_wide};
        named_sync(2, FEEDERS); /* the list before it has been read */
        for (int e = threadIdx.x % 128; e < tiles * TILE; e += FEEDERS)
            m.chosen[e] = e < count ? __ldg(chosen + e) : -1;
        named_sync(2, FEEDERS);
        feed_heads(m.of_q, heads, (char *)m.q, q, p.heads);
        feed_tiles(m, at, keys, tiles);
        feed_heads(m.of_index, heads, (char *)m.q_index, q_index, p.index_heads);
        feed_tiles(m, at, index, tiles);
        heads.advance();
    }
}

/* ---- compute ---- */

/* A thread's query. Thread e of a warpgroup has entry e of each of its tiles, too. */
struct list_query {
    const slice &s;
    lists_shared &m;
    int group, tiles; /* tiles: of the call's lists */
    int64_t i;
    int count;
    ring_place<LIST_STAGES> place; /* the next tile in order, of keys or of keys_index */
    ring_place<1> heads;

    __device__ __forceinline__ int thread() const { return threadIdx.x % 128; }
    __device__ __forceinline__ int head0() const { return warp_of_group() * 16 + threadIdx.x % 32 / 4; }
    __device__ __forceinline__ int tile(int t) const { return t * GROUPS + group; }
    __device__ __forceinline__ int left(int t) const { return count - tile(t) * TILE; }
    __device__ __forceinline__ void sync() const
    {
        if (group == 0) named_sync(3, 128);
        else named_sync(4, 128);
    }
    __device__ __forceinline__ void sync_all() const { named_sync(1, COMPUTING); }
};

/* Attention's scores of the warpgroup's tiles. */
__device__ __forceinline__ void score_lists(list_query &x, float (&c)[GROUP_TILES][COLUMN_TILES][4])
{
    x.m.of_q.wait_full(x.heads);
    for (int tile = 0; tile < x.tiles; tile++) {
        x.m.entries.wait_full(x.place);
        wg_show();
#pragma unroll
        for (int t = 0; t < GROUP_TILES; t++)
            if (tile == x.tile(t)) {
                issue_scores<false>(c[t], smem_address(x.m.q), stage_address(x.m.stages, x.place.stage));
                wg_wait<0>(c[t]);
            }
        x.m.entries.give_back(x.place);
        x.place.advance();
    }
    x.m.of_q.give_back(x.heads);
}

/* Scores become their exponentials over the warpgroup's largest; returns the factors that make them shares of
 * a head's whole mass, and leaves the mass that each head gives to the entries. */
__device__ __forceinline__ void share_heads(list_query &x, float (&c)[GROUP_TILES][COLUMN_TILES][4],
                                            float (&factor)[2])
{
    const loss_params &p = x.s.of;
    const float scale2 = p.scale * log2_of_e;
    const int lane = threadIdx.x % 32;
    float most[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int t = 0; t < GROUP_TILES; t++) {
        clear_rows(c[t], x.head0(), p.heads);
        if (x.left(t) < TILE || x.tile(t) >= x.tiles) {
#pragma unroll
            for (int j = 0; j < COLUMN_TILES; j++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    if (j * 8 + lane % 4 * 2 + e % 2 >= x.left(t)) c[t][j][e] = -INFINITY;
        }
#pragma unroll
        for (int j = 0; j < COLUMN_TILES; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) most[e / 2] = fmaxf(most[e / 2], c[t][j][e]);
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        most[r] = fmaxf(most[r], __shfl_xor_sync(~0u, most[r], 1));
        most[r] = fmaxf(most[r], __shfl_xor_sync(~0u, most[r], 2));
        const float base = most[r] == -INFINITY ? 0.0f : most[r] * scale2;
#pragma unroll
        for (int t = 0; t < GROUP_TILES; t++)
#pragma unroll
            for (int j = 0; j < COLUMN_TILES; j++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float &here = c[t][j][r * 2 + e];
                    here = exp2_fast(fmaf(here, scale2, -base));
                    sum[r] += here;
                }
        sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
        sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
        if (lane % 4 == 0) x.m.heads[x.group][x.head0() + r * 8] = make_float2(most[r], sum[r]);
    }
    x.sync_all();
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int head = x.head0() + r * 8;
        float mass = 0.0f;
        factor[r] = 0.0f;
        if (head < p.heads) {
            const float2 a = x.m.heads[0][head], b = x.m.heads[1][head];
            const float now = fmaxf(a.x, b.x), base = now == -INFINITY ? 0.0f : now,
                        whole = a.y * exp2_fast((a.x - base) * scale2) +
                                b.y * exp2_fast((b.x - base) * scale2);
            const float own = now * p.scale + logf(whole),
                        window = p.lse_win.p[x.s.b * p.lse_win.s[0] + head * p.lse_win.s[1] +
                                             (x.s.first + x.i) * p.lse_win.s[2]],
                        sink = p.sink != NULL ? p.sink[head] : -INFINITY,
                        all = log_add_f32(own, log_add_f32(window, sink));
            mass = expf(own - all);
            factor[r] = exp2_fast((most[r] == -INFINITY ? 0.0f : most[r] * scale2) - all * log2_of_e);
        }
        if (x.group == 0 && lane % 4 == 0) x.m.mass[head] = mass;
    }
}

/* Both sums over heads of the warpgroup's tiles: of entry `thread`. */
__device__ __forceinline__ void sum_lists(list_query &x, const float (&c)[GROUP_TILES][COLUMN_TILES][4],
                                          const float (&factor)[2], const float (&w)[2],
                                          float (&teacher)[GROUP_TILES], float (&student)[GROUP_TILES])
{
    ring_place<LIST_STAGES> at = x.place;
    x.m.of_index.wait_full(x.heads);
    for (int tile = 0; tile < x.tiles; tile++) {
        x.m.entries.wait_full(at);
        wg_show();
#pragma unroll
        for (int t = 0; t < GROUP_TILES; t++)
            if (tile == x.tile(t)) {
                float z[COLUMN_TILES][4], v[32];
                uint32_t positive[2];
#pragma unroll
                for (int i = 0; i < 32; i++)
                    v[i] = fmaf(c[t][i / 2][i % 2], factor[0], c[t][i / 2][2 + i % 2] * factor[1]);
                sum_columns(v);
                put_columns(x.m.sums[x.group][t][0][warp_of_group()], v);
                issue_scores<false>(z, smem_address(x.m.q_index), stage_address(x.m.stages, at.stage));
                wg_wait<0>(z);
                clear_rows(z, x.head0(), x.s.of.index_heads);
                sum_index(x.m.sums[x.group][t][1][warp_of_group()], z, w, positive);
                x.m.positive[tile][x.thread()] = (uint64_t)positive[1] << 32 | positive[0];
            }
        at.advance();
    }
    x.sync();
#pragma unroll
    for (int t = 0; t < GROUP_TILES; t++) {
        float sum[SUM_KINDS] = {0.0f, 0.0f};
#pragma unroll
        for (int k = 0; k < SUM_KINDS; k++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (x.tile(t) < x.tiles) sum[k] += x.m.sums[x.group][t][k][i][x.thread()];
        teacher[t] = sum[0];
        student[t] = sum[1] * x.s.of.scale_index;
    }
}

/* The normaliser of the indexer's scores. */
__device__ __forceinline__ float student_lse(list_query &x, const float (&student)[GROUP_TILES])
{
    float most = -INFINITY, sum = 0.0f;
#pragma unroll
    for (int t = 0; t < GROUP_TILES; t++)
        if (x.thread() < x.left(t)) most = fmaxf(most, student[t]);
#pragma unroll
    for (int by = 16; by > 0; by /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, by));
#pragma unroll
    for (int t = 0; t < GROUP_TILES; t++)
        if (x.thread() < x.left(t)) sum += exp2_fast((student[t] - most) * log2_of_e);
#pragma unroll
    for (int by = 16; by > 0; by /= 2) sum += __shfl_xor_sync(~0u, sum, by);
    if (threadIdx.x % 32 == 0) x.m.student[x.group][warp_of_group()] = make_float2(most, sum);
    x.sync_all();
    float all = -INFINITY, whole = 0.0f;
#pragma unroll
    for (int i = 0; i < GROUPS * 4; i++) all = fmaxf(all, x.m.student[i / 4][i % 4].x);
#pragma unroll
    for (int i = 0; i < GROUPS * 4; i++) {
        const float2 part = x.m.student[i / 4][i % 4];
        if (part.x > -INFINITY) whole += part.y * expf(part.x - all);
    }
    return all + logf(whole);
}

/* The row of partials of an entry that the thread has in tile t, or -1. */
__device__ __forceinline__ int partial_row(const list_query &x, int t)
{
    if (x.s.sums == NULL || x.thread() >= x.left(t)) return -1;
    const int32_t entry = chosen_of(x.s, x.i)[x.tile(t) * TILE + x.thread()];
    const choice c = x.s.choices[entry * x.s.words + x.i / 32];
    return x.s.rows_before[entry] + c.before + __popc(c.chose & ((1u << x.i % 32) - 1));
}

/* The gradients of the entries' scores; a thread's part of the query's loss. */
__device__ __forceinline__ float compare_lists(list_query &x, const float (&teacher)[GROUP_TILES],
                                               const float (&student)[GROUP_TILES], float lse, float factor)
{
    float mass = 0.0f, loss = 0.0f;
#pragma unroll
    for (int h = 0; h < HEADS; h++) mass += x.m.mass[h];
    const bool taught = mass >= 0x1p-126f; /* as compare() */
#pragma unroll
    for (int t = 0; t < GROUP_TILES; t++) {
        float g = 0.0f;
        if (x.tile(t) >= x.tiles) continue;
        if (taught && x.thread() < x.left(t)) {
            const float of_head = teacher[t] / mass, log_p = student[t] - lse;
            g = factor * (expf(log_p) - of_head);
            loss += of_head * (logf(fmaxf(of_head, 1e-10f)) - log_p);
        }
        x.m.g[x.tile(t)][x.thread()] = g;
        x.m.gradient[x.tile(t)][x.thread()] = from_float<bf16>(g);
    }
#pragma unroll
    for (int by = 16; by > 0; by /= 2) loss += __shfl_xor_sync(~0u, loss, by);
    return loss;
}

/* q_index becomes w q_index. */
__device__ __forceinline__ void weigh_index(const list_query &x)
{
    const loss_params &p = x.s.of;
    char *const own = (char *)x.m.q_index;
#pragma unroll 2
    for (int at = (threadIdx.x - FEEDERS) * 16; at < LOSS_HEAD_BYTES; at += COMPUTING * 16) {
        const int head = at % HEAD_PANEL / 128;
        const float w = head < p.index_heads
                            ? value_at(p.w.p, p.w_dtype,
                                       x.s.b * p.w.s[0] + (x.s.first + x.i) * p.w.s[1] + head)
                            : 0.0f;
        const uint4 q = *(const uint4 *)(own + at);
        uint32_t words[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 two = unpack2<bf16>(words[i]);
            words[i] = head < p.index_heads ? pack2<bf16>(two.x * w, two.y * w) : 0;
        }
        *(uint4 *)(own + at) = make_uint4(words[0], words[1], words[2], words[3]);
    }
}

/* Half a tile of keys_index's gradient, as issue_rows(). */
__device__ __forceinline__ void issue_partials(const list_query &x, float (&c)[COLUMN_TILES][4],
                                               uint32_t (&a)[4][4], int tile, int half)
{
    enum { ONE = 0x3f80 }; /* in bf16 */
#pragma unroll
    for (int k = 0; k < 4; k++) turn_bits(a[k], (const uint8_t *)x.m.positive[tile], half, k, ONE, ONE);
    const uint64_t heads = wg_fresh(wg_tile(smem_address(x.m.q_index), HEAD_PANEL));
    wg_start();
#pragma unroll
    for (int k = 0; k < 4; k++) {
        if (k == 0) wg_rs_wide<bf16, WIDTH, false, true>(c, a[k], heads);
        else wg_rs_wide<bf16, WIDTH, true, true>(c, a[k], wg_further(heads, k * 16 * 128));
    }
    wg_commit();
}

__device__ __forceinline__ void store_partials(const list_query &x, const float (&c)[COLUMN_TILES][4],
                                               int tile, int half)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int at = half * 64 + x.head0() + h * 8, to = x.m.row[tile][at];
        store_row(x.s.partials + (int64_t)to * WIDTH, c, h, x.m.g[tile][at] * x.s.of.scale_index, WIDTH,
                  to >= 0, true);
    }
}

/* u of the warpgroup's 64 channels, from all tiles, and the partials of the warpgroup's tiles. */
__device__ __forceinline__ void walk_lists(list_query &x, float (&u)[HALF_TILES][4])
{
    for (int tile = 0; tile < x.tiles; tile++) {
        const uint64_t positive = x.m.positive[tile][x.thread()];
        const uint32_t *const pairs = (const uint32_t *)x.m.gradient[tile] + threadIdx.x % 4;
        uint32_t a[TILE / 16][4];
#pragma unroll
        for (int k = 0; k < TILE / 16; k++)
            mask_pairs(a[k], (uint32_t)(positive >> k * 8), pairs[k * 8], pairs[k * 8 + 4]);
        const uint64_t entries =
            wg_fresh(wg_tile(stage_address(x.m.stages, x.place.stage) + x.group * ENTRY_PANEL, ENTRY_PANEL));
        wg_start();
#pragma unroll
        for (int k = 0; k < TILE / 16; k++)
            wg_rs_wide<bf16, WIDTH / 2, true, true>(u, a[k], wg_further(entries, k * 16 * 128));
        wg_commit();
        if (x.s.sums != NULL && tile % GROUPS == x.group) {
            float c[COLUMN_TILES][4];
            uint32_t b[4][4];
            issue_partials(x, c, b, tile, 0);
            wg_wait<1>(u);
            x.m.entries.give_back(x.place);
            wg_wait<0>(c);
            store_partials(x, c, tile, 0);
            issue_partials(x, c, b, tile, 1);
            wg_wait<0>(c);
            store_partials(x, c, tile, 1);
        } else {
            wg_wait<0>(u);
            x.m.entries.give_back(x.place);
        }
        x.place.advance();
    }
}

/* Stores what the query's heads get: of d_w the second warpgroup leaves its channels' part to the first. */
__device__ __forceinline__ void give_heads(const list_query &x, const float (&u)[HALF_TILES][4],
                                           const float (&w)[2], bool d_q_wide)
{
    const loss_params &p = x.s.of;
    const int64_t query = x.s.first + x.i;
    const int channel0 = x.group * (WIDTH / 2), lane = threadIdx.x % 32;
    float part[2] = {0.0f, 0.0f};
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int head = x.head0() + h * 8;
        const bool here = head < p.index_heads;
        const bf16 *const q = (const bf16 *)p.q_index.p + x.s.b * p.q_index.s[0] + query * p.q_index.s[1] +
                              (here ? head * p.q_index.s[2] : 0) + channel0;
        if (p.d_q_index.p != NULL)
            store_row((bf16 *)p.d_q_index.p + x.s.b * p.d_q_index.s[0] + query * p.d_q_index.s[1] +
                          head * p.d_q_index.s[2] + channel0,
                      u, h, w[h] * p.scale_index, p.width - channel0, here, d_q_wide);
        if (p.d_w.p == NULL) continue;
#pragma unroll
        for (int j = 0; j < HALF_TILES; j++) {
            const int column = j * 8 + lane % 4 * 2;
            if (column + channel0 >= p.width || x.count == 0) continue;
            part[h] = fmaf(u[j][h * 2], to_float(q[column]), part[h]);
            part[h] = fmaf(u[j][h * 2 + 1], to_float(q[column + 1]), part[h]);
        }
        part[h] += __shfl_xor_sync(~0u, part[h], 1);
        part[h] += __shfl_xor_sync(~0u, part[h], 2);
        if (x.group == 1 && lane % 4 == 0) x.m.d_w[head] = part[h];
    }
    x.sync_all();
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int head = x.head0() + h * 8;
        if (p.d_w.p != NULL && x.group == 0 && lane % 4 == 0 && head < p.index_heads)
            put_at(p.d_w.p, p.w_dtype, x.s.b * p.d_w.s[0] + query * p.d_w.s[1] + head,
                   (part[h] + x.m.d_w[head]) * p.scale_index);
    }
}

__device__ __forceinline__ void give_loss(const list_query &x)
{
    const loss_params &p = x.s.of;
    const int64_t query = x.s.first + x.i;
    double loss = 0.0;
#pragma unroll
    for (int k = 0; k < GROUPS * 4; k++) loss += (double)x.m.loss[k / 4][k % 4];
    if (x.count == 0) loss = 0.0;
    p.losses[x.s.b * p.queries + query] = loss;
    if (p.row_loss.p != NULL)
        p.row_loss.p[x.s.b * p.row_loss.s[0] + query * p.row_loss.s[1]] = (float)loss;
}

__device__ __forceinline__ void compute_list(list_query &x, float factor, bool gradients, bool d_q_wide)
{
    const loss_params &p = x.s.of;
    float w[2] = {0.0f, 0.0f}, teacher[GROUP_TILES], student[GROUP_TILES];
#pragma unroll
    for (int h = 0; h < 2; h++)
        if (x.head0() + h * 8 < p.index_heads)
            w[h] = value_at(p.w.p, p.w_dtype,
                            x.s.b * p.w.s[0] + (x.s.first + x.i) * p.w.s[1] + x.head0() + h * 8);
#pragma unroll
    for (int t = 0; t < GROUP_TILES; t++)
        if (x.tile(t) < x.tiles) x.m.row[x.tile(t)][x.thread()] = partial_row(x, t);
    {
        float c[GROUP_TILES][COLUMN_TILES][4], share[2];
#pragma unroll
        for (int t = 0; t < GROUP_TILES; t++)
#pragma unroll
            for (int j = 0; j < COLUMN_TILES; j++)
#pragma unroll
                for (int e = 0; e < 4; e++) c[t][j][e] = 0.0f;
        score_lists(x, c);
        share_heads(x, c, share);
        sum_lists(x, c, share, w, teacher, student);
    }
    const float lse = student_lse(x, student), loss = compare_lists(x, teacher, student, lse, factor);
    if (threadIdx.x % 32 == 0) x.m.loss[x.group][warp_of_group()] = loss;
    if (gradients) {
        weigh_index(x);
        wg_show();
    }
    x.sync_all();
    if (threadIdx.x == FEEDERS) give_loss(x);
    float u[HALF_TILES][4] = {};
    if (gradients) walk_lists(x, u);
    else
        for (int tile = 0; tile < x.tiles; tile++, x.place.advance()) x.m.entries.give_back(x.place);
    x.m.of_index.give_back(x.heads);
    if (gradients) give_heads(x, u, w, d_q_wide);
    x.heads.advance();
}

__global__ void __launch_bounds__(LISTS_THREADS, 1)
    indexer_loss_lists(const __grid_constant__ slice s, const bool gradients, const bool d_q_wide)
{
#ifdef QUERN_WGMMA
    extern __shared__ __align__(1024) char memory[];
    lists_shared &m = *(lists_shared *)memory;
    if (threadIdx.x == 0) {
        m.entries.init(2 * FEEDERS, COMPUTING);
        m.of_q.init(2 * FEEDERS, COMPUTING);
        m.of_index.init(2 * FEEDERS, COMPUTING);
        mbar_init_done();
    }
    __syncthreads();
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0), tiles = (int)s.tiles;
    if (group == 0) {
        registers_down<FEED_REGISTERS>();
        feed_lists(s, m, tiles);
    } else {
        registers_up<232>();
        const float factor = s.of.lambda / (float)max((int64_t)*s.of.rows, (int64_t)1);
        list_query x = {s, m, group - 1, tiles, 0, 0, {}, {}};
        for (x.i = blockIdx.x; x.i < s.count; x.i += gridDim.x) {
            x.count = entries_of(s, x.i);
            compute_list(x, factor, gradients, d_q_wide);
        }
    }
#endif
}

} // namespace sm90_loss

#endif
