/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * attend_backward_rows.cuh - dQ of attention on Hopper for bf16 and f16: P = exp(S - lse) recomputed, dP = dO V^T,
 * dS = P (row_scale dP - delta), dQ = scale dS K.
 *
 * Blocks, plans and turns are the forward's (attend_forward.cuh). At D = 128 a computing warpgroup holds Q and dO of its 64
 * rows in registers as A operands, so that only K and V come from shared memory, 64 keys a stage. (At D = 64 shared memory
 * keeps up, and ptxas 13.0 gives the registers of held operands to dS.) While one warpgroup turns S
 * and dP into dS, the other's products run. dK and dV are
 * attend_backward_keys.cuh's: two kernels recompute S and dP (seven products for five), and every sum has one owner and
 * one order.
 *
 * Where a tile is not seen whole, warps 1 and 2 of the feeder look for what is not finite in K; if there is any, the
 * computing warpgroups together set it to 0 between the products that read it for S and for dQ, and the rows that see
 * it get NaN.
 *
 * Registers at D = 128: dQ 64, Q 32, dO 32, S 32, dP 32, dS 16 of 240. Limit: the tensor cores.
 */
#ifndef QUERN_CUDA_SM90_ATTEND_BACKWARD_ROWS_CUH
#define QUERN_CUDA_SM90_ATTEND_BACKWARD_ROWS_CUH

#include "any/attend/attend_backward.cuh"
#include "common/barrier.cuh"
#include "common/launch.cuh"
#include "common/tma.cuh"
#include "sm90/attend/attend.cuh"
#include "sm90/attend/work.cuh"

namespace sm90_rows {

enum { STAGES = 4, GROUPS = 2, M = 64 * GROUPS, KEYS = 64, SEARCHERS = 2, FEED = 40, COMPUTE = 232 };

struct maps {
    CUtensorMap q, d_o, k, v;
};

/* Offsets into shared memory. */
template <int DK, int DV> struct layout {
    static constexpr int Q = 0, DO = Q + M * DK * 2, K = DO + M * DV * 2, K_BYTES = KEYS * DK * 2, V_BYTES = KEYS * DV * 2;
    static constexpr int V = K + STAGES * K_BYTES, BARS = V + STAGES * V_BYTES; /* 8 bytes each */
    static constexpr int Q_FULL = BARS, Q_FREE = Q_FULL + 8, FULL = Q_FREE + 8, FREE = FULL + 8 * STAGES, SEARCHED = FREE + 8 * STAGES;
    static constexpr int TURN_FULL = SEARCHED + 8 * STAGES, TURN_FREE = TURN_FULL + 16;
    static constexpr int ODD = TURN_FREE + 16;                /* [STAGES][SEARCHERS]: something is not finite */
    static constexpr int TURN = ODD + 4 * STAGES * SEARCHERS; /* [2] plans */
    static constexpr int BYTES = TURN + 2 * sizeof(work);
    static_assert(BYTES <= 227 * 1024, "more than a block can have");
};

template <int DK, int DV> __device__ __forceinline__ const work &wait_turn(char *smem, uint32_t base, int turn)
{
    typedef layout<DK, DV> at;
    mbar_wait(base + at::TURN_FULL + 8 * (turn & 1), turn >> 1 & 1);
    return ((const work *)(smem + at::TURN))[turn & 1];
}

template <int DK, int DV> __device__ __forceinline__ void free_turn(uint32_t base, int turn)
{
    __syncwarp();
    if ((threadIdx.x & 31) == 0) mbar_arrive(base + layout<DK, DV>::TURN_FREE + 8 * (turn & 1));
}

/* Warp 3 of the feeder. The last plan has -1 queries. */
template <int DK, int DV> __device__ __forceinline__ void plan_turns(const attend_kernel &a, const work_plan &plan, char *smem, uint32_t base)
{
    typedef layout<DK, DV> at;
    work w = {};
    int32_t index = (int32_t)blockIdx.x;
    for (int turn = 0; w.queries >= 0; turn++) {
        if (index < plan.total) find_work<false>(a, plan, index, &w);
        else w.queries = -1;
        mbar_wait(base + at::TURN_FREE + 8 * (turn & 1), (turn >> 1 & 1) ^ 1);
        if ((threadIdx.x & 31) == 0) {
            ((work *)(smem + at::TURN))[turn & 1] = w;
            mbar_arrive(base + at::TURN_FULL + 8 * (turn & 1));
        }
        index = next_piece(plan);
    }
}

/* Warp 0 of the feeder: one thread copies. */
template <int DK, int DV> __device__ __forceinline__ void feed(const attend_kernel &a, const work_plan &plan, const maps &m, char *smem, uint32_t base)
{
    typedef layout<DK, DV> at;
    const bool lead = (threadIdx.x & 31) == 0;
    int step = 0, used = 0; /* tiles and pieces so far */
    for (int turn = 0;; turn++) {
        const work &w = wait_turn<DK, DV>(smem, base, turn);
        if (w.queries < 0) return;
        const int tiles = (w.slots + KEYS - 1) / KEYS;
        if (tiles > 0 && lead) {
            mbar_wait(base + at::Q_FREE, (used & 1) ^ 1);
            mbar_expect(base + at::Q_FULL, (DK + DV) / 64 * plan.queries * a.hs * 128);
#pragma unroll
            for (int p = 0; p < DK / 64; p++)
                tma_load(base + at::Q + p * M * 128, m.q, base + at::Q_FULL, p * 64, w.head0, w.q0 + w.query, w.view);
#pragma unroll
            for (int p = 0; p < DV / 64; p++)
                tma_load(base + at::DO + p * M * 128, m.d_o, base + at::Q_FULL, p * 64, w.head0, w.q0 + w.query, w.view);
            used++;
        }
        if (lead)
            for (int t = tiles - 1; t >= 0; t--, step++) {
                const int stage = step % STAGES, key = w.k0 + w.base + t * KEYS;
                const uint32_t full = base + at::FULL + 8 * stage;
                mbar_wait(base + at::FREE + 8 * stage, (step / STAGES & 1) ^ 1);
                mbar_expect(full, at::K_BYTES + at::V_BYTES);
#pragma unroll
                for (int p = 0; p < DK / 64; p++) tma_load(base + at::K + stage * at::K_BYTES + p * KEYS * 128, m.k, full, p * 64, w.kvh, key, w.view);
#pragma unroll
                for (int p = 0; p < DV / 64; p++) tma_load(base + at::V + stage * at::V_BYTES + p * KEYS * 128, m.v, full, p * 64, w.kvh, key, w.view);
            }
        free_turn<DK, DV>(base, turn);
    }
}

/* Warps 1 and 2 of the feeder. They free every stage, so that the others neither overtake them nor are overtaken. */
template <typename T, int DK, int DV> __device__ __forceinline__ void search(const attend_kernel &a, char *smem, uint32_t base)
{
    typedef layout<DK, DV> at;
    constexpr uint32_t INFINITE = __is_same(T, bf16) ? 0x7f80 : 0x7c00; /* the least bits of what is not finite */
    const int lane = threadIdx.x & 31, searcher = (threadIdx.x >> 5) - 1;
    int step = 0;
    for (int turn = 0;; turn++) {
        const work &w = wait_turn<DK, DV>(smem, base, turn);
        if (w.queries < 0) return;
        const seen_tiles seen = find_seen<KEYS, false>(w);
        for (int t = (w.slots + KEYS - 1) / KEYS - 1; t >= 0; t--, step++) {
            const int stage = step % STAGES;
            mbar_wait(base + at::FULL + 8 * stage, step / STAGES & 1);
            if (!tile_seen<KEYS, false>(a, w, seen, NULL, t)) {
                const char *tile = smem + at::K + stage * at::K_BYTES;
                uint32_t most = 0; /* of the bits without their signs, two values a word */
#pragma unroll 4
                for (int i = (searcher * 32 + lane) * 16; i < at::K_BYTES; i += SEARCHERS * 512) {
                    const uint4 x = *(const uint4 *)(tile + i);
                    most = __vmaxu2(most, __vmaxu2(__vmaxu2(x.x & 0x7fff7fff, x.y & 0x7fff7fff), __vmaxu2(x.z & 0x7fff7fff, x.w & 0x7fff7fff)));
                }
                const bool odd = __any_sync(~0u, (most & 0xffff) >= INFINITE || most >> 16 >= INFINITE);
                if (lane == 0) {
                    ((int32_t *)(smem + at::ODD))[stage * SEARCHERS + searcher] = odd;
                    mbar_arrive(base + at::SEARCHED + 8 * stage);
                }
            }
            if (lane == 0) mbar_arrive(base + at::FREE + 8 * stage);
        }
        free_turn<DK, DV>(base, turn);
    }
}

template <int DIM> struct dim_of {
    static constexpr int value = DIM;
};

/* What a computing thread knows of its rows lane / 4 and that + 8. */
struct row_state {
    int lo[2], hi[2];
    float lse2[2], delta[2], row_scale[2];
};

/* Both computing warpgroups: K of a tile becomes finite, and dQ of the rows that see what was not NaN. */
template <typename T, int DK, int DV, int OT>
__device__ __forceinline__ void clean_keys(float (&dq)[OT][4], char *tile, const work &w, const row_state &r, int slot0)
{
    constexpr uint32_t INFINITE = __is_same(T, bf16) ? 0x7f80 : 0x7c00;
    named_sync(1, 256); /* nobody multiplies with it */
    spread_nonfinite<T, KEYS>(dq, tile, 0, KEYS, true, [&](int j, int h) {
        const int key = w.base + slot0 + j;
        return key >= r.lo[h] && key < r.hi[h];
    });
    named_sync(1, 256);
#pragma unroll 1
    for (int i = (int)(threadIdx.x - 128) * 2; i < KEYS * DK * 2; i += 512) {
        uint16_t *x = (uint16_t *)(tile + i);
        if ((*x & 0x7fff) >= INFINITE) *x = 0;
    }
    async_fence();
    named_sync(1, 256);
}

template <typename T, int OT>
__device__ __forceinline__ void store_rows(float (&dq)[OT][4], const attend_kernel &a, const work &w, const int (&place)[2])
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int n = (int)quotient((uint32_t)place[h], a.by_hs), head = place[h] - n * a.hs + w.head0;
        if (n >= w.queries) continue;
        const int64_t to = (int64_t)w.view * a.d_q.s[0] + ((int64_t)w.q0 + w.query + n) * a.d_q.s[1] + head * a.d_q.s[2];
#pragma unroll
        for (int i = 0; i < OT; i++) {
            const int c = i * 8 + (threadIdx.x & 3) * 2;
            if (c < a.dim_k) store_pair<T>(a.d_q.p, to + c, dq[i][h * 2] * a.scale, dq[i][h * 2 + 1] * a.scale, a.f32_dq, a.add_q);
        }
    }
}

/* A computing warpgroup. */
template <typename T, int DK, int DV> __device__ __forceinline__ void compute(const attend_kernel &a, char *smem, uint32_t base, int group)
{
    typedef layout<DK, DV> at;
    constexpr int NT = KEYS / 8, OT = DK / 8;
    constexpr bool HOLD = DK > 64;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3;
    const int place[2] = {group * 64 + warp * 16 + (lane >> 2), group * 64 + warp * 16 + (lane >> 2) + 8};
    int step = 0, used = 0;
    uint32_t searched = 0; /* the parity of each stage's SEARCHED */
    auto arrive = [&](uint32_t bar) {
        if (lane == 0) mbar_arrive(base + bar);
    };
    for (int turn = 0;; turn++) {
        const work &w = wait_turn<DK, DV>(smem, base, turn);
        if (w.queries < 0) return;
        const int tiles = (w.slots + KEYS - 1) / KEYS;
        const seen_tiles seen = find_seen<KEYS, false>(w);
        row_state r = {{0, 0}, {0, 0}, {INFINITY, INFINITY}, {0.0f, 0.0f}, {1.0f, 1.0f}};
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int n = (int)quotient((uint32_t)place[h], a.by_hs);
            if (n >= w.queries) continue;
            row_keys(a, sequence_of(w), w.query + n, &r.lo[h], &r.hi[h]);
            row_statistics(a, sequence_of(w), (int64_t)w.q0 + w.query + n, w.head0 + place[h] - n * a.hs, &r.lse2[h], &r.delta[h], &r.row_scale[h]);
            if (r.lse2[h] == INFINITY) r.hi[h] = 0;
        }
        float dq[OT][4] = {}, s[NT][4], dp[NT][4];
        uint32_t fq[HOLD ? DK / 16 : 1][4], fdo[HOLD ? DV / 16 : 1][4], ds[NT / 2][4];
        /* acc = rows of this warpgroup, in `tile` or held as `f`, times 64 keys. */
        auto product = [&](auto &acc, const auto &f, uint32_t tile, uint32_t keys, auto dim) {
#pragma unroll
            for (int c = 0; c < decltype(dim)::value; c += 16) {
                const uint64_t x = wg_tile(tile + (c >> 6) * (M * 128) + group * 64 * 128 + (c & 63) * 2, 0),
                               y = wg_tile(keys + (c >> 6) * (KEYS * 128) + (c & 63) * 2, 0);
                if constexpr (HOLD) {
                    if (c == 0) wg_rs_wide<T, KEYS, false, false>(acc, f[c / 16], y);
                    else wg_rs_wide<T, KEYS, true, false>(acc, f[c / 16], y);
                } else {
                    if (c == 0) wg_ss_wide<T, KEYS, false>(acc, x, y);
                    else wg_ss_wide<T, KEYS, true>(acc, x, y);
                }
            }
        };
        if (tiles > 0) {
            mbar_wait(base + at::Q_FULL, used & 1);
            if constexpr (HOLD) {
#pragma unroll
                for (int i = 0; i < DK / 16; i++) load_a<M>(fq[i], base + at::Q, group * 64 + warp * 16, i * 16, lane);
#pragma unroll
                for (int i = 0; i < DV / 16; i++) load_a<M>(fdo[i], base + at::DO, group * 64 + warp * 16, i * 16, lane);
                __syncwarp();
                arrive(at::Q_FREE);
            }
            used++;
        }
        for (int t = tiles - 1; t >= 0; t--, step++) {
            const int stage = step % STAGES, slot0 = t * KEYS;
            mbar_wait(base + at::FULL + 8 * stage, step / STAGES & 1);
            wg_start();
            product(s, fq, base + at::Q, base + at::K + stage * at::K_BYTES, dim_of<DK>());
            product(dp, fdo, base + at::DO, base + at::V + stage * at::V_BYTES, dim_of<DV>());
            wg_commit();
            wg_wait<0>(s);
            wg_wait<0>(dp);
            const bool whole = tile_seen<KEYS, false>(a, w, seen, NULL, t);
#pragma unroll
            for (int i = 0; i < NT; i++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    float x[2];
#pragma unroll
                    for (int c = 0; c < 2; c++) {
                        const float p = exp2_fast(fmaf(s[i][h * 2 + c], a.scale_log2, -r.lse2[h]));
                        x[c] = p * fmaf(dp[i][h * 2 + c], r.row_scale[h], -r.delta[h]);
                    }
                    if (!whole) {
                        const int key = w.base + slot0 + i * 8 + (lane & 3) * 2;
                        if (key < r.lo[h] || key >= r.hi[h]) x[0] = 0.0f;
                        if (key + 1 < r.lo[h] || key + 1 >= r.hi[h]) x[1] = 0.0f;
                    }
                    ds[i >> 1][(i & 1) * 2 + h] = pack2<T>(x[0], x[1]);
                }
            if (!whole) {
                mbar_wait(base + at::SEARCHED + 8 * stage, searched >> stage & 1);
                searched ^= 1u << stage;
                const int32_t *odd = (const int32_t *)(smem + at::ODD) + stage * SEARCHERS;
                if (odd[0] != 0 || odd[1] != 0) clean_keys<T, DK, DV>(dq, smem + at::K + stage * at::K_BYTES, w, r, slot0);
            }
            wg_start();
            const uint32_t k = base + at::K + stage * at::K_BYTES;
#pragma unroll
            for (int c = 0; c < KEYS; c += 16) wg_rs_wide<T, DK, true, true>(dq, ds[c / 16], wg_tile(k + c * 128, KEYS * 128));
            wg_commit();
            wg_wait<0>(dq);
            arrive(at::FREE + 8 * stage);
        }
        if (!HOLD && tiles > 0) arrive(at::Q_FREE);
        if (w.queries > 0) store_rows<T, OT>(dq, a, w, place);
        free_turn<DK, DV>(base, turn);
    }
}

template <typename T, int DK, int DV>
__global__ void __launch_bounds__(128 * (GROUPS + 1), 1)
    attend_backward_rows_sm90(const __grid_constant__ attend_kernel a, const __grid_constant__ work_plan plan, const __grid_constant__ maps m)
{
#ifdef QUERN_WGMMA
    typedef layout<DK, DV> at;
    extern __shared__ __align__(1024) char smem[];
    const uint32_t base = smem_address(smem);
    if (threadIdx.x == 0) {
        mbar_init(base + at::Q_FULL, 1), mbar_init(base + at::Q_FREE, 4 * GROUPS);
        for (int i = 0; i < STAGES; i++) {
            mbar_init(base + at::FULL + 8 * i, 1), mbar_init(base + at::FREE + 8 * i, 4 * GROUPS + SEARCHERS);
            mbar_init(base + at::SEARCHED + 8 * i, SEARCHERS);
        }
        for (int i = 0; i < 2; i++) mbar_init(base + at::TURN_FULL + 8 * i, 1), mbar_init(base + at::TURN_FREE + 8 * i, 1 + SEARCHERS + 4 * GROUPS);
        mbar_init_done();
    }
    __syncthreads();
    const int group = __shfl_sync(~0u, threadIdx.x >> 7, 0), warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
    if (group == 0) {
        registers_down<FEED>();
        if (warp == 0) feed<DK, DV>(a, plan, m, smem, base);
        else if (warp <= SEARCHERS) search<T, DK, DV>(a, smem, base);
        else plan_turns<DK, DV>(a, plan, smem, base);
    } else {
        registers_up<COMPUTE>();
        compute<T, DK, DV>(a, smem, base, group - 1);
    }
#endif
}

template <typename T, int DK, int DV>
static quern_status run(const attend_args *args, const attend_launch &l, const sm90_device &device, void *workspace, cudaStream_t stream)
{
    const attend_kernel &a = l.kernel;
    work_plan plan = {0, 0, M / a.hs, 1, KEYS, NULL};
    const int64_t pieces = piece_bound(args->seqs, plan.queries, 1), total = pieces * a.units;
    if (total == 0) return QUERN_OK;
    plan.pieces = (int32_t)pieces, plan.total = (int32_t)total;
    maps m;
    quern_status status = tma_describe(&m.q, args->q, a.hs, plan.queries);
    if (status == QUERN_OK) status = tma_describe(&m.d_o, args->d_o, a.hs, plan.queries);
    if (status == QUERN_OK) status = tma_describe(&m.k, args->k, 1, KEYS);
    if (status == QUERN_OK) status = tma_describe(&m.v, args->v, 1, KEYS);
    if (status == QUERN_OK) status = sm90_count_from_zero(total, device, workspace, stream, &plan.taken);
    if (status != QUERN_OK) return status;
    const unsigned blocks = (unsigned)(total < device.multiprocessors ? total : device.multiprocessors);
    return launch_shared({stream, NULL}, attend_backward_rows_sm90<T, DK, DV>, dim3(blocks), 128 * (GROUPS + 1), layout<DK, DV>::BYTES,
                         "attend_backward_rows_sm90", a, plan, m);
}

}

#endif
