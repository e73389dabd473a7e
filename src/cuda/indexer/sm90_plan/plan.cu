/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* plan.cu - which calls Hopper's kernels take, and how their keys are copied and cut. */
#include "indexer/sm90_plan/plan.cuh"

namespace sm90_indexer
{

enum {
    SHARES = 64,
    ROUNDS = 4,            /* items a multiprocessor, where keys are cut */
    ENOUGH = 4,            /* items a multiprocessor that need no cut */
    MERGED_MOST = 26 << 10 /* ranks of a query that the merge holds */
};

int shares_of(const stage_exec *exec, const indexer_args *args)
{
    const int64_t queries = queries_of(args), k = args->idx.shape[2],
                  batch = present(args->cu) ? args->q.shape[1] : args->q.shape[0],
                  tiles = (queries == 1 ? 1 : (queries + MOST_QUERIES - 1) / MOST_QUERIES) * batch,
                  all = exec->multiprocessors, rounds = (tiles + all - 1) / all;
    if (tiles == 0 || tiles >= ENOUGH * all || tiles * 10 >= rounds * all * 9) return 1;
    const int64_t held = MERGED_MOST / k, most = held < SHARES ? held : (int64_t)SHARES;
    int64_t shares = (ROUNDS * all + tiles - 1) / tiles; /* the fewest that leave few idle at the end */
    for (; shares < most; shares++) {
        const int64_t items = tiles * shares;
        if (items * 20 >= (items + all - 1) / all * all * 19) break;
    }
    if (shares > most) shares = most;
    return (int)shares;
}

/* Keys of the call's view as TMA's descriptor has them: rows of a page, then pages. */
static tma_tensor rows_tensor(const indexer_args *args, int run)
{
    const quern_tensor &k = args->keys;
    return {k.data,
            k.dtype == QUERN_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            4,
            {64, k.shape[1], WIDTH / 64, k.shape[0]},
            {k.strides[1] * 2, 128, k.strides[0] * 2},
            {64, run, 1, 1},
            CU_TENSOR_MAP_SWIZZLE_128B};
}

/* How many rows a copy takes; 0 where bulk copies cannot bring the keys. */
static int run_of(const indexer_args *args)
{
    const bool pages = present(args->table), rows = args->format == ENTRY_ROWS;
    const quern_tensor &k = args->keys;
    const int64_t size = rows ? 2 : 1, page = pages ? args->page : (int64_t)KEYS,
                  row = k.ndim == 3 ? k.strides[1] : 0,
                  bytes = rows ? 0 : codes_of(args->format) + SCALE_BYTES;
    const int run = page < KEYS ? (int)page : (int)KEYS;
    if (k.shape[0] < 1 || (k.ndim == 3 && k.shape[1] < 1)) return 0;
    if (((uintptr_t)k.data & 15) != 0 ||
        (k.shape[0] > 1 && (k.strides[0] * size % 16 != 0 || k.strides[0] < 0)))
        return 0;
    if (KEYS % run != 0 || page % run != 0 || run < (rows ? 8 : 4)) return 0;
    if (rows)
        return row % 8 == 0 && row >= WIDTH && row < (int64_t)1 << 37 && k.strides[0] < (int64_t)1 << 37 &&
                       (k.shape[0] == 1 || k.strides[0] > 0)
                   ? run
                   : 0;
    return k.ndim == 3 ? (row == bytes ? run : 0) : k.shape[1] == bytes * page ? run : 0;
}

bool sm90_takes(const stage_exec *exec, const indexer_args *args)
{
    enum { SHARED_BYTES = 227 * 1024 };
    char limits[STAGE_WHY_BYTES];
    return exec->compute == 90 && exec->shared_bytes >= SHARED_BYTES && args->q.shape[2] == HEADS &&
           args->q.shape[3] == WIDTH && args->idx.shape[2] <= MOST_CHOSEN && index_takes(args, limits) &&
           run_of(args) > 0;
}

quern_status make_plan(const stage_exec *exec, const indexer_args *args, void *spread, plan *p)
{
    const int run = run_of(args);
    *p = {};
    /* Who asks for faults has the rows' places in memory. */
    p->a = index_kernel_of(args, queries_of(args) == 1 && exec->status == NULL ? NULL : spread);
    p->a.status = exec->status;
    p->cut.planar = args->format != ENTRY_ROWS && args->keys.ndim == 2;
    p->cut.shares = shares_of(exec, args);
    while (1 << p->cut.run_shift < run) p->cut.run_shift++;
    quern_status status = index_spread_rows(exec, args, p->a);
    if (status == QUERN_OK) status = index_report(exec, p->a);
    if (status == QUERN_OK && args->format == ENTRY_ROWS)
        status = tma_describe(&p->map, rows_tensor(args, run));
    return status;
}

} // namespace sm90_indexer
