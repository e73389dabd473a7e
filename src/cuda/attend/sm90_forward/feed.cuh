/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* feed.cuh - the warpgroup that feeds kernel.cuh's blocks, and their shared memory. */
#ifndef QUERN_CUDA_ATTEND_SM90_FORWARD_FEED_CUH
#define QUERN_CUDA_ATTEND_SM90_FORWARD_FEED_CUH

#include "hopper/barrier.cuh"
#include "hopper/tma.cuh"
#include "attend/sm90/rows.cuh"

namespace sm90_forward
{

enum { STAGES = 2, MOST_LIST = 256, HELPERS = 2 }; /* the feeder's warps beside those that copy and plan */

struct maps {
    CUtensorMap q, k, v, o;
    int32_t heads; /* of a box of O, which has the 16 rows of a warp; 0: the threads store O themselves */
};

/* What a turn of a block walks, W of the templates below: the keys of the one mask that a call has, or blocks
 * of keys that a list names. attend_gate/sm90/kernel.cuh has another. */
template <bool LIST> struct one_mask {
    typedef attend_kernel call;
    typedef sm90_forward::maps maps;
    typedef work turn;
    static constexpr bool LISTS = LIST, GATED = false, MASKS = false;
    static constexpr int TURNS = 2, LISTS_AHEAD = LIST ? 2 : 0, LIST_MOST = LIST ? MOST_LIST : 0,
                         SEARCHERS = HELPERS, EXTRA = 0;

    static __device__ __forceinline__ void find(const call &a, const work_plan &plan, int32_t index, int,
                                                turn *w)
    {
        find_work<LIST>(a, plan, index, w);
    }
    static __device__ __forceinline__ bool last(int) { return true; }
    static __device__ __forceinline__ const attend_kernel &mask(const call &a, const turn &) { return a; }
    static __device__ __forceinline__ bool listed(const turn &) { return LIST; }
    static __device__ __forceinline__ bool makes_list(const call &) { return false; }
    static __device__ __forceinline__ bool needs_q(const turn &w) { return w.slots > 0; }
    static __device__ __forceinline__ const CUtensorMap &k(const maps &m, const turn &) { return m.k; }
    static __device__ __forceinline__ const CUtensorMap &v(const maps &m, const turn &) { return m.v; }
    static __device__ __forceinline__ int box(const call &, const work_plan &plan, const turn &)
    {
        return plan.box;
    }
};

template <int DK, int DV, typename W> struct shape {
    static constexpr int GROUPS = DK == 64 && DV == 64 && !W::GATED ? 3 : 2, M = 64 * GROUPS;
    static constexpr int KEYS = DK <= 192 && DV <= 128 ? 128
                                : W::LISTS             ? 64
                                                       : 80,
                         Q_STAGES = DK <= 128 && DV <= 128 && !W::GATED ? 2 : 1;
    static constexpr int FEED = W::GATED      ? 72
                                : GROUPS == 3 ? 32
                                              : 40,
                         COMPUTE = W::GATED      ? 216
                                   : GROUPS == 3 ? 160
                                                 : 232; /* registers a thread */
    static_assert(FEED + GROUPS * COMPUTE <= (GROUPS + 1) * (512 / (GROUPS + 1) / 8 * 8),
                  "more registers than a block is launched with: its warps would wait for them for ever");
    /* Of ranges, Q stays in registers, which saves a fifth of what the products read of shared memory, and
     * the tile that a turn begins with may be half a tile. With lists the registers do not suffice: ptxas
     * would let no products overlap. O leaves by the copy engine, through its rows' place of Q. */
    static constexpr bool RANGES = !W::LISTS && !W::GATED, HELD = RANGES && DK == 128 && DV <= 128,
                          HALVES = RANGES && KEYS == 128, BULK = Q_STAGES == 2 && DV <= DK;
};

/* Offsets into shared memory. */
template <int DK, int DV, typename W> struct layout {
    static constexpr int M = shape<DK, DV, W>::M, KEYS = shape<DK, DV, W>::KEYS,
                         Q_STAGES = shape<DK, DV, W>::Q_STAGES;
    static constexpr int Q = 0, Q_STAGE = M * DK * 2, K = Q + Q_STAGES * Q_STAGE, K_STAGE = KEYS * DK * 2,
                         V = K + STAGES * K_STAGE, V_STAGE = KEYS * DV * 2,
                         SUMS = V + STAGES * V_STAGE;               /* [M][DV] */
    static constexpr int BARS = SUMS + (W::GATED ? M * DV * 4 : 0); /* 8 bytes each */
    static constexpr int Q_FULL = BARS, Q_FREE = Q_FULL + 16, K_FULL = Q_FREE + 16,
                         K_FREE = K_FULL + 8 * STAGES, V_FULL = K_FREE + 8 * STAGES;
    static constexpr int V_FREE = V_FULL + 8 * STAGES, V_CLEAN = V_FREE + 8 * STAGES,
                         TURN_FULL = V_CLEAN + 8 * STAGES, TURN_FREE = TURN_FULL + 8 * W::TURNS;
    static constexpr int ODD = TURN_FREE + 8 * W::TURNS;    /* [STAGES][HELPERS]: something was not finite */
    static constexpr int TURN = ODD + 4 * STAGES * HELPERS; /* [TURNS] plans */
    static constexpr int LIST =
        TURN + W::TURNS * (int)sizeof(typename W::turn);                     /* [LISTS_AHEAD][LIST_MOST] */
    static constexpr int SCRATCH = LIST + W::LISTS_AHEAD * W::LIST_MOST * 4; /* [LIST_MOST] */
    static constexpr int GATES = SCRATCH + (W::LISTS_AHEAD > 0 ? W::LIST_MOST * 4 : 0); /* [M][3] */
    static constexpr int GATES_FULL = (GATES + (W::GATED ? M * 12 : 0) + 15) / 16 * 16,
                         LIST_FULL = GATES_FULL + 8, EXTRA = GATES_FULL + (W::GATED ? 16 : 0),
                         BYTES = EXTRA + W::EXTRA;
    static_assert(BYTES <= 227 * 1024, "more than a block can have");
};

/* sm90/work.cuh's and sm90/rows.cuh's functions of a range or of a list, as a turn has it. */
template <int KEYS, typename W> __device__ __forceinline__ seen_tiles seen_of(const typename W::turn &w)
{
    return W::listed(w) ? find_seen<KEYS, true>(w) : find_seen<KEYS, false>(w);
}

template <int KEYS, typename W>
__device__ __forceinline__ bool sees_tile(const attend_kernel &a, const typename W::turn &w,
                                          const seen_tiles &seen, const int32_t *list, int t)
{
    return W::listed(w) ? tile_seen<KEYS, true>(a, w, seen, list, t)
                        : tile_seen<KEYS, false>(a, w, seen, list, t);
}

template <typename W, int NT>
__device__ __forceinline__ void hide_turn_unseen(float (&s)[NT][4], const attend_kernel &a,
                                                 const typename W::turn &w, const int32_t *list,
                                                 const row_state &r, int slot0)
{
    if (W::listed(w)) hide_unseen<NT, true>(s, a, w, list, r, slot0);
    else hide_unseen<NT, false>(s, a, w, list, r, slot0);
}

template <typename T, int KEYS, typename W, int OT>
__device__ __forceinline__ void add_turn_nonfinite(float (&o)[OT][4], const attend_kernel &a,
                                                   const typename W::turn &w, const int32_t *list,
                                                   const row_state &r, int slot0)
{
    if (W::listed(w)) add_nonfinite<T, KEYS, OT, true>(o, a, w, list, r, slot0);
    else add_nonfinite<T, KEYS, OT, false>(o, a, w, list, r, slot0);
}

/* The plan of a turn, and its clean list, stand in shared memory from wait_turn() to free_turn(). */
template <int DK, int DV, typename W>
__device__ __forceinline__ const typename W::turn &wait_turn(char *smem, uint32_t base, int turn)
{
    typedef layout<DK, DV, W> at;
    mbar_wait(base + at::TURN_FULL + 8 * (turn % W::TURNS), turn / W::TURNS & 1);
    return ((const typename W::turn *)(smem + at::TURN))[turn % W::TURNS];
}

/* Waits for a list that is left after its plan. */
template <int DK, int DV, typename W>
__device__ __forceinline__ void wait_list(const typename W::turn &w, uint32_t base, int turn)
{
    if constexpr (W::GATED)
        if (w.list_later) mbar_wait(base + layout<DK, DV, W>::LIST_FULL, turn / W::TURNS & 1);
}

template <int DK, int DV, typename W> __device__ __forceinline__ const int32_t *list_of(char *smem, int turn)
{
    const int at = W::LISTS_AHEAD > 1 ? turn % W::LISTS_AHEAD * W::LIST_MOST : 0;
    return (const int32_t *)(smem + layout<DK, DV, W>::LIST) + at;
}

template <int DK, int DV, typename W> __device__ __forceinline__ void free_turn(uint32_t base, int turn)
{
    mbar_arrive(base + layout<DK, DV, W>::TURN_FREE +
                8 * (turn % W::TURNS)); /* each lane's, for what it read */
}

/* Waits until the turn whose place `turn` takes has ended. */
template <int DK, int DV, typename W> __device__ __forceinline__ void wait_end_before(uint32_t base, int turn)
{
    mbar_wait(base + layout<DK, DV, W>::TURN_FREE + 8 * (turn % W::TURNS), (turn / W::TURNS & 1) ^ 1);
}

/* Leaves the plan of a turn, and its list. */
template <int DK, int DV, typename W>
__device__ __forceinline__ void leave_turn(const typename W::call &call, typename W::turn &w, int turn,
                                           char *smem, uint32_t base)
{
    typedef layout<DK, DV, W> at;
    wait_end_before<DK, DV, W>(base, turn);
    typename W::turn &left = ((typename W::turn *)(smem + at::TURN))[turn % W::TURNS];
    const bool lead = (threadIdx.x & 31) == 0;
    __syncwarp();
    if (lead) left = w;
    __syncwarp();
    if (W::listed(left) && left.queries > 0 && !W::makes_list(call)) {
        const attend_kernel &a = W::mask(call, left);
        int32_t *clean = (int32_t *)list_of<DK, DV, W>(smem, turn),
                *scratch = (int32_t *)(smem + at::SCRATCH);
        const int32_t *list = a.list + left.view * a.list_stride[0] + left.unit * a.list_stride[1] +
                              left.list_row * a.list_stride[2];
        const int kept = clean_by_warp(list, a.list_k, a.list_block, left.end, clean, scratch);
        if (lead) left.slots = kept * a.list_block;
        if constexpr (W::GATED) W::template find_whole<at::KEYS>(left, clean, kept, a.list_block);
    }
    if constexpr (W::MASKS) W::template leave_masks<at>(call, left, smem);
    mbar_arrive(base + at::TURN_FULL + 8 * (turn % W::TURNS)); /* each lane's, for what it wrote */
}

/* Warp 3 of the feeder: plans the turns, two ahead at most, and sorts their lists. The last plan has -1
 * queries. */
template <int DK, int DV, typename W>
__device__ __forceinline__ void plan_turns(const typename W::call &call, const work_plan &plan, char *smem,
                                           uint32_t base)
{
    typename W::turn w = {};
    int32_t index = (int32_t)blockIdx.x;
    for (int turn = 0; w.queries >= 0; turn++) {
        if (index < plan.total) W::find(call, plan, index, turn, &w);
        else w.queries = -1;
        leave_turn<DK, DV, W>(call, w, turn, smem, base);
        index = next_piece(plan);
    }
}

/* Warp 0 of the feeder: one thread copies. */
template <int DK, int DV, typename W>
__device__ __forceinline__ void feed(const typename W::call &call, const work_plan &plan,
                                     const typename W::maps &m, char *smem, uint32_t base)
{
    typedef layout<DK, DV, W> at;
    constexpr int KEYS = at::KEYS;
    const bool lead = (threadIdx.x & 31) == 0;
    int step = 0, used = 0; /* tiles and pieces so far */
    for (int turn = 0;; turn++) {
        const typename W::turn &w = wait_turn<DK, DV, W>(smem, base, turn);
        if (w.queries < 0) return;
        if (W::GATED && turn == 1) wait_for_before();
        wait_list<DK, DV, W>(w, base, turn);
        const int32_t *list = list_of<DK, DV, W>(smem, turn);
        const attend_kernel &a = W::mask(call, w);
        const int tiles = (w.slots + KEYS - 1) / KEYS, box = W::box(call, plan, w);
        if (W::needs_q(w) && lead) {
            const int stage = used % at::Q_STAGES;
            const uint32_t full = base + at::Q_FULL + 8 * stage;
            mbar_wait(base + at::Q_FREE + 8 * stage, (used / at::Q_STAGES & 1) ^ 1);
            mbar_expect(full, DK / 64 * plan.queries * a.hs * 128);
#pragma unroll
            for (int p = 0; p < DK / 64; p++)
                tma_load(base + at::Q + stage * at::Q_STAGE + p * at::M * 128, m.q, full, p * 64, w.head0,
                         w.q0 + w.query, w.view);
            if constexpr (W::GATED && !W::MASKS) W::template copy_others<DK, DV, W>(call, plan, m, w, base);
            used++;
        }
        auto copy = [&](const CUtensorMap &map, uint32_t to, uint32_t bar, int panels, int t) {
            for (int r = 0; r < KEYS; r += box) {
                const int slot = t * KEYS + r;
                int key = w.k0 + w.base + slot;
                if (W::listed(w)) {
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
                copy(W::k(m, w), base + at::K + stage * at::K_STAGE, base + at::K_FULL + 8 * stage, DK / 64,
                     t);
                mbar_wait(base + at::V_FREE + 8 * stage, parity);
                mbar_expect(base + at::V_FULL + 8 * stage, at::V_STAGE);
                copy(W::v(m, w), base + at::V + stage * at::V_STAGE, base + at::V_FULL + 8 * stage, DV / 64,
                     t);
            }
        free_turn<DK, DV, W>(base, turn);
    }
}

/* A searcher's part of V's tile in `stage`, which becomes finite. */
template <typename T, int DK, int DV, typename W>
__device__ __forceinline__ void search_tile(char *smem, uint32_t base, int stage, int searcher)
{
    typedef layout<DK, DV, W> at;
    constexpr uint32_t INFINITE =
        __is_same(T, bf16) ? 0x7f80 : 0x7c00; /* the least bits of what is not finite */
    const int lane = threadIdx.x & 31;
    char *tile = smem + at::V + stage * at::V_STAGE;
    uint32_t most = 0; /* of the bits without their signs, two values a word */
#pragma unroll 4
    for (int i = (searcher * 32 + lane) * 16; i < at::V_STAGE; i += W::SEARCHERS * 512) {
        const uint4 x = *(const uint4 *)(tile + i);
        most = __vmaxu2(most, __vmaxu2(__vmaxu2(x.x & 0x7fff7fff, x.y & 0x7fff7fff),
                                       __vmaxu2(x.z & 0x7fff7fff, x.w & 0x7fff7fff)));
    }
    bool odd = (most & 0xffff) >= INFINITE || most >> 16 >= INFINITE;
    if (odd) {
#pragma unroll 1
        for (int i = (searcher * 32 + lane) * 16; i < at::V_STAGE; i += W::SEARCHERS * 512) {
#pragma unroll 1
            for (int j = 0; j < 16; j += 2) {
                uint16_t *x = (uint16_t *)(tile + i + j);
                if ((*x & 0x7fff) >= INFINITE) *x = 0;
            }
        }
    }
    async_fence();
    odd = __any_sync(~0u, odd);
    if (lane == 0) ((int32_t *)(smem + at::ODD))[stage * HELPERS + searcher] = odd;
    mbar_arrive(base + at::V_CLEAN + 8 * stage); /* each lane's, for what it wrote */
}

/* Warps 1 and 2 of the feeder: tiles of V that are not seen whole become finite. They free every tile, so
 * that the others neither overtake them nor are overtaken. */
template <typename T, int DK, int DV, typename W>
__device__ __forceinline__ void search(const typename W::call &call, char *smem, uint32_t base)
{
    typedef layout<DK, DV, W> at;
    constexpr int KEYS = at::KEYS;
    const int lane = threadIdx.x & 31, searcher = (threadIdx.x >> 5) - 1;
    int step = 0;
    for (int turn = 0;; turn++) {
        const typename W::turn &w = wait_turn<DK, DV, W>(smem, base, turn);
        if (w.queries < 0) return;
        const int32_t *list = list_of<DK, DV, W>(smem, turn);
        const attend_kernel &a = W::mask(call, w);
        const seen_tiles seen = seen_of<KEYS, W>(w);
        for (int t = (w.slots + KEYS - 1) / KEYS - 1; t >= 0; t--, step++) {
            const int stage = step % STAGES;
            mbar_wait(base + at::V_FULL + 8 * stage, step / STAGES & 1);
            if (!sees_tile<KEYS, W>(a, w, seen, list, t))
                search_tile<T, DK, DV, W>(smem, base, stage, searcher);
            if (lane == 0) mbar_arrive(base + at::V_FREE + 8 * stage);
        }
        free_turn<DK, DV, W>(base, turn);
    }
}

} // namespace sm90_forward

#endif
