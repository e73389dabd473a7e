/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * append.c - tokens into streaming states: checks, then
 *
 *   [steps of weights.c, gemm: x w -> proj]  ->  pool_append
 */
#include "core/arena.h"
#include "core/context.h"
#include "core/error.h"
#include "core/float_state.h"
#include "core/op.h"
#include "core/view.h"
#include "dsv4/dsv4.h"
#include "dsv4/weights.h"

/* A call without x leaves `weight` and `gemm` as they are: to clear their 4 KiB takes as long as to merge a
 * token's series. */
typedef struct append_call {
    const quern_backend *backend;
    stage_exec exec;
    quern_dsv4_compress_params params;
    quern_dsv4_append_tensors t;
    const pool_state *like; /* the first state */
    int64_t tokens, entries;
    pool_append_args append;
    dsv4_weight weight; /* with x */
    gemm_args gemm;     /* with x; `c` absent: the weight makes projections itself */
} append_call;

static const pool_state *state_at(quern_dsv4_state *const *states, int64_t b)
{
    return (const pool_state *)states[b];
}

/* Checks each state and its count of tokens; sets the call's sums of tokens and entries. */
static quern_status check_states(quern_dsv4_state *const *states, const int64_t *counts, int64_t batch,
                                 int64_t *tokens, int64_t *entries)
{
    *tokens = *entries = 0;
    if (batch < 0)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "batch is %lld: 0 or more states are accepted",
                         (long long)batch);
    if (batch > 0 && (states == NULL || counts == NULL))
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s is NULL: an array of batch entries is needed",
                         states == NULL ? "states" : "counts");
    for (int64_t b = 0; b < batch; b++) {
        const quern_status status = dsv4_state_check(states[b], "states[]");
        if (status != QUERN_OK) return status;
        const pool_state *s = state_at(states, b);
        if (counts[b] < 0 || counts[b] > INT32_MAX - *tokens || counts[b] > INT32_MAX - s->position)
            return error_set(
                QUERN_ERR_INVALID_ARGUMENT,
                "counts[%lld] is %lld: 0 or more tokens are accepted, %d at most in a call and a sequence",
                (long long)b, (long long)counts[b], INT32_MAX);
        for (int64_t i = 0; i < b; i++)
            if (states[i] == states[b])
                return error_set(QUERN_ERR_INVALID_ARGUMENT,
                                 "states[%lld] is states[%lld]: each state is accepted once", (long long)b,
                                 (long long)i);
        *tokens += counts[b];
        *entries += pool_state_entries(s, s->position + counts[b]) - pool_state_entries(s, s->position);
    }
    return QUERN_OK;
}

/* Checks that the states fit the parameters and each other, and that positions stay in the table. */
static quern_status check_dims(const append_call *c, quern_dsv4_state *const *states, const int64_t *counts,
                               int64_t batch)
{
    const pool_state *like = c->like;
    const bool overlap = c->params.kind == QUERN_DSV4_CSA;
    for (int64_t b = 0; b < batch; b++) {
        const pool_state *s = state_at(states, b);
        if (s->ratio != c->params.ratio || s->overlap != overlap || s->width != like->width ||
            s->ring != like->ring)
            return error_set(QUERN_ERR_INVALID_ARGUMENT,
                             "states[%lld] is of ratio %d, %s, width %lld, ring %lld: ratio %lld, %s, width "
                             "%lld, ring %lld are accepted",
                             (long long)b, s->ratio, s->overlap ? "CSA" : "HCA", (long long)s->width,
                             (long long)s->ring, (long long)c->params.ratio, overlap ? "CSA" : "HCA",
                             (long long)like->width, (long long)like->ring);
        const int64_t whole = pool_state_entries(s, s->position + counts[b]);
        const int64_t last = s->origin + (whole - 1) * s->ratio + (c->params.rope_last ? s->ratio - 1 : 0);
        if (c->t.cos_sin != NULL && whole > pool_state_entries(s, s->position) &&
            last >= c->t.cos_sin->shape[0])
            return error_set(
                QUERN_ERR_INVALID_ARGUMENT,
                "states[%lld] comes to an entry at position %lld: cos_sin has positions 0 to %lld",
                (long long)b, (long long)last, (long long)c->t.cos_sin->shape[0] - 1);
        if (c->t.prev_b != NULL && s->begun)
            return error_set(QUERN_ERR_INVALID_ARGUMENT,
                             "prev_b is given, and states[%lld] has begun: empty states are accepted",
                             (long long)b);
    }
    return QUERN_OK;
}

static quern_status check_tensors(const append_call *c, int64_t batch, bool run)
{
    const quern_dsv4_append_tensors *t = &c->t;
    const bool csa = c->params.kind == QUERN_DSV4_CSA, project = t->x != NULL;
    const int64_t width = c->like->width, r = c->params.ratio, columns = pool_state_columns(c->like);
    const int64_t bytes = dsv4_row_bytes(c->params.format, width);
    const bool fp8 = t->w_fp8 != NULL, codes = t->w_codes != NULL, floats = !fp8 && !codes;
    if (project == (t->proj != NULL) || project != (t->w != NULL || !floats))
        return error_set(
            QUERN_ERR_INVALID_ARGUMENT, "proj is %s, x %s, w %s: proj alone, or x and w are accepted",
            t->proj != NULL ? "given" : "NULL", project ? "given" : "NULL", t->w != NULL ? "given" : "NULL");
    if ((t->w != NULL) + fp8 + codes > 1 || (t->w_fp8_scales != NULL) != fp8 ||
        (t->w_scales != NULL) != codes || (t->w_global != NULL) != codes)
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "w is %s, w_fp8 %s, w_codes %s: one of them is accepted, with scales of its own",
                         t->w != NULL ? "given" : "NULL", fp8 ? "given" : "NULL", codes ? "given" : "NULL");
    if (csa != (t->b_b != NULL))
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "b_b is %s: %s", csa ? "NULL" : "given",
                         csa ? "CSA needs it" : "HCA has no series b");
    if (!csa && t->prev_b != NULL)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "prev_b is given: HCA has no series b");
    const quern_tensor *like = project ? t->x : t->proj;
    const uint32_t act = VIEW_ACTIVATION & view_dtype_bit(like->dtype), weight = act | VIEW_F32;
    const int64_t in = project && t->x->ndim == 2 ? t->x->shape[1] : VIEW_ANY;
    if (codes && in % QUANTISE_BLOCK != 0)
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "x has %lld channels and w_codes is given: multiples of %d are accepted",
                         (long long)in, QUANTISE_BLOCK);
    const view_rule rules[] = {
        {"proj", t->proj, VIEW_ACTIVATION, 2, {c->tokens, columns}, project, false},
        {"x", t->x, VIEW_ACTIVATION, 2, {c->tokens, VIEW_ANY}, !project, false},
        {"w", t->w, weight, 2, {in, columns}, !project || !floats, false},
        {"w_fp8", t->w_fp8, VIEW_SCALE, 2, {columns, in}, !fp8, false},
        {"w_fp8_scales",
         t->w_fp8_scales,
         VIEW_F32 | VIEW_EXPONENT,
         2,
         {(columns + WIDEN_BLOCK - 1) / WIDEN_BLOCK, (in + WIDEN_BLOCK - 1) / WIDEN_BLOCK},
         !fp8,
         false},
        {"w_codes", t->w_codes, VIEW_CODES, 2, {in / 2, columns}, !codes, false},
        {"w_scales", t->w_scales, VIEW_SCALE, 2, {in / QUANTISE_BLOCK, columns}, !codes, false},
        {"w_global",
         t->w_global,
         VIEW_F32,
         t->w_global != NULL && t->w_global->ndim == 1,
         {1},
         !codes,
         false},
        {"b_a", t->b_a, weight, 2, {r, width}, false, false},
        {"b_b", t->b_b, weight, 2, {r, width}, !csa, false},
        {"prev_b", t->prev_b, weight, 3, {batch, r, 2 * width}, true, false},
        {"norm_weight", t->norm_weight, weight, 1, {width}, true, false},
        {"cos_sin", t->cos_sin, weight, 2, {VIEW_ANY, VIEW_ANY}, true, false},
        {"out",
         t->out,
         bytes > 0 ? 1u << QUERN_U8 : VIEW_ACTIVATION,
         2,
         {c->entries, bytes > 0 ? bytes : width},
         false,
         true},
        {"pooled", t->pooled, VIEW_F32, 2, {c->entries, width}, true, true},
    };
    quern_status status = view_check_all(rules, sizeof rules / sizeof *rules, like, run);
    if (status != QUERN_OK) return status;
    return dsv4_check_width(&c->params, width, t->cos_sin != NULL ? t->cos_sin->shape[1] : 0);
}

/* Fills the stages' arguments with memory from `a`, an arena that is being sized or carved. */
static void *carve(append_call *c, quern_dsv4_state *const *states, int64_t batch, arena *a)
{
    const quern_dsv4_append_tensors *t = &c->t;
    c->append.batch = batch;
    c->append.states = (pool_state *const *)states;
    c->append.proj = view_or_absent(t->proj);
    c->append.bias_a = view_or_absent(t->b_a);
    c->append.bias_b = view_or_absent(t->b_b);
    c->append.prev_b = view_or_absent(t->prev_b);
    c->append.entry = dsv4_entry(&c->params, t->norm_weight, t->cos_sin);
    c->append.out = view_or_absent(t->out);
    c->append.pooled = view_or_absent(t->pooled);
    c->append.cu = arena_take(a, (size_t)(batch + 1) * sizeof *c->append.cu);
    size_t bytes = 0;
    if (t->x != NULL) {
        const int64_t shape[] = {c->tokens, pool_state_columns(c->like)};
        const dsv4_weight_given given = {.w = view_or_absent(t->w),
                                         .w_fp8 = view_or_absent(t->w_fp8),
                                         .w_fp8_scales = view_or_absent(t->w_fp8_scales),
                                         .w_codes = view_or_absent(t->w_codes),
                                         .w_scales = view_or_absent(t->w_scales),
                                         .w_global = view_or_absent(t->w_global)};
        c->weight = dsv4_weight_of(t->x, &given, false, a);
        c->append.proj = c->weight.proj;
        c->gemm = (gemm_args){.a = *t->x, .b = c->weight.w};
        if (c->weight.proj.ndim == 0)
            c->append.proj = c->gemm.c = view_on(
                t->x, arena_take(a, (size_t)(shape[0] * shape[1]) * sizeof(float)), QUERN_F32, 2, shape);
        if (c->gemm.c.ndim > 0) bytes = c->backend->gemm.workspace(&c->exec, &c->gemm);
        (void)dsv4_weight_missing(c->backend, &c->exec, &c->weight, &bytes); /* the cpu has all */
    }
    const size_t pool = c->backend->pool_append.workspace(&c->exec, &c->append);
    return arena_take(a, pool > bytes ? pool : bytes);
}

static quern_status plan(quern_context *ctx, const quern_exec *exec, const quern_dsv4_compress_params *params,
                         quern_dsv4_state *const *states, const int64_t *counts, int64_t batch,
                         const quern_dsv4_append_tensors *tensors, bool run, append_call *c)
{
    quern_exec how;
    quern_status status;
    c->t = (quern_dsv4_append_tensors)QUERN_DSV4_APPEND_TENSORS_INIT;
    if (ctx == NULL)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "ctx is NULL: create one with quern_context_create()");
    if ((status = dsv4_params(params, &c->params)) != QUERN_OK ||
        (status = op_struct(&c->t, tensors, "tensors", "QUERN_DSV4_APPEND_TENSORS_INIT")) != QUERN_OK ||
        (status = op_exec(exec, &how)) != QUERN_OK ||
        (status = check_states(states, counts, batch, &c->tokens, &c->entries)) != QUERN_OK)
        return status;
    if (batch == 0) return QUERN_OK;
    c->like = state_at(states, 0);
    if ((status = check_tensors(c, batch, run)) != QUERN_OK ||
        (status = check_dims(c, states, counts, batch)) != QUERN_OK)
        return status;
    const quern_tensor *like = c->t.out;
    if (like->device != QUERN_CPU)
        return error_set(QUERN_ERR_UNSUPPORTED, "out is on device %d: the cpu keeps states",
                         (int)like->device);
    c->backend = context_backend(ctx, like->device, like->device_id, how.stream, &c->exec);
    return c->backend != NULL ? QUERN_OK : error_status();
}

/* x w -> proj. */
static quern_status project(const append_call *c, void *scratch)
{
    quern_status status = QUERN_OK;
    if (c->t.w_fp8_scales != NULL)
        status = dsv4_weight_check_powers(&c->weight.widen.scales, c->t.w_fp8_scales->data, "w_fp8_scales");
    if (c->t.w_global != NULL)
        status = view_check_globals(c->t.w_global->data, &c->weight.global, "w_global");
#define RUN(stage, step, output)                                                                             \
    if (status == QUERN_OK && c->weight.step.output.ndim > 0)                                                \
        status = c->backend->stage.run(&c->exec, &c->weight.step, scratch);
    DSV4_WEIGHT_STEPS(RUN)
#undef RUN
    return status != QUERN_OK || c->gemm.c.ndim == 0 ? status
                                                     : c->backend->gemm.run(&c->exec, &c->gemm, scratch);
}

quern_status quern_dsv4_append_entries(quern_dsv4_state *const *states, const int64_t *counts, int64_t batch,
                                       int64_t *n)
{
    int64_t tokens, entries;
    const quern_status status = check_states(states, counts, batch, &tokens, &entries);
    if (status != QUERN_OK) return status;
    if (n == NULL) return error_set(QUERN_ERR_INVALID_ARGUMENT, "n is NULL: a place for the count is needed");
    *n = entries;
    return QUERN_OK;
}

quern_status quern_dsv4_append_workspace(quern_context *ctx, const quern_dsv4_compress_params *params,
                                         quern_dsv4_state *const *states, const int64_t *counts,
                                         int64_t batch, const quern_dsv4_append_tensors *tensors,
                                         size_t *bytes)
{
    append_call c;
    const quern_status status = plan(ctx, NULL, params, states, counts, batch, tensors, false, &c);
    if (status != QUERN_OK) return status;
    if (bytes == NULL)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "bytes is NULL: a place for the size is needed");
    arena a = {NULL, 0};
    if (batch > 0) carve(&c, states, batch, &a);
    *bytes = arena_size(&a);
    return QUERN_OK;
}

quern_status quern_dsv4_append(quern_context *ctx, const quern_exec *exec,
                               const quern_dsv4_compress_params *params, quern_dsv4_state *const *states,
                               const int64_t *counts, int64_t batch, const quern_dsv4_append_tensors *tensors,
                               void *workspace, size_t workspace_bytes)
{
    DEFAULT_FLOAT_STATE;
    append_call c;
    quern_status status = plan(ctx, exec, params, states, counts, batch, tensors, true, &c);
    if (status != QUERN_OK || batch == 0) return status;
    arena a = arena_on(workspace);
    void *scratch = carve(&c, states, batch, &a);
    if ((status = view_check_workspace(workspace, workspace_bytes, arena_size(&a), c.t.out)) != QUERN_OK)
        return status;
    int64_t *cu = (int64_t *)(uintptr_t)c.append.cu;
    cu[0] = 0;
    for (int64_t b = 0; b < batch; b++) cu[b + 1] = cu[b] + counts[b];
    if (c.t.x != NULL && (status = project(&c, scratch)) != QUERN_OK) return status;
    return c.backend->pool_append.run(&c.exec, &c.append, scratch);
}
