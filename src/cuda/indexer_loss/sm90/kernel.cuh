/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * kernel.cuh - `pairs`: the warpgroups that compute, and the kernel. In each walk thread e of a warpgroup has
 * entry e of every tile, beside its part of the products.
 *
 * Limit: the tensor cores, 8 H D + 6 Hi C + (lists) 2 Hi C operations a pair: attention's scores are made
 * twice, which takes less than to keep them. Lists: the rows of a query are gathered four times from L2.
 */
#ifndef QUERN_CUDA_INDEXER_LOSS_SM90_KERNEL_CUH
#define QUERN_CUDA_INDEXER_LOSS_SM90_KERNEL_CUH

#include "indexer_loss/sm90/feed.cuh"
#include "indexer_loss/sm90/operands.cuh"

namespace sm90_loss
{

static constexpr float log2_of_e = 1.44269504f;

/* A warpgroup's query. */
template <int QUERIES, int STAGES> struct own_query {
    const slice &s;
    shared<QUERIES, STAGES> &m;
    uint32_t heads; /* of q, in shared memory */
    int group, tiles, count, chunks;
    int64_t i;  /* of the slice */
    int64_t at; /* of its arrays' first tile */
    ring_place<STAGES> place;

    __device__ __forceinline__ int thread() const { return threadIdx.x % 128; }
    __device__ __forceinline__ int head0() const { return warp_of_group() * 16 + threadIdx.x % 32 / 4; }
    __device__ __forceinline__ void sync() const
    {
        if (QUERIES == 1 || group == 0) named_sync(1, 128);
        else named_sync(2, 128);
    }
    __device__ __forceinline__ int64_t query() const { return s.first + i; }
    __device__ __forceinline__ int left(int tile) const { return count - tile * TILE; }
    __device__ __forceinline__ uint32_t stage() const { return stage_address(m.stages, place.stage); }
    __device__ __forceinline__ void take()
    {
        m.entries.wait_full(place);
        wg_show();
    }
    __device__ __forceinline__ void give_back()
    {
        m.entries.give_back(place);
        place.advance();
    }
};

/* Attention's products of the next tile. */
template <int QUERIES, int STAGES>
__device__ __forceinline__ void score_keys(own_query<QUERIES, STAGES> &x, float (&c)[COLUMN_TILES][4])
{
    x.take();
    issue_scores<false>(c, x.heads, x.stage());
    wg_wait<0>(c);
    x.give_back();
    for (int i = 1; i < x.chunks; i++) {
        x.take();
        issue_scores<true>(c, x.heads + i * LOSS_HEAD_BYTES, x.stage());
        wg_wait<0>(c);
        x.give_back();
    }
    clear_rows(c, x.head0(), x.s.of.heads);
}

__device__ __forceinline__ float log_add_f32(float a, float b)
{
    const float most = fmaxf(a, b);
    return most == -INFINITY ? most : most + logf(expf(a - most) + expf(b - most));
}

/* The first walk: the normaliser of each of a thread's two heads, to base 2, and the mass that all heads
 * leave to the entries. */
template <int QUERIES, int STAGES>
__device__ __forceinline__ float normalise(own_query<QUERIES, STAGES> &x, float (&lse2)[2])
{
    const loss_params &p = x.s.of;
    const float scale2 = p.scale * log2_of_e;
    const int lane = threadIdx.x % 32;
    float most[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};
    for (int tile = 0; tile < x.tiles; tile++) {
        float c[COLUMN_TILES][4];
        score_keys(x, c);
        const int left = x.left(tile);
        if (left < TILE) {
#pragma unroll
            for (int j = 0; j < COLUMN_TILES; j++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    if (j * 8 + lane % 4 * 2 + e % 2 >= left) c[j][e] = -INFINITY;
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float now = most[r];
#pragma unroll
            for (int j = 0; j < COLUMN_TILES; j++) now = fmaxf(now, fmaxf(c[j][r * 2], c[j][r * 2 + 1]));
            now = fmaxf(now, __shfl_xor_sync(~0u, now, 1));
            now = fmaxf(now, __shfl_xor_sync(~0u, now, 2));
            const float base = now == -INFINITY ? 0.0f : now * scale2;
            float all = sum[r] * exp2_fast(fmaf(most[r], scale2, -base));
#pragma unroll
            for (int j = 0; j < COLUMN_TILES; j++)
                all += exp2_fast(fmaf(c[j][r * 2], scale2, -base)) +
                       exp2_fast(fmaf(c[j][r * 2 + 1], scale2, -base));
            sum[r] = all;
            most[r] = now;
        }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int head = x.head0() + r * 8;
        sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
        sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
        float mass = 0.0f;
        lse2[r] = INFINITY;
        if (head < p.heads) {
            const int64_t query = x.i < x.s.count ? x.query() : x.s.first;
            const float own = most[r] * p.scale + logf(sum[r]),
                        window = p.lse_win.p[x.s.b * p.lse_win.s[0] + head * p.lse_win.s[1] +
                                             query * p.lse_win.s[2]],
                        sink = p.sink != NULL ? p.sink[head] : -INFINITY,
                        all = log_add_f32(own, log_add_f32(window, sink));
            mass = expf(own - all);
            lse2[r] = all * log2_of_e;
        }
        if (lane % 4 == 0) x.m.mass[x.group][head] = mass;
    }
    x.sync();
    float all = 0.0f;
#pragma unroll
    for (int h = 0; h < HEADS; h++) all += x.m.mass[x.group][h];
    return all;
}

/* The second walk: the sums over heads of each entry, and which products are positive, into the workspace.
 * Returns the normaliser of the indexer's scores. */
template <int QUERIES, int STAGES>
__device__ __forceinline__ float sum_heads(own_query<QUERIES, STAGES> &x, const float (&lse2)[2],
                                           const float (&w)[2])
{
    const loss_params &p = x.s.of;
    const float scale2 = p.scale * log2_of_e;
    const int thread = x.thread();
    float most = -INFINITY, sum = 0.0f;
    for (int tile = 0; tile < x.tiles; tile++) {
        float c[COLUMN_TILES][4], z[COLUMN_TILES][4], v[32];
        score_keys(x, c);
        x.take();
        issue_scores<false>(z, smem_address(x.m.q_index[x.group]), x.stage());
#pragma unroll
        for (int i = 0; i < 32; i++)
            v[i] = exp2_fast(fmaf(c[i / 2][i % 2], scale2, -lse2[0])) +
                   exp2_fast(fmaf(c[i / 2][2 + i % 2], scale2, -lse2[1]));
        sum_columns(v);
        float(&sums)[SUM_KINDS][4][TILE] = x.m.sums[x.group][tile % 2];
        put_columns(sums[0][warp_of_group()], v);
        wg_wait<0>(z);
        x.give_back();
        clear_rows(z, x.head0(), p.index_heads);
        uint32_t positive[2];
        sum_index(sums[1][warp_of_group()], z, w, positive);
        x.sync();
        float teacher = 0.0f, student = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            teacher += sums[0][i][thread];
            student += sums[1][i][thread];
        }
        student *= p.scale_index;
        const int64_t to = (x.at + tile) * TILE + thread;
        x.s.teacher[to] = teacher;
        x.s.student[to] = student;
        x.s.positive[to] = (uint64_t)positive[1] << 32 | positive[0];
        if (thread >= x.left(tile)) continue;
        const float now = fmaxf(most, student);
        sum = sum * exp2_fast((most - now) * log2_of_e) + exp2_fast((student - now) * log2_of_e);
        most = now;
    }
    float all = most;
#pragma unroll
    for (int by = 16; by > 0; by /= 2) all = fmaxf(all, __shfl_xor_sync(~0u, all, by));
    sum = most == -INFINITY ? 0.0f : sum * expf(most - all);
#pragma unroll
    for (int by = 16; by > 0; by /= 2) sum += __shfl_xor_sync(~0u, sum, by);
    float(&parts)[2][4] = x.m.parts[x.group];
    if (threadIdx.x % 32 == 0) parts[0][warp_of_group()] = all, parts[1][warp_of_group()] = sum;
    x.sync();
    most = fmaxf(fmaxf(parts[0][0], parts[0][1]), fmaxf(parts[0][2], parts[0][3]));
    sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (parts[0][i] > -INFINITY) sum += parts[1][i] * expf(parts[0][i] - most);
    return most + logf(sum);
}

/* The gradient of each entry's score, from here on in the place of its sums; with lists the row of its
 * partial. Returns the query's loss, in thread 0. */
template <bool LISTS, int QUERIES, int STAGES>
__device__ __forceinline__ double compare(own_query<QUERIES, STAGES> &x, float mass, float lse)
{
    const loss_params &p = x.s.of;
    const int64_t rows = LISTS ? (int64_t)*p.rows : x.s.seen;
    const float factor = p.lambda / (float)max(rows, (int64_t)1);
    /* Below it T has no normal number, and there is no teacher. */
    const bool taught = mass >= 0x1p-126f;
    float loss = 0.0f;
    for (int tile = 0; tile < x.tiles; tile++) {
        const int64_t at = (x.at + tile) * TILE + x.thread();
        const bool here = x.thread() < x.left(tile);
        float gradient = 0.0f;
        if (here && taught) {
            const float teacher = x.s.teacher[at] / mass, log_p = x.s.student[at] - lse;
            gradient = factor * (expf(log_p) - teacher);
            loss += teacher * (logf(fmaxf(teacher, 1e-10f)) - log_p);
        }
        x.s.gradient[at] = from_float<bf16>(gradient);
        if (!LISTS) continue;
        x.s.teacher[at] = gradient;
        int row = -1;
        if (here && x.s.sums != NULL) row = (int)(x.i * p.listed) + tile * TILE + x.thread();
        ((int *)x.s.student)[at] = row;
    }
#pragma unroll
    for (int by = 16; by > 0; by /= 2) loss += __shfl_xor_sync(~0u, loss, by);
    x.sync(); /* the parts have been read */
    float(&parts)[2][4] = x.m.parts[x.group];
    if (threadIdx.x % 32 == 0) parts[0][warp_of_group()] = loss;
    x.sync();
    return (double)parts[0][0] + (double)parts[0][1] + (double)parts[0][2] + (double)parts[0][3];
}

/* Rows of the heads of keys_index's gradient: w q_index, in the place of q_index or (TO not NULL) there. */
template <int QUERIES, int STAGES>
__device__ __forceinline__ void weigh_heads(own_query<QUERIES, STAGES> &x, char *to)
{
    const loss_params &p = x.s.of;
    char *const own = (char *)x.m.q_index[x.group];
#pragma unroll 2
    for (int at = x.thread() * 16; at < LOSS_HEAD_BYTES; at += 128 * 16) {
        const int head = at % HEAD_PANEL / 128;
        const float w = head < p.index_heads
                            ? value_at(p.w.p, p.w_dtype, x.s.b * p.w.s[0] + x.query() * p.w.s[1] + head)
                            : 0.0f;
        uint4 q = *(const uint4 *)(own + at);
        uint32_t words[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 two = unpack2<bf16>(words[i]);
            words[i] = head < p.index_heads ? pack2<bf16>(two.x * w, two.y * w) : 0;
        }
        *(uint4 *)((to != NULL ? to : own) + at) = make_uint4(words[0], words[1], words[2], words[3]);
    }
}

/* Half a tile of keys_index's gradient: rows of partials of 64 entries. */
template <int QUERIES, int STAGES>
__device__ __forceinline__ void issue_rows(own_query<QUERIES, STAGES> &x, float (&c)[COLUMN_TILES][4],
                                           uint32_t (&a)[4][4], int tile, int half)
{
    const uint32_t one = 0x3f803f80; /* in bf16, twice */
    const uint32_t ones[4] = {one, one, one, one};
    const uint8_t *const bits = (const uint8_t *)(x.s.positive + (x.at + tile) * TILE);
#pragma unroll
    for (int k = 0; k < 4; k++) turn_bits(a[k], bits, half, k, ones);
    const uint64_t heads = wg_fresh(wg_tile(smem_address(x.m.q_index[x.group]), HEAD_PANEL));
    wg_start();
#pragma unroll
    for (int k = 0; k < 4; k++) {
        if (k == 0) wg_rs_wide<bf16, WIDTH, false, true>(c, a[k], heads);
        else wg_rs_wide<bf16, WIDTH, true, true>(c, a[k], wg_further(heads, k * 16 * 128));
    }
    wg_commit();
}

/* Columns stand as in store_partials() of lists.cuh. */
template <int QUERIES, int STAGES>
__device__ __forceinline__ void store_rows(own_query<QUERIES, STAGES> &x,
                                           const float (&c)[COLUMN_TILES][4], int tile, int half)
{
    const int row = half * 64 + x.head0();
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int64_t at = (x.at + tile) * TILE + row + h * 8;
        const int to = ((const int *)x.s.student)[at];
        const float by = x.s.teacher[at] * x.s.of.scale_index;
        if (to < 0) continue;
#pragma unroll
        for (int j = 0; j < COLUMN_TILES; j += 4) {
            uint32_t words[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                words[i] = pack2<bf16>(c[j + i][h * 2] * by, c[j + i][h * 2 + 1] * by);
            store_eight(x.s.partials + (int64_t)to * WIDTH + (j + threadIdx.x % 4) * 8, words, true);
        }
    }
}

/* The third walk: u, and with lists the partials. */
template <bool LISTS, int QUERIES, int STAGES>
__device__ __forceinline__ void walk_back(own_query<QUERIES, STAGES> &x, float (&u)[COLUMN_TILES][4])
{
    for (int tile = 0; tile < x.tiles; tile++) {
        const int64_t at = (x.at + tile) * TILE;
        const uint64_t positive = x.s.positive[at + x.thread()];
        const uint32_t *const pairs = (const uint32_t *)(x.s.gradient + at) + threadIdx.x % 4;
        uint32_t a[TILE / 16][4];
#pragma unroll
        for (int k = 0; k < TILE / 16; k++)
            mask_pairs(a[k], (uint32_t)(positive >> k / 4 * 32), k % 4, pairs[k * 8], pairs[k * 8 + 4]);
        x.take();
        const uint64_t entries = wg_fresh(wg_tile(x.stage(), ENTRY_PANEL));
        wg_start();
#pragma unroll
        for (int k = 0; k < TILE / 16; k++)
            wg_rs_wide<bf16, WIDTH, true, true>(u, a[k], wg_further(entries, k * 16 * 128));
        wg_commit();
        if (LISTS && x.s.sums != NULL) {
            float c[COLUMN_TILES][4];
            uint32_t b[4][4];
            issue_rows(x, c, b, tile, 0);
            wg_wait<1>(u);
            x.give_back();
            wg_wait<0>(c);
            store_rows(x, c, tile, 0);
            issue_rows(x, c, b, tile, 1);
            wg_wait<0>(c);
            store_rows(x, c, tile, 1);
        } else {
            wg_wait<0>(u);
            x.give_back();
        }
    }
}

/* Stores what the query's heads get. */
template <int QUERIES, int STAGES>
__device__ __forceinline__ void give_gradients(const own_query<QUERIES, STAGES> &x,
                                               const float (&u)[COLUMN_TILES][4], const float (&w)[2],
                                               bool d_q_wide)
{
    const loss_params &p = x.s.of;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int head = x.head0() + h * 8;
        const bool here = head < p.index_heads;
        const bf16 *const q = (const bf16 *)p.q_index.p + x.s.b * p.q_index.s[0] +
                              x.query() * p.q_index.s[1] + (here ? head * p.q_index.s[2] : 0);
        if (p.d_q_index.p != NULL)
            store_row((bf16 *)p.d_q_index.p + x.s.b * p.d_q_index.s[0] + x.query() * p.d_q_index.s[1] +
                          head * p.d_q_index.s[2],
                      u, h, w[h] * p.scale_index, p.width, here, d_q_wide);
        if (p.d_w.p == NULL) continue;
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < COLUMN_TILES; j++) {
            const int column = j * 8 + threadIdx.x % 4 * 2;
            if (column >= p.width || x.count == 0) continue;
            sum = fmaf(u[j][h * 2], to_float(q[column]), sum);
            sum = fmaf(u[j][h * 2 + 1], to_float(q[column + 1]), sum);
        }
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        if (here && threadIdx.x % 4 == 0)
            put_at(p.d_w.p, p.w_dtype, x.s.b * p.d_w.s[0] + x.query() * p.d_w.s[1] + head,
                   sum * p.scale_index);
    }
}

template <bool LISTS, int QUERIES, int STAGES>
__device__ __forceinline__ void compute(own_query<QUERIES, STAGES> &x, bool gradients, bool d_q_wide)
{
    const loss_params &p = x.s.of;
    const bool here = x.i < x.s.count;
    float u[COLUMN_TILES][4], w[2] = {0.0f, 0.0f};
    double loss = 0.0;
    if (x.tiles > 0) {
        float lse2[2];
#pragma unroll
        for (int h = 0; h < 2; h++)
            if (here && x.head0() + h * 8 < p.index_heads)
                w[h] = value_at(p.w.p, p.w_dtype,
                                x.s.b * p.w.s[0] + x.query() * p.w.s[1] + x.head0() + h * 8);
        x.m.heads_full.wait({});
        wg_show();
        if (!LISTS && here && x.s.heads != NULL) weigh_heads(x, x.s.heads + x.i * LOSS_HEAD_BYTES);
        const float mass = normalise(x, lse2), lse = sum_heads(x, lse2, w);
        if (LISTS && gradients) {
            weigh_heads(x, NULL);
            wg_show();
        }
        loss = compare<LISTS>(x, mass, lse);
    }
#pragma unroll
    for (int j = 0; j < COLUMN_TILES; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) u[j][e] = 0.0f;
    if (LISTS && here && x.s.sums != NULL) {
        const int32_t *const chosen = chosen_of(x.s, x.i);
        choices_shared &choices = *(choices_shared *)x.m.sums;
        clear_choices(choices);
        x.sync();
        give_choices(
            x.s, choices, x.i, x.count, [&](int at) { return chosen[at]; }, [&] { x.sync(); });
    }
    if (gradients) {
        walk_back<LISTS>(x, u);
        if (here) give_gradients(x, u, w, d_q_wide);
    }
    if (!here || x.thread() != 0) return;
    if (x.count == 0) loss = 0.0;
    p.losses[x.s.b * p.queries + x.query()] = loss;
    if (p.row_loss.p != NULL)
        p.row_loss.p[x.s.b * p.row_loss.s[0] + x.query() * p.row_loss.s[1]] = (float)loss;
}

template <bool LISTS, int QUERIES, int STAGES>
__global__ void __launch_bounds__(128 + 128 * QUERIES, QUERIES == 1 ? 2 : 1)
    indexer_loss_pairs(const __grid_constant__ slice s, const bool gradients, const bool d_q_wide)
{
#ifdef QUERN_WGMMA
    extern __shared__ __align__(1024) char memory[];
    shared<QUERIES, STAGES> &m = *(shared<QUERIES, STAGES> *)memory;
    char *const heads = memory + heads_at<QUERIES, STAGES>();
    const int64_t first = (int64_t)blockIdx.x * QUERIES;
    const int chunks = (s.of.dim + WIDTH - 1) / WIDTH;
    int most = 0;
    for (int q = 0; q < QUERIES; q++) most = max(most, entries_of(s, first + q));
    const int tiles = (most + TILE - 1) / TILE;
    if (threadIdx.x == 0) {
        m.entries.init(2 * FEEDERS, 128 * QUERIES);
        m.heads_full.init(2 * FEEDERS);
        mbar_init_done();
    }
    __syncthreads();
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (group == 0) {
        registers_down<FEED_REGISTERS>();
        if (tiles > 0) feed<LISTS>(s, m, heads, tiles, most, gradients);
    } else {
        registers_up<QUERIES == 1 ? 216 : 232>();
        own_query<QUERIES, STAGES> x = {s,
                                        m,
                                        smem_address(heads) + (group - 1) * chunks * LOSS_HEAD_BYTES,
                                        group - 1,
                                        tiles,
                                        entries_of(s, first + group - 1),
                                        chunks,
                                        first + group - 1,
                                        (first + group - 1) * s.tiles,
                                        {}};
        compute<LISTS>(x, gradients, d_q_wide);
    }
#endif
}

/* The slice's arrays have room for a query more than it has, where a block has two. */
template <bool LISTS, int QUERIES, int STAGES> static quern_status launch(cudaStream_t stream, const slice &s)
{
    const loss_params &p = s.of;
    const int chunks = (p.dim + WIDTH - 1) / WIDTH;
    const bool gradients =
        p.d_q_index.p != NULL || p.d_w.p != NULL || (LISTS && s.sums != NULL);
    return launch_shared({stream, NULL}, indexer_loss_pairs<LISTS, QUERIES, STAGES>,
                         dim3((unsigned)((s.count + QUERIES - 1) / QUERIES)), 128 + 128 * QUERIES,
                         heads_at<QUERIES, STAGES>() + (size_t)(QUERIES * chunks * LOSS_HEAD_BYTES),
                         "indexer_loss_pairs", s, gradients, s.d_q_wide);
}

} // namespace sm90_loss

#endif
