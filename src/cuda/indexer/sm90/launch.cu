/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* launch.cu - which calls Hopper's kernel takes, and how it cuts them. */
#include "indexer/sm90/shared.cuh"
#include "common/rows.cuh"
#include "variants.cuh"

using namespace sm90_indexer;

enum {
    SHARES = 64,
    ROUNDS = 4,            /* items a multiprocessor, where keys are cut */
    ENOUGH = 4,            /* items a multiprocessor that need no cut */
    MERGED_MOST = 26 << 10 /* ranks of a query that the merge holds */
};

static key_kind kind_of(const indexer_args *args)
{
    return args->format == ENTRY_ROWS ? ROWS : args->format == ENTRY_FP4 ? FP4 : args->rounded ? CODES : FP8;
}

/* Queries of a sequence; a varlen batch is one of single queries. */
static int64_t queries_of(const indexer_args *args)
{
    return present(args->cu) ? 1 : args->q.shape[1];
}

/* By how many shares a tile's keys are cut: by shapes alone, as is the workspace. */
static int shares_of(const stage_exec *exec, const indexer_args *args)
{
    const int64_t queries = queries_of(args), k = args->idx.shape[2],
                  batch = present(args->cu) ? args->q.shape[1] : args->q.shape[0],
                  tiles = (queries == 1 ? 1 : (queries + MOST_QUERIES - 1) / MOST_QUERIES) * batch,
                  all = exec->multiprocessors, turns = (tiles + all - 1) / all;
    if (tiles == 0 || tiles >= ENOUGH * all || tiles * 10 >= turns * all * 9) return 1;
    const int64_t held = MERGED_MOST / k, most = held < SHARES ? held : (int64_t)SHARES;
    int64_t shares = (ROUNDS * all + tiles - 1) / tiles; /* the fewest that leave few idle at the end */
    for (; shares < most; shares++) {
        const int64_t items = tiles * shares;
        if (items * 20 >= (items + all - 1) / all * all * 19) break;
    }
    if (shares > most) shares = most;
    return (int)shares;
}

static size_t list_bytes(const indexer_args *args, int shares)
{
    return (size_t)args->q.shape[0] * (size_t)args->q.shape[1] * (size_t)shares * (size_t)args->idx.shape[2] *
           sizeof(uint32_t);
}

/* The most entries of a sequence. */
static int64_t raw_row_of(const indexer_args *args)
{
    return present(args->table) ? args->table.shape[1] * args->page : args->keys.shape[1];
}

/* Keys of the call's view as the copy engine sees them: rows of a page, then pages. */
static tma_tensor rows_tensor(const indexer_args *args, int run)
{
    const quern_tensor &k = args->keys;
    return {k.data,
            k.dtype == QUERN_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            4,
            {64, k.shape[1], PANELS, k.shape[0]},
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
                  bytes = rows ? 0 : codes_of(kind_of(args)) + SCALE_BYTES;
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

static bool indexer_sm90_supports(const stage_exec *exec, const indexer_args *args, char *)
{
    enum { SHARED_BYTES = 227 * 1024 };
    char limits[STAGE_WHY_BYTES];
    static_assert(most_of(room_of(2, ROWS)) >= 2048 && most_of(room_of(3, FP8)) >= 2048,
                  "lists of 2048 entries have room");
    return exec->compute == 90 && exec->shared_bytes >= SHARED_BYTES && args->q.shape[2] == HEADS &&
           args->q.shape[3] == WIDTH && args->idx.shape[2] <= 2048 && index_takes(args, limits) &&
           run_of(args) > 0;
}

/* How many single queries are scored at once, so that their scores take no more than so many bytes. */
static int64_t slice_of(const indexer_args *args)
{
    enum { RAW_FLOATS = 1 << 26 };
    const int64_t all = args->q.shape[0] * args->q.shape[1],
                  row = raw_row_of(args) > 0 ? raw_row_of(args) : 1,
                  most = row < RAW_FLOATS ? RAW_FLOATS / row : 1;
    return present(args->cu) && most < all ? most : all;
}

/* Single queries' scores, in floats, and behind them the ranks of the best. */
static int64_t raw_floats(const indexer_args *args)
{
    return (slice_of(args) * raw_row_of(args) + 3) / 4 * 4;
}

/* What a varlen batch is spread to, and lists of shares or single queries' scores. */
static size_t indexer_sm90_bytes(const stage_exec *exec, const indexer_args *args)
{
    if (exec->compute != 90 || args->q.shape[2] != HEADS || args->q.shape[3] != WIDTH) return 0;
    if (queries_of(args) == 1)
        return room_for(index_spread_bytes(args) +
                        (size_t)(raw_floats(args) + slice_of(args) * (raw_row_of(args) / RANKED + 1)) *
                            sizeof(float));
    const int shares = shares_of(exec, args);
    return shares > 1 ? room_for(2 * list_bytes(args, shares)) : 0;
}

static quern_status run_kind(const stage_exec *exec, const indexer_args *args, const index_kernel &a,
                             const key_feed &f, const CUtensorMap &map, bool one)
{
    switch (kind_of(args)) {
    case CODES: return indexer_codes(exec, a, f, map, one);
    case FP8: return indexer_fp8(exec, a, f, map, one);
    case FP4: return indexer_fp4(exec, a, f, map, one);
    default: break;
    }
    return args->q.dtype == QUERN_BF16 ? indexer_bf16(exec, a, f, map, one)
                                       : indexer_f16(exec, a, f, map, one);
}

/* Of a varlen batch the queries from `row` on, at most so many; q and w have elements of these bytes. */
static index_kernel rows_from(index_kernel a, int64_t row, int64_t most, int64_t q_bytes, int64_t w_bytes)
{
    a.q.p = (char *)a.q.p + row * a.q.s[0] * q_bytes;
    a.w = (const char *)a.w + row * a.w_row[0] * w_bytes;
    a.idx += row * a.idx_row[0];
    a.count += row * a.count_row[0];
    if (a.scores != NULL) a.scores += row * a.scores_row[0];
    a.positions += row;
    a.sequence += row;
    a.limit += row;
    if (a.batch - row < most) most = a.batch - row;
    a.batch = (int32_t)most;
    return a;
}

static quern_status indexer_sm90_run(const stage_exec *exec, const indexer_args *args, void *workspace)
{
    if (args->q.shape[0] == 0 || args->q.shape[1] == 0) return QUERN_OK;
    char *const memory = room_at<char>(workspace);
    index_kernel a = index_kernel_of(args, memory);
    a.status = exec->status;
    const int run = run_of(args);
    quern_status status = index_spread_rows(exec, args, a);
    if (status == QUERN_OK) status = index_report(exec, a);
    if (status != QUERN_OK) return status;
    key_feed f = {};
    f.planar = args->format != ENTRY_ROWS && args->keys.ndim == 2;
    f.shares = shares_of(exec, args);
    while (1 << f.run_shift < run) f.run_shift++;
    const bool one = a.queries == 1;
    if (one) {
        f.raw = (float *)(memory + index_spread_bytes(args));
        f.raw_row = raw_row_of(args);
        f.best = (uint32_t *)(f.raw + raw_floats(args));
    } else if (f.shares > 1) {
        f.rank = (uint32_t *)memory;
        f.index = (int32_t *)((char *)f.rank + list_bytes(args, f.shares));
    }
    CUtensorMap map = {};
    if (args->format == ENTRY_ROWS) {
        status = tma_describe(&map, rows_tensor(args, run));
        if (status != QUERN_OK) return status;
    }
    if (!present(args->cu)) return run_kind(exec, args, a, f, map, one);
    for (int64_t row = 0; row < a.batch && status == QUERN_OK; row += slice_of(args))
        status = run_kind(exec, args,
                          rows_from(a, row, slice_of(args), bytes_of(args->q.dtype), bytes_of(args->w.dtype)),
                          f, map, one);
    return status;
}

extern const variant<indexer_args> indexer_sm90 = {"indexer_sm90", indexer_sm90_supports, indexer_sm90_bytes,
                                                   indexer_sm90_run};
