/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * attend_forward.cuh - attention's forward on Hopper for bf16 and f16, every mask; after FlashAttention-3
 * (arXiv 2407.08608).
 *
 * A persistent block is one warpgroup that feeds and GROUPS that compute, each with 64 of the block's
 * rows. The feeder's warp 0 copies Q, K and V by TMA into two stages; warps 1 and 2 look for what is not
 * finite in V's tiles that some row does not see whole; warp 3 plans (work.cuh) and sorts lists. A computing
 * warpgroup walks its keys from the last to the first: S = Q K^T (wgmma, both from shared memory), softmax in
 * registers, O += P V with P from registers. The next tile's Q K^T starts before this tile's softmax, and
 * named barriers let the warpgroups take turns, so that one's softmax runs beside another's products.
 *
 * NaN and infinity in V reach the rows that see them and no others: a factor of 0 does not undo them. Where a
 * tile is not seen whole, the searching warps set them to 0 in shared memory, and the rows that see them add
 * them from global memory.
 *
 * Registers at D = 128: O 64, S 64, P 32 of 232; shared memory: Q 64 KB (two stages), K and V 128 KB. Limit:
 * the tensor cores, with the 16 exponentials a clock and SM close behind at D = 64.
 */
#ifndef QUERN_CUDA_SM90_ATTEND_FORWARD_CUH
#define QUERN_CUDA_SM90_ATTEND_FORWARD_CUH

#include "common/barrier.cuh"
#include "common/launch.cuh"
#include "common/tma.cuh"
#include "sm90/attend/attend.cuh"
#include "sm90/attend/work.cuh"

namespace sm90_forward
{

enum { STAGES = 2, MOST_LIST = 256, SEARCHERS = 2 };

struct maps {
    CUtensorMap q, k, v;
};

template <int DK, int DV, bool LISTED> struct shape {
    static constexpr int GROUPS = DK == 64 && DV == 64 ? 3 : 2, M = 64 * GROUPS;
    static constexpr int KEYS = DK <= 192 && DV <= 128 ? 128
                                : LISTED               ? 64
                                                       : 80,
                         Q_STAGES = DK <= 128 && DV <= 128 ? 2 : 1;
    static constexpr int FEED = GROUPS == 3 ? 32 : 40,
                         COMPUTE = GROUPS == 3 ? 160 : 232; /* registers a thread */
};

/* Offsets into shared memory. */
template <int DK, int DV, bool LISTED> struct layout {
    static constexpr int M = shape<DK, DV, LISTED>::M, KEYS = shape<DK, DV, LISTED>::KEYS,
                         Q_STAGES = shape<DK, DV, LISTED>::Q_STAGES;
    static constexpr int Q = 0, Q_STAGE = M * DK * 2, K = Q + Q_STAGES * Q_STAGE, K_STAGE = KEYS * DK * 2,
                         V = K + STAGES * K_STAGE, V_STAGE = KEYS * DV * 2;
    static constexpr int BARS = V + STAGES * V_STAGE; /* 8 bytes each */
    static constexpr int Q_FULL = BARS, Q_FREE = Q_FULL + 16, K_FULL = Q_FREE + 16,
                         K_FREE = K_FULL + 8 * STAGES, V_FULL = K_FREE + 8 * STAGES;
    static constexpr int V_FREE = V_FULL + 8 * STAGES, V_CLEAN = V_FREE + 8 * STAGES,
                         TURN_FULL = V_CLEAN + 8 * STAGES, TURN_FREE = TURN_FULL + 16;
    static constexpr int ODD = TURN_FREE + 16; /* [STAGES][SEARCHERS]: something was not finite */
    static constexpr int TURN = ODD + 4 * STAGES * SEARCHERS; /* [2] plans */
    static constexpr int LIST = TURN + 2 * sizeof(work);      /* [2][MOST_LIST], then scratch */
    static constexpr int BYTES = LIST + (LISTED ? 3 * MOST_LIST * 4 : 0);
    static_assert(BYTES <= 227 * 1024, "more than a block can have");
};

/* The plan of a turn, and its clean list, stand in shared memory from wait_turn() to free_turn(). */
template <int DK, int DV, bool LISTED>
__device__ __forceinline__ const work &wait_turn(char *smem, uint32_t base, int turn)
{
    typedef layout<DK, DV, LISTED> at;
    mbar_wait(base + at::TURN_FULL + 8 * (turn & 1), turn >> 1 & 1);
    return ((const work *)(smem + at::TURN))[turn & 1];
}

template <int DK, int DV, bool LISTED> __device__ __forceinline__ const int32_t *list_of(char *smem, int turn)
{
    return (const int32_t *)(smem + layout<DK, DV, LISTED>::LIST) + (turn & 1) * MOST_LIST;
}

template <int DK, int DV, bool LISTED> __device__ __forceinline__ void free_turn(uint32_t base, int turn)
{
    mbar_arrive(base + layout<DK, DV, LISTED>::TURN_FREE +
                8 * (turn & 1)); /* each lane's, for what it read */
}

/* Warp 3 of the feeder: plans the turns, two ahead at most, and sorts their lists. The last plan has -1
 * queries. */
template <int DK, int DV, bool LISTED>
__device__ __forceinline__ void plan_turns(const attend_kernel &a, const work_plan &plan, char *smem,
                                           uint32_t base)
{
    typedef layout<DK, DV, LISTED> at;
    work w = {};
    int32_t index = (int32_t)blockIdx.x;
    for (int turn = 0; w.queries >= 0; turn++) {
        if (index < plan.total) find_work<LISTED>(a, plan, index, &w);
        else w.queries = -1;
        mbar_wait(base + at::TURN_FREE + 8 * (turn & 1), (turn >> 1 & 1) ^ 1);
        if (LISTED && w.queries > 0) {
            int32_t *clean = (int32_t *)(smem + at::LIST) + (turn & 1) * MOST_LIST,
                    *scratch = (int32_t *)(smem + at::LIST) + 2 * MOST_LIST;
            const int32_t *list = a.list + w.view * a.list_stride[0] + w.unit * a.list_stride[1] +
                                  w.list_row * a.list_stride[2];
            w.slots = clean_by_warp(list, a.list_k, a.list_block, w.end, clean, scratch) * a.list_block;
        }
        if ((threadIdx.x & 31) == 0) ((work *)(smem + at::TURN))[turn & 1] = w;
        mbar_arrive(base + at::TURN_FULL + 8 * (turn & 1)); /* each lane's, for what it wrote */
        index = next_piece(plan);
    }
}

/* Warp 0 of the feeder: one thread copies. */
template <int DK, int DV, bool LISTED>
__device__ __forceinline__ void feed(const attend_kernel &a, const work_plan &plan, const maps &m, char *smem,
                                     uint32_t base)
{
    typedef layout<DK, DV, LISTED> at;
    constexpr int KEYS = at::KEYS;
    const bool lead = (threadIdx.x & 31) == 0;
    int step = 0, used = 0; /* tiles and pieces so far */
    for (int turn = 0;; turn++) {
        const work &w = wait_turn<DK, DV, LISTED>(smem, base, turn);
        if (w.queries < 0) return;
        const int32_t *list = list_of<DK, DV, LISTED>(smem, turn);
        const int tiles = (w.slots + KEYS - 1) / KEYS;
        if (tiles > 0 && lead) {
            const int stage = used % at::Q_STAGES;
            const uint32_t full = base + at::Q_FULL + 8 * stage;
            mbar_wait(base + at::Q_FREE + 8 * stage, (used / at::Q_STAGES & 1) ^ 1);
            mbar_expect(full, DK / 64 * plan.queries * a.hs * 128);
#pragma unroll
            for (int p = 0; p < DK / 64; p++)
                tma_load(base + at::Q + stage * at::Q_STAGE + p * at::M * 128, m.q, full, p * 64, w.head0,
                         w.q0 + w.query, w.view);
            used++;
        }
        auto copy = [&](const CUtensorMap &map, uint32_t to, uint32_t bar, int panels, int t) {
            for (int r = 0; r < KEYS; r += plan.box) {
                const int slot = t * KEYS + r;
                int key = w.k0 + w.base + slot;
                if (LISTED) {
                    const int e = (int)quotient((uint32_t)slot, a.by_block);
                    key = slot < w.slots ? w.k0 + list[e] * a.list_block + (slot - e * a.list_block)
                                         : (int)a.sq.n_kv;
                }
                for (int p = 0; p < panels; p++)
                    tma_load(to + p * KEYS * 128 + r * 128, map, bar, p * 64, w.kvh, key, w.view);
            }
        };
        if (lead)
            for (int t = tiles - 1; t >= 0; t--, step++) {
                const int stage = step % STAGES;
                const uint32_t parity = (step / STAGES & 1) ^ 1;
                mbar_wait(base + at::K_FREE + 8 * stage, parity);
                mbar_expect(base + at::K_FULL + 8 * stage, at::K_STAGE);
                copy(m.k, base + at::K + stage * at::K_STAGE, base + at::K_FULL + 8 * stage, DK / 64, t);
                mbar_wait(base + at::V_FREE + 8 * stage, parity);
                mbar_expect(base + at::V_FULL + 8 * stage, at::V_STAGE);
                copy(m.v, base + at::V + stage * at::V_STAGE, base + at::V_FULL + 8 * stage, DV / 64, t);
            }
        free_turn<DK, DV, LISTED>(base, turn);
    }
}

/* Warps 1 and 2 of the feeder: tiles of V that are not seen whole become finite. They free every tile, so
 * that the others neither overtake them nor are overtaken. */
template <typename T, int DK, int DV, bool LISTED>
__device__ __forceinline__ void search(const attend_kernel &a, char *smem, uint32_t base)
{
    typedef layout<DK, DV, LISTED> at;
    constexpr int KEYS = at::KEYS;
    constexpr uint32_t INFINITE =
        __is_same(T, bf16) ? 0x7f80 : 0x7c00; /* the least bits of what is not finite */
    const int lane = threadIdx.x & 31, searcher = (threadIdx.x >> 5) - 1;
    int step = 0;
    for (int turn = 0;; turn++) {
        const work &w = wait_turn<DK, DV, LISTED>(smem, base, turn);
        if (w.queries < 0) return;
        const int32_t *list = list_of<DK, DV, LISTED>(smem, turn);
        const seen_tiles seen = find_seen<KEYS, LISTED>(w);
        for (int t = (w.slots + KEYS - 1) / KEYS - 1; t >= 0; t--, step++) {
            const int stage = step % STAGES;
            mbar_wait(base + at::V_FULL + 8 * stage, step / STAGES & 1);
            if (tile_seen<KEYS, LISTED>(a, w, seen, list, t)) {
                if (lane == 0) mbar_arrive(base + at::V_FREE + 8 * stage);
                continue;
            }
            char *tile = smem + at::V + stage * at::V_STAGE;
            uint32_t most = 0; /* of the bits without their signs, two values a word */
#pragma unroll 4
            for (int i = (searcher * 32 + lane) * 16; i < at::V_STAGE; i += SEARCHERS * 512) {
                const uint4 x = *(const uint4 *)(tile + i);
                most = __vmaxu2(most, __vmaxu2(__vmaxu2(x.x & 0x7fff7fff, x.y & 0x7fff7fff),
                                               __vmaxu2(x.z & 0x7fff7fff, x.w & 0x7fff7fff)));
            }
            bool odd = (most & 0xffff) >= INFINITE || most >> 16 >= INFINITE;
            if (odd) {
#pragma unroll 1
                for (int i = (searcher * 32 + lane) * 16; i < at::V_STAGE; i += SEARCHERS * 512) {
#pragma unroll 1
                    for (int j = 0; j < 16; j += 2) {
                        uint16_t *x = (uint16_t *)(tile + i + j);
                        if ((*x & 0x7fff) >= INFINITE) *x = 0;
                    }
                }
            }
            async_fence();
            odd = __any_sync(~0u, odd);
            if (lane == 0) ((int32_t *)(smem + at::ODD))[stage * SEARCHERS + searcher] = odd;
            mbar_arrive(base + at::V_CLEAN + 8 * stage); /* each lane's, for what it wrote */
            if (lane == 0) mbar_arrive(base + at::V_FREE + 8 * stage);
        }
        free_turn<DK, DV, LISTED>(base, turn);
    }
}

/* What a computing thread knows of its rows lane / 4 and that + 8: what they see, and their softmax so far.
 */
struct row_state {
    int lo[2], hi[2];
    float top[2], sum[2];
};

/* S becomes its exponentials; O's rows are to be multiplied by `shrink`. */
template <int NT>
__device__ __forceinline__ void softmax(float (&s)[NT][4], row_state &r, float (&shrink)[2], float scale_log2)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float top = r.top[h];
#pragma unroll
        for (int i = 0; i < NT; i++) top = fmaxf(top, fmaxf(s[i][h * 2], s[i][h * 2 + 1]));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        const float base = top == -INFINITY ? 0.0f : top * scale_log2;
        shrink[h] = exp2_fast(r.top[h] * scale_log2 - base);
        r.top[h] = top;
        float sum = r.sum[h] * shrink[h];
#pragma unroll
        for (int i = 0; i < NT; i++) {
            s[i][h * 2] = exp2_fast(fmaf(s[i][h * 2], scale_log2, -base));
            s[i][h * 2 + 1] = exp2_fast(fmaf(s[i][h * 2 + 1], scale_log2, -base));
            sum += s[i][h * 2] + s[i][h * 2 + 1];
        }
        r.sum[h] = sum;
    }
}

/* The first key of columns 8 i ... 8 i + 7 of a tile. */
template <bool LISTED>
__device__ __forceinline__ int column_key(const attend_kernel &a, const work &w, const int32_t *list,
                                          int slot)
{
    if (!LISTED) return w.base + slot;
    const int e = (int)quotient((uint32_t)slot, a.by_block);
    return slot < w.slots ? list[e] * a.list_block + (slot - e * a.list_block) : INT32_MAX - 8;
}

template <int NT, bool LISTED>
__device__ __forceinline__ void hide_unseen(float (&s)[NT][4], const attend_kernel &a, const work &w,
                                            const int32_t *list, const row_state &r, int slot0)
{
#pragma unroll
    for (int i = 0; i < NT; i++) {
        const int key = column_key<LISTED>(a, w, list, slot0 + i * 8) + (threadIdx.x & 3) * 2;
#pragma unroll
        for (int c = 0; c < 2; c++)
#pragma unroll
            for (int h = 0; h < 2; h++)
                if (key + c < r.lo[h] || key + c >= r.hi[h]) s[i][h * 2 + c] = -INFINITY;
    }
}

/* Adds what is not finite in the tile's V to the rows that see it. */
template <typename T, int KEYS, int OT, bool LISTED>
__device__ __forceinline__ void add_nonfinite(float (&o)[OT][4], const attend_kernel &a, const work &w,
                                              const int32_t *list, const row_state &r, int slot0)
{
    const T *v = (const T *)a.v.p + (int64_t)w.view * a.v.s[0] + (int64_t)w.k0 * a.v.s[1] + w.kvh * a.v.s[2] +
                 (threadIdx.x & 3) * 2;
    for (int j = 0; j < KEYS; j++) {
        const int key = column_key<LISTED>(a, w, list, slot0 + (j & ~7)) + (j & 7);
        const bool s0 = key >= r.lo[0] && key < r.hi[0], s1 = key >= r.lo[1] && key < r.hi[1];
        if (!s0 && !s1) continue;
        const T *row = v + key * a.v.s[1];
#pragma unroll
        for (int i = 0; i < OT; i++)
            if (i * 8 < a.dim_v)
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    const float x = to_float<T>(row[i * 8 + c]), add = isfinite(x) ? 0.0f : x;
                    o[i][c] += s0 ? add : 0.0f;
                    o[i][2 + c] += s1 ? add : 0.0f;
                }
    }
}

/* Exchanges 32-bit words among the four lanes of a row so that each holds 16 consecutive bytes. */
__device__ __forceinline__ void transpose4(uint32_t (&w)[4])
{
    const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
    const uint32_t a = __shfl_xor_sync(~0u, odd ? w[0] : w[1], 1),
                   b = __shfl_xor_sync(~0u, odd ? w[2] : w[3], 1);
    const uint32_t x[4] = {odd ? a : w[0], odd ? w[1] : a, odd ? b : w[2], odd ? w[3] : b};
    const uint32_t c = __shfl_xor_sync(~0u, high ? x[0] : x[2], 2),
                   d = __shfl_xor_sync(~0u, high ? x[1] : x[3], 2);
    w[0] = high ? c : x[0];
    w[1] = high ? d : x[1];
    w[2] = high ? x[2] : c;
    w[3] = high ? x[3] : d;
}

/* The state of a thread's two rows before their first key. */
__device__ __forceinline__ row_state begin_rows(const attend_kernel &a, const work &w, const int (&place)[2])
{
    row_state r = {{0, 0}, {0, 0}, {-INFINITY, -INFINITY}, {0.0f, 0.0f}};
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int n = (int)quotient((uint32_t)place[h], a.by_hs);
        if (n < w.queries) row_keys(a, sequence_of(w), w.query + n, &r.lo[h], &r.hi[h]);
    }
    return r;
}

/* Divides O by the rows' sums and stores it, and LSE. */
template <typename T, int OT>
__device__ __forceinline__ void store_rows(float (&o)[OT][4], const attend_kernel &a, const work &w,
                                           row_state &r, const int (&place)[2])
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float sum = r.sum[h];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        const int n = (int)quotient((uint32_t)place[h], a.by_hs), head = place[h] - n * a.hs + w.head0;
        const bool mine = n < w.queries;
        const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
        const int64_t row = (int64_t)w.q0 + w.query + n;
        if (mine && a.lse.p != NULL && (threadIdx.x & 3) == 0)
            a.lse.p[(int64_t)w.view * a.lse.s[0] + head * a.lse.s[1] + row * a.lse.s[2]] =
                sum == 0.0f ? -INFINITY : r.top[h] * a.scale + logf(sum);
        if (a.o.p == NULL) continue;
        T *to = (T *)a.o.p + (int64_t)w.view * a.o.s[0] + row * a.o.s[1] + head * a.o.s[2];
#pragma unroll
        for (int i = 0; i < OT; i += 4) {
            uint32_t words[4];
#pragma unroll
            for (int j = 0; j < 4; j++) { /* + 0: an unseen value's sign may stand in a sum that is 0 */
                const float x = o[i + j][h * 2] * inverse + 0.0f, y = o[i + j][h * 2 + 1] * inverse + 0.0f;
                words[j] = pack2<T>(x, y);
            }
            transpose4(words);
            const int c = (i + (threadIdx.x & 3)) * 8;
            if (mine && c < a.dim_v) *(uint4 *)(to + c) = make_uint4(words[0], words[1], words[2], words[3]);
        }
    }
}

/* Probabilities as the operand of P V. */
template <typename T, int NT>
__device__ __forceinline__ void pack_rows(const float (&s)[NT][4], uint32_t (&p)[NT / 2][4])
{
#pragma unroll
    for (int i = 0; i < NT / 2; i++)
#pragma unroll
        for (int j = 0; j < 4; j++)
            p[i][j] = pack2<T>(s[i * 2 + (j >> 1)][(j & 1) * 2], s[i * 2 + (j >> 1)][(j & 1) * 2 + 1]);
}

/* A computing warpgroup. */
template <typename T, int DK, int DV, bool LISTED>
__device__ __forceinline__ void compute(const attend_kernel &a, char *smem, uint32_t base, int group)
{
    typedef layout<DK, DV, LISTED> at;
    constexpr int KEYS = at::KEYS, M = at::M, GROUPS = shape<DK, DV, LISTED>::GROUPS, NT = KEYS / 8,
                  OT = DV / 8;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3, own = 1 + group,
              next = 1 + (group + 1) % GROUPS;
    const int place[2] = {group * 64 + warp * 16 + (lane >> 2), group * 64 + warp * 16 + (lane >> 2) + 8};
    int step = 0, used = 0;
    uint32_t clean = 0; /* the parity of each stage's V_CLEAN */
    auto arrive = [&](uint32_t bar) {
        if (lane == 0) mbar_arrive(base + bar);
    };
    if (group == GROUPS - 1) named_arrive(1, 256); /* the first warpgroup goes first */
    for (int turn = 0;; turn++) {
        const work &w = wait_turn<DK, DV, LISTED>(smem, base, turn);
        if (w.queries < 0) return;
        const int32_t *list = list_of<DK, DV, LISTED>(smem, turn);
        const int tiles = (w.slots + KEYS - 1) / KEYS;
        const seen_tiles seen = find_seen<KEYS, LISTED>(w); /* at DV = 256 registers are too few to keep it */
        row_state r = begin_rows(a, w, place);
        float o[OT][4] = {}, s[NT][4];
        uint32_t p[NT / 2][4];
        auto scores = [&](int stage) {
            const uint64_t q = wg_fresh(wg_tile(
                               base + at::Q + used % at::Q_STAGES * at::Q_STAGE + group * 64 * 128, 0)),
                           k = wg_fresh(wg_tile(base + at::K + stage * at::K_STAGE, 0));
#pragma unroll
            for (int c = 0; c < DK; c += 16) {
                const uint64_t da = wg_further(q, (c >> 6) * (M * 128) + (c & 63) * 2),
                               db = wg_further(k, (c >> 6) * (KEYS * 128) + (c & 63) * 2);
                if (c == 0) wg_ss_wide<T, KEYS, false>(s, da, db);
                else wg_ss_wide<T, KEYS, true>(s, da, db);
            }
            wg_commit();
        };
        /* O += P V of tile t, once V is there and, where some row does not see all of it, clean. */
        auto values = [&](int stage, int at_step, int t) {
            mbar_wait(base + at::V_FULL + 8 * stage, at_step / STAGES & 1);
            if (!tile_seen<KEYS, LISTED>(a, w, DV > 128 ? find_seen<KEYS, LISTED>(w) : seen, list, t)) {
                mbar_wait(base + at::V_CLEAN + 8 * stage, clean >> stage & 1);
                clean ^= 1u << stage;
                const int32_t *found = (const int32_t *)(smem + at::ODD) + stage * SEARCHERS;
                if (__shfl_sync(~0u, lane == 0 ? found[0] | found[1] : 0, 0) != 0) /* lane 0 frees V */
                    add_nonfinite<T, KEYS, OT, LISTED>(o, a, w, list, r, t * KEYS);
            }
            const uint64_t v = wg_fresh(wg_tile(base + at::V + stage * at::V_STAGE, KEYS * 128));
            wg_start();
#pragma unroll
            for (int c = 0; c < KEYS; c += 16)
                wg_rs_wide<T, DV, true, true>(o, p[c / 16], wg_further(v, c * 128));
            wg_commit();
        };
        float shrink[2];
        if (tiles > 0) {
            int stage = step % STAGES;
            mbar_wait(base + at::Q_FULL + 8 * (used % at::Q_STAGES), used / at::Q_STAGES & 1);
            mbar_wait(base + at::K_FULL + 8 * stage, step / STAGES & 1);
            wg_start();
            scores(stage);
            wg_wait<0>(s);
            arrive(at::K_FREE + 8 * stage);
            if (!tile_seen<KEYS, LISTED>(a, w, DV > 128 ? find_seen<KEYS, LISTED>(w) : seen, list, tiles - 1))
                hide_unseen<NT, LISTED>(s, a, w, list, r, (tiles - 1) * KEYS);
            softmax(s, r, shrink, a.scale_log2);
            pack_rows<T>(s, p);
            for (int t = tiles - 2; t >= 0; t--) {
                const int before = step, last = stage;
                step++;
                stage = step % STAGES;
                mbar_wait(base + at::K_FULL + 8 * stage, step / STAGES & 1);
                named_sync(own, 256);
                wg_start();
                scores(stage);
                values(last, before, t + 1);
                named_arrive(next, 256);
                wg_wait<1>(s);
                arrive(at::K_FREE + 8 * stage);
                if (!tile_seen<KEYS, LISTED>(a, w, DV > 128 ? find_seen<KEYS, LISTED>(w) : seen, list, t))
                    hide_unseen<NT, LISTED>(s, a, w, list, r, t * KEYS);
                softmax(s, r, shrink, a.scale_log2);
                wg_wait<0>(o);
                arrive(at::V_FREE + 8 * last);
                pack_rows<T>(s, p);
                if (__any_sync(~0u, shrink[0] != 1.0f || shrink[1] != 1.0f))
#pragma unroll
                    for (int i = 0; i < OT; i++)
#pragma unroll
                        for (int c = 0; c < 4; c++) o[i][c] *= shrink[c >> 1];
            }
            arrive(at::Q_FREE + 8 * (used % at::Q_STAGES));
            values(stage, step, 0);
            wg_wait<0>(o);
            arrive(at::V_FREE + 8 * stage);
            step++;
            used++;
        }
        if (w.queries > 0) store_rows<T, OT>(o, a, w, r, place);
        free_turn<DK, DV, LISTED>(base, turn);
    }
}

template <typename T, int DK, int DV, bool LISTED>
__global__ void __launch_bounds__(128 * (shape<DK, DV, LISTED>::GROUPS + 1), 1)
    attend_forward_sm90(const __grid_constant__ attend_kernel a, const __grid_constant__ work_plan plan,
                        const __grid_constant__ maps m)
{
#ifdef QUERN_WGMMA
    typedef layout<DK, DV, LISTED> at;
    typedef shape<DK, DV, LISTED> sh;
    extern __shared__ __align__(1024) char smem[];
    const uint32_t base = smem_address(smem);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            mbar_init(base + at::Q_FULL + 8 * i, 1), mbar_init(base + at::Q_FREE + 8 * i, 4 * sh::GROUPS);
            mbar_init(base + at::K_FULL + 8 * i, 1), mbar_init(base + at::K_FREE + 8 * i, 4 * sh::GROUPS);
            mbar_init(base + at::V_FULL + 8 * i, 1),
                mbar_init(base + at::V_FREE + 8 * i, 4 * sh::GROUPS + SEARCHERS);
            mbar_init(base + at::V_CLEAN + 8 * i, SEARCHERS * WARP_ARRIVALS);
            mbar_init(base + at::TURN_FULL + 8 * i, WARP_ARRIVALS),
                mbar_init(base + at::TURN_FREE + 8 * i, (1 + SEARCHERS + 4 * sh::GROUPS) * WARP_ARRIVALS);
        }
        mbar_init_done();
    }
    __syncthreads();
    const int group = __shfl_sync(~0u, threadIdx.x >> 7, 0), warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
    if (group == 0) {
        registers_down<sh::FEED>();
        if (warp == 0) feed<DK, DV, LISTED>(a, plan, m, smem, base);
        else if (warp <= SEARCHERS) search<T, DK, DV, LISTED>(a, smem, base);
        else plan_turns<DK, DV, LISTED>(a, plan, smem, base);
    } else {
        registers_up<sh::COMPUTE>();
        compute<T, DK, DV, LISTED>(a, smem, base, group - 1);
    }
#endif
}

template <typename T, int DK, int DV, bool LISTED>
static quern_status launch(const attend_args *args, const attend_kernel &a, const sm90_device &device,
                           void *workspace, cudaStream_t stream)
{
    typedef shape<DK, DV, LISTED> sh;
    work_plan plan = {0, 0, sh::M / a.hs, 1, sh::KEYS, NULL};
    if (LISTED) {
        if (plan.queries > a.tile) plan.queries = a.tile;
        plan.per_tile = (a.tile + plan.queries - 1) / plan.queries;
        plan.box = 16;
        while (plan.box < sh::KEYS && a.list_block % (2 * plan.box) == 0) plan.box *= 2;
    }
    const int64_t pieces = piece_bound(args->seqs, LISTED ? a.tile : plan.queries, 1) * plan.per_tile,
                  total = pieces * a.units;
    if (total == 0) return QUERN_OK;
    plan.pieces = (int32_t)pieces;
    plan.total = (int32_t)total;
    maps m;
    quern_status status = tma_describe(&m.q, args->q, a.hs, plan.queries);
    if (status == QUERN_OK) status = tma_describe(&m.k, args->k, 1, plan.box);
    if (status == QUERN_OK) status = tma_describe(&m.v, args->v, 1, plan.box);
    if (status == QUERN_OK) status = sm90_count_from_zero(total, device, workspace, stream, &plan.taken);
    if (status != QUERN_OK) return status;
    const unsigned blocks = (unsigned)(total < device.multiprocessors ? total : device.multiprocessors);
    return launch_shared({stream, NULL}, attend_forward_sm90<T, DK, DV, LISTED>, dim3(blocks),
                         128 * (sh::GROUPS + 1), layout<DK, DV, LISTED>::BYTES, "attend_forward_sm90", a,
                         plan, m);
}

template <typename T, int DK, int DV>
static quern_status run(const attend_args *args, const attend_launch &l, const sm90_device &device,
                        void *workspace, cudaStream_t stream)
{
    return l.listed ? launch<T, DK, DV, true>(args, l.kernel, device, workspace, stream)
                    : launch<T, DK, DV, false>(args, l.kernel, device, workspace, stream);
}

} // namespace sm90_forward

#endif
