/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* swizzle.c - scales between rows and the order of tensor cores: the operation's schema and its one stage. */
#include "core/error.h"
#include "nvfp4/call.h"

#include <stddef.h>

/* The number of a tensor. */
#define T(field) OP_TENSOR(quern_nvfp4_swizzle_tensors, field)
enum { TENSORS = OP_TENSOR_COUNT(quern_nvfp4_swizzle_tensors) };
enum { S_E = 1, S_E1 };
enum { L_LINEAR = OP_LEAD, L_SWIZZLED };
enum { ASKED_ROWS, ASKED_COLUMNS };
enum { TILE_ROWS = 128, TILE_COLUMNS = 4 };

static const op_tensor tensors[] = {
    {"linear", "scales", OP_SCALE, OP_NONE, {L_LINEAR}, {0}},
    {"swizzled", "swizzled", OP_SCALE, OP_NONE, {L_SWIZZLED}, {0}},
    {"tokens_per_expert", "tokens_per_expert", OP_I32, OP_NONE, {S_E}, {0}},
    {"pad_row_offsets", "pad_row_offsets", OP_I32, OP_NONE, {S_E1}, {0}},
};

#define FIELD(member) OP_FIELD(quern_nvfp4_swizzle_params, member)
static const op_param params[] = {
    {FIELD(inverse), OP_FLAG, 0, 1, NULL, "from swizzled to scales"},
    {FIELD(weight), OP_FLAG, 0, 1, nvfp4_layout_words,
     "scales [rows, columns], or a weight's, [E, columns, rows]"},
    {FIELD(experts), OP_FLAG, 0, 1, NULL,
     "rows of experts, each from a tile of its own; with tokens_per_expert"},
};
static const int8_t like[] = {T(linear), T(swizzled), OP_NONE};
static const char *const operations[] = {"nvfp4_swizzle"};
static const char symbols[] = "E E+1";
static const char *const leads[] = {"rows columns|E columns rows...", "bytes|E bytes...", NULL};
static const op_rename renames[] = {{"weight", "layout", NULL}, {NULL, NULL, NULL}};
static const op_entry ops[] = {
    {.name = "nvfp4-swizzle",
     .help = "scales to the order of tensor cores, in tiles of 128 rows and 4 columns, and back",
     .renames = renames,
     .asked = {[ASKED_ROWS] = "rows", [ASKED_COLUMNS] = "columns"}},
};

#define PARAMS(call) ((quern_nvfp4_swizzle_params *)op_params(call))

static quern_status check_params(op_call *call)
{
    if (!PARAMS(call)->experts || !PARAMS(call)->weight) return QUERN_OK;
    return error_argument("experts is true with weight: it is accepted for activations");
}

static void roles(op_call *call)
{
    const quern_nvfp4_swizzle_params *p = op_params(call);
    call->role[T(linear)] = p->inverse ? OP_RESULT : OP_NEEDED;
    call->role[T(swizzled)] = p->inverse ? OP_NEEDED : OP_RESULT;
    call->role[T(tokens_per_expert)] = p->experts ? OP_NEEDED : OP_UNUSED;
    op_allow(call, T(pad_row_offsets), p->experts && !p->inverse, OP_OPTIONAL_RESULT,
             p->inverse ? " with inverse: it is written with experts, from scales"
                        : " without experts: it is written with experts, from scales");
    op_reason(call, T(tokens_per_expert), ": a tensor is needed with experts");
}

/* Whole tiles of `tile`; false where the result overflows. */
static bool tiled(int64_t n, int64_t tile, int64_t *padded)
{
    return !__builtin_mul_overflow(n / tile + (n % tile != 0), tile, padded);
}

static quern_status refuse_size(int64_t rows)
{
    return error_argument("scales of %lld rows: tiles of at most 2^63 - 1 bytes are accepted",
                          (long long)rows);
}

/* Bytes of tiles that hold `rows` rows, a whole number of tiles, of `columns` scales. */
static quern_status find_bytes(int64_t rows, int64_t columns, int64_t *bytes)
{
    int64_t across;
    if (tiled(columns, TILE_COLUMNS, &across) && !__builtin_mul_overflow(rows, across, bytes))
        return QUERN_OK;
    return refuse_size(rows);
}

/* The rows of tiles that the experts' tokens fill. */
static quern_status sum_rows(const int32_t *tokens, int64_t experts, int64_t rows, int64_t *padded)
{
    int64_t sum = 0;
    *padded = 0;
    for (int64_t e = 0; e < experts; e++) {
        if (tokens[e] < 0 || tokens[e] > rows - sum)
            return error_argument(
                "tokens_per_expert[%lld] is %d: 0 to the %lld rows that are left is accepted", (long long)e,
                tokens[e], (long long)(rows - sum));
        sum += tokens[e];
        *padded += ((int64_t)tokens[e] + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS;
    }
    if (*padded <= INT32_MAX) return QUERN_OK;
    return error_argument("tokens_per_expert make %lld padded rows: at most %d are accepted",
                          (long long)*padded, INT32_MAX);
}

/* Rows and columns of the scales: as given, else as asked for. */
static quern_status find_matrix(op_call *call, int64_t *rows, int64_t *columns)
{
    const bool weight = PARAMS(call)->weight;
    const quern_tensor *linear = call->given[T(linear)], *swizzled = call->given[T(swizzled)];
    const int32_t first = linear != NULL ? T(linear) : T(swizzled), ndim = weight ? 3 : 2;
    op_extents *shape = &call->lead[L_LINEAR - OP_LEAD];
    const quern_status status = op_check_ndim(call, first, linear != NULL ? ndim : ndim - 1);
    if (status != QUERN_OK) return status;
    *rows = linear != NULL ? linear->shape[weight ? 2 : 0] : call->asked[ASKED_ROWS];
    *columns = linear != NULL ? linear->shape[1] : call->asked[ASKED_COLUMNS];
    if (*rows < 0 || *columns < 0)
        return error_argument("rows is %lld and columns %lld: 0 or more are accepted", (long long)*rows,
                              (long long)*columns);
    if (linear == NULL && *rows == 0 && *columns == 0 && swizzled->shape[ndim - 2] > 0)
        return error_argument("linear is NULL, rows and columns are 0: the extents of the scales are needed");
    const int64_t experts = (linear != NULL ? linear : swizzled)->shape[0];
    *shape = weight ? (op_extents){3, {experts, *columns, *rows}} : (op_extents){2, {*rows, *columns}};
    return QUERN_OK;
}

/* The rows of tiles: with experts as many as their tokens fill, or the most that they can fill. */
static quern_status find_padded(const op_call *call, int64_t rows, int64_t *padded)
{
    const quern_tensor *tokens = call->given[T(tokens_per_expert)];
    int64_t most;
    if (!op_uses(call, T(tokens_per_expert)))
        return tiled(rows, TILE_ROWS, padded) ? QUERN_OK : refuse_size(rows);
    if (call->contents && tokens->device == QUERN_CPU && tokens->data != NULL)
        return sum_rows(tokens->data, tokens->shape[0], rows, padded);
    if (__builtin_mul_overflow(tokens->shape[0], TILE_ROWS - 1, &most) ||
        __builtin_add_overflow(most, rows, &most))
        return refuse_size(rows);
    *padded = most / TILE_ROWS * TILE_ROWS;
    return QUERN_OK;
}

static quern_status derive(op_call *call)
{
    const quern_tensor *swizzled = call->given[T(swizzled)];
    op_extents *shape = &call->lead[L_SWIZZLED - OP_LEAD];
    int64_t rows = 0, columns = 0, padded = 0, bytes = 0;
    quern_status status = find_matrix(call, &rows, &columns);
    if (status != QUERN_OK) return status;
    call->symbol[S_E1] = call->symbol[S_E] + 1;
    if ((status = find_padded(call, rows, &padded)) != QUERN_OK ||
        (status = find_bytes(padded, columns, &bytes)) != QUERN_OK)
        return status;
    if (PARAMS(call)->experts && swizzled != NULL && swizzled->ndim == 1) bytes = swizzled->shape[0];
    *shape = PARAMS(call)->weight ? (op_extents){2, {call->lead[L_LINEAR - OP_LEAD].extent[0], bytes}}
                                  : (op_extents){1, {bytes}};
    return QUERN_OK;
}

static quern_status check_data(const op_call *call, void *const *data)
{
    const swizzle_args *args = OP_FIND(call, swizzle);
    int64_t padded = 0, needed = 0;
    quern_status status;
    if (args->tokens.ndim == 0) return QUERN_OK;
    if ((status = sum_rows(data[T(tokens_per_expert)], call->symbol[S_E], args->linear.shape[0], &padded)) !=
            QUERN_OK ||
        (status = find_bytes(padded, args->linear.shape[1], &needed)) != QUERN_OK)
        return status;
    if (args->swizzled.shape[0] >= needed) return QUERN_OK;
    return error_argument(
        "swizzled.shape[0] is %lld: at least the %lld bytes of the experts' tiles are accepted",
        (long long)args->swizzled.shape[0], (long long)needed);
}

static void build(op_build *b)
{
    const op_call *call = b->call;
    const quern_nvfp4_swizzle_params *p = op_params(call);
    *OP_ADD(b, swizzle) = (swizzle_args){.inverse = p->inverse,
                                         .transposed = p->weight,
                                         .linear = op_view(call, T(linear), false),
                                         .swizzled = op_view(call, T(swizzled), false),
                                         .tokens = op_view(call, T(tokens_per_expert), false),
                                         .pad_row_offsets = op_view(call, T(pad_row_offsets), false)};
}

const op_family nvfp4_swizzle_family = {
    OP_TABLES(operations, params, symbols, ops),
    OP_ROWS(tensors, quern_nvfp4_swizzle_tensors, QUERN_NVFP4_SWIZZLE_TENSORS_INIT),
    OP_CALL(quern_nvfp4_swizzle_params, QUERN_NVFP4_SWIZZLE_PARAMS_INIT, OP_STEP_BYTES(swizzle)),
    .first = QUERN_OP_NVFP4_SWIZZLE,
    .leads = leads,
    .like = like,
    .check_params = check_params,
    .roles = roles,
    .derive = derive,
    .check_data = check_data,
    .build = build,
};

quern_status quern_nvfp4_swizzle_workspace(quern_context *ctx, const quern_nvfp4_swizzle_params *given,
                                           const quern_nvfp4_swizzle_tensors *views, size_t *bytes)
{
    return op_workspace_of(&nvfp4_swizzle_family, 0, ctx, given, views, bytes);
}

quern_status quern_nvfp4_swizzle(quern_context *ctx, const quern_exec *exec,
                                 const quern_nvfp4_swizzle_params *given,
                                 const quern_nvfp4_swizzle_tensors *views, void *workspace,
                                 size_t workspace_bytes)
{
    return op_run(&nvfp4_swizzle_family, 0, ctx, exec, given, views, workspace, workspace_bytes);
}
