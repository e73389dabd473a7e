/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* launch.cu - which calls Hopper's kernel of a step takes, and who takes the shares of a query's keys. */
#include "attend_mqa/sm90_decode/shared.cuh"
#include "variants.cuh"

using namespace sm90_mqa_decode;

enum {
    STEP_QUERIES = 8, /* the most queries of a sequence that are always a step */
    SPLIT_ROWS = 24,  /* the most queries times groups of heads whose keys are split: more fill the machine */
    HEADS_LEAST = 16, /* the fewest heads a block takes while there are idle multiprocessors */
    SPLIT_PARTS = 640 /* the most parts, which stand in the workspace */
};

/* The most rows that a view or a table names for a sequence. */
static int64_t rows_of(const quern_tensor &rows, const quern_tensor &table, int64_t page)
{
    return !present(rows) ? 0 : present(table) ? table.shape[1] * page : rows.shape[1];
}

/* How a call is cut, without its pointers. */
static decode_kernel cut_of(const stage_exec *exec, const attend_mqa_args *args)
{
    decode_kernel w = {};
    const int64_t raw_rows = rows_of(args->kv, args->kv_table, args->page),
                  raw = args->window < raw_rows ? args->window : raw_rows,
                  entry_rows = rows_of(args->entries, args->entries_table, args->page),
                  entries = present(args->list) && args->list.shape[2] < entry_rows ? args->list.shape[2]
                                                                                    : entry_rows;
    const int64_t queries = args->q.shape[0] * args->q.shape[1], most = INT32_MAX / 4;
    const int tiles = tiles_of((int)(raw < most ? raw : most), (int)(entries < most ? entries : most));
    w.heads = HEADS;
    w.groups = (int32_t)((args->q.shape[2] + HEADS - 1) / HEADS);
    w.shares = (tiles + share_of(tiles) - 1) / share_of(tiles);
    if (tiles > SHARES) w.shares = SHARES; /* fewer tiles than the most may make more shares */
    w.whole = queries * w.groups > SPLIT_ROWS || queries * w.groups * w.shares > SPLIT_PARTS;
    for (int groups = w.groups; !w.whole && w.heads > HEADS_LEAST; w.heads /= 2, w.groups = groups) {
        groups = (int)((args->q.shape[2] + w.heads / 2 - 1) / (w.heads / 2));
        if (queries * groups * w.shares > exec->multiprocessors) break;
    }
    w.items = (int32_t)(queries * w.groups * (w.whole ? 1 : w.shares));
    /* Of several queries a block each would wait for its plan; of one the launch before would take longer. */
    w.planned = (w.whole && w.items > exec->multiprocessors) ||
                (present(args->list) && args->list.shape[2] > SORTED_MOST);
    const bool paged = present(args->kv_table) && (!present(args->entries) || present(args->entries_table));
    w.guess = !w.planned && !present(args->seqs.cu_q) && paged && (tiles <= SHARES || !present(args->list));
    if (w.whole) w.shares = tiles > SHARES ? SHARES : 1;
    w.paired = w.whole && w.items * PAIR <= exec->multiprocessors;
    return w;
}

static bool decode_supports(const stage_exec *exec, const attend_mqa_args *args, char *)
{
    enum { SHARED_BYTES = 227 * 1024 };
    static_assert(sizeof(shared<bf16>) <= SHARED_BYTES, "a block has room");
    char limits[STAGE_WHY_BYTES];
    const bool step =
        present(args->positions) || (!present(args->seqs.cu_q) && args->q.shape[1] <= STEP_QUERIES);
    return exec->compute == 90 && exec->shared_bytes >= SHARED_BYTES && args->q.shape[3] == MQA_DIM && step &&
           mqa_takes(args, limits);
}

/* The parts of the workspace behind the plan. */
static size_t carve(const stage_exec *exec, const attend_mqa_args *args, char *memory, decode_kernel *w)
{
    const size_t all = (size_t)(args->q.shape[0] * args->q.shape[1] * w->groups),
                 parts = all * (size_t)w->shares;
    size_t at = (attend_mqa_bytes(exec, args) + 15) / 16 * 16;
    if (w->whole) {
        w->values = (float *)(memory + at);
        return at + (w->shares > 1 ? (size_t)exec->multiprocessors * 2 * VALUE_FLOATS * sizeof(float) : 0);
    }
    w->places = (int4 *)(memory + at);
    at += all * sizeof(int4);
    w->sums = (float4 *)(memory + at);
    at += parts * HEADS * sizeof(float4);
    w->values = (float *)(memory + at);
    return at + parts * HEADS * MQA_DIM * sizeof(float);
}

static size_t decode_bytes(const stage_exec *exec, const attend_mqa_args *args)
{
    enum { ALIGNMENT = 16 };
    char limits[STAGE_WHY_BYTES];
    if (!decode_supports(exec, args, limits)) return 0;
    decode_kernel w = cut_of(exec, args);
    return carve(exec, args, NULL, &w) + ALIGNMENT;
}

static quern_status decode_run(const stage_exec *exec, const attend_mqa_args *args, void *workspace)
{
    if (args->q.shape[0] == 0 || args->q.shape[1] == 0) return QUERN_OK;
    char *const memory = (char *)(((uintptr_t)workspace + 15) / 16 * 16);
    decode_kernel w = cut_of(exec, args);
    (void)carve(exec, args, memory, &w);
    w.plan = mqa_planner_of(exec, args, memory);
    w.a = mqa_kernel_of(args, w.plan);
    quern_status status = w.planned ? mqa_make_plan(exec, w.plan, w.a.rows) : QUERN_OK;
    if (status == QUERN_OK) status = args->q.dtype == QUERN_BF16 ? decode_bf16(exec, w) : decode_f16(exec, w);
    return status != QUERN_OK || w.whole ? status : combine_shares(exec, w, args->q.dtype);
}

extern const variant<attend_mqa_args> attend_mqa_sm90_decode = {"attend_mqa_sm90_decode", decode_supports,
                                                                decode_bytes, decode_run};
