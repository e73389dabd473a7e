/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* turns.cuh - what the blocks of kernel.cuh's kernels walk: a piece's rows by one branch after
 * another. */
#ifndef QUERN_CUDA_ATTEND_GATE_SM90_TURNS_CUH
#define QUERN_CUDA_ATTEND_GATE_SM90_TURNS_CUH

#include "attend/sm90_forward/kernel.cuh"
#include "attend_gate/sm90/choose_by_mean.cuh"
#include "attend_gate/sm90/params.cuh"

namespace sm90_forward
{

struct gated_maps {
    CUtensorMap q, k[SM90_BRANCHES], v[SM90_BRANCHES];
};

/* A branch of a piece. */
struct gated_turn : work {
    int32_t branch, piece;        /* the piece's number among the block's */
    int32_t whole_from, whole_to; /* the tiles that every row sees whole */
    int32_t before, after;        /* query q's first key is q + before; its keys begin in q + after tokens */
    uint32_t stride_m, stride_s;  /* how many tokens apart keys begin, as fast_div has it */
    float scale_log2;
    bool first, last;
    bool again;      /* V is searched */
    bool list_later; /* warp 1 makes the list */
    bool absent;     /* the other block of the pair walks this branch of the rows */
    bool lent;       /* the other block stores these rows' O */
    bool borrows;    /* and takes into it what this one has left */
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

/* The second branch has lists; the others' pieces are its. */
struct three_branches {
    typedef sm90_gated call;
    typedef gated_maps maps;
    typedef gated_turn turn;
    static constexpr bool LISTS = false, GATED = true, MASKS = false;
    /* Warps of the feeder that find gates; warps that leave sums. */
    static constexpr int TURNS = SM90_BRANCHES, LISTS_AHEAD = 1, LIST_MOST = SM90_GATED_LIST, SEARCHERS = 1,
                         GATE_WARPS = 1, SUMMING = 4;
    /* Behind what says whether each piece has something that is not finite: barriers of what stands in the
     * place of the rows' sums before them, rows of the tile's other piece and sums of its rows, and of sums
     * for another block. */
    static constexpr int OTHER_FULL = 4 * PIECES, SUMS_FULL = OTHER_FULL + 8, SUMS_READ = SUMS_FULL + 8,
                         EXTRA = SUMS_READ + 8;

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
    static __device__ __forceinline__ void meet(const call &) {}
    static __device__ __forceinline__ void meet_wait(const call &) {}
    static __device__ __forceinline__ void part(const call &) {}
    static __device__ __forceinline__ int32_t first_piece(const call &, const work_plan &)
    {
        return (int32_t)blockIdx.x;
    }
    static __device__ __forceinline__ int32_t piece_after(const call &, const work_plan &plan, int32_t)
    {
        return next_piece(plan);
    }
    static __device__ __forceinline__ void share(const call &, const work_plan &, int32_t, gated_turn *) {}
    template <typename T, int DK, int DV, typename W>
    static __device__ __forceinline__ void leave_lists(const call &a, char *smem, uint32_t base);
    template <int DK, int DV, typename W>
    static __device__ __forceinline__ void plan_pieces(const call &a, const work_plan &plan, char *smem,
                                                       uint32_t base);
    template <typename T, int DK, int DV, typename W>
    static __device__ __forceinline__ void leave_gates(const call &a, int part, char *smem, uint32_t base);
    template <typename W> static __device__ __forceinline__ void init_more(uint32_t extra)
    {
        mbar_init(extra + OTHER_FULL, 1);
        mbar_init(extra + SUMS_FULL, W::SUMMING * WARP_ARRIVALS);
        mbar_init(extra + SUMS_READ, WARP_ARRIVALS);
    }
    template <int DK, int DV, typename W>
    static __device__ __forceinline__ void copy_others(const call &a, const work_plan &plan, const maps &m,
                                                       const turn &w, uint32_t base);
    struct row_masks {
    };
    template <int KEYS>
    static __device__ __forceinline__ void find_whole(turn &w, const int32_t *list, int kept, int block);
    template <typename T, int DK, int DV, typename W>
    static __device__ __forceinline__ void walk(const call &a, char *smem, uint32_t base, int group);
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

/* The pieces that the block may have to compute again. */
template <typename AT> __device__ __forceinline__ int32_t *odd_piece(char *smem, int piece)
{
    return (int32_t *)(smem + AT::EXTRA) + piece % PIECES;
}

} // namespace sm90_forward

#endif
