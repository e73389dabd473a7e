/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* plan.cu - the plan of attention whose heads share their keys: a block a query. */
#include "attend_mqa/plan.cuh"

using namespace mqa;

enum { ALIGNMENT = 16 };

__global__ void __launch_bounds__(PLANNERS) mqa_plan(const __grid_constant__ mqa_planner a)
{
    extern __shared__ int32_t held[];
    __shared__ plan_room room;
    let_next_start();
    if (threadIdx.x == 0) room.sorted = held;
    __syncthreads();
    plan_query<0>(a, room, a.row0 + blockIdx.x);
    int32_t *const to = a.kept + (int64_t)blockIdx.x * a.k;
    if (room.list != NULL && room.list != to)
        for (int i = threadIdx.x; i < room.query.entries; i += PLANNERS) to[i] = room.list[i];
    if (threadIdx.x == 0) a.queries[blockIdx.x] = room.query;
}

static int64_t queries_of(const attend_mqa_args *args)
{
    return args->q.shape[0] * args->q.shape[1];
}

static int64_t list_of(const attend_mqa_args *args)
{
    return present(args->list) ? args->list.shape[2] : 0;
}

bool mqa_takes(const attend_mqa_args *args, char why[STAGE_WHY_BYTES])
{
    const bool bytes = args->format == ENTRY_ROW584;
    const quern_dtype kv = args->kv.dtype;
    if (args->q.dtype == QUERN_F32 || (bytes ? args->q.dtype != QUERN_BF16 : kv != args->q.dtype))
        snprintf(why, STAGE_WHY_BYTES,
                 "q is %s and kv %s: the cuda backend takes bf16 or f16 for both, or bf16 with rows of bytes",
                 dtype_text(args->q.dtype), dtype_text(kv));
    else if (args->o.dtype != args->q.dtype)
        snprintf(why, STAGE_WHY_BYTES, "o is %s and q %s: the cuda backend takes one dtype for both",
                 dtype_text(args->o.dtype), dtype_text(args->q.dtype));
    else if (args->q.shape[3] > MQA_DIM)
        snprintf(why, STAGE_WHY_BYTES, "head dim %lld: the cuda backend takes multiples of 8 up to %d",
                 (long long)args->q.shape[3], MQA_DIM);
    else if (list_of(args) > MQA_LIST_MOST)
        snprintf(why, STAGE_WHY_BYTES, "lists of %lld entries: the cuda backend takes up to %d",
                 (long long)list_of(args), MQA_LIST_MOST);
    else if (queries_of(args) > INT32_MAX / 4 || args->ratio > INT32_MAX)
        snprintf(why, STAGE_WHY_BYTES,
                 "%lld queries, a ratio of %lld: the cuda backend takes up to %d and %d",
                 (long long)queries_of(args), (long long)args->ratio, INT32_MAX / 4, INT32_MAX);
    else return true;
    return false;
}

size_t attend_mqa_bytes(const stage_exec *, const attend_mqa_args *args)
{
    const size_t n = (size_t)queries_of(args);
    return n * sizeof(mqa_query) + n * (size_t)list_of(args) * sizeof(int32_t) + ALIGNMENT;
}

mqa_kernel mqa_kernel_of(const attend_mqa_args *args, const mqa_planner &plan)
{
    mqa_kernel a = {};
    a.queries = plan.queries;
    a.list = plan.list != NULL ? plan.kept : NULL;
    a.list_row = plan.k;
    a.rows = (int32_t)queries_of(args);
    a.raw = plan.raw;
    a.entries = plan.entries;
    a.bytes = args->format == ENTRY_ROW584;
    a.q = view4_of(args->q);
    a.o = view4_of(args->o);
    a.lse = view3_of(args->lse);
    a.lse_win = view3_of(args->lse_win);
    a.sink = (const float *)args->sink.data;
    if (present(args->cos_sin))
        a.rotation = {args->cos_sin.data, args->cos_sin.strides[0], args->cos_sin.dtype,
                      (int32_t)args->cos_sin.shape[1]};
    a.heads = (int32_t)args->q.shape[2];
    a.dim = (int32_t)args->q.shape[3];
    a.scale = args->scale;
    a.scale2 = args->scale * 1.44269504089f;
    a.q_wide = rows_aligned16(args->q);
    a.o_wide = rows_aligned16(args->o);
    return a;
}

mqa_planner mqa_planner_of(const stage_exec *exec, const attend_mqa_args *args, void *workspace)
{
    const int64_t rows = queries_of(args), codes = args->format == ENTRY_ROW584 ? MQA_CODES : 0;
    mqa_planner p = {};
    p.of = seqs_of(args->seqs);
    p.raw = row_source_of(args->kv, args->kv_table, args->page, codes);
    p.entries = row_source_of(args->entries, args->entries_table, args->page, codes);
    p.positions = (const int32_t *)args->positions.data;
    p.position = args->position;
    p.window = args->window;
    p.entry_rows = present(args->entries) ? args->entries.shape[1] : 0;
    p.ratio = fast_div_by(args->ratio > 0 ? (uint32_t)args->ratio : 1);
    p.n_q = fast_div_by(args->seqs.n_q > 0 && args->seqs.n_q < INT32_MAX ? (uint32_t)args->seqs.n_q : 1);
    p.queries = (mqa_query *)(((uintptr_t)workspace + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
    p.kept = (int32_t *)(p.queries + rows);
    p.status = exec->status;
    if (present(args->list)) {
        p.list = (const int32_t *)args->list.data;
        p.k = (int32_t)args->list.shape[2];
        for (int i = 0; i < 2; i++) p.list_row[i] = args->list.strides[i];
    }
    if (present(args->count)) {
        p.count = (const int32_t *)args->count.data;
        for (int i = 0; i < 2; i++) p.count_row[i] = args->count.strides[i];
    }
    return p;
}

quern_status mqa_make_plan(const stage_exec *exec, const mqa_planner &plan, int64_t rows)
{
    size_t room = 1;
    while (room < (size_t)plan.k) room *= 2;
    return launch_shared({(cudaStream_t)exec->stream, NULL}, mqa_plan, dim3((unsigned)rows), PLANNERS,
                         room * sizeof(int32_t), "plan of queries", plan);
}
