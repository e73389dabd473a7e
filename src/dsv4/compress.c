/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * compress.c - the compressors' public functions: checks, then one stage.
 *
 *   forward:  pool_forward
 *   backward: pool_backward
 */
#include "core/arena.h"
#include "core/context.h"
#include "core/error.h"
#include "core/float_state.h"
#include "core/op.h"
#include "core/view.h"
#include "dsv4/dsv4.h"

typedef struct compress_call {
    const quern_backend *backend;
    stage_exec exec;
    quern_dsv4_compress_params params;
    quern_dsv4_compress_tensors t;
    bool backward, varlen;
    int32_t lead; /* leading extents of proj or x: 0 or 1 */
    int64_t batch, tokens, width, columns, entries;
    pool_args pool;
} compress_call;

static quern_status check_projection(const quern_dsv4_compress_tensors *t)
{
    if ((t->proj != NULL) != (t->x != NULL) && (t->x != NULL) == (t->w != NULL)) return QUERN_OK;
    return error_set(QUERN_ERR_INVALID_ARGUMENT, "proj is %s, x %s, w %s: proj alone, or x and w are accepted", t->proj != NULL ? "given" : "NULL",
                     t->x != NULL ? "given" : "NULL", t->w != NULL ? "given" : "NULL");
}

/* A tensor that means nothing here. */
static quern_status refuse(const quern_tensor *t, const char *name, const char *why)
{
    return t == NULL ? QUERN_OK : error_set(QUERN_ERR_INVALID_ARGUMENT, "%s is given: %s", name, why);
}

static quern_status check_uses(const compress_call *c)
{
    const quern_dsv4_compress_tensors *t = &c->t;
    quern_status status = QUERN_OK;
    const struct {
        bool meaningless;
        const quern_tensor *t;
        const char *name, *why;
    } rules[] = {
        {c->params.kind == QUERN_DSV4_HCA, t->b_b, "b_b", "HCA has no series b"},
        {c->params.kind == QUERN_DSV4_HCA, t->prev_b, "prev_b", "HCA has no series b"},
        {t->prev_b == NULL, t->has_prev, "has_prev", "it stands beside prev_b"},
        {!c->varlen, t->has_prev, "has_prev", "it stands beside cu_seqlens"},
        {!c->varlen, t->start_tokens, "start_tokens", "it stands beside cu_seqlens; params.start_token holds otherwise"},
        {!c->varlen, t->start_positions, "start_positions", "it stands beside cu_seqlens; params.start_abs_pos holds otherwise"},
        {!c->varlen, t->block_counts, "block_counts", "it stands beside cu_seqlens; params.n_blocks holds otherwise"},
        {!c->varlen, t->cu_seqlens_cmp, "cu_seqlens_cmp", "it stands beside cu_seqlens"},
        {c->backward && t->proj == NULL, t->d_proj, "d_proj", "proj is NULL"},
        {c->backward && t->x == NULL, t->d_x, "d_x", "x is NULL"},
        {c->backward && t->x == NULL, t->d_w, "d_w", "w is NULL"},
        {c->backward && t->prev_b == NULL, t->d_prev_b, "d_prev_b", "prev_b is NULL"},
        {c->backward && t->b_b == NULL, t->d_b_b, "d_b_b", "b_b is NULL"},
        {c->backward && t->norm_weight == NULL, t->d_norm_weight, "d_norm_weight", "norm_weight is NULL"},
    };
    for (size_t i = 0; i < sizeof rules / sizeof *rules && status == QUERN_OK; i++)
        if (rules[i].meaningless) status = refuse(rules[i].t, rules[i].name, rules[i].why);
    return status;
}

/* Sizes from b_a and from proj or x. */
static quern_status derive(compress_call *c, bool run)
{
    const quern_dsv4_compress_tensors *t = &c->t;
    const quern_tensor *main = t->proj != NULL ? t->proj : t->x;
    const char *name = t->proj != NULL ? "proj" : "x";
    const view_rule bias = {"b_a", t->b_a, VIEW_ACTIVATION, 2, {c->params.ratio, VIEW_ANY}, false, false};
    quern_status status = view_check(&bias, NULL, run);
    if (status != QUERN_OK) return status;
    c->varlen = t->cu_seqlens != NULL;
    c->width = t->b_a->shape[1];
    c->columns = (c->params.kind == QUERN_DSV4_CSA ? 4 : 2) * c->width;
    if (main->ndim != 2 && (c->varlen || main->ndim != 3))
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s has %d dimensions: %s accepted", name, main->ndim, c->varlen ? "2 with cu_seqlens are" : "2 or 3 are");
    c->lead = main->ndim - 2;
    c->batch = c->lead > 0 ? main->shape[0] : c->varlen ? (t->cu_seqlens->ndim == 1 ? t->cu_seqlens->shape[0] - 1 : 0) : 1;
    c->tokens = main->shape[c->lead];
    if (c->batch < 0) return error_set(QUERN_ERR_INVALID_ARGUMENT, "cu_seqlens has 0 entries: batch + 1 are accepted");
    if (c->tokens < 0 || c->tokens > INT32_MAX)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s has %lld tokens: at most %d are accepted", name, (long long)c->tokens, INT32_MAX);
    const int64_t first = c->params.start_token, whole = (c->tokens - first) / c->params.ratio;
    if (!c->varlen && first > c->tokens)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "start_token is %lld: 0 to the %lld tokens of a sequence are accepted", (long long)first,
                         (long long)c->tokens);
    if (c->varlen && c->params.n_blocks > 0)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "n_blocks is %lld with cu_seqlens: 0, or block_counts, is accepted", (long long)c->params.n_blocks);
    if (c->params.n_blocks > whole && !c->varlen)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "n_blocks is %lld: 0 (all) to the %lld whole blocks after start_token are accepted",
                         (long long)c->params.n_blocks, (long long)whole);
    c->entries = c->varlen ? c->tokens / c->params.ratio : c->params.n_blocks > 0 ? c->params.n_blocks : whole;
    return dsv4_check_width(&c->params, c->width, t->cos_sin != NULL && t->cos_sin->ndim == 2 ? t->cos_sin->shape[1] : 0);
}

static quern_status check_tensors(const compress_call *c, bool run)
{
    const quern_dsv4_compress_tensors *t = &c->t;
    const quern_tensor *main = t->proj != NULL ? t->proj : t->x, none = {0};
    const bool csa = c->params.kind == QUERN_DSV4_CSA, back = c->backward, own = c->lead > 0 || c->varlen;
    const int64_t width = c->width, r = c->params.ratio, in = t->x != NULL && t->x->ndim == 2 + c->lead ? t->x->shape[1 + c->lead] : VIEW_ANY;
    const int64_t bytes = dsv4_row_bytes(c->params.format, width);
    const uint32_t act = VIEW_ACTIVATION & 1u << (unsigned)main->dtype, weight = act | VIEW_F32;
#define ROWS(n, columns) 2 + c->lead, {c->lead > 0 ? c->batch : (n), c->lead > 0 ? (n) : (columns), (columns)}
#define BLOCK own ? 3 : 2, {own ? c->batch : r, own ? r : 2 * width, 2 * width}
#define RESULT(name) {#name, back ? NULL : t->name
#define GRADIENT(name) {#name, back ? t->name : NULL
    const view_rule rules[] = {
        {"proj", t->proj, VIEW_ACTIVATION, ROWS(c->tokens, c->columns), true, false},
        {"x", t->x, VIEW_ACTIVATION, ROWS(c->tokens, in), true, false},
        {"w", t->w, weight, 2, {in, c->columns}, true, false},
        {"b_a", t->b_a, weight, 2, {r, width}, false, false},
        {"b_b", t->b_b, weight, 2, {r, width}, !csa, false},
        {"prev_b", t->prev_b, weight, BLOCK, true, false},
        {"norm_weight", t->norm_weight, weight, 1, {width}, true, false},
        {"cos_sin", t->cos_sin, weight, 2, {VIEW_ANY, VIEW_ANY}, true, false},
        {"cu_seqlens", t->cu_seqlens, VIEW_I32, 1, {c->batch + 1}, true, false},
        {"start_tokens", t->start_tokens, VIEW_I32, 1, {c->batch}, true, false},
        {"start_positions", t->start_positions, VIEW_I32, 1, {c->batch}, true, false},
        {"block_counts", t->block_counts, VIEW_I32, 1, {c->batch}, true, false},
        {"has_prev", t->has_prev, VIEW_I32, 1, {c->batch}, true, false},
        RESULT(cu_seqlens_cmp), VIEW_I32, 1, {c->batch + 1}, true, true},
        RESULT(pooled), VIEW_F32, ROWS(c->entries, width), true, true},
        RESULT(out), bytes > 0 ? 1u << QUERN_U8 : VIEW_ACTIVATION, ROWS(c->entries, bytes > 0 ? bytes : width), back, true},
        GRADIENT(d_out), weight, ROWS(c->entries, width), !back, false},
        GRADIENT(d_proj), act, ROWS(c->tokens, c->columns), true, true},
        GRADIENT(d_x), act, ROWS(c->tokens, in), true, true},
        GRADIENT(d_prev_b), 1u << (unsigned)(t->prev_b != NULL ? t->prev_b : &none)->dtype, BLOCK, true, true},
        GRADIENT(d_w), VIEW_F32, 2, {in, c->columns}, true, true},
        GRADIENT(d_b_a), VIEW_F32, 2, {r, width}, true, true},
        GRADIENT(d_b_b), VIEW_F32, 2, {r, width}, true, true},
        GRADIENT(d_norm_weight), VIEW_F32, 1, {width}, true, true},
    };
#undef ROWS
#undef BLOCK
#undef RESULT
#undef GRADIENT
    return view_check_all(rules, sizeof rules / sizeof *rules, main, run);
}

static int64_t value_at(const quern_tensor *t, int64_t b, int64_t otherwise)
{
    return t != NULL ? ((const int32_t *)t->data)[b * t->strides[0]] : otherwise;
}

/* What stands in the host's memory: each sequence's start, count and positions. */
static quern_status check_sequences(const compress_call *c)
{
    const quern_dsv4_compress_tensors *t = &c->t;
    const int64_t r = c->params.ratio, most = t->cos_sin != NULL ? t->cos_sin->shape[0] : INT64_MAX;
    quern_status status = c->varlen ? view_check_offsets(t->cu_seqlens->data, c->batch, "cu_seqlens", c->tokens) : QUERN_OK;
    for (int64_t b = 0; b < c->batch && status == QUERN_OK; b++) {
        const int32_t *cu = c->varlen ? t->cu_seqlens->data : NULL;
        const int64_t n = cu != NULL ? cu[b + 1] - cu[b] : c->tokens, start = value_at(t->start_tokens, b, c->params.start_token);
        const int64_t position = value_at(t->start_positions, b, c->params.start_abs_pos), whole = (n - start) / r;
        const int64_t blocks = value_at(t->block_counts, b, c->params.n_blocks > 0 ? c->params.n_blocks : whole);
        const int64_t last = position + (blocks - 1) * r + (c->params.rope_last ? r - 1 : 0);
        if (start < 0 || start > n)
            status = error_set(QUERN_ERR_INVALID_ARGUMENT, "sequence %lld starts at token %lld: 0 to its %lld tokens are accepted", (long long)b,
                               (long long)start, (long long)n);
        else if (blocks < 0 || blocks > whole)
            status = error_set(QUERN_ERR_INVALID_ARGUMENT, "sequence %lld has block count %lld: 0 to its %lld whole blocks are accepted", (long long)b,
                               (long long)blocks, (long long)whole);
        else if (position < 0 || (!c->params.rope_last && position % r != 0))
            status = error_set(QUERN_ERR_INVALID_ARGUMENT, "sequence %lld starts at position %lld: %s accepted", (long long)b, (long long)position,
                               position < 0 ? "0 or more is" : "multiples of ratio are, unless rope_last is set,");
        else if (blocks > 0 && last >= most)
            status = error_set(QUERN_ERR_INVALID_ARGUMENT, "sequence %lld comes to an entry at position %lld: cos_sin has positions 0 to %lld",
                               (long long)b, (long long)last, (long long)most - 1);
    }
    return status;
}

/* [B, rows, columns] for stages; `own`: a batch extent is there. */
static quern_tensor with_batch(const quern_tensor *t, bool own)
{
    return t == NULL || own ? view_or_absent(t) : view_with_batch(t);
}

static quern_tensor rows_view(const compress_call *c, const quern_tensor *t)
{
    return with_batch(t, c->lead > 0);
}

static pool_args pool_of(const compress_call *c)
{
    const quern_dsv4_compress_tensors *t = &c->t;
    pool_args p = {.ratio = c->params.ratio, .width = c->width, .overlap = c->params.kind == QUERN_DSV4_CSA, .batch = c->batch,
                   .start_token = c->params.start_token, .start_position = c->params.start_abs_pos, .blocks = c->params.n_blocks};
    const bool own = c->lead > 0 || c->varlen;
    p.cu_seqlens = view_or_absent(t->cu_seqlens);
    p.start_tokens = view_or_absent(t->start_tokens);
    p.start_positions = view_or_absent(t->start_positions);
    p.block_counts = view_or_absent(t->block_counts);
    p.has_prev = view_or_absent(t->has_prev);
    p.proj = rows_view(c, t->proj);
    p.x = rows_view(c, t->x);
    p.w = view_or_absent(t->w);
    p.bias_a = view_or_absent(t->b_a);
    p.bias_b = view_or_absent(t->b_b);
    p.prev_b = with_batch(t->prev_b, own);
    p.entry = dsv4_entry(&c->params, t->norm_weight, t->cos_sin);
    if (!c->backward) {
        p.cu_entries = view_or_absent(t->cu_seqlens_cmp);
        p.pooled = rows_view(c, t->pooled);
        p.out = rows_view(c, t->out);
        return p;
    }
    p.d_out = rows_view(c, t->d_out);
    p.d_proj = rows_view(c, t->d_proj);
    p.d_x = rows_view(c, t->d_x);
    p.d_w = view_or_absent(t->d_w);
    p.d_prev_b = with_batch(t->d_prev_b, own);
    p.d_bias_a = view_or_absent(t->d_b_a);
    p.d_bias_b = view_or_absent(t->d_b_b);
    p.d_norm_weight = view_or_absent(t->d_norm_weight);
    return p;
}

static const pool_stage *stage_of(const compress_call *c)
{
    return c->backward ? &c->backend->pool_backward : &c->backend->pool_forward;
}

/* Checks everything visible to the host and fills the stage's arguments. */
static quern_status plan(quern_context *ctx, const quern_exec *exec, const quern_dsv4_compress_params *params,
                         const quern_dsv4_compress_tensors *tensors, bool backward, bool run, compress_call *c)
{
    quern_exec how;
    quern_status status;
    char why[STAGE_WHY_BYTES] = "";
    *c = (compress_call){.t = QUERN_DSV4_COMPRESS_TENSORS_INIT, .backward = backward};
    if (ctx == NULL) return error_set(QUERN_ERR_INVALID_ARGUMENT, "ctx is NULL: create one with quern_context_create()");
    if ((status = dsv4_params(params, &c->params)) != QUERN_OK ||
        (status = op_struct(&c->t, tensors, "tensors", "QUERN_DSV4_COMPRESS_TENSORS_INIT")) != QUERN_OK ||
        (status = op_exec(exec, &how)) != QUERN_OK || (status = check_projection(&c->t)) != QUERN_OK || (status = derive(c, run)) != QUERN_OK ||
        (status = check_uses(c)) != QUERN_OK || (status = check_tensors(c, run)) != QUERN_OK)
        return status;
    const quern_tensor *like = c->t.b_a;
    c->backend = context_backend(ctx, like->device, like->device_id, how.stream, &c->exec);
    if (c->backend == NULL) return error_status();
    if (stage_of(c)->run == NULL) return error_set(QUERN_ERR_UNSUPPORTED, "the %s backend has no compressors: the cpu has", c->backend->name);
    if (run && (status = check_sequences(c)) != QUERN_OK) return status;
    c->pool = pool_of(c);
    return STAGE_TAKES(*stage_of(c), &c->exec, &c->pool, why) ? QUERN_OK : error_set(QUERN_ERR_UNSUPPORTED, "%s", why);
}

static quern_status workspace_of(quern_context *ctx, const quern_dsv4_compress_params *params, const quern_dsv4_compress_tensors *tensors,
                                 bool backward, size_t *bytes)
{
    compress_call c;
    const quern_status status = plan(ctx, NULL, params, tensors, backward, false, &c);
    if (status != QUERN_OK) return status;
    if (bytes == NULL) return error_set(QUERN_ERR_INVALID_ARGUMENT, "bytes is NULL: a place for the size is needed");
    *bytes = stage_of(&c)->workspace(&c.exec, &c.pool);
    return QUERN_OK;
}

static quern_status call(quern_context *ctx, const quern_exec *exec, const quern_dsv4_compress_params *params,
                         const quern_dsv4_compress_tensors *tensors, bool backward, void *workspace, size_t workspace_bytes)
{
    DEFAULT_FLOAT_STATE;
    compress_call c;
    quern_status status = plan(ctx, exec, params, tensors, backward, true, &c);
    if (status != QUERN_OK) return status;
    status = view_check_workspace(workspace, workspace_bytes, stage_of(&c)->workspace(&c.exec, &c.pool), c.t.b_a);
    return status != QUERN_OK ? status : stage_of(&c)->run(&c.exec, &c.pool, workspace);
}

quern_status quern_dsv4_compress_workspace(quern_context *ctx, const quern_dsv4_compress_params *params, const quern_dsv4_compress_tensors *tensors,
                                           size_t *bytes)
{
    return workspace_of(ctx, params, tensors, false, bytes);
}

quern_status quern_dsv4_compress(quern_context *ctx, const quern_exec *exec, const quern_dsv4_compress_params *params,
                                 const quern_dsv4_compress_tensors *tensors, void *workspace, size_t workspace_bytes)
{
    return call(ctx, exec, params, tensors, false, workspace, workspace_bytes);
}

quern_status quern_dsv4_compress_backward_workspace(quern_context *ctx, const quern_dsv4_compress_params *params,
                                                    const quern_dsv4_compress_tensors *tensors, size_t *bytes)
{
    return workspace_of(ctx, params, tensors, true, bytes);
}

quern_status quern_dsv4_compress_backward(quern_context *ctx, const quern_exec *exec, const quern_dsv4_compress_params *params,
                                          const quern_dsv4_compress_tensors *tensors, void *workspace, size_t workspace_bytes)
{
    return call(ctx, exec, params, tensors, true, workspace, workspace_bytes);
}
