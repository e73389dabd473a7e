/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * lists.cuh - `pairs` of lists of up to 512 entries and up to 128 channels. Blocks are persistent and take a
 * query at a time:
 *
 *   feed      one warpgroup gathers its keys, then its keys_index, each once, and notes what it chose of each
 *             range; of the next query it is ahead by its heads and as many tiles as stages are free
 *   compute   a warpgroup a tile of 128 entries, four or, of lists up to 256, two: each scheduler has four
 *             warps to choose from. Attention's scores stay in registers until the normalisers of heads are
 *             known, 64 a thread; keys_index stays in stages from the indexer's scores until u is made.
 *             Two warpgroups make u of 64 channels each; with four there are two such sets, whose parts
 *             are added
 *
 * The bits of which z are positive, and the gradients g, stand in shared memory: for keys_index's gradient
 * they are read with entries as rows. Four products a pair, and rows of partials. Limit: the tensor cores,
 * the exponentials, and 256 KB a query from L2.
 */
#ifndef QUERN_CUDA_INDEXER_LOSS_SM90_LISTS_CUH
#define QUERN_CUDA_INDEXER_LOSS_SM90_LISTS_CUH

#include "indexer_loss/sm90/lists_feed.cuh"

namespace sm90_loss
{

/* A warpgroup's tile of a query, number `group`. Thread e of it has entry e of the tile, too. For u two
 * warpgroups with half of the channels each are a set, and the sets take the tiles in turn. */
template <int GROUPS> struct list_query {
    enum { COMPUTING = GROUPS * 128, SETS = GROUPS / 2 };
    const slice &s;
    lists_shared &m;
    int group;
    int64_t i;
    int count;
    int32_t uses; /* of stages, before this query's */
    ring_place<1> heads;

    __device__ __forceinline__ int thread() const { return threadIdx.x % 128; }
    __device__ __forceinline__ int head0() const { return warp_of_group() * 16 + threadIdx.x % 32 / 4; }
    __device__ __forceinline__ int left() const { return count - group * TILE; }
    __device__ __forceinline__ int half() const { return group % 2; }
    __device__ __forceinline__ int set() const { return group / 2; }
    __device__ __forceinline__ const list_facts &facts() const { return m.facts[heads.parity]; }
    __device__ __forceinline__ ring_place<LIST_STAGES> keys_at(int tile) const
    {
        return ring_place<LIST_STAGES>::of(uses + tile);
    }
    __device__ __forceinline__ ring_place<LIST_STAGES> index_at(int tile) const
    {
        return ring_place<LIST_STAGES>::of(uses + GROUPS + tile);
    }
    __device__ __forceinline__ uint32_t address(const ring_place<LIST_STAGES> &at) const
    {
        return stage_address(m.stages, at.stage);
    }
    __device__ __forceinline__ void sync() const { named_sync(8 + group, 128); }
    __device__ __forceinline__ void sync_all() const { named_sync(1, COMPUTING); }
    /* Of as many arrivals a stage as there are warps: where fewer read it, each makes several. */
    __device__ __forceinline__ void give_back(const ring_place<LIST_STAGES> &at, int arrivals) const
    {
        if ((int)(threadIdx.x % 32) < arrivals) m.entries.give_back(at);
    }
};

/* The products of the warpgroup's tile of keys, and of half of its tile of keys_index; they are under way. */
template <int GROUPS>
__device__ __forceinline__ void issue_keys(const list_query<GROUPS> &x, float (&c)[COLUMN_TILES][4])
{
    const ring_place<LIST_STAGES> at = x.keys_at(x.group);
    x.m.entries.wait_full(at);
    wg_show();
    issue_scores<false>(c, smem_address(x.m.q), x.address(at));
}
template <int GROUPS>
__device__ __forceinline__ void issue_index(const list_query<GROUPS> &x, float (&z)[HALF_TILES][4], int half)
{
    const uint32_t entries = x.address(x.index_at(x.group)) + half * (ENTRY_PANEL / 2);
    const uint64_t a = wg_fresh(wg_tile(smem_address(x.m.q_index), 0)), b = wg_fresh(wg_tile(entries, 0));
    wg_start();
#pragma unroll
    for (int k = 0; k < WIDTH / 16; k++) {
        const uint64_t heads = wg_further(a, k / 4 * HEAD_PANEL + k % 4 * 32),
                       rows = wg_further(b, k / 4 * ENTRY_PANEL + k % 4 * 32);
        if (k == 0) wgmma_ss<bf16, TILE / 2, false, false>(z, heads, rows);
        else wgmma_ss<bf16, TILE / 2, true, false>(z, heads, rows);
    }
    wg_commit();
}

/* A tile's scores become their exponentials over the largest of each of a thread's two heads. */
template <int GROUPS>
__device__ __forceinline__ void raise_tile(const list_query<GROUPS> &x, float (&c)[COLUMN_TILES][4],
                                           float (&most)[2], float (&sum)[2])
{
    const float scale2 = x.s.of.scale * log2_of_e;
    clear_rows(c, x.head0(), x.s.of.heads);
    if (x.left() < TILE) {
#pragma unroll
        for (int j = 0; j < COLUMN_TILES; j++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (j * 8 + (int)threadIdx.x % 4 * 2 + e % 2 >= x.left()) c[j][e] = -INFINITY;
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float high[2] = {-INFINITY, -INFINITY}, all[2] = {0.0f, 0.0f};
#pragma unroll
        for (int j = 0; j < COLUMN_TILES; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) high[e] = fmaxf(high[e], c[j][r * 2 + e]);
        most[r] = fmaxf(high[0], high[1]);
        most[r] = fmaxf(most[r], __shfl_xor_sync(~0u, most[r], 1));
        most[r] = fmaxf(most[r], __shfl_xor_sync(~0u, most[r], 2));
        const float base = most[r] == -INFINITY ? 0.0f : most[r] * scale2;
#pragma unroll
        for (int j = 0; j < COLUMN_TILES; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float &here = c[j][r * 2 + e];
                here = exp2_fast(fmaf(here, scale2, -base));
                all[e] += here;
            }
        sum[r] = all[0] + all[1];
        sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
        sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
    }
}

/* What makes a tile's exponentials shares of a head's whole mass; leaves the mass that each head gives to the
 * entries. */
template <int GROUPS>
__device__ __forceinline__ void share_heads(const list_query<GROUPS> &x, const float (&most)[2],
                                            const float (&sum)[2], float (&factor)[2])
{
    const loss_params &p = x.s.of;
    const float scale2 = p.scale * log2_of_e;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < 2; r++)
        if (lane % 4 == 0) x.m.heads[x.group][x.head0() + r * 8] = make_float2(most[r], sum[r]);
    x.sync_all();
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int head = x.head0() + r * 8;
        float mass = 0.0f;
        factor[r] = 0.0f;
        if (head < p.heads) {
            const float elsewhere2 = x.facts().elsewhere[head];
            float2 of[GROUPS];
            float now = -INFINITY, whole = 0.0f;
#pragma unroll
            for (int t = 0; t < GROUPS; t++) {
                of[t] = x.m.heads[t][head];
                now = fmaxf(now, of[t].x);
            }
            const float top = fmaxf(now == -INFINITY ? now : now * scale2, elsewhere2),
                        base = top == -INFINITY ? 0.0f : top;
#pragma unroll
            for (int t = 0; t < GROUPS; t++)
                whole = fmaf(of[t].y, exp2_fast(fmaf(of[t].x, scale2, -base)), whole);
            const float all = top == -INFINITY ? 1.0f : whole + exp2_fast(elsewhere2 - base),
                        one = __fdividef(1.0f, all);
            mass = whole * one;
            factor[r] = most[r] == -INFINITY ? 0.0f : exp2_fast(fmaf(most[r], scale2, -base)) * one;
        }
        if (lane % 4 == 0) x.m.mass[x.group][head] = mass;
    }
}

/* The sums over a warp's heads of the shares of a tile. */
__device__ __forceinline__ void sum_shares(float *to, const float (&c)[COLUMN_TILES][4],
                                           const float (&factor)[2])
{
    float v[32];
#pragma unroll
    for (int i = 0; i < 32; i++) v[i] = fmaf(c[i / 2][i % 2], factor[0], c[i / 2][2 + i % 2] * factor[1]);
    sum_columns(v);
    put_columns(to, v);
}

/* The larger of both, or what is no number. */
__device__ __forceinline__ float max_nan(float a, float b)
{
    float most;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(b));
    return most;
}

/* The sums over a thread's two heads of 16 of its columns' scores z, weighed; and which of these are
 * positive. */
template <int GROUPS>
__device__ __forceinline__ void weigh_half(const list_query<GROUPS> &x, float *v, float (&z)[HALF_TILES][4],
                                           const float (&w)[2], uint32_t &positive)
{
    if (x.s.of.index_heads != HEADS) {
#pragma unroll
        for (int j = 0; j < HALF_TILES; j++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (x.head0() + e / 2 * 8 >= x.s.of.index_heads) z[j][e] = 0.0f;
    }
    uint32_t others = 0;
#pragma unroll
    for (int i = 15; i >= 0; i--) {
        const float a = z[i / 2][i % 2], b = z[i / 2][2 + i % 2];
        v[i] = fmaf(w[1], max_nan(b, 0.0f), w[0] * max_nan(a, 0.0f));
    }
#pragma unroll
    for (int j = HALF_TILES - 1; j >= 0; j--)
#pragma unroll
        for (int e = 3; e >= 0; e--)
            others = __funnelshift_l(__float_as_uint(z[j][e] - 0x1p-149f), others, 1); /* its sign */
    positive = ~others;
    /* From here on the scores' registers are free. */
#pragma unroll
    for (int i = 0; i < 16; i++) asm volatile("" : "+f"(v[i]));
    asm volatile("" : "+r"(positive));
}

/* Both sums over heads of the warpgroup's tile: of entry `thread`. */
template <int GROUPS>
__device__ __forceinline__ void sum_lists(list_query<GROUPS> &x, float &teacher, float &student)
{
    float(&sums)[SUM_KINDS][4][TILE] = x.m.sums[x.group];
    x.m.of_q.wait_full(x.heads);
    x.count = x.facts().count;
    {
        float c[COLUMN_TILES][4], most[2], sum[2], factor[2];
        issue_keys(x, c);
        wg_wait<0>(c);
        x.give_back(x.keys_at(x.group), GROUPS);
        if (threadIdx.x % 32 == 0) x.m.of_q.give_back(x.heads);
        raise_tile(x, c, most, sum);
        share_heads(x, most, sum, factor);
        sum_shares(sums[0][warp_of_group()], c, factor);
    }
    {
        const float w[2] = {x.facts().w[x.head0()], x.facts().w[x.head0() + 8]};
        float v[32], z[HALF_TILES][4], y[HALF_TILES][4];
        uint32_t positive[2];
        x.m.of_index.wait_full(x.heads);
        x.m.entries.wait_full(x.index_at(x.group));
        wg_show();
        issue_index(x, z, 0);
        issue_index(x, y, 1);
        wg_wait<1>(z);
        weigh_half(x, v, z, w, positive[0]);
        wg_wait<0>(y);
        weigh_half(x, v + 16, y, w, positive[1]);
        sum_columns(v);
        put_columns(sums[1][warp_of_group()], v);
        x.m.positive[x.group][x.thread()] = (uint64_t)positive[1] << 32 | positive[0];
    }
    x.sync();
    float all[SUM_KINDS] = {0.0f, 0.0f};
#pragma unroll
    for (int k = 0; k < SUM_KINDS; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) all[k] += sums[k][i][x.thread()];
    teacher = all[0];
    student = all[1] * x.s.of.scale_index;
}

/* The normaliser of the indexer's scores. */
template <int GROUPS>
__device__ __forceinline__ float student_lse(const list_query<GROUPS> &x, float student)
{
    const bool here = x.thread() < x.left();
    float most = here ? student : -INFINITY;
#pragma unroll
    for (int by = 16; by > 0; by /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, by));
    float sum = here ? exp2_fast((student - most) * log2_of_e) : 0.0f;
#pragma unroll
    for (int by = 16; by > 0; by /= 2) sum += __shfl_xor_sync(~0u, sum, by);
    if (threadIdx.x % 32 == 0) x.m.student[x.group][warp_of_group()] = make_float2(most, sum);
    x.sync_all();
    /* A lane a part. */
    const float2 part = (&x.m.student[0][0])[threadIdx.x % (GROUPS * 4)];
    float all = part.x;
#pragma unroll
    for (int by = GROUPS * 2; by > 0; by /= 2) all = fmaxf(all, __shfl_xor_sync(~0u, all, by));
    float whole = part.x > -INFINITY ? part.y * exp2_fast((part.x - all) * log2_of_e) : 0.0f;
#pragma unroll
    for (int by = GROUPS * 2; by > 0; by /= 2) whole += __shfl_xor_sync(~0u, whole, by);
    return all + __logf(whole);
}

/* The mass that all heads give to the entries. */
template <int GROUPS> __device__ __forceinline__ float mass_of_all(const list_query<GROUPS> &x)
{
    const int lane = threadIdx.x % 32;
    float mass = x.m.mass[x.group][lane] + x.m.mass[x.group][lane + 32];
#pragma unroll
    for (int by = 16; by > 0; by /= 2) mass += __shfl_xor_sync(~0u, mass, by);
    return mass;
}

/* The gradients of the entries' scores; a warp's part of the query's loss. */
template <int GROUPS>
__device__ __forceinline__ float compare_lists(const list_query<GROUPS> &x, float teacher, float student,
                                               float lse, float mass)
{
    const bool taught = mass >= 0x1p-126f; /* as compare() */
    float loss = 0.0f, g = 0.0f;
    if (taught && x.thread() < x.left()) {
        const float of_head = __fdividef(teacher, mass), log_p = student - lse;
        g = __fdividef(x.s.of.lambda, (float)max(x.m.rows, 1)) * (exp2_fast(log_p * log2_of_e) - of_head);
        loss = of_head * (__logf(fmaxf(of_head, 1e-10f)) - log_p);
    }
    x.m.g[x.group][x.thread()] = g;
    x.m.gradient[x.group][x.thread()] = from_float<bf16>(g);
#pragma unroll
    for (int by = 16; by > 0; by /= 2) loss += __shfl_xor_sync(~0u, loss, by);
    return loss;
}

/* The operand of 64 entries' rows of partials: bits times w. */
template <int GROUPS>
__device__ __forceinline__ void weigh_bits(const list_query<GROUPS> &x, uint32_t (&b)[4][4], int rows)
{
    const uint32_t *const w = (const uint32_t *)x.facts().w16 + threadIdx.x % 4;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const uint32_t near = w[k * 8], far = w[k * 8 + 4], heads[4] = {near, near, far, far};
        turn_bits(b[k], (const uint8_t *)x.m.positive[x.group], rows, k, heads);
    }
}

/* 64 channels of these rows, without their entries' factors. */
template <int GROUPS>
__device__ __forceinline__ void issue_partials(const list_query<GROUPS> &x, float (&c)[HALF_TILES][4],
                                               const uint32_t (&b)[4][4], int panel)
{
    const uint64_t heads = wg_fresh(wg_tile(smem_address(x.m.q_index) + panel * HEAD_PANEL, HEAD_PANEL));
    wg_start();
#pragma unroll
    for (int k = 0; k < 4; k++) {
        if (k == 0) wg_rs_wide<bf16, WIDTH / 2, false, true>(c, b[k], heads);
        else wg_rs_wide<bf16, WIDTH / 2, true, true>(c, b[k], wg_further(heads, k * 16 * 128));
    }
    wg_commit();
}

/* The same in bf16: of a thread's two rows two columns a word. Four words are stored as they stand: the sums
 * turn columns, once an entry. */
typedef uint32_t partial_words[2][HALF_TILES];

template <int GROUPS>
__device__ __forceinline__ void round_partials(const list_query<GROUPS> &x, partial_words &words,
                                               const float (&c)[HALF_TILES][4], int rows)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const float by = x.m.g[x.group][rows * 64 + x.head0() + h * 8] * x.s.of.scale_index;
#pragma unroll
        for (int j = 0; j < HALF_TILES; j++)
            words[h][j] = pack2<bf16>(c[j][h * 2] * by, c[j][h * 2 + 1] * by);
    }
}

template <int GROUPS>
__device__ __forceinline__ void store_partials(const list_query<GROUPS> &x, const partial_words &words,
                                               int rows, int panel)
{
    const int rows_given = x.s.sums != NULL ? x.left() : 0;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int row = rows * 64 + x.head0() + h * 8;
        bf16 *const to = x.s.partials + (x.i * x.s.of.listed + x.group * TILE + row) * WIDTH +
                         panel * (WIDTH / 2) + threadIdx.x % 4 * 8;
        if (row >= rows_given) continue;
#pragma unroll
        for (int j = 0; j < HALF_TILES; j += 4)
            __stcs((uint4 *)(to + j * 8),
                   make_uint4(words[h][j], words[h][j + 1], words[h][j + 2], words[h][j + 3]));
    }
}

/* A tile's part of u, of the warpgroup's 64 channels. */
template <int GROUPS>
__device__ __forceinline__ void issue_u(const list_query<GROUPS> &x, float (&u)[HALF_TILES][4],
                                        uint32_t (&a)[TILE / 16][4], int tile)
{
    const uint64_t positive = x.m.positive[tile][x.thread()];
    const uint32_t *const pairs = (const uint32_t *)x.m.gradient[tile] + threadIdx.x % 4;
#pragma unroll
    for (int k = 0; k < TILE / 16; k++)
        mask_pairs(a[k], (uint32_t)(positive >> k / 4 * 32), k % 4, pairs[k * 8], pairs[k * 8 + 4]);
    const uint64_t entries =
        wg_fresh(wg_tile(x.address(x.index_at(tile)) + x.half() * ENTRY_PANEL, ENTRY_PANEL));
    wg_start();
#pragma unroll
    for (int k = 0; k < TILE / 16; k++)
        wg_rs_wide<bf16, WIDTH / 2, true, true>(u, a[k], wg_further(entries, k * 16 * 128));
    wg_commit();
}

/* u of one of the set's two tiles. */
template <int GROUPS>
__device__ __forceinline__ void add_u(const list_query<GROUPS> &x, float (&u)[HALF_TILES][4], int step)
{
    const int tile = step * x.SETS + x.set();
    uint32_t a[TILE / 16][4];
    issue_u(x, u, a, tile);
    wg_wait<0>(u);
    if (step == 0 || x.SETS == 1 || x.set() == 0) x.give_back(x.index_at(tile), x.SETS);
    else named_arrive(3 + x.half(), 256);
}

/* The partials of half of the warpgroup's own tile. */
template <int GROUPS> __device__ __forceinline__ void give_partials(const list_query<GROUPS> &x, int rows)
{
    uint32_t b[4][4];
    float c[HALF_TILES][4];
    partial_words words;
    weigh_bits(x, b, rows);
    issue_partials(x, c, b, 0);
    wg_wait<0>(c);
    round_partials(x, words, c, rows);
    issue_partials(x, c, b, 1);
    store_partials(x, words, rows, 0);
    wg_wait<0>(c);
    round_partials(x, words, c, rows);
    store_partials(x, words, rows, 1);
}

/* The channels of which a warpgroup has all of u, and gives its heads what they get: tiles of eight. */
template <int GROUPS> __device__ constexpr int own_tiles()
{
    return HALF_TILES / list_query<GROUPS>::SETS;
}

/* Adds the sets' parts of u, a half of the channels in each set, through the last tile's stage: that of the
 * tile before it is free for the next query's keys while partials are made. */
template <int GROUPS>
__device__ __forceinline__ void add_sets(const list_query<GROUPS> &x, const float (&u)[HALF_TILES][4],
                                         float (&own)[own_tiles<GROUPS>()][4])
{
    enum { OWN = own_tiles<GROUPS>() };
    const bool upper = x.set() == 1;
#pragma unroll
    for (int j = 0; j < OWN; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) own[j][e] = upper ? u[(j + OWN) % HALF_TILES][e] : u[j][e];
    if (x.SETS == 1) return;
    const ring_place<LIST_STAGES> last = x.index_at(GROUPS - 1);
    float4 *const parts = (float4 *)x.m.stages[last.stage][x.half()] + x.thread(),
                  *const to = parts + x.set() * OWN * 128, *const from = parts + (1 - x.set()) * OWN * 128;
    /* Those who read the panel have done so. */
    if (upper) x.sync();
    else named_sync(3 + x.half(), 256);
#pragma unroll
    for (int j = 0; j < OWN; j++) {
        const float(&low)[4] = u[j], (&high)[4] = u[(j + OWN) % HALF_TILES];
        to[j * 128] = make_float4(upper ? low[0] : high[0], upper ? low[1] : high[1],
                                  upper ? low[2] : high[2], upper ? low[3] : high[3]);
    }
    named_sync(6 + x.half(), 256);
#pragma unroll
    for (int j = 0; j < OWN; j++) {
        const float4 part = from[j * 128];
        own[j][0] += part.x, own[j][1] += part.y, own[j][2] += part.z, own[j][3] += part.w;
    }
    x.give_back(last, 1);
}

/* Stores what the query's heads get: of d_w the warpgroups leave their channels' parts to the first. */
template <int GROUPS>
__device__ __forceinline__ void give_heads(const list_query<GROUPS> &x,
                                           const float (&u)[own_tiles<GROUPS>()][4], bool d_q_wide)
{
    const loss_params &p = x.s.of;
    const int64_t query = x.s.first + x.i;
    const int tile0 = x.set() * own_tiles<GROUPS>(), channel0 = x.half() * (WIDTH / 2) + tile0 * 8,
              lane = threadIdx.x % 32;
    float part[2] = {0.0f, 0.0f};
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int head = x.head0() + h * 8;
        const char *const q = (const char *)x.m.q_index + x.half() * HEAD_PANEL + head * 128 + lane % 4 * 4;
        if (p.d_q_index.p != NULL)
            store_row((bf16 *)p.d_q_index.p + x.s.b * p.d_q_index.s[0] + query * p.d_q_index.s[1] +
                          head * p.d_q_index.s[2] + channel0,
                      u, h, x.facts().w[head] * p.scale_index, p.width - channel0, head < p.index_heads,
                      d_q_wide);
        if (p.d_w.p == NULL || x.count == 0) continue;
#pragma unroll
        for (int j = 0; j < own_tiles<GROUPS>(); j++) {
            const float2 two = unpack2<bf16>(*(const uint32_t *)(q + (((j + tile0) ^ (head & 7)) << 4)));
            part[h] = fmaf(u[j][h * 2], two.x, part[h]);
            part[h] = fmaf(u[j][h * 2 + 1], two.y, part[h]);
        }
        part[h] += __shfl_xor_sync(~0u, part[h], 1);
        part[h] += __shfl_xor_sync(~0u, part[h], 2);
    }
    if (p.d_w.p == NULL) return;
#pragma unroll
    for (int h = 0; h < 2; h++)
        if (lane % 4 == 0) x.m.d_w[x.group][x.head0() + h * 8] = part[h];
    if (x.group > 0) {
        named_arrive(5, x.COMPUTING);
        return;
    }
    named_sync(5, x.COMPUTING);
    const int head = x.thread();
    if (head >= p.index_heads) return;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < GROUPS; i++) sum += x.m.d_w[i][head];
    put_at(p.d_w.p, p.w_dtype, x.s.b * p.d_w.s[0] + query * p.d_w.s[1] + head, sum * p.scale_index);
}

template <int GROUPS> __device__ __forceinline__ void give_loss(const list_query<GROUPS> &x)
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

template <int GROUPS>
__device__ __forceinline__ void compute_list(list_query<GROUPS> &x, bool gradients, bool d_q_wide)
{
    float teacher, student;
    sum_lists(x, teacher, student);
    const float mass = mass_of_all(x), lse = student_lse(x, student),
                loss = compare_lists(x, teacher, student, lse, mass);
    if (threadIdx.x % 32 == 0) x.m.loss[x.group][warp_of_group()] = loss;
    x.sync_all();
    if (threadIdx.x == FEEDERS + 128) give_loss(x);
    if (gradients) {
        float u[HALF_TILES][4] = {};
#pragma unroll 1
        for (int i = 0; i < 4; i++) /* one set makes u while the other makes partials */
            if ((i + x.set()) % 2 == 0) add_u(x, u, i / 2);
            else give_partials(x, i / 2);
        float own[own_tiles<GROUPS>()][4];
        add_sets(x, u, own);
        give_heads(x, own, d_q_wide);
    } else
        for (int tile = 0; tile < GROUPS; tile++) x.give_back(x.index_at(tile), 1);
    x.m.of_index.give_back(x.heads);
    x.heads.advance();
    x.uses += 2 * GROUPS;
}

template <int GROUPS>
__global__ void __launch_bounds__(FEEDERS + GROUPS * 128, 1)
    indexer_loss_lists(const __grid_constant__ slice s, const bool gradients, const bool d_q_wide)
{
#ifdef QUERN_WGMMA
    enum { COMPUTING = GROUPS * 128, WARPS = COMPUTING / 32 };
    extern __shared__ __align__(1024) char memory[];
    lists_shared &m = *(lists_shared *)memory;
    if (threadIdx.x == 0) {
        m.entries.init(2 * FEEDERS, WARPS);
        m.of_q.init(2 * FEEDERS, WARPS);
        m.of_index.init(2 * FEEDERS, COMPUTING);
        mbar_init_done();
        m.rows = 0;
    }
    __syncthreads();
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (group == 0) {
        registers_down<GROUPS == 2 ? 80 : 32>();
        feed_lists<GROUPS>(s, m);
    } else {
        registers_up<GROUPS == 2 ? 208 : 112>();
        wait_for_before();
        if (s.of.rows == NULL) count_rows(s.of, &m.rows, threadIdx.x - FEEDERS, COMPUTING);
        else if (threadIdx.x == FEEDERS) m.rows = *s.of.rows;
        list_query<GROUPS> x = {s, m, group - 1, 0, 0, 0, {}};
        for (x.i = blockIdx.x; x.i < s.count; x.i += gridDim.x) compute_list(x, gradients, d_q_wide);
    }
#endif
}

} // namespace sm90_loss

#endif
