/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * append.c - tokens into streaming states: checks, then
 *
 *   [steps of weights.c, gemm: x w -> proj]  ->  pool_append
 */
#include "core/error.h"
#include "core/view.h"
#include "dsv4/call.h"

/* A tensor by its field. */
#define DP(field) OP_TENSOR(quern_dsv4_append_tensors, field)
static const op_tensor tensors[] = {{"proj", "proj", OP_ACTIVATION, OP_NONE, {DS_T, DS_COLUMNS}, {0}},
                                    {"x", "X", OP_ACTIVATION, OP_NONE, {DS_T, DS_IN}, {0}},
                                    {"w", "W", OP_WEIGHT, OP_NONE, {DS_IN, DS_COLUMNS}, {0}},
                                    {"b_a", "B_a", OP_WEIGHT, OP_NONE, {DS_R, DS_C}, {0}},
                                    {"b_b", "B_b", OP_WEIGHT, OP_NONE, {DS_R, DS_C}, {0}},
                                    {"prev_b", "prev_b", OP_WEIGHT, OP_NONE, {DS_B, DS_R, DS_2C}, {0}},
                                    {"norm_weight", "norm_weight", OP_WEIGHT, OP_NONE, {DS_C}, {0}},
                                    {"cos_sin", "cos_sin", OP_WEIGHT, OP_NONE, {DS_P, DS_ROPE}, {0}},
                                    {"out", "out", OP_STORED, OP_NONE, {DS_N, DS_ROW}, {0}},
                                    {"pooled", "pooled", OP_F32, OP_NONE, {DS_N, DS_C}, {0}},
                                    DSV4_WEIGHT_TENSORS("w", "W_", DS_IN, DS_COLUMNS)};
_Static_assert(sizeof tensors / sizeof *tensors == OP_TENSOR_COUNT(quern_dsv4_append_tensors),
               "a row a tensor");
static const dsv4_weight_row weight_row = {{DP(w), OP_NONE}, DP(w_fp8)};

/* The states, which are no tensors, stand behind what is cleared when the call begins. */
typedef struct append_call {
    op_call head;
    quern_dsv4_compress_params params;
    dsv4_weight_given weight;
    _Alignas(op_step) char program[DSV4_WEIGHT_BYTES + OP_STEP_BYTES(gemm) + OP_STEP_BYTES(pool_append)];
    quern_dsv4_state *const *states;
    const int64_t *counts;
    int64_t batch, tokens, entries;
    /* in the workspace: i64 [B], i32 [B], [B], [B], [B + 1] */
    quern_tensor slots, positions, merged, origins, cu;
} append_call;

static const pool_state *state_at(quern_dsv4_state *const *states, int64_t b)
{
    return (const pool_state *)states[b];
}

/* Checks each state and its count of tokens; makes them the call's. */
static quern_status take_states(append_call *c, quern_dsv4_state *const *states, const int64_t *counts,
                                int64_t batch)
{
    c->states = states;
    c->counts = counts;
    c->batch = batch;
    c->tokens = c->entries = 0;
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
        if (counts[b] < 0 || counts[b] > INT32_MAX - c->tokens || counts[b] > INT32_MAX - s->position)
            return error_set(
                QUERN_ERR_INVALID_ARGUMENT,
                "counts[%lld] is %lld: 0 or more tokens are accepted, %d at most in a call and a sequence",
                (long long)b, (long long)counts[b], INT32_MAX);
        for (int64_t i = 0; i < b; i++)
            if (states[i] == states[b])
                return error_set(QUERN_ERR_INVALID_ARGUMENT,
                                 "states[%lld] is states[%lld]: each state is accepted once", (long long)b,
                                 (long long)i);
        c->tokens += counts[b];
        c->entries += pool_state_entries(s, s->position + counts[b]) - pool_state_entries(s, s->position);
    }
    return QUERN_OK;
}

static quern_dsv4_compress_params *params_of(const op_call *call)
{
    return &((append_call *)(uintptr_t)call)->params;
}

/* Starts and blocks are the states'. */
static quern_status check_params(op_call *call)
{
    params_of(call)->start_abs_pos = 0;
    return dsv4_resolve(params_of(call));
}

static void roles(op_call *call)
{
    const bool csa = params_of(call)->kind == QUERN_DSV4_CSA, project = call->given[DP(x)] != NULL;
    uint8_t *r = call->role;
    r[DP(proj)] = project ? OP_REFUSED : OP_NEEDED;
    r[DP(x)] = r[DP(norm_weight)] = r[DP(cos_sin)] = OP_OPTIONAL;
    r[DP(b_a)] = OP_NEEDED;
    r[DP(b_b)] = csa ? OP_NEEDED : OP_REFUSED;
    r[DP(prev_b)] = csa ? OP_OPTIONAL : OP_REFUSED;
    r[DP(out)] = OP_RESULT;
    r[DP(pooled)] = OP_OPTIONAL_RESULT;
    dsv4_weight_roles(call, &weight_row, project);
}

static quern_status refuse(const op_call *call, int32_t tensor)
{
    const char *why = "proj alone, or x and a weight are accepted";
    if (tensor == DP(b_b) || tensor == DP(prev_b)) why = "HCA has no series b";
    else if (tensor != DP(proj) && call->given[DP(x)] != NULL)
        return dsv4_weight_refuse(call, &weight_row, tensor);
    return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s is given: %s", tensors[tensor].field, why);
}

/* Checks that the states fit the parameters and each other, and that positions stay in the table. */
static quern_status check_states(const op_call *call)
{
    const append_call *c = (const append_call *)call;
    const quern_dsv4_compress_params *p = &c->params;
    const pool_state *like = state_at(c->states, 0);
    const bool overlap = p->kind == QUERN_DSV4_CSA;
    for (int64_t b = 0; b < c->batch; b++) {
        const pool_state *s = state_at(c->states, b);
        if (s->ratio != p->ratio || s->overlap != overlap || s->width != like->width || s->ring != like->ring)
            return error_set(QUERN_ERR_INVALID_ARGUMENT,
                             "states[%lld] is of ratio %d, %s, width %lld, ring %lld: ratio %lld, %s, width "
                             "%lld, ring %lld are accepted",
                             (long long)b, s->ratio, s->overlap ? "CSA" : "HCA", (long long)s->width,
                             (long long)s->ring, (long long)p->ratio, overlap ? "CSA" : "HCA",
                             (long long)like->width, (long long)like->ring);
        const int64_t whole = pool_state_entries(s, s->position + c->counts[b]);
        const int64_t last = s->origin + (whole - 1) * s->ratio + (p->rope_last ? s->ratio - 1 : 0);
        if (op_uses(call, DP(cos_sin)) && whole > pool_state_entries(s, s->position) &&
            last >= call->symbol[DS_P])
            return error_set(
                QUERN_ERR_INVALID_ARGUMENT,
                "states[%lld] comes to an entry at position %lld: cos_sin has positions 0 to %lld",
                (long long)b, (long long)last, (long long)call->symbol[DS_P] - 1);
        if (op_uses(call, DP(prev_b)) && s->begun)
            return error_set(QUERN_ERR_INVALID_ARGUMENT,
                             "prev_b is given, and states[%lld] has begun: empty states are accepted",
                             (long long)b);
    }
    return QUERN_OK;
}

static quern_status derive(op_call *call)
{
    const append_call *c = (const append_call *)call;
    const quern_dsv4_compress_params *p = &c->params;
    const int32_t first = call->given[DP(x)] != NULL ? DP(x) : DP(proj);
    const quern_tensor *main = call->given[first], *cos_sin = call->given[DP(cos_sin)];
    int64_t *s = call->symbol;
    if (main == NULL)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "proj is NULL: proj, or x and w, are needed");
    call->like = *main;
    call->writes = true; /* the states */
    quern_status status = op_check_activation(call, first, 2);
    if (status == QUERN_OK && cos_sin != NULL) status = op_check_kind(call, DP(cos_sin), 2);
    if (status != QUERN_OK) return status;
    if (main->device != QUERN_CPU)
        return error_set(QUERN_ERR_UNSUPPORTED, "%s is on device %d: the cpu keeps states",
                         tensors[first].field, (int)main->device);
    s[DS_B] = c->batch;
    s[DS_T] = c->tokens;
    s[DS_N] = c->entries;
    s[DS_IN] = main->shape[1];
    s[DS_R] = p->ratio;
    s[DS_C] = state_at(c->states, 0)->width;
    s[DS_2C] = 2 * s[DS_C];
    s[DS_COLUMNS] = pool_row_columns(p->kind == QUERN_DSV4_CSA, s[DS_C]);
    s[DS_P] = cos_sin != NULL ? cos_sin->shape[0] : 0;
    s[DS_ROPE] = cos_sin != NULL ? cos_sin->shape[1] : 0;
    s[DS_ROW] = p->format == QUERN_DSV4_ROWS ? s[DS_C] : dsv4_row_bytes(p->format, s[DS_C]);
    if ((status = dsv4_check_width(p, s[DS_C], s[DS_ROPE])) != QUERN_OK ||
        (status = dsv4_weight_check(call, &weight_row, s[DS_IN])) != QUERN_OK)
        return status;
    if (op_uses(call, DP(out))) status = dsv4_check_stored(call, DP(out), p->format);
    return status == QUERN_OK ? check_states(call) : status;
}

static quern_status check_data(const op_call *call, void *const *data)
{
    return dsv4_weight_check_data(call, &weight_row, &((const append_call *)call)->weight, data);
}

/* The lowest address of the states' floats. */
static float *first_floats(const append_call *c)
{
    float *first = pool_state_data(state_at(c->states, 0));
    for (int64_t b = 1; b < c->batch; b++)
        if (pool_state_data(state_at(c->states, b)) < first) first = pool_state_data(state_at(c->states, b));
    return first;
}

/* States may stand anywhere at multiples of 64 bytes: they are rows of a view that has one at each. */
enum { STATE_STEP = 64 / sizeof(float) };

static quern_tensor view(const op_build *b, int32_t tensor)
{
    return op_view(b->call, tensor, false);
}

/* x w in f32, or the caller's. */
static quern_tensor projection(op_build *b)
{
    append_call *c = (append_call *)b->call;
    const quern_tensor x = view(b, DP(x));
    c->weight = dsv4_weight_views(b->call, &weight_row);
    if (x.ndim == 0) return view(b, DP(proj));
    const dsv4_weight weight = dsv4_weight_add(b, &x, &c->weight, false);
    if (weight.proj.ndim > 0) return weight.proj;
    const quern_tensor proj = op_matrix(b, QUERN_F32, c->tokens, b->call->symbol[DS_COLUMNS]);
    *OP_ADD(b, gemm) = (gemm_args){.a = x, .b = weight.w, .c = proj};
    return proj;
}

static void build(op_build *b)
{
    append_call *c = (append_call *)b->call;
    const pool_state *like = state_at(c->states, 0);
    const int64_t batch = c->batch, more = batch + 1, floats[] = {1, pool_floats_of(like)};
    const quern_tensor norm_weight = view(b, DP(norm_weight)), cos_sin = view(b, DP(cos_sin));
    c->slots = op_room(b, QUERN_I64, 1, &batch);
    c->positions = op_room(b, QUERN_I32, 1, &batch);
    c->merged = op_room(b, QUERN_I32, 1, &batch);
    c->origins = op_room(b, QUERN_I32, 1, &batch);
    c->cu = op_room(b, QUERN_I32, 1, &more);
    const quern_tensor proj = projection(b);
    pool_append_args *args = OP_ADD(b, pool_append);
    *args = (pool_append_args){.ratio = like->ratio,
                               .width = like->width,
                               .ring = like->ring,
                               .overlap = like->overlap != 0,
                               .step = {c->slots, c->positions, view_ranges(&c->cu)},
                               .origins = c->origins,
                               .merged = c->merged,
                               .state =
                                   view_on(&b->call->like, op_address(first_floats(c)), QUERN_F32, 2, floats),
                               .proj = proj,
                               .bias_a = view(b, DP(b_a)),
                               .bias_b = view(b, DP(b_b)),
                               .prev_b = view(b, DP(prev_b)),
                               .entry = dsv4_entry(&c->params, &norm_weight, &cos_sin),
                               .out = view(b, DP(out)),
                               .pooled = view(b, DP(pooled))};
    args->state.strides[0] = STATE_STEP;
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
    .tensors = tensors,
    .tensor_count = OP_TENSOR_COUNT(quern_dsv4_append_tensors),
    .varlen_by = OP_NONE,
    .params = dsv4_compress_param_rows,
    .param_count = DSV4_COMPRESS_PARAMS,
    .defaults = &dsv4_compress_defaults,
    .params_init = "QUERN_DSV4_COMPRESS_PARAMS_INIT",
    .tensors_init = "QUERN_DSV4_APPEND_TENSORS_INIT",
    .call_size = offsetof(append_call, states),
    .params_at = offsetof(append_call, params),
    .program_at = offsetof(append_call, program),
    .check_params = check_params,
    .roles = roles,
    .refuse = refuse,
    .derive = derive,
    .check_data = check_data,
    .build = build,
    .begin = begin,
};

quern_status quern_dsv4_append_entries(quern_dsv4_state *const *states, const int64_t *counts, int64_t batch,
                                       int64_t *n)
{
    append_call c;
    const quern_status status = take_states(&c, states, counts, batch);
    if (status != QUERN_OK) return status;
    if (n == NULL) return error_set(QUERN_ERR_INVALID_ARGUMENT, "n is NULL: a place for the count is needed");
    *n = c.entries;
    return QUERN_OK;
}

quern_status quern_dsv4_append_workspace(quern_context *ctx, const quern_dsv4_compress_params *params,
                                         quern_dsv4_state *const *states, const int64_t *counts,
                                         int64_t batch, const quern_dsv4_append_tensors *of, size_t *bytes)
{
    append_call c;
    const quern_status status = take_states(&c, states, counts, batch);
    if (status == QUERN_OK && batch == 0 && bytes != NULL) *bytes = 0;
    if (status != QUERN_OK || (batch == 0 && bytes != NULL)) return status;
    return op_workspace_of(&c.head, &family, 0, ctx, params, of, bytes);
}

quern_status quern_dsv4_append(quern_context *ctx, const quern_exec *exec,
                               const quern_dsv4_compress_params *params, quern_dsv4_state *const *states,
                               const int64_t *counts, int64_t batch, const quern_dsv4_append_tensors *of,
                               void *workspace, size_t workspace_bytes)
{
    append_call c;
    quern_status status = take_states(&c, states, counts, batch);
    if (status != QUERN_OK || batch == 0) return status;
    status = op_run(&c.head, &family, 0, ctx, exec, params, of, workspace, workspace_bytes);
    for (int64_t b = 0; b < batch && status == QUERN_OK; b++)
        dsv4_state_advance((pool_state *)states[b], counts[b], c.head.alignment[DP(prev_b)] > 0);
    return status;
}
