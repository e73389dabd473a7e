/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * attend_backward_keys.cuh - dK and dV of attention on Hopper for bf16 and f16, where keys are a range:
 *
 *   dV = P^T row_scale dO, dK = scale dS^T Q (P, dS as in attend_backward_rows.cuh): a block owns 128 keys, 64 each of
 *   two computing warpgroups, and walks the rows that see them, up to 64 a stage: as many queries as fit, with their
 *   hs heads.
 * Everything is transposed: S^T = K Q^T leaves P^T in registers as the A operand of P^T dO. The heads of a group meet in
 * one row stream, so dK and dV are whole, without atomics. Where keys are few, blockIdx.z shares out the rows, and
 * attend_backward_sum (any/attend/attend_backward_keys.cu) adds the shares in their order.
 *
 * Warp 0 of the feeding warpgroup copies Q and dO by TMA; warps 1 and 2 fetch the rows' statistics, one row a thread,
 * and look for what is not finite in rows that do not see all of these keys. If there is any, the computing warpgroups
 * together set it to 0 between the products that read it for S and dP and those for dK and dV, and the keys that such a
 * row sees get it (NaN in dK).
 *
 * Registers at D = 128: dK 64, dV 64, S^T 32, dP^T 32, P^T and dS^T 32 of 232. Limit: the tensor cores.
 */
#ifndef QUERN_CUDA_SM90_ATTEND_BACKWARD_KEYS_CUH
#define QUERN_CUDA_SM90_ATTEND_BACKWARD_KEYS_CUH

#include "any/attend/attend_backward.cuh"
#include "common/barrier.cuh"
#include "common/launch.cuh"
#include "common/tma.cuh"
#include "sm90/attend/attend.cuh"

namespace sm90_keys {

enum { STAGES = 4, GROUPS = 2, KEYS = 64 * GROUPS, ROWS = 64, SEARCHERS = 2, FEED = 40, COMPUTE = 232 };

struct maps {
    CUtensorMap q, d_o, k, v;
};

/* Of the rows of a stage. lse2: times log2 e, +inf where a row sees nothing. */
struct statistics {
    float lse2[ROWS], delta[ROWS], row_scale[ROWS];
    int32_t lo[ROWS], hi[ROWS];
    int32_t part[SEARCHERS]; /* some of a searcher's rows do not see all keys: 1; and something in them is not finite: 3 */
    int32_t pad[2];
};

/* Offsets into shared memory. */
template <int DK, int DV> struct layout {
    static constexpr int K = 0, V = K + KEYS * DK * 2, Q_BYTES = ROWS * DK * 2, DO_BYTES = ROWS * DV * 2, Q = V + KEYS * DV * 2;
    static constexpr int DO = Q + STAGES * Q_BYTES, STAT = DO + STAGES * DO_BYTES, BARS = STAT + STAGES * (int)sizeof(statistics);
    static constexpr int OWN_FULL = BARS, FULL = OWN_FULL + 8, FREE = FULL + 8 * STAGES, STAT_FULL = FREE + 8 * STAGES;
    static constexpr int BYTES = STAT_FULL + 8 * STAGES;
    static_assert(BYTES <= 227 * 1024, "more than a block can have");
};

/* The keys of a block, and its share of the queries that see them. */
struct key_block {
    sequence seq;
    int kvh, head0, key0, key_end;
    int first, steps; /* the first query, and how many stages */
    int64_t slot;     /* of the partial sums */
};

__device__ __forceinline__ bool find_keys(const attend_kernel &a, int queries, key_block *b)
{
    sequence flipped;
    int64_t key0;
    if (!piece_at(by_key(a.sq), blockIdx.x, KEYS, 1, &flipped, &key0)) return false;
    b->seq = flip(flipped);
    b->kvh = (int)blockIdx.y, b->head0 = b->kvh * a.group;
    b->key0 = (int)key0;
    b->key_end = (int)(key0 + KEYS < b->seq.nk ? key0 + KEYS : b->seq.nk);
    b->slot = ((int64_t)blockIdx.y * gridDim.x + blockIdx.x) * a.splits + blockIdx.z;
    int lo, hi;
    const int qa = first_query(b->seq.nq, [&](int64_t i) { row_keys(a, b->seq, i, &lo, &hi); return hi > b->key0; });
    const int qb = first_query(b->seq.nq, [&](int64_t i) { row_keys(a, b->seq, i, &lo, &hi); return lo >= b->key_end; });
    const int all = qb > qa ? (qb - qa + queries - 1) / queries : 0, per = (all + a.splits - 1) / a.splits, from = per * (int)blockIdx.z;
    b->first = qa + from * queries;
    b->steps = from >= all ? 0 : all - from < per ? all - from : per;
    return true;
}

/* Warp 0 of the feeder: one thread copies. */
template <int DK, int DV>
__device__ __forceinline__ void feed(const key_block &b, int queries, int hs, const maps &m, uint32_t base)
{
    typedef layout<DK, DV> at;
    if ((threadIdx.x & 31) != 0 || b.steps == 0) return;
    const int view = (int)b.seq.view_b, key = (int)b.seq.k0 + b.key0, query = (int)b.seq.q0 + b.first;
    mbar_expect(base + at::OWN_FULL, KEYS * (DK + DV) * 2);
#pragma unroll
    for (int p = 0; p < DK / 64; p++) tma_load(base + at::K + p * KEYS * 128, m.k, base + at::OWN_FULL, p * 64, b.kvh, key, view);
#pragma unroll
    for (int p = 0; p < DV / 64; p++) tma_load(base + at::V + p * KEYS * 128, m.v, base + at::OWN_FULL, p * 64, b.kvh, key, view);
    for (int t = 0; t < b.steps; t++) {
        const int stage = t % STAGES, n = query + t * queries;
        const uint32_t full = base + at::FULL + 8 * stage;
        mbar_wait(base + at::FREE + 8 * stage, (t / STAGES & 1) ^ 1);
        mbar_expect(full, (DK + DV) / 64 * queries * hs * 128);
#pragma unroll
        for (int p = 0; p < DK / 64; p++) tma_load(base + at::Q + stage * at::Q_BYTES + p * ROWS * 128, m.q, full, p * 64, b.head0, n, view);
#pragma unroll
        for (int p = 0; p < DV / 64; p++) tma_load(base + at::DO + stage * at::DO_BYTES + p * ROWS * 128, m.d_o, full, p * 64, b.head0, n, view);
    }
}

/* Warps 1 and 2 of the feeder: thread r has row r of each stage. */
template <typename T, int DK, int DV>
__device__ __forceinline__ void fetch_statistics(const attend_kernel &a, const key_block &b, int queries, char *smem, uint32_t base)
{
    typedef layout<DK, DV> at;
    const int lane = threadIdx.x & 31, row = (int)threadIdx.x - 32, searcher = row >> 5;
    const int x = (int)quotient((uint32_t)row, a.by_hs), head = b.head0 + row - x * a.hs;
    for (int t = 0; t < b.steps; t++) {
        const int stage = t % STAGES, n = b.first + t * queries + x;
        statistics *st = (statistics *)(smem + at::STAT) + stage;
        int lo = 0, hi = 0;
        float lse2 = INFINITY, delta = 0.0f, row_scale = 1.0f;
        if (x < queries && n < b.seq.nq) {
            row_statistics(a, b.seq, b.seq.q0 + n, head, &lse2, &delta, &row_scale);
            if (lse2 != INFINITY) row_keys(a, b.seq, n, &lo, &hi);
        }
        const bool part = lo > b.key0 || hi < b.key_end;
        bool odd = false;
        mbar_wait(base + at::FREE + 8 * stage, (t / STAGES & 1) ^ 1);
        st->lse2[row] = lse2, st->delta[row] = delta, st->row_scale[row] = row_scale, st->lo[row] = lo, st->hi[row] = hi;
        if (__any_sync(~0u, part)) {
            mbar_wait(base + at::FULL + 8 * stage, t / STAGES & 1);
            for (int i = 0; i < 2; i++) {
                const char *tile = smem + (i ? at::DO + stage * at::DO_BYTES : at::Q + stage * at::Q_BYTES) + row * 128;
                for (int p = 0; part && p < (i ? DV : DK) / 64; p++)
#pragma unroll
                    for (int c = 0; c < 128; c += 16) {
                        const uint4 v = *(const uint4 *)(tile + p * ROWS * 128 + c);
                        constexpr uint32_t LOW = __is_same(T, bf16) ? 0x7f80 : 0x7c00;
                        const uint32_t most = __vmaxu2(__vmaxu2(v.x & 0x7fff7fff, v.y & 0x7fff7fff), __vmaxu2(v.z & 0x7fff7fff, v.w & 0x7fff7fff));
                        odd = odd || (most & 0xffff) >= LOW || most >> 16 >= LOW;
                    }
            }
        }
        const int found = (__any_sync(~0u, part) ? 1 : 0) | (__any_sync(~0u, odd) ? 2 : 0);
        if (lane == 0) st->part[searcher] = found;
        mbar_arrive(base + at::STAT_FULL + 8 * stage); /* each lane's, for what it wrote */
    }
}

/* Both computing warpgroups: Q and dO of a stage become finite; what was not goes to the keys that see it. */
template <typename T, int DK, int DV>
__device__ __forceinline__ void clean_rows(float (&dk)[DK / 8][4], float (&dv)[DV / 8][4], char *q, char *g, const statistics *st, int key)
{
    constexpr uint32_t INFINITE = __is_same(T, bf16) ? 0x7f80 : 0x7c00;
    auto sees = [&](int j, int h) { return key + h * 8 >= st->lo[j] && key + h * 8 < st->hi[j]; };
    named_sync(1, 256); /* nobody multiplies with them */
    spread_nonfinite<T, ROWS>(dk, q, 0, ROWS, true, sees);
    spread_nonfinite<T, ROWS>(dv, g, 0, ROWS, false, sees);
    named_sync(1, 256);
#pragma unroll 1
    for (int i = (int)(threadIdx.x - 128) * 2; i < ROWS * (DK + DV) * 2; i += 512) {
        uint16_t *x = (uint16_t *)(i < ROWS * DK * 2 ? q + i : g + i - ROWS * DK * 2);
        if ((*x & 0x7fff) >= INFINITE) *x = 0;
    }
    async_fence();
    named_sync(1, 256);
}

/* dK and dV of one thread's keys, or their share. */
template <typename T, int DK, int DV>
__device__ __forceinline__ void store_keys(float (&dk)[DK / 8][4], float (&dv)[DV / 8][4], const attend_kernel &a, const key_block &b, int place)
{
    const int width = a.dim_k + a.dim_v;
    const bool whole = a.splits <= 1;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int r = place + h * 8, key = b.key0 + r;
        if (key >= b.key_end) continue;
        float *part = a.part + (b.slot * KEYS + r) * width;
        const int64_t at_k = b.seq.view_b * a.d_k.s[0] + (b.seq.k0 + key) * a.d_k.s[1] + b.kvh * a.d_k.s[2];
        const int64_t at_v = b.seq.view_b * a.d_v.s[0] + (b.seq.k0 + key) * a.d_v.s[1] + b.kvh * a.d_v.s[2];
#pragma unroll
        for (int i = 0; i < DK / 8; i++) {
            const int c = i * 8 + (threadIdx.x & 3) * 2;
            const float x = dk[i][h * 2] * a.scale, y = dk[i][h * 2 + 1] * a.scale;
            if (c >= a.dim_k) continue;
            if (whole) store_pair<T>(a.d_k.p, at_k + c, x, y, a.f32_dkv, a.add_k);
            else *(float2 *)(part + c) = make_float2(x, y);
        }
#pragma unroll
        for (int i = 0; i < DV / 8; i++) {
            const int c = i * 8 + (threadIdx.x & 3) * 2;
            if (c >= a.dim_v) continue;
            if (whole) store_pair<T>(a.d_v.p, at_v + c, dv[i][h * 2], dv[i][h * 2 + 1], a.f32_dkv, a.add_v);
            else *(float2 *)(part + a.dim_k + c) = make_float2(dv[i][h * 2], dv[i][h * 2 + 1]);
        }
    }
}

/* P^T and dS^T of a stage, from S^T and dP^T. PART: some of these pairs do not see each other. */
template <typename T, bool PART, int NT>
__device__ __forceinline__ void softmax(const float (&s)[NT][4], const float (&dp)[NT][4], uint32_t (&fp)[NT / 2][4], uint32_t (&fs)[NT / 2][4],
                                        const statistics *st, float scale_log2, int key)
{
#pragma unroll
    for (int i = 0; i < NT; i++) {
        const int r = i * 8 + (threadIdx.x & 3) * 2;
        const float2 lse2 = *(const float2 *)&st->lse2[r], delta = *(const float2 *)&st->delta[r], rs = *(const float2 *)&st->row_scale[r];
        int2 lo = make_int2(0, 0), hi = make_int2(0, 0);
        if (PART) lo = *(const int2 *)&st->lo[r], hi = *(const int2 *)&st->hi[r];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float p[2] = {exp2_fast(fmaf(s[i][h * 2], scale_log2, -lse2.x)), exp2_fast(fmaf(s[i][h * 2 + 1], scale_log2, -lse2.y))};
            float d[2] = {p[0] * fmaf(dp[i][h * 2], rs.x, -delta.x), p[1] * fmaf(dp[i][h * 2 + 1], rs.y, -delta.y)};
            p[0] *= rs.x, p[1] *= rs.y;
            if (PART) {
                const int k = key + h * 8;
                if (k < lo.x || k >= hi.x) p[0] = d[0] = 0.0f;
                if (k < lo.y || k >= hi.y) p[1] = d[1] = 0.0f;
            }
            fp[i >> 1][(i & 1) * 2 + h] = pack2<T>(p[0], p[1]);
            fs[i >> 1][(i & 1) * 2 + h] = pack2<T>(d[0], d[1]);
        }
    }
}

/* A computing warpgroup. */
template <typename T, int DK, int DV>
__device__ __forceinline__ void compute(const attend_kernel &a, const key_block &b, char *smem, uint32_t base, int group)
{
    typedef layout<DK, DV> at;
    constexpr int NT = ROWS / 8;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3, place = group * 64 + warp * 16 + (lane >> 2), key = b.key0 + place;
    const uint32_t ak = base + at::K + group * 64 * 128, av = base + at::V + group * 64 * 128;
    float dk[DK / 8][4] = {}, dv[DV / 8][4] = {}, s[NT][4], dp[NT][4];
    uint32_t fp[NT / 2][4], fs[NT / 2][4];
    auto products = [&](int stage) {
        const uint32_t q = base + at::Q + stage * at::Q_BYTES, g = base + at::DO + stage * at::DO_BYTES;
#pragma unroll
        for (int c = 0; c < DK; c += 16) {
            const uint64_t x = wg_tile(ak + (c >> 6) * (KEYS * 128) + (c & 63) * 2, 0), y = wg_tile(q + (c >> 6) * (ROWS * 128) + (c & 63) * 2, 0);
            if (c == 0) wg_ss_wide<T, ROWS, false>(s, x, y);
            else wg_ss_wide<T, ROWS, true>(s, x, y);
        }
#pragma unroll
        for (int c = 0; c < DV; c += 16) {
            const uint64_t x = wg_tile(av + (c >> 6) * (KEYS * 128) + (c & 63) * 2, 0), y = wg_tile(g + (c >> 6) * (ROWS * 128) + (c & 63) * 2, 0);
            if (c == 0) wg_ss_wide<T, ROWS, false>(dp, x, y);
            else wg_ss_wide<T, ROWS, true>(dp, x, y);
        }
        wg_commit();
    };
    if (b.steps > 0) mbar_wait(base + at::OWN_FULL, 0);
    for (int t = 0; t < b.steps; t++) {
        const int stage = t % STAGES;
        const statistics *st = (const statistics *)(smem + at::STAT) + stage;
        mbar_wait(base + at::FULL + 8 * stage, t / STAGES & 1);
        wg_start();
        products(stage);
        mbar_wait(base + at::STAT_FULL + 8 * stage, t / STAGES & 1);
        wg_wait<0>(s);
        wg_wait<0>(dp);
        const int part = st->part[0] | st->part[1];
        if (part == 0) softmax<T, false>(s, dp, fp, fs, st, a.scale_log2, key);
        else softmax<T, true>(s, dp, fp, fs, st, a.scale_log2, key);
        char *q = smem + at::Q + stage * at::Q_BYTES, *g = smem + at::DO + stage * at::DO_BYTES;
        if (part & 2) clean_rows<T, DK, DV>(dk, dv, q, g, st, key);
        const uint32_t aq = base + at::Q + stage * at::Q_BYTES, ag = base + at::DO + stage * at::DO_BYTES;
        wg_start();
#pragma unroll
        for (int c = 0; c < ROWS; c += 16) wg_rs_wide<T, DV, true, true>(dv, fp[c / 16], wg_tile(ag + c * 128, ROWS * 128));
#pragma unroll
        for (int c = 0; c < ROWS; c += 16) wg_rs_wide<T, DK, true, true>(dk, fs[c / 16], wg_tile(aq + c * 128, ROWS * 128));
        wg_commit();
        wg_wait<0>(dk);
        wg_wait<0>(dv);
        mbar_arrive(base + at::FREE + 8 * stage); /* each lane's, for what it read */
    }
    store_keys<T, DK, DV>(dk, dv, a, b, place);
}

template <typename T, int DK, int DV>
__global__ void __launch_bounds__(128 * (GROUPS + 1), 1)
    attend_backward_keys_sm90(const __grid_constant__ attend_kernel a, int queries, const __grid_constant__ maps m)
{
#ifdef QUERN_WGMMA
    typedef layout<DK, DV> at;
    extern __shared__ __align__(1024) char smem[];
    const uint32_t base = smem_address(smem);
    key_block b;
    if (!find_keys(a, queries, &b)) return;
    if (threadIdx.x == 0) {
        mbar_init(base + at::OWN_FULL, 1);
        for (int i = 0; i < STAGES; i++) {
            mbar_init(base + at::FULL + 8 * i, 1), mbar_init(base + at::FREE + 8 * i, 128 * GROUPS);
            mbar_init(base + at::STAT_FULL + 8 * i, 32 * SEARCHERS);
        }
        mbar_init_done();
    }
    /* Rows of a stage that no copy fills meet factors of 0, and must be finite. */
    for (int i = (int)threadIdx.x * 16; i < at::STAT - at::Q; i += (int)blockDim.x * 16)
        if (i % (ROWS * 128) >= queries * a.hs * 128) *(uint4 *)(smem + at::Q + i) = make_uint4(0, 0, 0, 0);
    async_fence();
    __syncthreads();
    const int group = __shfl_sync(~0u, threadIdx.x >> 7, 0), warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
    if (group == 0) {
        registers_down<FEED>();
        if (warp == 0) feed<DK, DV>(b, queries, a.hs, m, base);
        else if (warp <= SEARCHERS) fetch_statistics<T, DK, DV>(a, b, queries, smem, base);
    } else {
        registers_up<COMPUTE>();
        compute<T, DK, DV>(a, b, smem, base, group - 1);
    }
#endif
}

/* A grid of `pieces` pieces of KEYS keys, the kernel's `splits` set. */
template <typename T, int DK, int DV>
static quern_status run(const attend_args *args, const attend_launch &l, int64_t pieces, cudaStream_t stream)
{
    const attend_kernel &a = l.kernel;
    const int queries = ROWS / a.hs;
    maps m;
    quern_status status = tma_describe(&m.q, args->q, a.hs, queries);
    if (status == QUERN_OK) status = tma_describe(&m.d_o, args->d_o, a.hs, queries);
    if (status == QUERN_OK) status = tma_describe(&m.k, args->k, 1, KEYS);
    if (status == QUERN_OK) status = tma_describe(&m.v, args->v, 1, KEYS);
    if (status != QUERN_OK) return status;
    return launch_shared({stream, NULL}, attend_backward_keys_sm90<T, DK, DV>, dim3((unsigned)pieces, (unsigned)a.kv_heads, (unsigned)a.splits),
                         128 * (GROUPS + 1), layout<DK, DV>::BYTES, "attend_backward_keys_sm90", a, queries, m);
}

}

#endif
