/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * slices.cu - how a backward call is cut into slices of queries, and their launches. A slice has whole
 * sequences or a part of one, and as many queries as PARTIAL_BYTES of partials allow, by shape alone.
 */
#include "attend_mqa/backward/backward.cuh"
#include "variants.cuh"

extern "C" {
#include "core/arena.h"
}

extern const variant<convert_args> convert_any;

enum { QUERIES_MOST = 4096 };
static const int64_t PARTIAL_BYTES = (int64_t)2 << 30;

struct slicing {
    int64_t batch, n_q, n_kv, entries, heads, dim, list;
    int64_t raw_most, entries_most, groups; /* rows of keys a query sees at most */
    int64_t queries, sequences;             /* of a slice, at most */
    bool cut, widens_q;                     /* dQ is wanted in f32, which no kernel of pairs writes */
};

static slicing slicing_of(const attend_mqa_args *args, int heads)
{
    slicing s = {};
    s.batch = args->q.shape[0];
    s.n_q = args->q.shape[1];
    s.heads = args->q.shape[2];
    s.dim = args->q.shape[3];
    s.n_kv = args->kv.shape[1];
    s.entries = present(args->entries) ? args->entries.shape[1] : 0;
    s.list = present(args->list) ? args->list.shape[2] : 0;
    s.groups = (s.heads + heads - 1) / heads;
    s.widens_q = present(args->d_q) && args->d_q.dtype == QUERN_F32;
    s.raw_most = args->window < s.n_kv ? args->window : s.n_kv;
    s.entries_most = present(args->list) && s.list < s.entries ? s.list : s.entries;
    const int64_t bytes = (s.raw_most + s.entries_most) * s.groups * s.dim * 2;
    int64_t most = bytes > 0 ? PARTIAL_BYTES / bytes : (int64_t)QUERIES_MOST;
    most = most > QUERIES_MOST ? (int64_t)QUERIES_MOST : most > 1 ? most : 1;
    s.cut = s.n_q > most;
    if (s.cut) {
        const int64_t slices = (s.n_q + most - 1) / most;
        s.queries = (s.n_q + slices - 1) / slices;
        s.sequences = 1;
    } else {
        s.sequences = s.n_q > 0 ? most / s.n_q : s.batch;
        if (s.sequences > s.batch) s.sequences = s.batch;
        s.queries = s.sequences * s.n_q;
    }
    return s;
}

struct slice_room {
    mqa_query *plan;
    int32_t *kept;
    mqa_head *heads;
    choice *choices;
    int32_t *first, *taken;
    void *partials;
    float *carry[2], *entries;
    double *sinks;
    void *d_q; /* of all queries, in the activations' dtype */
};

static slice_room carve(const slicing &s, arena *a)
{
    const int64_t entries = s.sequences * s.entries, words = (s.queries + 31) / 32;
    auto take = [&](int64_t n, size_t size) { return arena_take(a, (size_t)n * size); };
    slice_room r = {};
    r.plan = (mqa_query *)take(s.queries, sizeof *r.plan);
    r.kept = (int32_t *)take(s.queries * s.list, sizeof *r.kept);
    r.heads = (mqa_head *)take(s.queries * s.heads, sizeof *r.heads);
    r.choices = (choice *)take(entries * words, sizeof *r.choices);
    r.first = (int32_t *)take(entries, sizeof *r.first);
    r.taken = (int32_t *)take(1, sizeof *r.taken);
    r.partials = take(s.queries * (s.raw_most + s.entries_most) * s.groups * s.dim, sizeof(uint16_t));
    for (int i = 0; i < 2; i++)
        r.carry[i] = (float *)take(s.cut ? s.raw_most * s.dim : 0, sizeof *r.carry[i]);
    r.entries = (float *)take(s.cut ? s.entries * s.dim : 0, sizeof *r.entries);
    r.sinks = (double *)take(s.heads, sizeof *r.sinks);
    r.d_q = take(s.widens_q ? s.batch * s.n_q * s.heads * s.dim : 0, sizeof(uint16_t));
    return r;
}

size_t mqa_backward_bytes(const attend_mqa_args *args, int heads)
{
    arena a = {NULL, 0};
    carve(slicing_of(args, heads), &a);
    return arena_size(&a);
}

bool mqa_backward_takes(const attend_mqa_args *args, char why[STAGE_WHY_BYTES])
{
    const quern_tensor *const like[] = {&args->o, &args->d_o, &args->d_q, &args->d_kv, &args->d_entries};
    if (!mqa_takes(args, why)) return false;
    for (int i = 0; i < 5; i++) {
        const quern_tensor &t = *like[i];
        if (!present(t) || t.dtype == args->q.dtype || (i >= 2 && t.dtype == QUERN_F32)) continue;
        snprintf(why, STAGE_WHY_BYTES,
                 "q is %s, o, d_o or a gradient %s: the cuda backend takes one dtype, and gradients in f32",
                 dtype_text(args->q.dtype), dtype_text(t.dtype));
        return false;
    }
    if (present(args->kv_table) || present(args->entries_table) || args->format == ENTRY_ROW584)
        snprintf(why, STAGE_WHY_BYTES, "the backward of rows in pages or bytes is not in the cuda backend");
    else if (present(args->seqs.cu_kv))
        snprintf(why, STAGE_WHY_BYTES, "the cuda backend's backward takes raw rows with q's offsets only");
    else return true;
    return false;
}

/* The plan of a slice's queries. */
static mqa_planner planner_of(const stage_exec *exec, const attend_mqa_args *args, const slice_room &r)
{
    mqa_planner p = mqa_planner_of(exec, args, r.plan);
    p.queries = r.plan;
    p.kept = r.kept;
    return p;
}

static mqa_backward backward_of(const attend_mqa_args *args, const quern_tensor &d_q, const mqa_planner &plan,
                                const slicing &s, const slice_room &r)
{
    mqa_backward b = {};
    b.of = mqa_kernel_of(args, plan);
    b.d_o = view4_of(args->d_o);
    b.d_q = view4_of(d_q);
    b.d_o_wide = rows_aligned16(args->d_o);
    b.d_q_wide = rows_aligned16(d_q);
    b.heads = r.heads;
    b.choices = r.choices;
    b.first = r.first;
    b.taken = r.taken;
    b.groups = (int32_t)s.groups;
    b.raw_most = (int32_t)s.raw_most;
    b.entry_rows = s.entries;
    b.partials = r.partials;
    b.raw_wanted = present(args->d_kv);
    b.entries_wanted = present(args->d_entries);
    return b;
}

static mqa_sums sums_of(const attend_mqa_args *args, const slicing &s, const slice_room &r,
                        const mqa_backward &b, int64_t sequences, int64_t first, int64_t end)
{
    mqa_sums x = {};
    x.b = b;
    x.n_q = s.n_q;
    x.n_kv = s.n_kv;
    x.window = args->window;
    x.first = first;
    x.end = end;
    x.cut = s.cut;
    x.begins = first == 0;
    x.ends = end == s.n_q;
    x.d_kv = view3_of(args->d_kv);
    x.d_entries = view3_of(args->d_entries);
    x.wide_kv = args->d_kv.dtype == QUERN_F32;
    x.wide_entries = args->d_entries.dtype == QUERN_F32;
    x.entries = r.entries;
    const int64_t slice = s.cut ? first / s.queries : 0;
    x.carried = r.carry[(slice + 1) & 1];
    x.carry = r.carry[slice & 1];
    int64_t rows = sequences * s.n_kv;
    if (s.cut) { /* those that the slice's queries may see, and at the sequence's ends the rest */
        const int64_t behind = s.n_kv - s.n_q, low = first + behind - args->window + 1, high = end + behind;
        x.raw0 = x.begins || low < 0 ? 0 : low;
        rows = (x.ends ? s.n_kv : high) - x.raw0;
    }
    x.raw_rows = b.raw_wanted && rows > 0 ? rows : 0;
    x.entry_rows = b.entries_wanted ? sequences * s.entries : 0;
    return x;
}

/* A slice: sequences from sequence0 on, or queries [first, end) of that one. */
static quern_status run_slice(const stage_exec *exec, const attend_mqa_args *args, const slicing &s,
                              const slice_room &r, mqa_planner plan, mqa_backward b, int64_t sequence0,
                              int64_t first, int64_t end, mqa_pairs *pairs)
{
    cudaStream_t stream = (cudaStream_t)exec->stream;
    const int64_t left = s.batch - sequence0, sequences = left < s.sequences ? left : s.sequences;
    b.of.rows = (int32_t)(s.cut ? end - first : sequences * s.n_q);
    b.words = (b.of.rows + 31) / 32;
    b.sequence0 = sequence0;
    plan.row0 = sequence0 * s.n_q + first;
    quern_status status = b.of.rows > 0 ? mqa_make_plan(exec, plan, b.of.rows) : QUERN_OK;
    if (status == QUERN_OK) status = mqa_head_statistics(stream, b, args->q.dtype);
    if (status == QUERN_OK && b.entries_wanted) status = mqa_rank_choices(stream, b, sequences * s.entries);
    if (status == QUERN_OK && b.of.rows > 0) status = pairs(exec, b);
    if (status == QUERN_OK)
        status = mqa_sum_partials(stream, sums_of(args, s, r, b, sequences, first, end), args->q.dtype);
    if (status == QUERN_OK && present(args->d_sink))
        status = mqa_sink_sums(stream, b, r.sinks, (float *)args->d_sink.data, sequence0 == 0 && first == 0,
                               sequence0 + sequences == s.batch && end == s.n_q);
    return status;
}

/* dQ as the kernels of pairs write it. */
static quern_tensor narrow_d_q(const attend_mqa_args *args, const slicing &s, const slice_room &r)
{
    quern_tensor t = args->d_q;
    if (!s.widens_q) return t;
    t.data = r.d_q;
    t.dtype = args->q.dtype;
    t.strides[3] = 1;
    t.strides[2] = s.dim;
    t.strides[1] = s.heads * s.dim;
    t.strides[0] = s.n_q * t.strides[1];
    return t;
}

quern_status mqa_backward_run(const stage_exec *exec, const attend_mqa_args *args, void *workspace, int heads,
                              mqa_pairs *pairs)
{
    const slicing s = slicing_of(args, heads);
    arena a = arena_on(workspace);
    const slice_room r = carve(s, &a);
    const mqa_planner plan = planner_of(exec, args, r);
    const quern_tensor d_q = narrow_d_q(args, s, r);
    const mqa_backward b = backward_of(args, d_q, plan, s, r);
    if (s.batch == 0)
        return present(args->d_sink)
                   ? cuda_report(cudaMemsetAsync(args->d_sink.data, 0, (size_t)s.heads * sizeof(float),
                                                 (cudaStream_t)exec->stream),
                                 "gradient of sinks")
                   : QUERN_OK;
    for (int64_t sequence = 0; sequence < s.batch; sequence += s.sequences) {
        const int64_t step = s.cut ? s.queries : s.n_q;
        for (int64_t first = 0, more = 1; more != 0; first += step) {
            const int64_t end = first + step < s.n_q ? first + step : s.n_q;
            const quern_status status = run_slice(exec, args, s, r, plan, b, sequence, first, end, pairs);
            if (status != QUERN_OK) return status;
            more = end < s.n_q;
        }
    }
    const convert_args widening = {args->seqs, d_q, args->d_q};
    return s.widens_q ? convert_any.run(exec, &widening, NULL) : QUERN_OK;
}
