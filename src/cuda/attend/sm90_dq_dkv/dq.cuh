/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * dq.cuh - dQ of attention on Hopper for bf16 and f16, where keys are a range and a head
 * dim exceeds 128: P = exp(S - lse) recomputed, dP = dO V^T, dS = P (row_scale dP - delta), dQ = scale dS K.
 * dK and dV are dkv.cuh's: two kernels compute S and dP twice (seven products for five), and
 * every sum has one owner and one order. One kernel has no room for dQ's tile beside dK and dV.
 *
 * Blocks and pieces are the forward's (sm90_forward/kernel.cuh, sm90/schedule.cuh): a persistent block
 * owns 128 rows, 64 each of two computing warpgroups, and walks their keys from the last to the first. The
 * next tile's S and dP are issued behind this tile's dQ, so the tensor cores have work while dS is made of
 * the one warpgroup's or the other's.
 *
 * What is not finite in K would reach dQ of rows that do not see it. Warps 1 and 2 of the feeder look for it
 * in tiles that are not seen whole; if there is any, the computing warpgroups together set it to 0 between
 * the products that read it for S and for dQ, and the rows that see it get NaN. A row that sees nothing, by
 * its lse, makes all tiles of its block such.
 *
 * Registers: 192/128: dQ 96, S 40, dP 40, dS 20; 256: dQ 128, S 24, dP 24, dS 12. Shared memory: 192/128: Q,
 * dO 80 KB, K, V of 80 keys in two stages 100 KB; 256: 128 KB, and 96 KB of 48 keys. Limit: the tensor cores,
 * and at 256 shared memory, 2560 clocks a tile where the products take 2304.
 */
#ifndef QUERN_CUDA_ATTEND_SM90_DQ_DKV_DQ_CUH
#define QUERN_CUDA_ATTEND_SM90_DQ_DKV_DQ_CUH

#include "attend/backward/params.cuh"
#include "hopper/nonfinite.cuh"
#include "hopper/ring.cuh"
#include "common/launch.cuh"
#include "hopper/tma.cuh"
#include "attend/sm90/attend.cuh"
#include "attend/sm90/schedule.cuh"

namespace sm90_rows
{

enum {
    STAGES = 2,
    PLANS = 2,
    GROUPS = 2,
    M = 64 * GROUPS,
    SEARCHERS = 2,
    CLEANING = 1,
    FEED = 40,
    COMPUTE = 232
};

struct maps {
    CUtensorMap q, d_o, k, v;
};

/* Of a row of the piece. lse2: times log2 e, +inf where it sees nothing. */
struct row_state {
    float lse2, delta, row_scale;
    int32_t lo, hi;
};

template <int DK, int DV> struct __align__(1024) shared
{
    static constexpr int KEYS = DV <= 128 ? 80 : 48;
    typedef uint16_t panel_row[64];
    panel_row q[DK / 64][M], d_o[DV / 64][M], k[STAGES][DK / 64][KEYS], v[STAGES][DV / 64][KEYS];
    ring<1> queries; /* with dO */
    ring<STAGES> keys;
    stage_barriers<STAGES> searched;
    ring<PLANS> plans;
    int32_t found[STAGES][SEARCHERS]; /* some rows do not see all keys: 1; and something in them is not
                                         finite: 3 */
    work plan[PLANS];
    row_state row[M];

    /* One thread. */
    __device__ __forceinline__ void init()
    {
        queries.init(1, 4 * GROUPS);
        keys.init(1, 128 * GROUPS + SEARCHERS);
        searched.init(SEARCHERS * WARP_ARRIVALS);
        plans.init(1, (1 + SEARCHERS + 4 * GROUPS) * WARP_ARRIVALS);
        mbar_init_done();
    }

    /* The plan of the block's n-th piece; it stays until all have given it back. */
    __device__ __forceinline__ const work &wait_plan(int n)
    {
        const auto at = ring_place<PLANS>::of(n);
        plans.wait_full(at);
        return plan[at.stage];
    }
    /* Each lane's, for what it read. */
    __device__ __forceinline__ void give_back_plan(int n)
    {
        plans.give_back(ring_place<PLANS>::of(n));
    }
};

/* Warp 3 of the feeder: plans pieces, two ahead at most. The last plan has -1 queries. */
template <int DK, int DV>
__device__ __forceinline__ void plan_pieces(const attend_kernel &a, const work_plan &plan, shared<DK, DV> &s)
{
    work w = {};
    int32_t index = (int32_t)blockIdx.x;
    for (int n = 0; w.queries >= 0; n++) {
        const auto at = ring_place<PLANS>::of(n);
        if (index < plan.total) find_work<false>(a, plan, index, &w);
        else w.queries = -1;
        s.plans.wait_free(at);
        if ((threadIdx.x & 31) == 0) {
            s.plan[at.stage] = w;
            s.plans.give(at);
        }
        index = next_piece(plan);
    }
}

/* Warp 0 of the feeder: one thread copies. */
template <int DK, int DV>
__device__ __forceinline__ void copy_tiles(const attend_kernel &a, const work_plan &plan, const maps &m,
                                           shared<DK, DV> &s)
{
    constexpr int KEYS = shared<DK, DV>::KEYS;
    const bool lead = (threadIdx.x & 31) == 0;
    int step = 0, used = 0; /* tiles and pieces so far */
    auto copy = [](auto &panels, const CUtensorMap &map, uint32_t full, int head, int row, int view) {
        constexpr int PANELS = sizeof panels / sizeof *panels;
#pragma unroll
        for (int p = 0; p < PANELS; p++)
            tma_load(smem_address(panels) + p * (uint32_t)sizeof *panels, map, full, p * 64, head, row, view);
    };
    for (int n = 0;; n++) {
        const work &w = s.wait_plan(n);
        if (w.queries < 0) return;
        const int tiles = (w.slots + KEYS - 1) / KEYS;
        if (tiles > 0 && lead) {
            const auto at = ring_place<1>::of(used);
            s.queries.wait_free(at);
            const uint32_t full = s.queries.expect(at, (DK + DV) / 64 * plan.queries * a.hs * 128);
            copy(s.q, m.q, full, w.head0, w.q0 + w.query, w.view);
            copy(s.d_o, m.d_o, full, w.head0, w.q0 + w.query, w.view);
            used++;
        }
        if (lead)
            for (int t = tiles - 1; t >= 0; t--, step++) {
                const auto at = ring_place<STAGES>::of(step);
                const int key = w.k0 + w.base + t * KEYS;
                s.keys.wait_free(at);
                const uint32_t full = s.keys.expect(at, sizeof s.k[0] + sizeof s.v[0]);
                copy(s.k[at.stage], m.k, full, w.kvh, key, w.view);
                copy(s.v[at.stage], m.v, full, w.kvh, key, w.view);
            }
        s.give_back_plan(n);
    }
}

/* Whether a row of the piece sees nothing, by its lse; a searcher's lanes look at half of the rows. */
__device__ __forceinline__ bool some_empty(const attend_kernel &a, const work &w)
{
    bool empty = false;
    for (int row = (int)threadIdx.x - 32; row < w.queries * a.hs; row += 32 * SEARCHERS) {
        const int n = (int)quotient((uint32_t)row, a.by_hs);
        float lse2, delta, row_scale;
        row_statistics(a, sequence_of(w), (int64_t)w.q0 + w.query + n, w.head0 + row - n * a.hs, &lse2,
                       &delta, &row_scale);
        empty = empty || lse2 == INFINITY;
    }
    return __any_sync(~0u, empty);
}

/* Warps 1 and 2 of the feeder. They free every stage, so that the others neither overtake them nor are
 * overtaken. A searcher looks at half of a tile for one of its reasons, at all of it for the other. */
template <typename T, int DK, int DV>
__device__ __forceinline__ void search_keys(const attend_kernel &a, shared<DK, DV> &s)
{
    constexpr int KEYS = shared<DK, DV>::KEYS, BYTES = sizeof s.k[0];
    const int lane = threadIdx.x & 31, searcher = (threadIdx.x >> 5) - 1;
    int step = 0;
    for (int n = 0;; n++) {
        const work &w = s.wait_plan(n);
        if (w.queries < 0) return;
        const seen_tiles seen = find_seen<KEYS, false>(w);
        const bool empty = some_empty(a, w);
        for (int t = (w.slots + KEYS - 1) / KEYS - 1; t >= 0; t--, step++) {
            const auto at = ring_place<STAGES>::of(step);
            s.keys.wait_full(at);
            const bool whole = tile_seen(seen, t);
            uint32_t most = 0;
            if (!whole || empty) {
                const char *tile = (const char *)s.k[at.stage];
                const int first = empty ? 0 : searcher * 512, by = empty ? 512 : SEARCHERS * 512;
#pragma unroll 4
                for (int i = first + lane * 16; i < BYTES; i += by)
                    most = largest_bits(most, *(const uint4 *)(tile + i));
            }
            const bool found = __any_sync(~0u, is_nonfinite<T>(most));
            if (lane == 0) s.found[at.stage][searcher] = (!whole || empty ? 1 : 0) | (found ? 2 : 0);
            s.searched.arrive(at); /* each lane's, for what it read */
            if (lane == 0) s.keys.give_back(at);
        }
        s.give_back_plan(n);
    }
}

/* A computing warp publishes what is known of its 16 rows, the first of them row `first` of the piece. */
__device__ __forceinline__ void describe_rows(const attend_kernel &a, const work &w, int first,
                                              row_state *rows)
{
    const int row = first + (threadIdx.x & 31), n = (int)quotient((uint32_t)row, a.by_hs);
    __syncwarp();
    if (row < first + 16) {
        row_state r = {INFINITY, 0.0f, 1.0f, 0, 0};
        if (n < w.queries) {
            row_keys(a, sequence_of(w), w.query + n, &r.lo, &r.hi);
            row_statistics(a, sequence_of(w), (int64_t)w.q0 + w.query + n, w.head0 + row - n * a.hs, &r.lse2,
                           &r.delta, &r.row_scale);
            if (r.lse2 == INFINITY) r.hi = 0;
        }
        rows[row] = r;
    }
    __syncwarp();
}

/* dS of a tile from P, which stands in `s`, and dP. PART: some pairs do not see each other. `rows`: this
 * thread's first; its second is 8 further. */
template <typename T, bool PART, int NT>
__device__ __forceinline__ void score_gradients(const float (&s)[NT][4], const float (&dp)[NT][4],
                                                uint32_t (&ds)[NT / 2][4], const row_state *rows, int key0)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const float delta = rows[h * 8].delta, row_scale = rows[h * 8].row_scale;
        const int lo = PART ? rows[h * 8].lo : 0, hi = PART ? rows[h * 8].hi : 0;
#pragma unroll
        for (int i = 0; i < NT; i++) {
            float x[2];
#pragma unroll
            for (int c = 0; c < 2; c++) {
                x[c] = s[i][h * 2 + c] * fmaf(dp[i][h * 2 + c], row_scale, -delta);
                const int key = key0 + i * 8 + c;
                if (PART && (key < lo || key >= hi)) x[c] = 0.0f;
            }
            ds[i >> 1][(i & 1) * 2 + h] = pack2<T>(x[0], x[1]);
        }
    }
}

/* Both computing warpgroups: K of a tile becomes finite, and dQ of the rows that see what was not NaN. */
template <typename T, int DK, int KEYS, int OT>
__device__ __forceinline__ void clean_keys(float (&dq)[OT][4], char *tile, const row_state *rows, int key0)
{
    named_sync(CLEANING, 128 * GROUPS); /* nobody multiplies with it */
    spread_nonfinite<T, KEYS>(dq, tile, 0, KEYS, true, [&](int j, int h) {
        return key0 + j >= rows[h * 8].lo && key0 + j < rows[h * 8].hi;
    });
    named_sync(CLEANING, 128 * GROUPS);
#pragma unroll 1
    for (int i = (int)(threadIdx.x - 128) * 2; i < KEYS * DK * 2; i += 256 * GROUPS) {
        clear_nonfinite<T>((uint16_t *)(tile + i));
    }
    async_fence();
    named_sync(CLEANING, 128 * GROUPS);
}

template <typename T, int OT>
__device__ __forceinline__ void store_rows(const float (&dq)[OT][4], const attend_kernel &a, const work &w,
                                           int place)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int row = place + h * 8, n = (int)quotient((uint32_t)row, a.by_hs),
                  head = row - n * a.hs + w.head0;
        if (n >= w.queries) continue;
        const int64_t to =
            (int64_t)w.view * a.d_q.s[0] + ((int64_t)w.q0 + w.query + n) * a.d_q.s[1] + head * a.d_q.s[2];
#pragma unroll
        for (int i = 0; i < OT; i++) {
            const int c = i * 8 + (threadIdx.x & 3) * 2;
            if (c < a.dim_k)
                store_pair<T>(a.d_q.p, to + c, dq[i][h * 2] * a.scale, dq[i][h * 2 + 1] * a.scale, a.f32_dq,
                              a.add_q);
        }
    }
}

/* acc = 64 rows of M times KEYS keys. */
template <typename T, int DIM, int KEYS>
__device__ __forceinline__ void rows_by_keys(float (&acc)[KEYS / 8][4], uint32_t rows, uint32_t keys)
{
    const uint64_t x0 = wg_fresh(wg_tile(rows, 0)), y0 = wg_fresh(wg_tile(keys, 0));
#pragma unroll
    for (int c = 0; c < DIM; c += 16) {
        const uint64_t x = wg_further(x0, (c >> 6) * (M * 128) + (c & 63) * 2),
                       y = wg_further(y0, (c >> 6) * (KEYS * 128) + (c & 63) * 2);
        if (c == 0) wg_ss_wide<T, KEYS, false>(acc, x, y);
        else wg_ss_wide<T, KEYS, true>(acc, x, y);
    }
    wg_commit();
}

/* A computing warpgroup. */
template <typename T, int DK, int DV>
__device__ __forceinline__ void compute(const attend_kernel &a, shared<DK, DV> &sm, int group)
{
    typedef ring_place<STAGES> place_of;
    constexpr int KEYS = shared<DK, DV>::KEYS, NT = KEYS / 8, OT = DK / 8;
    const int lane = threadIdx.x & 31, place = group * 64 + (threadIdx.x >> 5 & 3) * 16 + (lane >> 2);
    const uint32_t rows_q = smem_address(sm.q) + group * 64 * 128,
                   rows_do = smem_address(sm.d_o) + group * 64 * 128;
    const row_state *rows = sm.row + place;
    int step = 0, used = 0;
    for (int n = 0;; n++) {
        const work &w = sm.wait_plan(n);
        if (w.queries < 0) return;
        const int tiles = (w.slots + KEYS - 1) / KEYS;
        describe_rows(a, w, place & ~15, sm.row);
        float dq[OT][4] = {}, s[NT][4], dp[NT][4];
        uint32_t ds[NT / 2][4];
        auto products = [&](int stage) {
            wg_start();
            rows_by_keys<T, DK, KEYS>(s, rows_q, stage_address(sm.k, stage));
            rows_by_keys<T, DV, KEYS>(dp, rows_do, stage_address(sm.v, stage));
        };
        /* S becomes P while dP is under way. */
        auto probabilities = [&]() {
            wg_wait<1>(s);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const float lse2 = rows[h * 8].lse2;
#pragma unroll
                for (int i = 0; i < NT; i++) {
                    s[i][h * 2] = exp2_fast(fmaf(s[i][h * 2], a.scale_log2, -lse2));
                    s[i][h * 2 + 1] = exp2_fast(fmaf(s[i][h * 2 + 1], a.scale_log2, -lse2));
                }
            }
            wg_wait<0>(dp);
        };
        if (tiles > 0) {
            sm.queries.wait_full(ring_place<1>::of(used++));
            sm.keys.wait_full(place_of::of(step));
            products(step % STAGES);
            probabilities();
        }
#pragma unroll 1
        for (int t = tiles - 1; t >= 0; t--, step++) {
            const auto at = place_of::of(step);
            const int key0 = w.base + t * KEYS;
            sm.searched.wait(at);
            const int part = sm.found[at.stage][0] | sm.found[at.stage][1];
            if (part == 0) score_gradients<T, false>(s, dp, ds, rows, key0 + (lane & 3) * 2);
            else score_gradients<T, true>(s, dp, ds, rows, key0 + (lane & 3) * 2);
            if (part & 2) clean_keys<T, DK, KEYS>(dq, (char *)sm.k[at.stage], rows, key0);
            const uint64_t k = wg_fresh(wg_tile(stage_address(sm.k, at.stage), KEYS * 128));
            wg_start();
#pragma unroll
            for (int c = 0; c < KEYS; c += 16)
                wg_rs_wide<T, DK, true, true>(dq, ds[c / 16], wg_further(k, c * 128));
            wg_commit();
            /* After the last tile the products are of what the stage holds, and nobody reads them. */
            if (t > 0) sm.keys.wait_full(place_of::of(step + 1));
            products((step + 1) % STAGES);
            wg_wait<2>(dq);
            sm.keys.give_back(at); /* each lane's, for what it read */
            probabilities();
        }
        if (tiles > 0 && lane == 0) sm.queries.give_back({});
        if (w.queries > 0) store_rows<T, OT>(dq, a, w, place);
        sm.give_back_plan(n);
    }
}

template <typename T, int DK, int DV>
__global__ void __launch_bounds__(128 * (GROUPS + 1), 1)
    attend_backward_rows_sm90(const __grid_constant__ attend_kernel a, const __grid_constant__ work_plan plan,
                              const __grid_constant__ maps m)
{
#ifdef QUERN_WGMMA
    extern __shared__ __align__(1024) char smem[];
    shared<DK, DV> &s = *(shared<DK, DV> *)smem;
    if (threadIdx.x == 0) s.init();
    __syncthreads();
    const int group = __shfl_sync(~0u, threadIdx.x >> 7, 0), warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
    if (group == 0) {
        registers_down<FEED>();
        if (warp == 0) copy_tiles(a, plan, m, s);
        else if (warp <= SEARCHERS) search_keys<T>(a, s);
        else plan_pieces(a, plan, s);
    } else {
        registers_up<COMPUTE>();
        compute<T>(a, s, group - 1);
    }
#endif
}

template <typename T, int DK, int DV>
static quern_status run(const attend_args *args, const attend_launch &l, const sm90_device &device,
                        void *workspace, cudaStream_t stream)
{
    const attend_kernel &a = l.kernel;
    constexpr int KEYS = shared<DK, DV>::KEYS;
    work_plan plan = {0, 0, M / a.hs, 1, KEYS, NULL};
    const int64_t pieces = piece_bound(args->seqs, plan.queries, 1), total = pieces * a.units;
    if (total == 0) return QUERN_OK;
    plan.pieces = (int32_t)pieces;
    plan.total = (int32_t)total;
    maps m;
    quern_status status = tma_describe(&m.q, args->q, a.hs, plan.queries);
    if (status == QUERN_OK) status = tma_describe(&m.d_o, args->d_o, a.hs, plan.queries);
    if (status == QUERN_OK) status = tma_describe(&m.k, args->k, 1, KEYS);
    if (status == QUERN_OK) status = tma_describe(&m.v, args->v, 1, KEYS);
    if (status == QUERN_OK) status = sm90_count_from_zero(total, device, workspace, stream, &plan.taken);
    if (status != QUERN_OK) return status;
    const unsigned blocks = (unsigned)(total < device.multiprocessors ? total : device.multiprocessors);
    return launch_shared({stream, NULL}, attend_backward_rows_sm90<T, DK, DV>, dim3(blocks),
                         128 * (GROUPS + 1), sizeof(shared<DK, DV>), "attend_backward_rows_sm90", a, plan, m);
}

} // namespace sm90_rows

#endif
