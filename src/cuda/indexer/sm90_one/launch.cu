/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* launch.cu - calls of one query a sequence, a slice of a varlen batch at a time. */
#include "indexer/sm90_one/params.cuh"
#include "variants.cuh"

using namespace sm90_indexer;

static bool indexer_sm90_one_supports(const stage_exec *exec, const indexer_args *args, char *)
{
    return queries_of(args) == 1 && sm90_takes(exec, args);
}

/* Room for the scores of the most entries of a sequence. */
static int64_t raw_row_of(const indexer_args *args)
{
    return in_fours(present(args->table) ? args->table.shape[1] * args->page : args->keys.shape[1]);
}

/* How many single queries are scored at once: their scores take at most RAW_FLOATS. */
static int64_t slice_of(const indexer_args *args)
{
    enum { RAW_FLOATS = 1 << 26 };
    const int64_t all = args->q.shape[0] * args->q.shape[1],
                  row = raw_row_of(args) > 0 ? raw_row_of(args) : 1,
                  most = row < RAW_FLOATS ? RAW_FLOATS / row : 1;
    return present(args->cu) && most < all ? most : all;
}

/* Single queries' scores, in floats; behind them stand the ranks of the best. */
static int64_t raw_floats(const indexer_args *args)
{
    return slice_of(args) * raw_row_of(args);
}

/* What a varlen batch is spread to, and single queries' scores. */
static size_t indexer_sm90_one_bytes(const stage_exec *exec, const indexer_args *args)
{
    if (exec->compute != 90 || args->q.shape[2] != HEADS || args->q.shape[3] != WIDTH) return 0;
    if (queries_of(args) != 1) return 0;
    const int64_t row = raw_row_of(args), ranks = row > SHORT_ROW ? slice_of(args) * best_row(row) : 0;
    return room_for(index_spread_bytes(args) + (size_t)(raw_floats(args) + ranks) * sizeof(float));
}

static quern_status run_keys(const stage_exec *exec, const indexer_args *args, plan &p, const raw_scores &to)
{
    if (args->format == ENTRY_FP4) return indexer_one_fp4(exec, p, to);
    if (args->format != ENTRY_ROWS) return (args->rounded ? indexer_one_codes : indexer_one_fp8)(exec, p, to);
    return (args->q.dtype == QUERN_BF16 ? indexer_one_bf16 : indexer_one_f16)(exec, p, to);
}

/* Of a varlen batch the queries from `row` on, `most` at most; q and w have elements of these bytes. */
static index_kernel rows_from(index_kernel a, int64_t row, int64_t most, int64_t q_bytes, int64_t w_bytes)
{
    a.q.p = (char *)a.q.p + row * a.q.s[0] * q_bytes;
    a.w = (const char *)a.w + row * a.w_row[0] * w_bytes;
    a.idx += row * a.idx_row[0];
    a.count += row * a.count_row[0];
    if (a.scores != NULL) a.scores += row * a.scores_row[0];
    if (a.cu == NULL) {
        a.positions += row;
        a.sequence += row;
        a.limit += row;
    }
    a.row = (int32_t)row;
    if (a.batch - row < most) most = a.batch - row;
    a.batch = (int32_t)most;
    return a;
}

static quern_status indexer_sm90_one_run(const stage_exec *exec, const indexer_args *args, void *workspace)
{
    plan p;
    if (args->q.shape[0] == 0 || args->q.shape[1] == 0) return QUERN_OK;
    char *const memory = room_at<char>(workspace);
    quern_status status = make_plan(exec, args, memory, &p);
    if (status != QUERN_OK) return status;
    raw_scores to = {(float *)(memory + index_spread_bytes(args)), raw_row_of(args), NULL};
    if (to.row > SHORT_ROW) to.best = (uint32_t *)(to.raw + raw_floats(args));
    if (!present(args->cu)) return run_keys(exec, args, p, to);
    const index_kernel all = p.a;
    for (int64_t row = 0; row < all.batch && status == QUERN_OK; row += slice_of(args)) {
        p.a = rows_from(all, row, slice_of(args), bytes_of(args->q.dtype), bytes_of(args->w.dtype));
        status = run_keys(exec, args, p, to);
    }
    return status;
}

extern const variant<indexer_args> indexer_sm90_one = {"indexer_sm90_one", indexer_sm90_one_supports,
                                                       indexer_sm90_one_bytes, indexer_sm90_one_run};
