/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* turns.cuh - what the blocks of kernel.cuh's kernels walk: a piece's rows by one branch after
 * another. */
#ifndef QUERN_CUDA_ATTEND_GATE_SM90_TURNS_CUH
#define QUERN_CUDA_ATTEND_GATE_SM90_TURNS_CUH

#include "attend/sm90/products.cuh"
#include "hopper/nonfinite.cuh"
#include "hopper/ring.cuh"
#include "hopper/tma.cuh"
#include "attend_gate/sm90/choose_by_mean.cuh"
#include "attend_gate/sm90/params.cuh"

namespace sm90_gate
{

struct gated_maps {
    CUtensorMap q, k[SM90_BRANCHES], v[SM90_BRANCHES];
};

/* A branch of a piece. */
struct gated_turn : work {
    int32_t branch, piece;        /* the piece's number among the block's */
    int32_t whole_from, whole_to; /* the tiles that every row sees whole */
    int32_t before, after;        /* query q's first key is q + before; its keys begin in q + after tokens */
    uint32_t stride_m, stride_s;  /* how many tokens from key to key, as fast_div has it */
    float scale_log2;
    bool first, last;
    bool again;      /* V is searched */
    bool list_later; /* warp 1 makes the list */
    bool peer_walks; /* the other block of the pair walks this branch of the rows */
    bool for_peer;   /* the other block stores these rows' O */
    bool adds_peer;  /* and takes into it what this one has left */
};

/* The keys [lo, hi) that a query of a turn sees: mask_keys() without its cases. */
__device__ __forceinline__ void keys_of_row(const gated_turn &w, int query, int *lo, int *hi)
{
    const int tokens = query + w.after, first = query + w.before > 0 ? query + w.before : 0,
              end = tokens <= 0 ? 0 : (int)quotient((uint32_t)tokens - 1, {0, w.stride_m, w.stride_s}) + 1;
    *lo = first < w.nk ? first : w.nk;
    *hi = end < *lo ? *lo : end < w.nk ? end : w.nk;
}

enum { PIECES = 4 }; /* more than are planned and not yet ended */

template <int D, typename W> struct shared;

/* The second branch has lists; the others' pieces are its. */
struct three_branches {
    typedef sm90_gated call;
    typedef gated_maps maps;
    typedef gated_turn turn;
    static constexpr bool MASKS = false;
    /* Warps of the feeder that find gates; warps that write sums. */
    static constexpr int GATE_WARPS = 1, SUMMING = 4;

    static __device__ __forceinline__ void find(const call &a, const work_plan &plan, int32_t index,
                                                gated_turn *w, int32_t *number)
    {
        find_work<true, false, SECTION, false>(a.branch[SM90_FIRST_BRANCH], plan, index, w, number, a.by);
    }
    static __device__ __forceinline__ void begin_turn(int turn, gated_turn *w)
    {
        w->branch = (turn + SM90_FIRST_BRANCH) % SM90_BRANCHES;
        w->piece = turn / SM90_BRANCHES;
        w->first = w->branch == SM90_FIRST_BRANCH;
        w->last = last(turn);
    }
    static __device__ __forceinline__ bool last(int turn)
    {
        return turn % SM90_BRANCHES == SM90_BRANCHES - 1;
    }
    static __device__ __forceinline__ const attend_kernel &mask(const call &a, const turn &w)
    {
        return a.branch[w.branch];
    }
    static __device__ __forceinline__ bool listed(const turn &w) { return w.branch == 1; }
    static __device__ __forceinline__ bool needs_q(const turn &w) { return w.queries > 0 && w.first; }
    static __device__ __forceinline__ const CUtensorMap &k(const maps &m, const turn &w)
    {
        return m.k[w.branch];
    }
    static __device__ __forceinline__ const CUtensorMap &v(const maps &m, const turn &w)
    {
        return m.v[w.branch];
    }
    static __device__ __forceinline__ int box(const call &, const work_plan &plan, const turn &w)
    {
        return w.branch == 1 ? plan.box : 128;
    }
    static __device__ __forceinline__ bool makes_list(const call &a) { return a.choice.here; }
    static __device__ __forceinline__ void fetch_maps(const maps &m);
    /* Blocks in pairs: sm90_few/kernel.cuh. */
    static __device__ __forceinline__ void arrive_peer(const call &) {}
    static __device__ __forceinline__ void wait_peer(const call &) {}
    static __device__ __forceinline__ void end_peer(const call &) {}
    static __device__ __forceinline__ int32_t first_piece(const call &, const work_plan &)
    {
        return (int32_t)blockIdx.x;
    }
    static __device__ __forceinline__ int32_t piece_after(const call &, const work_plan &plan, int32_t)
    {
        return next_piece(plan);
    }
    static __device__ __forceinline__ void share(const call &, const work_plan &, int32_t, gated_turn *) {}
    template <typename T, int D, typename W>
    static __device__ __forceinline__ void make_lists(const call &a, shared<D, W> &sm);
    template <int D, typename W>
    static __device__ __forceinline__ void plan_pieces(const call &a, const work_plan &plan,
                                                       shared<D, W> &sm);
    template <typename T, int D, typename W>
    static __device__ __forceinline__ void make_gates(const call &a, int part, shared<D, W> &sm);
    template <int D, typename W>
    static __device__ __forceinline__ void copy_others(const call &a, const work_plan &plan, const maps &m,
                                                       const turn &w, shared<D, W> &sm);
    struct row_masks {
    };
    static __device__ __forceinline__ void find_whole(turn &w, const int32_t *list, int kept, int block);
    template <typename T, int D, typename W>
    static __device__ __forceinline__ void walk(const call &a, shared<D, W> &sm, int group);
};

/* The copy engine reads a map from memory when it first uses it. */
__device__ __forceinline__ void three_branches::fetch_maps(const maps &m)
{
    if (threadIdx.x != 32) return;
    tma_prefetch(m.q);
#pragma unroll
    for (int i = 0; i < SM90_BRANCHES; i++) {
        tma_prefetch(m.k[(i + SM90_FIRST_BRANCH) % SM90_BRANCHES]);
        tma_prefetch(m.v[(i + SM90_FIRST_BRANCH) % SM90_BRANCHES]);
    }
}

/* HELPERS: the feeder's warps beside those that copy and plan. Registers a thread: FEED of the feeding
 * warpgroup's, COMPUTE of the others'. */
enum { STAGES = 2, HELPERS = 2, GROUPS = 2, M = 64 * GROUPS, KEYS = 128, FEED = 72, COMPUTE = 216 };
static_assert(FEED + GROUPS * COMPUTE <= (GROUPS + 1) * (512 / (GROUPS + 1) / 8 * 8),
              "more registers than a block is launched with: its warps would wait for them for ever");

template <int D, typename W> struct __align__(1024) shared
{
    typedef uint16_t panel_row[64];
    panel_row q[D / 64][M], k[STAGES][D / 64][KEYS], v[STAGES][D / 64][KEYS];
    /* The threads' sums of the branches; before them, the rows of the tile's other piece and the sums of its
     * rows. */
    union {
        float4 sums[D / 8][M * 2];
        struct {
            panel_row q[D / 64][M];
            float sum[D];
        } other;
    };
    ring<1> queries;
    ring<STAGES> keys, values;
    stage_barriers<STAGES> searched; /* V of a stage is finite */
    ring<SM90_BRANCHES> plans;
    stage_barriers<1> gates_full, list_full, other_full, sums_full, sums_read;
    int32_t nonfinite[STAGES]; /* something was found in V */
    gated_turn plan[SM90_BRANCHES];
    int32_t list[W::MASKS ? 1 : SM90_GATED_LIST], scratch[W::MASKS ? 1 : SM90_GATED_LIST];
    float gates[M][SM90_BRANCHES];
    int32_t again[PIECES]; /* a piece ended with something that is not finite */
    uint32_t masks[W::MASKS ? SM90_MASKS : 1][SM90_MASK_WORDS];

    /* One thread. */
    __device__ __forceinline__ void init()
    {
        queries.init(1, 4 * GROUPS);
        keys.init(1, 4 * GROUPS);
        values.init(1, 4 * GROUPS);
        searched.init(WARP_ARRIVALS);
        plans.init(WARP_ARRIVALS, (1 + HELPERS + 4 * GROUPS) * WARP_ARRIVALS);
        gates_full.init(W::GATE_WARPS * WARP_ARRIVALS);
        list_full.init(WARP_ARRIVALS);
        other_full.init(1);
        sums_full.init(W::SUMMING * WARP_ARRIVALS);
        sums_read.init(WARP_ARRIVALS);
        mbar_init_done();
    }
};

/* The plan of a turn, and its clean list, stay from wait_turn() to free_turn(). */
template <typename S> __device__ __forceinline__ gated_turn &wait_turn(S &sm, int turn)
{
    const auto at = ring_place<SM90_BRANCHES>::of(turn);
    sm.plans.wait_full(at);
    return sm.plan[at.stage];
}

/* Waits for a list that is left after its plan. */
template <typename S> __device__ __forceinline__ void wait_list(const gated_turn &w, S &sm, int turn)
{
    if (w.list_later) sm.list_full.wait(ring_place<1>::of(turn / SM90_BRANCHES));
}

/* Each lane's, for what it read. */
template <typename S> __device__ __forceinline__ void free_turn(S &sm, int turn)
{
    sm.plans.give_back(ring_place<SM90_BRANCHES>::of(turn));
}

/* Waits until the turn whose place `turn` takes has ended. */
template <typename S> __device__ __forceinline__ void wait_end_before(S &sm, int turn)
{
    sm.plans.wait_free(ring_place<SM90_BRANCHES>::of(turn));
}

} // namespace sm90_gate

#endif
