/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * kernel.cuh - NSA's three branches and their gate in one pass where lists belong to few rows, a
 * token of some heads mostly, of short sequences: sm90/kernel.cuh's kernel, whose selected branch walks all
 * keys that a piece's rows see.
 *
 * Neighbours' lists together name nearly all blocks of a short sequence. So a piece has the rows of several
 * lists, and each list a mask, a bit for each block, in shared memory. A tile of 128 keys has two halves,
 * each in one block: a row takes the maximum and the exponentials of those halves that its mask has. So a
 * tile costs what it costs dense attention.
 *
 * Where all compressed entries fit one tile, the warps choose the blocks themselves (choose_blocks.cuh): they
 * have the probabilities of their rows in registers when they walk the compressed branch, which has a tile
 * even where no entry is seen. Elsewhere warp 3 of the feeder makes masks of the lists that it finds in
 * memory.
 *
 * Where every block has one piece, the longest piece and the shortest differ by 19 tiles of 22 at 2k. So
 * blocks are launched in pairs, as clusters, of a long piece and a short one. The block with the short one
 * also walks the long one's window and keeps its sums in its own shared memory; the other block adds them at
 * its end. The sum of three branches has the same bits either way.
 *
 * Limit: the tiles of keys, those of dense attention and of the other two branches.
 */
#ifndef QUERN_CUDA_ATTEND_GATE_SM90_FEW_KERNEL_CUH
#define QUERN_CUDA_ATTEND_GATE_SM90_FEW_KERNEL_CUH

#include "attend_gate/sm90/kernel.cuh"
#include "attend_gate/sm90_few/choose_blocks.cuh"

namespace sm90_gate
{

struct few_branches : three_branches {
    static constexpr bool MASKS = true;
    static constexpr int GATE_WARPS = 2, SUMMING = 8;

    static __device__ __forceinline__ void find(const call &a, const work_plan &plan, int32_t index,
                                                gated_turn *w, int32_t *number)
    {
        find_work<false, true, SECTION, false>(a.branch[SM90_FIRST_BRANCH], plan, index, w, number, a.by);
    }
    /* Block 2 p of a pair has the long piece, number p, block 2 p + 1 the short one. Of the first `helped`
     * pairs the latter walks the first branch of the long one, too, afterwards. */
    static __device__ __forceinline__ void arrive_peer(const call &a)
    {
        if (a.pairs) cluster_sync_arrive();
    }
    static __device__ __forceinline__ void wait_peer(const call &a)
    {
        if (a.pairs) cluster_sync_wait();
    }
    /* A block ends when the other one has read what it left. */
    static __device__ __forceinline__ void end_peer(const call &a)
    {
        arrive_peer(a);
        wait_peer(a);
    }
    static __device__ __forceinline__ int32_t first_piece(const call &a, const work_plan &plan)
    {
        const int32_t block = (int32_t)blockIdx.x, pair = block >> 1;
        return !a.pairs ? block : block & 1 ? plan.total - 1 - pair : pair;
    }
    static __device__ __forceinline__ int32_t piece_after(const call &a, const work_plan &plan, int32_t piece)
    {
        const int32_t pair = (int32_t)blockIdx.x >> 1;
        if (!a.pairs) return next_piece(plan);
        return pair < a.helped && piece == plan.total - 1 - pair ? pair : plan.total;
    }
    static __device__ __forceinline__ void share(const call &a, const work_plan &, int32_t piece,
                                                 gated_turn *w)
    {
        const int32_t pair = (int32_t)blockIdx.x >> 1;
        const bool shared = a.pairs && pair < a.helped && piece == pair && !w->again;
        w->for_peer = shared && (blockIdx.x & 1) == 1;
        w->adds_peer = shared && !w->for_peer;
        w->peer_walks = shared && w->for_peer != w->first;
        if (w->peer_walks) w->slots = 0;
    }
    static __device__ __forceinline__ bool listed(const turn &) { return false; }
    static __device__ __forceinline__ bool masked(const turn &w) { return w.branch == 1; }
    static __device__ __forceinline__ int box(const call &, const work_plan &plan, const turn &)
    {
        return plan.box;
    }
    /* Which halves of tile t this thread's row h takes, a bit each. */
    template <typename S>
    static __device__ __forceinline__ uint32_t halves_of(const call &a, int row, int t, const S &sm)
    {
        const uint32_t *mask = sm.masks[quotient((uint32_t)row, a.by_mask)];
        const uint32_t b0 = quotient((uint32_t)(t * KEYS), a.branch[1].by_block),
                       b1 = quotient((uint32_t)(t * KEYS + KEYS / 2), a.branch[1].by_block);
        return (mask[b0 >> 5] >> (b0 & 31) & 1) | (mask[b1 >> 5] >> (b1 & 31) & 1) << 1;
    }
    template <typename S>
    static __device__ __forceinline__ void make_masks(const call &a, const turn &w, S &sm);
    /* The words of a thread's masks that have the blocks of the tile at hand, and which halves of it a row
     * takes. */
    struct row_masks {
        uint32_t word[2], halves[2];
        int loaded; /* 0: none, else which words, counted from 1 */
    };
    template <typename S>
    static __device__ __forceinline__ void find_halves(row_masks &m, const call &a, int branch,
                                                       const int (&place)[2], int t, const S &sm);
    template <int NT>
    static __device__ __forceinline__ void weigh(float (&s)[NT][4], row_state &r, float (&shrink)[2],
                                                 float scale_log2, const row_masks &m, bool again);
    template <typename T, typename S, int OT>
    static __device__ __forceinline__ void add_nonfinite(float (&o)[OT][4], const call &a, const turn &w,
                                                         const row_state &r, const int (&place)[2], int t,
                                                         const S &sm);
    template <typename S, int NT>
    static __device__ __forceinline__ void choose_blocks(const float (&s)[NT][4], const call &a,
                                                         const turn &w, const row_state &r, S &sm)
    {
        choose_blocks_of(s, a.choice, a.branch[1], w, r, &sm.masks[0][0]);
    }
};

/* The planner makes masks of a piece's lists. */
template <typename S>
__device__ __forceinline__ void few_branches::make_masks(const call &call, const turn &w, S &sm)
{
    const attend_kernel &a = call.branch[1];
    const int lane = threadIdx.x & 31, lists = (w.queries + a.tile - 1) / a.tile;
    uint32_t *const masks = &sm.masks[0][0];
    if (call.choice.here || !masked(w) || w.queries <= 0) return;
    for (int i = lane; i < SM90_MASKS * SM90_MASK_WORDS; i += 32) masks[i] = 0;
    __syncwarp();
    const int32_t *list =
        a.list + w.view * a.list_stride[0] + w.unit * a.list_stride[1] + w.list_row * a.list_stride[2];
    for (int e0 = 0; e0 < a.list_k; e0 += 32) {
        const int e = e0 + lane;
#pragma unroll 8
        for (int l = 0; l < lists; l++) {
            const int32_t x = e < a.list_k ? list[l * a.list_stride[2] + e] : -1;
            if (x >= 0 && (int64_t)x * a.list_block < w.end)
                atomicOr(&masks[l * SM90_MASK_WORDS + (x >> 5)], 1u << (x & 31));
        }
    }
    __syncwarp();
}

/* softmax() of a tile whose halves a row takes or not. What a row does not take becomes 0, unless it is not
 * finite. */
template <int NT>
__device__ __forceinline__ void softmax_of_halves(float (&s)[NT][4], row_state &r, float (&shrink)[2],
                                                  float scale_log2, const uint32_t (&halves)[2])
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float most[2] = {-INFINITY, -INFINITY};
#pragma unroll
        for (int i = 0; i < NT; i++)
            most[i * 2 / NT] = fmaxf(most[i * 2 / NT], fmaxf(s[i][h * 2], s[i][h * 2 + 1]));
        float top = r.top[h];
        top = fmaxf(top, halves[h] & 1 ? most[0] : -INFINITY);
        top = fmaxf(top, halves[h] & 2 ? most[1] : -INFINITY);
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        const float base = top == -INFINITY ? 0.0f : top * scale_log2;
        const float less[2] = {halves[h] & 1 ? -base : -INFINITY, halves[h] & 2 ? -base : -INFINITY};
        shrink[h] = exp2_fast(r.top[h] * scale_log2 - base);
        r.top[h] = top;
        float sum = r.sum[h] * shrink[h];
#pragma unroll
        for (int i = 0; i < NT; i++) {
            s[i][h * 2] = exp2_fast(fmaf(s[i][h * 2], scale_log2, less[i * 2 / NT]));
            s[i][h * 2 + 1] = exp2_fast(fmaf(s[i][h * 2 + 1], scale_log2, less[i * 2 / NT]));
            sum += s[i][h * 2] + s[i][h * 2 + 1];
        }
        r.sum[h] = sum;
    }
}

template <typename S>
__device__ __forceinline__ void few_branches::find_halves(row_masks &m, const call &a, int branch,
                                                          const int (&place)[2], int t, const S &sm)
{
    m.halves[0] = m.halves[1] = 3;
    if (branch != 1) {
        m.loaded = 0;
        return;
    }
    const int b0 = (int)quotient((uint32_t)(t * KEYS), a.branch[1].by_block),
              b1 = (int)quotient((uint32_t)(t * KEYS + KEYS / 2), a.branch[1].by_block);
    if ((b0 >> 5) + 1 != m.loaded) { /* b1 is in the same word, for b0 is even where they differ */
        m.loaded = (b0 >> 5) + 1;
#pragma unroll
        for (int h = 0; h < 2; h++) m.word[h] = sm.masks[quotient((uint32_t)place[h], a.by_mask)][b0 >> 5];
    }
#pragma unroll
    for (int h = 0; h < 2; h++)
        m.halves[h] = (m.word[h] >> (b0 & 31) & 1) | (m.word[h] >> (b1 & 31) & 1) << 1;
}

/* S becomes its exponentials. */
template <int NT>
__device__ __forceinline__ void few_branches::weigh(float (&s)[NT][4], row_state &r, float (&shrink)[2],
                                                    float scale_log2, const row_masks &m, bool again)
{
    if (again)
#pragma unroll
        for (int i = 0; i < NT; i++)
#pragma unroll
            for (int c = 0; c < 4; c++)
                if (!(m.halves[c >> 1] >> i * 2 / NT & 1)) s[i][c] = -INFINITY;
    softmax_of_halves(s, r, shrink, scale_log2, m.halves);
}

/* Adds what is not finite in the V of tile t to the rows that see it. */
template <typename T, typename S, int OT>
__device__ __forceinline__ void few_branches::add_nonfinite(float (&o)[OT][4], const call &call,
                                                            const turn &w, const row_state &r,
                                                            const int (&place)[2], int t, const S &sm)
{
    row_state part = r;
    if (!masked(w)) {
        add_branch_nonfinite<T, KEYS>(o, call.branch[w.branch], w, NULL, r, t * KEYS);
        return;
    }
#pragma unroll 1
    for (int half = 0; half < 2; half++) {
        const int key0 = t * KEYS + half * (KEYS / 2);
#pragma unroll
        for (int h = 0; h < 2; h++) part.hi[h] = halves_of(call, place[h], t, sm) >> half & 1 ? r.hi[h] : 0;
        attend_parts::add_nonfinite<T, KEYS / 2, OT, false>(o, call.branch[1], w, NULL, part, key0);
    }
}

template <typename T, int D>
__global__ void __launch_bounds__(128 * (GROUPS + 1), 1)
    attend_gated_few_sm90(const __grid_constant__ sm90_gated a, const __grid_constant__ work_plan plan,
                          const __grid_constant__ gated_maps m)
{
    take_turns<T, D, few_branches>(a, plan, m);
}

/* Tiles of keys of the rows of piece `index` in a branch, where all blocks have one sequence's. */
static inline int64_t tiles_of_piece(const attend_kernel &a, const work_plan &plan, int64_t index, int keys)
{
    const key_mask mask = mask_of(a);
    const int64_t first = (plan.pieces - 1 - index / a.units) * plan.queries,
                  end = first + plan.queries < a.sq.n_q ? first + plan.queries : a.sq.n_q;
    const int64_t slots =
        mask_keys(&mask, a.sq.n_q, a.sq.n_kv, end - 1).hi - mask_keys(&mask, a.sq.n_q, a.sq.n_kv, first).lo;
    return slots > 0 ? (slots + keys - 1) / keys : 0;
}

/* Makes pairs of a longest piece and a shortest one and so on, where each block has one; `helped`: the first
 * so many, whose longer piece stays the longer one without its first branch. */
static inline void find_pairs(const work_plan &plan, int keys, const sm90_device &device, sm90_gated *a)
{
    enum { START = 2 }; /* tiles that another piece costs a block besides */
    const seqs &s = a->branch[1].sq;
    a->pairs = plan.total <= device.multiprocessors && plan.total % 2 == 0 && s.cu_q == NULL &&
               s.batch == 1 && a->branch[1].units <= SECTION;
    for (a->helped = 0; a->pairs && a->helped < plan.total / 2; a->helped++) {
        int64_t longer = 0, shorter = 0;
        for (int i = 0; i < SM90_BRANCHES; i++) {
            longer += tiles_of_piece(a->branch[i], plan, a->helped, keys);
            shorter += tiles_of_piece(a->branch[i], plan, plan.total - 1 - a->helped, keys);
        }
        const int64_t part = tiles_of_piece(a->branch[SM90_FIRST_BRANCH], plan, a->helped, keys);
        if (shorter + part + START >= longer) break;
    }
    a->pairs = a->helped > 0;
}

template <typename T, int D>
static quern_status launch_gated_few(const attend_gate_args *args, const sm90_gated &a,
                                     const sm90_device &device, void *workspace, cudaStream_t stream)
{
    const attend_kernel &listed = a.branch[1];
    work_plan plan = {0, 0, M / listed.hs / listed.tile * listed.tile, 1, KEYS, NULL};
    plan.pieces = (int32_t)piece_bound(args->branch[1].seqs, plan.queries, 1);
    plan.total = plan.pieces * listed.units;
    sm90_gated paired = a;
    find_pairs(plan, KEYS, device, &paired);
    return launch_pieces<T, D, few_branches>(args, paired, device, workspace, stream, plan,
                                             attend_gated_few_sm90<T, D>);
}

} // namespace sm90_gate

#endif
