/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * long.cuh - gradients of HCA's blocks of 128 rows of 512 channels: a cluster of eight blocks has an entry at
 * a time, 64 channels a block.
 *
 * Rows are read once, into stages of 32 KB, and their gradients leave from there. Three roles a block: 16
 * warps have eight rows each, with their biases and the sums of the biases' gradients in registers; two warps
 * have a channel a lane, bring the warps' sums together and take the entry's gradient back through rotation
 * and norm, for which the blocks of the cluster send each other two sums; a thread feeds and stores. The row
 * warps add up the next entry before they spread the gradients of this one, so nobody waits for the cluster.
 * Weights take two exp2, as registers hold no second entry. Shared memory: 6 stages (192 KB), the warps' sums
 * (24 KB). A scheduler issues some 1500 instructions an entry, 0.3 of the time that its 64 KB take at the
 * copy rate. Limit: bytes moved over the copy rate.
 */
#ifndef QUERN_CUDA_POOL_SM90_LONG_CUH
#define QUERN_CUDA_POOL_SM90_LONG_CUH

#include "hopper/cluster.cuh"
#include "pool/sm90/rows.cuh"

enum {
    PART = WIDTH / LONG_CLUSTER, /* channels of a block */
    LONG_STAGES = 6,
    ROW_WARPS = 16,
    CHANNEL_WARPS = PART / 32,
    FEED_WARP = ROW_WARPS + CHANNEL_WARPS,
    LONG_THREADS = (FEED_WARP + 1) * 32,
    QUADS = PART / GROUP_CHANNELS,
    OWN_ROWS = LONG_RATIO * QUADS / (ROW_WARPS * 32), /* rows of a thread, every second one */
    SENDERS = LONG_CLUSTER * CHANNEL_WARPS
};

/* An entry whose rows are in a stage; after a run's last one comes one that is not there. */
struct long_facts {
    int64_t position;
    int32_t row, view;
    bool live;
};

template <typename T> struct long_room {
    alignas(128) T row[LONG_STAGES][2][LONG_RATIO][PART]; /* values, logits */
    T d_out[LONG_STAGES][PART];
    float sums[2][ROW_WARPS][3][PART]; /* the largest logit, the weights' sum, that of the weighted values */
    float statistic[2][3][PART];       /* as pool_statistic */
    float2 norm[2][SENDERS];           /* of the cluster's channel warps: squares, dot */
    long_facts facts[LONG_STAGES];
    stage_barriers<LONG_STAGES> full, done;
    ring<2> summed, known;
    stage_barriers<2> sent;
};
static_assert(sizeof(long_room<bf16>) <= POOL_SM90_SHARED, "a block's shared memory");

/* ---- the feed ---- */

/* Asks for the rows of the first live entry from `e` on; without one says so and returns false. */
template <typename T>
__device__ __forceinline__ bool long_ask(const pool_gradients_kernel &k, const CUtensorMap &rows,
                                         long_room<T> &m, int first, const ring_place<LONG_STAGES> &at,
                                         int64_t &e)
{
    const pool_kernel &a = k.pool;
    long_facts &f = m.facts[at.stage];
    pool_facts x = {};
    for (; e < k.entries && !x.live; e += a.runs) x = pool_facts_of(a, pool_entry_at(a, e));
    f.live = x.live;
    if (!x.live) {
        m.full.arrive(at);
        return false;
    }
    f.position = x.position;
    f.row = (int32_t)x.row;
    f.view = (int32_t)x.view_b;
    const uint32_t bar = m.full.expect(at, sizeof(m.row[0]) + sizeof(m.d_out[0]));
    for (int part = 0; part < 2; part++)
        tma_load(smem_address(&m.row[at.stage][part][0][0]), rows, bar, part * WIDTH + first, 0, f.row,
                 f.view);
    bulk_load(smem_address(&m.d_out[at.stage][0]),
              (const T *)a.d_out + x.view_b * a.d_out_b + x.n * a.d_out_row + first, sizeof(m.d_out[0]), bar);
    return true;
}

/* One thread. An entry's stage is free once its gradients have been read, which is known an entry later. */
template <typename T>
__device__ __forceinline__ void long_feed(const pool_gradients_kernel &k, const CUtensorMap &rows,
                                          const CUtensorMap &gradients, long_room<T> &m, int first,
                                          int64_t run)
{
    ring_place<LONG_STAGES> at, asked;
    int64_t e = run;
    bool more = true;
    for (int i = 0; i < LONG_STAGES - 1 && more; i++, asked.advance())
        more = long_ask(k, rows, m, first, asked, e);
    for (; m.facts[at.stage].live; at.advance()) {
        const long_facts &f = m.facts[at.stage];
        m.done.wait(at);
        for (int part = 0; part < 2 && k.stores; part++)
            tma_store(gradients, smem_address(&m.row[at.stage][part][0][0]), part * WIDTH + first, 0, f.row,
                      f.view);
        tma_commit();
        wait_read_but_last();
        if (!more) continue;
        more = long_ask(k, rows, m, first, asked, e);
        asked.advance();
    }
    tma_wait_written();
}

/* ---- rows: a lane has four channels of every second row of a warp's eight ---- */

struct own_rows {
    channels bias[OWN_ROWS], gradient[OWN_ROWS];
    int row, channel; /* the first one, of the block's */
    bool no_bias;     /* some bias is -inf */
};

__device__ __forceinline__ own_rows own_rows_of(const pool_gradients_kernel &k, int first)
{
    own_rows r = {};
    const int lane = (int)threadIdx.x % 32;
    r.row = (int)threadIdx.x / 32 * OWN_ROWS * 2 + lane / QUADS;
    r.channel = lane % QUADS * GROUP_CHANNELS;
#pragma unroll
    for (int u = 0; u < OWN_ROWS; u++)
#pragma unroll
        for (int i = 0; i < GROUP_CHANNELS; i++) {
            const int64_t row = r.row + 2 * u;
            r.bias[u].x[i] = k.bias_a.at(row * k.pool.bias_a_row + first + r.channel + i);
            r.no_bias = r.no_bias || r.bias[u].x[i] == -INFINITY;
        }
    return r;
}

template <typename T>
__device__ __forceinline__ uint2 *long_place(T (&rows)[LONG_RATIO][PART], const own_rows &r, int u)
{
    return (uint2 *)&rows[r.row + 2 * u][r.channel];
}

/* Values whose logit is -inf become 0. */
template <typename T>
__device__ __forceinline__ void long_clear_values(T (&row)[2][LONG_RATIO][PART], const own_rows &r)
{
#pragma unroll
    for (int u = 0; u < OWN_ROWS; u++) {
        const channels x = unpack4<T>(*long_place(row[1], r, u));
        channels v = unpack4<T>(*long_place(row[0], r, u));
#pragma unroll
        for (int i = 0; i < GROUP_CHANNELS; i++)
            if (x.x[i] + r.bias[u].x[i] == -INFINITY) v.x[i] = 0.0f;
        *long_place(row[0], r, u) = pack4<T>(v);
    }
}

/* The sums of a warp's rows. */
template <typename T>
__device__ __forceinline__ void long_sums(long_room<T> &m, const own_rows &r, int stage, int sums)
{
    const float log2_e = 1.44269504089f;
    channels x[OWN_ROWS], most, sum = {}, weighted = {};
    uint32_t least = 0;
#pragma unroll
    for (int i = 0; i < GROUP_CHANNELS; i++) most.x[i] = -1e38f; /* times log2(e) it is finite */
#pragma unroll
    for (int u = 0; u < OWN_ROWS; u++) {
        const uint2 raw = *long_place(m.row[stage][1], r, u);
        x[u] = unpack4<T>(raw);
        least = least2<T>(least, least2<T>(raw.x, raw.y));
#pragma unroll
        for (int i = 0; i < GROUP_CHANNELS; i++) {
            x[u].x[i] += r.bias[u].x[i];
            most.x[i] = fmaxf(most.x[i], x[u].x[i]);
        }
    }
    if (r.no_bias || has_none<T>(least)) long_clear_values<T>(m.row[stage], r);
#pragma unroll
    for (int i = 0; i < GROUP_CHANNELS; i++)
        most.x[i] = fmaxf(most.x[i], __shfl_xor_sync(~0u, most.x[i], QUADS));
#pragma unroll
    for (int u = 0; u < OWN_ROWS; u++) {
        const channels v = unpack4<T>(*long_place(m.row[stage][0], r, u));
#pragma unroll
        for (int i = 0; i < GROUP_CHANNELS; i++) {
            const float weight = exp2_fast(fmaf(x[u].x[i], log2_e, most.x[i] * -log2_e));
            sum.x[i] += weight;
            weighted.x[i] = fmaf(weight, v.x[i], weighted.x[i]);
        }
    }
#pragma unroll
    for (int i = 0; i < GROUP_CHANNELS; i++) {
        sum.x[i] += __shfl_xor_sync(~0u, sum.x[i], QUADS);
        weighted.x[i] += __shfl_xor_sync(~0u, weighted.x[i], QUADS);
    }
    if (threadIdx.x % 32 >= QUADS) return;
    float(&to)[3][PART] = m.sums[sums][threadIdx.x / 32];
    *(float4 *)&to[0][r.channel] = float4_of(most);
    *(float4 *)&to[1][r.channel] = float4_of(sum);
    *(float4 *)&to[2][r.channel] = float4_of(weighted);
}

/* Gradients in the rows' places. */
template <typename T>
__device__ __forceinline__ void long_spread(long_room<T> &m, own_rows &r, int stage, int known)
{
    const float log2_e = 1.44269504089f;
    const float(&from)[3][PART] = m.statistic[known];
    const channels shift = channels_of(*(const float4 *)&from[0][r.channel]),
                   pooled = channels_of(*(const float4 *)&from[1][r.channel]),
                   scale = channels_of(*(const float4 *)&from[2][r.channel]);
#pragma unroll
    for (int u = 0; u < OWN_ROWS; u++) {
        uint2 *const logit = long_place(m.row[stage][1], r, u), *const value =
                                                                    long_place(m.row[stage][0], r, u);
        const channels x = unpack4<T>(*logit), v = unpack4<T>(*value);
        channels d_value, d_logit;
#pragma unroll
        for (int i = 0; i < GROUP_CHANNELS; i++) {
            d_value.x[i] = exp2_fast(fmaf(x.x[i] + r.bias[u].x[i], log2_e, shift.x[i])) * scale.x[i];
            d_logit.x[i] = d_value.x[i] * (v.x[i] - pooled.x[i]);
            r.gradient[u].x[i] += d_logit.x[i];
        }
        *value = pack4<T>(d_value);
        *logit = pack4<T>(d_logit);
    }
}

template <typename T>
__device__ __forceinline__ void long_rows(const pool_gradients_kernel &k, long_room<T> &m, int first,
                                          int64_t run)
{
    own_rows r = own_rows_of(k, first);
    ring_place<LONG_STAGES> at, next;
    ring_place<2> sums, known;
    auto add_up = [&]() {
        m.full.wait(next);
        const bool live = m.facts[next.stage].live;
        if (!live) return false;
        m.summed.wait_free(sums);
        long_sums(m, r, next.stage, sums.stage);
        m.summed.give(sums);
        sums.advance();
        next.advance();
        return true;
    };
    for (bool more = add_up(); more; at.advance(), known.advance()) {
        more = add_up();
        m.known.wait_full(known);
        long_spread(m, r, at.stage, known.stage);
        m.known.give_back(known);
        async_fence();
        m.done.arrive(at);
    }
    float *const part = k.pool.parts + (run * LONG_RATIO + r.row) * WIDTH + first + r.channel;
#pragma unroll
    for (int u = 0; u < OWN_ROWS; u++) *(float4 *)(part + 2 * u * WIDTH) = float4_of(r.gradient[u]);
}

/* ---- channels ---- */

struct channel_sums {
    float most, sum, weighted;
};

template <typename T>
__device__ __forceinline__ channel_sums long_sum_up(const long_room<T> &m, int sums, int channel)
{
    const float log2_e = 1.44269504089f;
    channel_sums s = {-1e38f, 0.0f, 0.0f};
    float most[ROW_WARPS];
#pragma unroll
    for (int w = 0; w < ROW_WARPS; w++) {
        most[w] = m.sums[sums][w][0][channel];
        s.most = fmaxf(s.most, most[w]);
    }
#pragma unroll
    for (int w = 0; w < ROW_WARPS; w++) {
        const float scale = exp2_fast((most[w] - s.most) * log2_e);
        s.sum = fmaf(m.sums[sums][w][1][channel], scale, s.sum);
        s.weighted = fmaf(m.sums[sums][w][2][channel], scale, s.weighted);
    }
    return s;
}

/* The cosine and sine of a channel's pair. */
__device__ __forceinline__ float2 long_angles(const entry_kernel &e, int64_t position, int channel)
{
    const int start = e.width - e.rotated;
    const int64_t at = (position + e.offset) * e.angle_row + (channel - start) / 2;
    if (channel < start) return make_float2(1.0f, 0.0f);
    return make_float2(e.angles.at(at), e.angles.at(at + e.rotated / 2));
}

/* d, the gradient of norm(x), becomes that of x; the channel warps of the cluster come together. */
template <typename T>
__device__ __forceinline__ void long_norm(const entry_kernel &e, long_room<T> &m, ring_place<2> &at,
                                          uint32_t rank, float norm, float pooled, float &d, float &d_norm)
{
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32 - ROW_WARPS;
    const float x = e.round_bf16 ? __bfloat162float(__float2bfloat16_rn(pooled)) : pooled;
    float squares = x * x, dot = d * x * norm;
#pragma unroll
    for (int by = 16; by > 0; by /= 2) {
        squares += __shfl_xor_sync(~0u, squares, by);
        dot += __shfl_xor_sync(~0u, dot, by);
    }
    if (warp == 0 && lane == 0) m.sent.expect(at, sizeof(m.norm[0]));
    if (lane < LONG_CLUSTER) {
        const uint32_t to = smem_address(&m.norm[at.stage][rank * CHANNEL_WARPS + warp]);
        cluster_send(cluster_address(to, (uint32_t)lane), make_float2(squares, dot),
                     cluster_address(smem_address(&m.sent.of[at.stage]), (uint32_t)lane));
    }
    m.sent.wait_cluster(at);
    squares = dot = 0.0f;
#pragma unroll
    for (int i = 0; i < SENDERS; i++) {
        const float2 own = m.norm[at.stage][i];
        squares += own.x;
        dot += own.y;
    }
    at.advance();
    const float scale = rsqrtf(squares / WIDTH + e.eps), mean = dot / WIDTH * scale * scale;
    d_norm = fmaf(d * x, scale, d_norm);
    d = (d * norm - x * mean) * scale;
}

/* A block may send an entry's sums to another one's place of two entries before: it has that block's of the
 * entry between, which were sent after it had read the place. */
template <typename T>
__device__ __forceinline__ void long_channels(const pool_gradients_kernel &k, long_room<T> &m, int first,
                                              uint32_t rank, int64_t run)
{
    const float log2_e = 1.44269504089f;
    const entry_kernel &entry = k.pool.entry;
    const int own = (int)threadIdx.x - ROW_WARPS * 32, channel = first + own;
    const float norm = entry.norm.p != NULL ? entry.norm.at(channel) : 0.0f;
    float d_norm = 0.0f;
    ring_place<LONG_STAGES> at;
    ring_place<2> now, sent;
    for (;; at.advance(), now.advance()) {
        m.full.wait(at);
        if (!m.facts[at.stage].live) break;
        const int64_t position = m.facts[at.stage].position;
        const bool angles = entry_has_angles(entry, position);
        const float2 turn = angles ? long_angles(entry, position, channel) : make_float2(1.0f, 0.0f);
        float d = to_float(m.d_out[at.stage][own]);
        m.summed.wait_full(now);
        const channel_sums s = long_sum_up(m, now.stage, own);
        m.summed.give_back(now);
        const float pooled = s.sum != 0.0f ? __fdividef(s.weighted, s.sum) : 0.0f,
                    other = __shfl_xor_sync(~0u, d, 1);
        d = d * turn.x + other * (channel % 2 == 0 ? turn.y : -turn.y);
        if (!angles) d = 0.0f; /* its row is 0 */
        else if (entry.norm.p != NULL) long_norm(entry, m, sent, rank, norm, pooled, d, d_norm);
        m.known.wait_free(now);
        m.statistic[now.stage][0][own] = s.most * -log2_e;
        m.statistic[now.stage][1][own] = pooled;
        m.statistic[now.stage][2][own] = s.sum != 0.0f ? __fdividef(d, s.sum) : 0.0f;
        m.known.give(now);
    }
    k.pool.norm_parts[run * WIDTH + channel] = d_norm;
}

template <typename T>
__global__ void __launch_bounds__(LONG_THREADS, 1)
    pool_long_gradients(const __grid_constant__ pool_gradients_kernel k,
                        const __grid_constant__ CUtensorMap rows,
                        const __grid_constant__ CUtensorMap gradients)
{
    extern __shared__ __align__(128) char room[];
    long_room<T> &m = *(long_room<T> *)room;
    const uint32_t rank = blockIdx.x % LONG_CLUSTER;
    const int warp = (int)threadIdx.x / 32, first = (int)rank * PART;
    const int64_t run = blockIdx.x / LONG_CLUSTER;
    if (threadIdx.x == 0) {
        m.full.init(1);
        m.done.init(ROW_WARPS * WARP_ARRIVALS);
        m.summed.init(ROW_WARPS * WARP_ARRIVALS, CHANNEL_WARPS * WARP_ARRIVALS);
        m.known.init(CHANNEL_WARPS * WARP_ARRIVALS, ROW_WARPS * WARP_ARRIVALS);
        m.sent.init(1);
        mbar_init_done();
    }
    cluster_sync_arrive();
    cluster_sync_wait();
    if (warp < ROW_WARPS) long_rows(k, m, first, run);
    else if (warp < FEED_WARP) long_channels(k, m, first, rank, run);
    else if (threadIdx.x % 32 == 0) long_feed(k, rows, gradients, m, first, run);
    cluster_sync_arrive(); /* no block ends while another one sends to it */
    cluster_sync_wait();
}

/* Boxes of a block's rows and channels. */
static inline quern_status long_describe(CUtensorMap *map, const quern_tensor &t)
{
    const int64_t size = 2;
    const tma_tensor of = {t.data,
                           t.dtype == QUERN_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                           4,
                           {t.shape[2], 1, t.shape[1], t.shape[0]},
                           {16, t.strides[1] * size, t.strides[0] * size},
                           {PART, 1, LONG_RATIO, 1},
                           CU_TENSOR_MAP_SWIZZLE_NONE};
    return tma_describe(map, of);
}

template <typename T>
static quern_status pool_sm90_long(const pool_gradients_kernel &a, const pool_args *args, cudaStream_t stream)
{
    CUtensorMap rows, gradients;
    quern_status status = long_describe(&rows, args->proj);
    if (status == QUERN_OK) status = long_describe(&gradients, a.stores ? args->d_proj : args->proj);
    if (status != QUERN_OK) return status;
    return launch_cluster(stream, pool_long_gradients<T>, dim3((unsigned)a.pool.runs * LONG_CLUSTER),
                          LONG_THREADS, sizeof(long_room<T>), "pool's gradients", LONG_CLUSTER, false, a,
                          rows, gradients);
}

#endif
