/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * kernel.cuh - lists by probability on Hopper, for bf16 and f16 and lists of 4, 8 or 16 rows (one
 * token of as many heads, mostly); the scores stay on the chip.
 *
 * A persistent block is a warpgroup whose first warp feeds and three (two above D = 128) that compute, 64
 * rows each. A warp's 16 rows are one list, two or four, wholly its own: it holds them as the A operand in
 * registers, so that shared memory carries nothing but entries. It walks the entries 128 at a time: S = Q K^T
 * (wgmma), p = exp(S - lse), the sum over each list's rows by a butterfly among the lanes, which gives every
 * lane its part of the 128 sums. These go to shared memory, and the lists take those of up to four steps at
 * once (select/lists.cuh), which costs less than one step after another.
 * Warpgroups wait for nothing but entries, so that one's products run beside the others' exponentials and
 * lists.
 *
 * The feeding warp takes pieces (longest first, by a counter: no result depends on who computes them), puts
 * their places in shared memory, and copies their rows and entries by TMA; rows of the next piece as soon as
 * all warps hold this one's. The warp beside it makes notes for the next piece: the statistics of its rows
 * and what its lists choose from.
 *
 * Registers at D = 128: Q 32, S 64 of 152. Shared memory: Q 48 KB, entries 96 KB. Limit: the tensor cores
 * and, as long, the exponentials at 16 a clock and SM.
 */
#ifndef QUERN_CUDA_SELECT_SM90_KERNEL_CUH
#define QUERN_CUDA_SELECT_SM90_KERNEL_CUH

#include "select/lists.cuh"
#include "hopper/products.cuh"
#include "hopper/schedule.cuh"
#include "hopper/tma.cuh"
#include "common/fold.cuh"
#include "select/sm90/params.cuh"

namespace sm90_select_softmax
{

enum { STEP = 128, STAGES = 3, PLANS = 2, MOST = SM90_SELECT_MOST };

/* Above D = 128 registers suffice for two warpgroups. */
template <int DK> struct shape {
    static constexpr int GROUPS = DK <= 128 ? 3 : 2, ROWS = 64 * GROUPS, COMPUTING = 4 * GROUPS,
                         THREADS_ALL = 128 * (GROUPS + 1);
    static constexpr int FEED = GROUPS == 3 ? 56 : 40, COMPUTE = GROUPS == 3 ? 152 : 232; /* registers */
};

struct maps {
    CUtensorMap q, k;
};

/* A piece of one sequence: `view` in dim 0 of the views, rows q0 ... and k0 ... in dim 1. */
struct piece {
    int32_t view, q0, nq, k0, nk;
    int32_t unit, head0, kvh;
    int32_t query;    /* the first; -1: no more pieces */
    int32_t list_row; /* of the first list */
    int32_t steps;    /* of STEP entries */
};

__device__ __forceinline__ sequence sequence_of(const piece &w)
{
    return {0, w.view, w.q0, w.nq, w.k0, w.nk};
}

/* What the lists of a warp hold, LISTS of them, and scores that they have not taken yet, behind older ones
 * that their blocks overlap. */
template <int LISTS, int SCORES> struct warp_lists {
    uint32_t room[64];
    uint32_t keys[LISTS][MOST];
    int32_t indices[LISTS][MOST];
    float scores[LISTS][SCORES];
};

/* LIST: rows of a list. */
template <int DK, int LIST_ROWS> struct __align__(1024) shared
{
    static constexpr int LIST = LIST_ROWS, ROWS = shape<DK>::ROWS, COMPUTING = shape<DK>::COMPUTING,
                         LISTS = 16 / LIST; /* of a warp */
    static constexpr int BATCH =
        LIST == 16 ? 4 : LIST / (DK <= 128 ? 2 : 4); /* steps whose scores a list takes at once */
    static constexpr int SCORES = SM90_SELECT_HISTORY + BATCH * STEP;
    typedef warp_lists<LISTS, SCORES> own_lists;

    typedef uint16_t panel_row[64];
    panel_row q[DK / 64][ROWS], k[STAGES][DK / 64][STEP];
    ring<1> rows;
    ring<STAGES> entries;
    ring<PLANS> plans;
    stage_barriers<PLANS> noted; /* what is noted about a plan's piece: */
    piece plan[PLANS];
    float lse2[PLANS][ROWS];
    int32_t seen[PLANS][ROWS]; /* by query */
    contest contests[PLANS][COMPUTING][LISTS];
    __align__(16) own_lists lists[COMPUTING];

    /* One thread. */
    __device__ __forceinline__ void init()
    {
        rows.init(1, COMPUTING * READER_ARRIVALS);
        entries.init(1, COMPUTING * READER_ARRIVALS);
        plans.init(1, (COMPUTING + 1) * WARP_ARRIVALS);
        noted.init(WARP_ARRIVALS);
        mbar_init_done();
    }
};

/* Piece `index`; its query is -1 where a varlen batch has no such piece. All lanes of the warp call. */
__device__ __forceinline__ void find_lists_of_piece(const select_kernel &s, const sm90_select_plan &plan,
                                                    int32_t index, piece *w)
{
    const attend_kernel &a = s.a;
    const int32_t i = plan.pieces - 1 - index / a.units; /* the longest causal ones first */
    w->unit = index % a.units;
    w->kvh = a.units == a.heads ? w->unit / a.group : w->unit;
    w->head0 = a.units == a.heads ? w->unit : w->unit * a.group;
    int32_t lists; /* of the sequences before */
    if (!find_piece(a.sq, i, plan.queries, w, &w->query, a.tile, &lists)) {
        w->query = -1;
        return;
    }
    w->list_row = lists + w->query / a.tile;
    int64_t last = (int64_t)w->query + plan.queries - 1;
    if (last > w->nq - 1) last = w->nq - 1;
    const int64_t end = mask_blocks_seen(a.causal != 0, w->nq, last, s.select_block) * s.s_over_d;
    w->steps = (int32_t)((end + STEP - 1) / STEP);
}

/* Varlen: list rows that no tile has. One warp of each block calls, with all lanes. */
__device__ __forceinline__ void pad_rest(const select_kernel &s)
{
    const seqs &sq = s.a.sq;
    int32_t lists = 0; /* of all sequences */
    if (sq.cu_q == NULL) return;
    for (int64_t b = threadIdx.x & 31; b < sq.batch; b += 32) {
        const int64_t n = cu_seqlens_at(sq.cu_q, b + 1, sq.n_q) - cu_seqlens_at(sq.cu_q, b, sq.n_q);
        if (n > 0) lists += (int32_t)((n + s.a.tile - 1) / s.a.tile);
    }
    lists = (int32_t)__reduce_add_sync(~0u, lists);
    for (int64_t row = lists + (int64_t)blockIdx.x; row < s.list_rows; row += gridDim.x)
        for (int u = 0; u < s.a.units; u++) pad_lists(s, 0, u, row, row + 1);
}

/* The feeding warp. */
template <int DK, int LIST>
__device__ __forceinline__ void feed(const select_kernel &s, const sm90_select_plan &plan, const maps &m,
                                     shared<DK, LIST> &sm)
{
    const bool lead = (threadIdx.x & 31) == 0;
    int32_t index = (int32_t)blockIdx.x;
    int n = 0, step = 0; /* pieces and steps so far */
    piece w = {};
    pad_rest(s);
    while (w.query >= 0) {
        if (index < plan.total) {
            find_lists_of_piece(s, plan, index, &w);
            index = next_piece(plan);
            if (w.query < 0) { /* varlen: other pieces may be there */
                w.query = 0;
                continue;
            }
        } else {
            w.query = -1;
        }
        const auto at = ring_place<PLANS>::of(n);
        sm.plans.wait_free(at);
        if (lead) {
            sm.plan[at.stage] = w;
            sm.plans.give(at);
        }
        if (w.query < 0) return;
        if (lead) {
            const auto here = ring_place<1>::of(n);
            sm.rows.wait_free(here);
            const uint32_t rows_full = sm.rows.expect(here, DK / 64 * plan.queries * s.a.hs * 128);
            for (int p = 0; p < DK / 64; p++)
                tma_load(stage_address(sm.q, p), m.q, rows_full, p * 64, w.head0, w.q0 + w.query, w.view);
            for (int t = 0; t < w.steps; t++, step++) {
                const auto stage = ring_place<STAGES>::of(step);
                sm.entries.wait_free(stage);
                const uint32_t full = sm.entries.expect(stage, sizeof sm.k[0]);
                for (int p = 0; p < DK / 64; p++)
                    tma_load(stage_address(sm.k, stage.stage) + p * STEP * 128, m.k, full, p * 64, w.kvh,
                             w.k0 + t * STEP, w.view);
            }
        }
        __syncwarp();
        n++;
    }
}

/* The warp that makes notes on each piece: the lse of its rows, times log2 e, the end of what its queries
 * see, and what its lists choose from. It waits for its readers and arrives for what it reads itself, though
 * the feeder's waiting orders both: racecheck follows no chain of barriers. */
template <int DK, int LIST>
__device__ __forceinline__ void make_notes(const select_kernel &s, const sm90_select_plan &plan,
                                           shared<DK, LIST> &sm)
{
    const attend_kernel &a = s.a;
    const int lane = threadIdx.x & 31;
    for (int i = 0;; i++) {
        const auto at = ring_place<PLANS>::of(i);
        sm.plans.wait_full(at);
        const piece &w = sm.plan[at.stage];
        if (w.query < 0) return;
        sm.plans.wait_free(at); /* ends at once: the feeder has waited */
        float *const lse2 = sm.lse2[at.stage];
        int32_t *const seen = sm.seen[at.stage];
        contest *const in = sm.contests[at.stage][0];
        const int left = w.nq - w.query, queries = left < plan.queries ? left : plan.queries;
        for (int r = lane; r < sm.ROWS; r += 32) {
            const int n = (int)quotient((uint32_t)r, a.by_hs);
            lse2[r] = n < queries
                          ? 1.4426950408889634f *
                                a.lse.p[(int64_t)w.view * a.lse.s[0] + (w.head0 + r - n * a.hs) * a.lse.s[1] +
                                        ((int64_t)w.q0 + w.query + n) * a.lse.s[2]]
                          : 0.0f;
        }
        for (int n = lane; n < queries; n += 32) {
            int ignore;
            row_keys(a, sequence_of(w), w.query + n, &ignore, &seen[n]);
        }
        for (int l = lane; l * a.tile < queries; l += 32) in[l] = find_contest(s, w.nq, w.query + l * a.tile);
        sm.noted.arrive(at);
        sm.plans.give_back(at);
    }
}

/* Sums over the rows of each list, to scores[list][SCORES]. p: probabilities of rows lane / 4 and that + 8,
 * columns 8 i + 2 (lane % 4) ... */
template <int LIST, int SCORES>
__device__ __forceinline__ void sum_rows(const float (&p)[16][4], float *scores)
{
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int h = 0; h < (LIST == 16 ? 1 : 2); h++) {
        float x[32];
#pragma unroll
        for (int i = 0; i < 32; i++)
            x[i] = LIST == 16 ? p[i / 2][i % 2] + p[i / 2][2 + i % 2] : p[i / 2][h * 2 + i % 2];
        constexpr int LEFT = LIST == 4 ? 8 : 4; /* values that a lane ends with */
        if (LIST == 4) {
            fold<32>(x, 8);
            fold<16>(x, 4);
        } else {
            fold<32>(x, 16);
            fold<16>(x, 8);
            fold<8>(x, 4);
        }
        const int list = LIST == 16 ? 0 : LIST == 8 ? h : h * 2 + (lane >> 4);
        const int first = (LIST == 4 ? lane >> 2 & 3 : lane >> 2) * (LEFT / 2) * 8 + (lane & 3) * 2;
#pragma unroll
        for (int i = 0; i < LEFT; i += 2)
            *(float2 *)(scores + list * SCORES + first + i / 2 * 8) = make_float2(x[i], x[i + 1]);
    }
}

/* Probabilities in place of the products. `seen`: every row sees all columns from e0 on. */
__device__ __forceinline__ void exponentiate(float (&x)[16][4], float scale_log2, const float (&lse2)[2],
                                             const int (&hi)[2], int e0, bool seen)
{
#pragma unroll
    for (int i = 0; i < 16; i++)
#pragma unroll
        for (int c = 0; c < 4; c++) x[i][c] = exp2_fast(fmaf(x[i][c], scale_log2, -lse2[c >> 1]));
    if (seen) return;
#pragma unroll
    for (int i = 0; i < 16; i++)
#pragma unroll
        for (int c = 0; c < 4; c++)
            if (e0 + i * 8 + (int)(threadIdx.x & 3) * 2 + (c & 1) >= hi[c >> 1]) x[i][c] = 0.0f;
}

/* The notes about this lane's two rows: their statistics and what they see. */
template <typename S>
__device__ __forceinline__ void read_notes(const attend_kernel &a, const S &sm, int plan, int row,
                                           int queries, float (&lse2)[2], int (&hi)[2])
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int r = row + h * 8, n = (int)quotient((uint32_t)r, a.by_hs);
        lse2[h] = sm.lse2[plan][r];
        hi[h] = n < queries ? sm.seen[plan][n] : 0;
    }
}

template <int LISTS, int SCORES> __device__ __forceinline__ void empty_lists(warp_lists<LISTS, SCORES> &x)
{
    const int lane = threadIdx.x & 31;
    for (int l = 0; l < LISTS; l++) {
        x.keys[l][lane] = 0;
        x.scores[l][lane] = 0.0f;
    }
    __syncwarp();
}

template <int LISTS, int SCORES>
__device__ __forceinline__ best_list best_of(warp_lists<LISTS, SCORES> &x, const contest *in, int l)
{
    return {x.keys[l], x.indices[l], in[l].size};
}

/* A warp's `lists` lists take the scores of entries [e0, e0 + entries). */
template <int LISTS, int SCORES>
__device__ __forceinline__ void take_scores(const select_kernel &s, warp_lists<LISTS, SCORES> &x,
                                            const contest *in, int lists, int e0, int entries)
{
    constexpr int BATCH = (SCORES - SM90_SELECT_HISTORY) / STEP, FEW = BATCH > 1 ? BATCH / 2 : 1; /* steps */
    const int lane = threadIdx.x & 31;
    __syncwarp();
#pragma unroll 1
    for (int l = 0; l < lists; l++) {
        float *scores = x.scores[l] + SM90_SELECT_HISTORY;
        if (entries <= FEW * STEP)
            close_many<FEW * STEP / 32, true>(s, in[l], best_of(x, in, l), e0, entries, scores, x.room);
        else close_many<BATCH * STEP / 32, true>(s, in[l], best_of(x, in, l), e0, entries, scores, x.room);
        if (s.history == 0) continue;
        __syncwarp(); /* all have read the history */
        scores[lane - SM90_SELECT_HISTORY] = scores[lane + entries - SM90_SELECT_HISTORY];
    }
    __syncwarp();
}

/* A computing warpgroup. */
template <typename T, int DK, int LIST>
__device__ __forceinline__ void compute(const select_kernel &s, const sm90_select_plan &plan,
                                        shared<DK, LIST> &sm, int group)
{
    typedef shared<DK, LIST> memory;
    const attend_kernel &a = s.a;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3, row0 = group * 64 + warp * 16;
    auto &own = sm.lists[group * 4 + warp];
    int step = 0;
    for (int n = 0;; n++) {
        const auto at = ring_place<PLANS>::of(n);
        sm.plans.wait_full(at);
        const piece &w = sm.plan[at.stage];
        if (w.query < 0) return;
        float lse2[2], x[16][4];
        int hi[2];
        uint32_t q[DK / 16][4];
        empty_lists(own);
        const contest *const in = sm.contests[at.stage][group * 4 + warp];
        const int left = w.nq - w.query, queries = left < plan.queries ? left : plan.queries;
        const int ahead = (queries + a.tile - 1) / a.tile - row0 / LIST;
        const int lists = ahead < 0 ? 0 : ahead < memory::LISTS ? ahead : memory::LISTS;
        sm.noted.wait(at);
        read_notes(a, sm, at.stage, row0 + (lane >> 2), queries, lse2, hi);
        sm.rows.wait_full(ring_place<1>::of(n));
#pragma unroll
        for (int c = 0; c < DK / 16; c++) load_a<memory::ROWS>(q[c], smem_address(sm.q), row0, c * 16, lane);
        give_back_by_warp(sm.rows, ring_place<1>{});
        const int steps = w.steps;
        for (int t = 0; t < steps; t++, step++) {
            const auto stage = ring_place<STAGES>::of(step);
            const uint32_t k = stage_address(sm.k, stage.stage);
            sm.entries.wait_full(stage);
            wg_start();
#pragma unroll
            for (int c = 0; c < DK; c += 16) {
                const uint64_t entries = wg_tile(k + (c >> 6) * (STEP * 128) + (c & 63) * 2, 0);
                if (c == 0) wg_rs_wide<T, STEP, false, false>(x, q[c / 16], entries);
                else wg_rs_wide<T, STEP, true, false>(x, q[c / 16], entries);
            }
            wg_commit();
            wg_wait<0>(x);
            give_back_by_warp(sm.entries, stage);
            const int e0 = t * STEP, held = t % memory::BATCH;
            exponentiate(x, a.scale_log2, lse2, hi, e0,
                         __all_sync(~0u, e0 + STEP <= hi[0] && e0 + STEP <= hi[1]));
            sum_rows<LIST, memory::SCORES>(x, own.scores[0] + SM90_SELECT_HISTORY + held * STEP);
            if (held == memory::BATCH - 1 || t + 1 == steps)
                take_scores(s, own, in, lists, e0 - held * STEP, (held + 1) * STEP);
        }
        const int row = w.list_row + row0 / LIST;
        for (int l = 0; l < lists; l++)
            if (row + l < s.list_rows) write_blocks(s, in[l], best_of(own, in, l), w.view, w.unit, row + l);
        sm.plans.give_back(at);
    }
}

template <typename T, int DK, int LIST>
__global__ void __launch_bounds__(shape<DK>::THREADS_ALL, 1)
    select_softmax_sm90(const __grid_constant__ select_kernel s,
                        const __grid_constant__ sm90_select_plan plan, const __grid_constant__ maps m)
{
#ifdef QUERN_WGMMA
    extern __shared__ __align__(1024) char smem[];
    shared<DK, LIST> &sm = *(shared<DK, LIST> *)smem;
    if (threadIdx.x == 0) sm.init();
    __syncthreads();
    const int group = __shfl_sync(~0u, threadIdx.x >> 7, 0);
    const int warp = __shfl_sync(~0u, threadIdx.x >> 5 & 3, 0);
    if (group == shape<DK>::GROUPS) {
        registers_down<shape<DK>::FEED>();
        if (warp == 0) feed(s, plan, m, sm);
        if (warp == 1) make_notes(s, plan, sm);
    } else {
        registers_up<shape<DK>::COMPUTE>();
        compute<T>(s, plan, sm, group);
    }
#endif
}

template <typename T, int DK, int LIST>
static quern_status launch(const select_kernel &s, const sm90_select_call &call)
{
    sm90_select_plan plan = {0, 0, shape<DK>::ROWS / s.a.hs, NULL};
    const int64_t pieces = piece_bound(call.args->seqs, plan.queries, 1), total = pieces * s.a.units;
    if (total == 0) return QUERN_OK;
    plan.pieces = (int32_t)pieces;
    plan.total = (int32_t)total;
    maps m;
    quern_status status = tma_describe(&m.q, call.args->q, s.a.hs, plan.queries);
    if (status == QUERN_OK) status = tma_describe(&m.k, call.args->keys, 1, STEP);
    if (status == QUERN_OK && total > call.multiprocessors) {
        plan.taken = (int32_t *)(((uintptr_t)call.workspace + 3) & ~(uintptr_t)3);
        status = cuda_report(cudaMemsetAsync(plan.taken, 0, sizeof *plan.taken, call.stream),
                             "select: the counter of pieces");
    }
    if (status != QUERN_OK) return status;
    const unsigned blocks = (unsigned)(total < call.multiprocessors ? total : call.multiprocessors);
    return launch_shared({call.stream, NULL}, select_softmax_sm90<T, DK, LIST>, dim3(blocks),
                         shape<DK>::THREADS_ALL, sizeof(shared<DK, LIST>), "select", s, plan, m);
}

template <typename T, int DK> static quern_status run(const select_kernel &s, const sm90_select_call &call)
{
    const int rows = s.a.tile * s.a.hs;
    return rows == 16  ? launch<T, DK, 16>(s, call)
           : rows == 8 ? launch<T, DK, 8>(s, call)
                       : launch<T, DK, 4>(s, call);
}

} // namespace sm90_select_softmax

#endif
