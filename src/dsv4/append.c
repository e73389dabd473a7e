/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * append.c - tokens into streaming states: checks, then
 *
 *   [steps of weights.c, gemm: x w -> proj]  ->  pool_append
 */
#include "core/error.h"
#include "core/float_state.h"
#include "core/view.h"
#include "dsv4/dsv4.h"
#include "dsv4/weights.h"
#include "runtime/context.h"

/* No description of tensors: a call's states are no tensors. Only its steps are a program's. */
typedef struct append_call {
    op_call head;
    quern_dsv4_compress_params params;
    quern_dsv4_append_tensors t;
    const pool_state *like; /* the first state */
    int64_t tokens, entries, batch;
    quern_dsv4_state *const *states;
    const int64_t *counts;
    /* in the workspace: i64 [B], i32 [B], [B], [B], [B + 1] */
    quern_tensor slots, positions, merged, origins, cu;
    _Alignas(op_step) char program[DSV4_WEIGHT_BYTES + OP_STEP_BYTES(gemm) + OP_STEP_BYTES(pool_append)];
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
    const int64_t width = c->like->width, r = c->params.ratio, columns = pool_row_columns(csa, width);
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

/* x w in f32. */
static quern_tensor add_projection(op_build *b)
{
    const append_call *c = (const append_call *)b->call;
    const quern_dsv4_append_tensors *t = &c->t;
    const quern_tensor x = op_known_view(t->x, false);
    const dsv4_weight_given given = {.w = op_known_view(t->w, false),
                                     .w_fp8 = op_known_view(t->w_fp8, false),
                                     .w_fp8_scales = op_known_view(t->w_fp8_scales, false),
                                     .w_codes = op_known_view(t->w_codes, false),
                                     .w_scales = op_known_view(t->w_scales, false),
                                     .w_global = op_known_view(t->w_global, false)};
    const dsv4_weight weight = dsv4_weight_add(b, &x, &given, false);
    if (weight.proj.ndim > 0) return weight.proj;
    const quern_tensor proj =
        op_matrix(b, QUERN_F32, c->tokens, pool_row_columns(c->like->overlap != 0, c->like->width));
    *OP_ADD(b, gemm) = (gemm_args){.a = x, .b = weight.w, .c = proj};
    return proj;
}

/* The lowest address of the states' floats. */
static float *first_floats(const append_call *c)
{
    float *first = pool_state_data(c->like);
    for (int64_t b = 1; b < c->batch; b++)
        if (pool_state_data(state_at(c->states, b)) < first) first = pool_state_data(state_at(c->states, b));
    return first;
}

/* States may stand anywhere at multiples of 64 bytes: they are rows of a view that has one at each. */
enum { STATE_STEP = 64 / sizeof(float) };

static void build(op_build *b)
{
    append_call *c = (append_call *)b->call;
    const quern_dsv4_append_tensors *t = &c->t;
    const pool_state *like = c->like;
    const int64_t batch = c->batch, more = batch + 1, floats[] = {1, pool_floats_of(like)};
    c->slots = op_room(b, QUERN_I64, 1, &batch);
    c->positions = op_room(b, QUERN_I32, 1, &batch);
    c->merged = op_room(b, QUERN_I32, 1, &batch);
    c->origins = op_room(b, QUERN_I32, 1, &batch);
    c->cu = op_room(b, QUERN_I32, 1, &more);
    const quern_tensor proj = t->x != NULL ? add_projection(b) : op_known_view(t->proj, false);
    pool_append_args *args = OP_ADD(b, pool_append);
    args->ratio = like->ratio;
    args->width = like->width;
    args->ring = like->ring;
    args->overlap = like->overlap != 0;
    args->step = (stage_step){c->slots, c->positions, view_ranges(&c->cu)};
    args->origins = c->origins;
    args->merged = c->merged;
    args->state = view_on(&b->call->like, op_address(first_floats(c)), QUERN_F32, 2, floats);
    args->state.strides[0] = STATE_STEP;
    args->proj = proj;
    args->bias_a = op_known_view(t->b_a, false);
    args->bias_b = op_known_view(t->b_b, false);
    args->prev_b = op_known_view(t->prev_b, false);
    args->entry = dsv4_entry(&c->params, NULL, NULL);
    args->entry.norm_weight = op_known_view(t->norm_weight, false);
    args->entry.cos_sin = op_known_view(t->cos_sin, false);
    args->out = op_known_view(t->out, false);
    args->pooled = op_known_view(t->pooled, false);
}

/* What the states' headers say. */
static void begin(const op_call *call, const op_frame *frame)
{
    const append_call *c = (const append_call *)call;
    int64_t *slots = op_placed(c->slots.data, frame);
    int32_t *positions = op_placed(c->positions.data, frame), *merged = op_placed(c->merged.data, frame),
            *origins = op_placed(c->origins.data, frame), *cu = op_placed(c->cu.data, frame);
    const float *first = first_floats(c);
    cu[0] = 0;
    for (int64_t b = 0; b < c->batch; b++) {
        const pool_state *s = state_at(c->states, b);
        slots[b] =
            (int64_t)(((uintptr_t)pool_state_data(s) - (uintptr_t)first) / (STATE_STEP * sizeof *first));
        positions[b] = (int32_t)s->position;
        merged[b] = (int32_t)(s->position - s->held);
        origins[b] = (int32_t)s->origin;
        cu[b + 1] = (int32_t)(cu[b] + c->counts[b]);
    }
}

static const char *const operations[] = {"dsv4_append"};
static const op_family family = {
    .operations = operations,
    .operation_count = 1,
    .call_size = sizeof(append_call),
    .program_at = offsetof(append_call, program),
    .build = build,
    .begin = begin,
};

static quern_status plan(quern_context *ctx, const quern_exec *exec, const quern_dsv4_compress_params *params,
                         quern_dsv4_state *const *states, const int64_t *counts, int64_t batch,
                         const quern_dsv4_append_tensors *tensors, bool run, append_call *c)
{
    quern_exec how;
    quern_status status;
    c->head.bytes = 0;
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
    op_call *head = &c->head;
    head->family = &family;
    head->operation = 0;
    head->like = *like;
    head->backend = context_backend(ctx, like->device, like->device_id, how.stream, &head->exec);
    if (head->backend == NULL) return error_status();
    c->batch = batch;
    c->states = states;
    c->counts = counts;
    return op_program_build(head);
}

/* The contents of scales. */
static quern_status check_data(const quern_dsv4_append_tensors *t)
{
    quern_status status = QUERN_OK;
    if (t->w_fp8_scales != NULL)
        status = dsv4_weight_check_powers(t->w_fp8_scales, t->w_fp8_scales->data, "w_fp8_scales");
    if (t->w_global != NULL && status == QUERN_OK)
        status = dsv4_weight_check_global(t->w_global, t->w_global->data, "w_global");
    return status;
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
    *bytes = c.head.bytes;
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
    if (status != QUERN_OK || batch == 0 ||
        (status = view_check_workspace(workspace, workspace_bytes, c.head.bytes, c.t.out)) != QUERN_OK)
        return status;
    if ((status = check_data(&c.t)) != QUERN_OK) return status;
    const quern_exec how = QUERN_EXEC_INIT;
    const op_frame frame = op_frame_of(&c.head, &how, NULL, workspace);
    status = op_program_run(&c.head, &frame);
    for (int64_t b = 0; b < batch && status == QUERN_OK; b++)
        dsv4_state_advance((pool_state *)states[b], counts[b], c.t.prev_b != NULL);
    return status;
}
