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
    const int32_t first = call->given[DP(x)] != NULL ? DP(x) : DP(proj);
    call->writes = true; /* the states */
    call->symbol[DS_B] = c->batch;
    call->symbol[DS_T] = c->tokens;
    call->symbol[DS_N] = c->entries;
    call->lead[0] = (op_extents){1, {c->entries}};
    const quern_status status = dsv4_append_derive(call, &c->params, state_at(c->states, 0)->width);
    if (status == QUERN_OK && call->like.device != QUERN_CPU)
        return error_set(QUERN_ERR_UNSUPPORTED, "%s is on device %d: the cpu keeps states",
                         dsv4_append_rows[first].field, (int)call->like.device);
    return status == QUERN_OK ? check_states(call) : status;
}

static quern_status check_data(const op_call *call, void *const *data)
{
    return dsv4_weight_check_data(call, &dsv4_append_weights[0], &((const append_call *)call)->weight, data);
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
    const quern_tensor proj = dsv4_append_projection(b, false, &c->weight);
    pool_append_args *args = OP_ADD(b, pool_append);
    *args = (pool_append_args){.ratio = like->ratio,
                               .ring = like->ring,
                               .overlap = like->overlap != 0,
                               .step = {c->slots, c->positions, view_ranges(&c->cu)},
                               .origins = c->origins};
    args->part[0] = (pool_append_part){
        .width = like->width,
        .merged = c->merged,
        .state = view_on(&b->call->like, op_address(first_floats(c)), QUERN_F32, 2, floats),
        .proj = proj,
        .bias_a = view(b, DP(b_a)),
        .bias_b = view(b, DP(b_b)),
        .prev_b = view(b, DP(prev_b)),
        .entry = dsv4_entry(&c->params, &norm_weight, &cos_sin),
        .out = view(b, DP(out)),
        .pooled = view(b, DP(pooled))};
    args->part[0].state.strides[0] = STATE_STEP;
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
    .tensors = dsv4_append_rows,
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
    .roles = dsv4_append_roles,
    .refuse = dsv4_append_refuse,
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
