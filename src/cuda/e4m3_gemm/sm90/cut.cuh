/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* cut.cuh - how a product of few rows is cut: by sm90_few or sm90_short, the tokens of a tile, and the blocks
 * that share one. What a cut costs, in 10 ns of an H200: docs/notes/linear-sm90.md has the times. */
#ifndef QUERN_CUDA_E4M3_GEMM_SM90_CUT_CUH
#define QUERN_CUDA_E4M3_GEMM_SM90_CUT_CUH

#include "e4m3_gemm/sm90/few.cuh"

#include <algorithm>

namespace sm90_e4m3
{

enum {
    FEW_ROWS = 128,
    FEW_RUNS = 256,
    SHARES_MOST = 8,
    TURN = 80 /* of a tile, beside its runs */
};

/* shares 0: no cut. */
struct few_cut {
    int tokens, shares;
    int64_t cost;
};

/* A width of tiles: runs whose sums a block of sm90_few keeps, and the time of four runs in sm90_few and in
 * sm90_short. */
struct few_width {
    int tokens, kept, few, brief;
};
static constexpr few_width few_widths[] = {
    {8, 48, 90, 96}, {16, 32, 95, 100}, {32, 8, 110, 110}, {64, 4, 165, 130}};

static inline int64_t ratio_up(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

/* Blocks that run at once: of clusters of four and of eight 120 did on an H200. */
static inline int64_t blocks_at_once(const stage_exec *exec, int shares)
{
    return shares <= 2 ? exec->multiprocessors : exec->multiprocessors * 10 / 11;
}

static inline few_cut cut_few(const stage_exec *exec, const product_params &q)
{
    static constexpr int join[] = {0, 120, 150, 230}; /* of 1, 2, 4 and 8 blocks */
    few_cut best = {0, 0, 0};
    if (q.runs > FEW_RUNS) return best;
    for (const few_width &w : few_widths)
        for (int i = 0, shares = 1; shares <= SHARES_MOST && shares <= q.runs; i++, shares *= 2) {
            const int64_t runs = ratio_up(q.runs, shares), at_once = blocks_at_once(exec, shares),
                          tiles = q.panels * q.p.groups * ratio_up(q.p.tokens, w.tokens),
                          turns = ratio_up(tiles * shares, at_once),
                          cost = turns * (ratio_up(runs, TAKERS) * w.few + TURN) + join[i];
            if (shares > 1 && (runs > w.kept || turns > 1)) continue;
            if (best.shares == 0 || cost < best.cost) best = {w.tokens, shares, cost};
        }
    return best;
}

/* Blocks of sm90_short along W's rows. */
static inline int64_t short_blocks(const stage_exec *exec, const product_params &q, int tokens)
{
    const int64_t tiles = ratio_up(q.p.tokens, tokens) * q.p.groups;
    return std::min(ratio_up(q.p.out, SET_ROWS), std::max(exec->multiprocessors / tiles, (int64_t)1));
}

static inline few_cut cut_short(const stage_exec *exec, const product_params &q)
{
    few_cut best = {0, 0, 0};
    for (const few_width &w : few_widths) {
        const int64_t blocks = short_blocks(exec, q, w.tokens),
                      tiles = ratio_up(q.p.tokens, w.tokens) * q.p.groups,
                      turns = ratio_up(ratio_up(q.p.out, SET_ROWS), blocks) *
                              ratio_up(blocks * tiles, exec->multiprocessors),
                      cost = turns * (q.runs * w.brief + TURN);
        if (q.runs * w.tokens * RUN * 2 > SHORT_BYTES) continue;
        if (best.shares == 0 || cost < best.cost) best = {w.tokens, 1, cost};
    }
    return best;
}

/* Behind a group's last column stand the next group's, which are no zeros. */
static inline bool few_take(const stage_exec *exec, const e4m3_gemm_args *args, size_t bytes)
{
    return exec->compute == 90 && exec->shared_bytes >= bytes && !args->round && tiles_take(args) &&
           (exec->variant != NULL || args->a.shape[0] <= FEW_ROWS) && tiles_take_rows(args);
}

static inline product_params few_product_of(const stage_exec *exec, const e4m3_gemm_args *args, int tokens)
{
    product_params q = product_of(exec, args, tokens);
    q.panels = ratio_up(q.p.out, WG_ROWS);
    return q;
}

static inline quern_status few_describe(const e4m3_gemm_args *args, const product_params &q, int tokens,
                                        CUtensorMap *w, CUtensorMap *a)
{
    const quern_status status = describe_bytes(w, args->codes.data, args->codes.shape[0],
                                               args->codes.shape[1], q.p.code_row, WG_ROWS);
    return status == QUERN_OK ? tma_describe(a, rows_of_a(args), 1, tokens) : status;
}

} // namespace sm90_e4m3

#endif
