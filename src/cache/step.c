/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* step.c - extents, views and checks of a step over keys and values. */
#include "cache/step.h"

#include "core/error.h"
#include "core/view.h"

#include <inttypes.h>

const char *const step_symbols[] = {"",
                                    [ST_T] = "T",
                                    [ST_HKV] = "Hkv",
                                    [ST_D] = "D",
                                    [ST_DV] = "Dv",
                                    [ST_PAGE] = "64(D+Dv)",
                                    [ST_B] = "B",
                                    [ST_B1] = "B+1",
                                    [ST_PAGES] = "pages",
                                    [ST_COLUMNS] = "columns",
                                    [ST_ENTRY_PAGES] = "entry_pages",
                                    [ST_ENTRY_COLUMNS] = "entry_columns",
                                    [ST_WIN_PAGES] = "win_pages",
                                    [ST_WIN_COLUMNS] = "win_columns",
                                    [ST_H] = "H",
                                    [ST_HS] = "Hs",
                                    [ST_K] = "k",
                                    [ST_3] = "3",
                                    [ST_IN] = "lD|D",
                                    [ST_IN_V] = "lDv|Dv",
                                    [ST_L] = "l",
                                    [ST_COPIES] = "C",
                                    [ST_COPY] = "3",
                                    [ST_PACKED] = "bytes",
                                    [ST_HI] = "Hi",
                                    [ST_DI] = "D_I",
                                    [ST_INDEX_PAGE] = "64D_I",
                                    NULL};

const op_tensor step_decode_tensors[] = {
    {"q", "Q", OP_ACTIVATION, OP_NONE, {ST_T, ST_H, ST_D}, {0}},
    {"o", "O", OP_ACTIVATION, OP_NONE, {ST_T, ST_H, ST_DV}, {0}},
    {"lse", "lse", OP_F32, OP_NONE, {ST_H, ST_T}, {0}},
    {"w_gate", "gate", OP_WEIGHT, OP_NONE, {ST_H, ST_3, ST_D}, {0}},
    {"gates", "gates", OP_F32, OP_NONE, {ST_T, ST_H, ST_3}, {0}},
    {"block_idx", "block_idx", OP_I32, OP_NONE, {ST_HS, ST_T, ST_K}, {0}},
    {"block_count", "block_count", OP_I32, OP_NONE, {ST_HS, ST_T}, {0}},
    {"sink", "sink", OP_F32, OP_NONE, {ST_H}, {0}},
    STEP_ROWS,
    {"q_index", "q_I", OP_ACTIVATION, OP_NONE, {ST_T, ST_HS, ST_DI}, {0}},
    STEP_INDEX,
};
_Static_assert(sizeof step_decode_tensors / sizeof *step_decode_tensors == STEP_DECODE_TENSORS,
               "a row a tensor");

void step_pool_roles(op_call *call, int32_t tokens, bool entries, op_role of_pools)
{
    const int32_t shift = tokens - STEP_TOKENS;
    uint8_t *r = call->role + shift;
    const quern_tensor *const *given = call->given + shift;
    r[STEP_TOKENS] = of_pools;
    r[STEP_TOKENS_TABLE] = OP_NEEDED;
    r[STEP_SLC] = given[STEP_SLC] != NULL ? of_pools : OP_OPTIONAL;
    r[STEP_ENTRIES] = entries ? of_pools : OP_REFUSED;
    r[STEP_ENTRIES_TABLE] = entries ? OP_NEEDED : OP_REFUSED;
    r[STEP_WIN] = given[STEP_WIN] != NULL ? of_pools : OP_OPTIONAL;
    r[STEP_WIN_TABLE] = given[STEP_WIN] != NULL ? OP_NEEDED : OP_REFUSED;
}

quern_status step_derive_rows(op_call *call, int32_t rows)
{
    const quern_tensor *t = call->given[rows];
    if (t == NULL)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s is NULL: a tensor is needed",
                         call->family->tensors[rows].field);
    call->varlen = true; /* views of tokens get a leading extent of 1 */
    call->like = *t;
    const quern_status status = op_check_activation(call, rows, 3);
    if (status != QUERN_OK) return status;
    call->symbol[ST_T] = t->shape[0];
    if (t->shape[0] > INT32_MAX)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s.shape[0] is %lld: 0 to %d is accepted",
                         call->family->tensors[rows].field, (long long)t->shape[0], INT32_MAX);
    return QUERN_OK;
}

quern_status step_derive_pools(op_call *call, int32_t tokens)
{
    static const struct {
        int32_t tensor, ndim, symbol; /* the extent that is free, or 0 */
    } sized[] = {{STEP_TOKENS, 3, ST_PAGES},
                 {STEP_TOKENS_TABLE, 2, ST_COLUMNS},
                 {STEP_SLC, 3, 0},
                 {STEP_ENTRIES, 3, ST_ENTRY_PAGES},
                 {STEP_ENTRIES_TABLE, 2, ST_ENTRY_COLUMNS},
                 {STEP_WIN, 3, ST_WIN_PAGES},
                 {STEP_WIN_TABLE, 2, ST_WIN_COLUMNS}};
    int64_t *s = call->symbol;
    s[ST_PAGE] = CACHE_BLOCK * (s[ST_D] + s[ST_DV]);
    for (size_t i = 0; i < sizeof sized / sizeof *sized; i++) {
        const int32_t tensor = tokens - STEP_TOKENS + sized[i].tensor, ndim = sized[i].ndim;
        const bool row = ndim == 2 && call->family->tensors[tensor].fixed[1] == 0; /* of a table */
        if (!op_uses(call, tensor)) continue;
        const quern_status status = op_check_kind(call, tensor, row ? 1 : ndim);
        if (status != QUERN_OK) return status;
        if (sized[i].symbol != 0) s[sized[i].symbol] = call->given[tensor]->shape[ndim == 2 && !row];
    }
    if (op_uses(call, tokens)) s[ST_HKV] = call->given[tokens]->shape[1];
    return QUERN_OK;
}

quern_status step_derive_index(op_call *call, int32_t index, int32_t rows)
{
    int64_t *s = call->symbol;
    quern_status status = op_check_kind(call, index, 3);
    if (status != QUERN_OK) return status;
    const int64_t *shape = call->given[index]->shape;
    s[ST_HI] = shape[1];
    if (rows != OP_NONE) {
        if ((status = op_check_activation(call, rows, 3)) != QUERN_OK) return status;
        s[ST_DI] = call->given[rows]->shape[2];
        if ((status = view_check_head_dim(call->family->tensors[rows].field, s[ST_DI])) != QUERN_OK)
            return status;
        s[ST_INDEX_PAGE] = CACHE_BLOCK * s[ST_DI];
        return QUERN_OK;
    }
    if (shape[2] % CACHE_BLOCK != 0)
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "index.shape[2] is %" PRId64 ": 64 times the channels of an index key is accepted",
                         shape[2]);
    s[ST_DI] = shape[2] / CACHE_BLOCK;
    s[ST_INDEX_PAGE] = shape[2];
    return QUERN_OK;
}

quern_status step_derive(op_call *call, int32_t slots)
{
    const quern_tensor *t = call->given[slots];
    if (t == NULL) return error_set(QUERN_ERR_INVALID_ARGUMENT, "slots is NULL: a tensor is needed");
    const quern_status status = op_check_kind(call, slots, 1);
    if (status != QUERN_OK) return status;
    call->symbol[ST_B] = t->shape[0];
    call->symbol[ST_B1] = t->shape[0] + 1;
    return step_derive_pools(call, slots + STEP_TOKENS);
}

quern_status step_derive_decode(op_call *call)
{
    const quern_tensor *q = call->given[DD(q)], *o = call->given[DD(o)], *pool = call->given[DD(tokens)];
    int64_t *s = call->symbol;
    quern_status status = view_check_order(q, o);
    if (status == QUERN_OK) status = step_derive_rows(call, DD(q));
    if (status == QUERN_OK) status = view_check_head_dim("q", q->shape[2]);
    if (status == QUERN_OK && o != NULL) status = op_check_activation(call, DD(o), 3);
    if (status == QUERN_OK && o == NULL && (pool == NULL || pool->ndim != 3))
        status = error_set(QUERN_ERR_INVALID_ARGUMENT, "o is NULL: a tensor is needed");
    if (status != QUERN_OK) return status;
    s[ST_H] = q->shape[1];
    s[ST_D] = q->shape[2];
    s[ST_DV] = o != NULL ? o->shape[2] : pool->shape[2] / CACHE_BLOCK - s[ST_D];
    s[ST_3] = 3;
    if ((status = view_check_head_dim("o", s[ST_DV])) != QUERN_OK ||
        (status = step_derive(call, DD(slots))) != QUERN_OK)
        return status;
    return view_check_heads(s[ST_H], s[ST_HKV], s[ST_T]);
}

int64_t step_capacity(const op_call *call)
{
    const int64_t columns = call->symbol[ST_COLUMNS];
    return columns < INT32_MAX / CACHE_BLOCK ? columns * CACHE_BLOCK : INT32_MAX;
}

stage_step step_of(const op_build *b, int32_t slots)
{
    const quern_tensor cu = op_view(b->call, slots + STEP_CU, false);
    return (stage_step){op_view(b->call, slots, false), op_view(b->call, slots + STEP_POSITIONS, false),
                        view_ranges(&cu)};
}

cache_plane step_plane(const op_build *b, int32_t pool, int32_t table, bool ring)
{
    const int64_t *s = b->call->symbol;
    cache_plane plane = {.blocks = op_view(b->call, pool, false),
                         .table = op_view(b->call, table, false),
                         .dim = s[ST_D],
                         .dim_v = s[ST_DV]};
    if (ring) plane.ring = s[ST_WIN_COLUMNS];
    return plane;
}

cache_plane step_index_plane(const op_build *b, int32_t index, int32_t table)
{
    return (cache_plane){.blocks = op_view(b->call, index, false),
                         .table = op_view(b->call, table, false),
                         .dim = b->call->symbol[ST_DI]};
}

static int64_t number(const quern_tensor *view, const void *data, int64_t i)
{
    return ((const int32_t *)data)[i * view->strides[0]];
}

/* Tokens of sequence b with the step's, and the step's. */
static int64_t end_of(const step_data *s, int64_t b, int64_t *count)
{
    const int32_t *cu = s->data[s->slots + STEP_CU];
    const int64_t slot = number(&s->step->slots, s->data[s->slots], b);
    *count = slot < 0 ? 0 : number(&s->step->rows, cu, b + 1) - number(&s->step->rows, cu, b);
    return *count + (slot < 0 ? 0 : number(&s->step->positions, s->data[s->slots + STEP_POSITIONS], b));
}

quern_status step_check_numbers(const stage_step *step, const int32_t *cu, const int32_t *positions,
                                int64_t batch, int64_t tokens)
{
    int64_t last = 0;
    for (int64_t b = 0; b <= batch; b++) {
        const int64_t now = number(&step->rows, cu, b);
        if (now < last || (b == 0 && now != 0) || now > tokens)
            return error_set(QUERN_ERR_INVALID_ARGUMENT,
                             "cu[%" PRId64 "] is %" PRId64
                             ": offsets from 0, which do not fall, up to the %" PRId64 " tokens are accepted",
                             b, now, tokens);
        last = now;
    }
    for (int64_t b = 0; b < batch; b++) {
        const int64_t at = number(&step->positions, positions, b);
        if (at < 0)
            return error_set(QUERN_ERR_INVALID_ARGUMENT,
                             "positions[%" PRId64 "] is %" PRId64 ": 0 or more is accepted", b, at);
    }
    return QUERN_OK;
}

quern_status step_check(const step_data *s)
{
    return step_check_numbers(s->step, s->data[s->slots + STEP_CU], s->data[s->slots + STEP_POSITIONS],
                              s->call->symbol[ST_B], s->call->symbol[ST_T]);
}

quern_status step_check_table(const step_data *s, const cache_plane *plane, int32_t table, bool entries)
{
    const int64_t columns = plane->table.shape[1], pages = plane->blocks.shape[0];
    const int32_t *data = s->data[table];
    const char *name = s->call->family->tensors[table].field;
    for (int64_t b = 0; b < s->call->symbol[ST_B]; b++) {
        int64_t count;
        const int64_t tokens = end_of(s, b, &count),
                      rows = entries ? mask_entries(tokens, s->block_size, s->stride) : tokens,
                      needed = rows / CACHE_BLOCK + (rows % CACHE_BLOCK != 0);
        if (plane->ring > 0 ? count > columns * CACHE_BLOCK : needed > columns)
            return error_set(QUERN_ERR_INVALID_ARGUMENT,
                             "%s has %" PRId64 " columns: those of sequence %" PRId64
                             " of the call, which comes "
                             "to %" PRId64 " rows, are accepted",
                             name, columns, b, plane->ring > 0 ? count : rows);
        for (int64_t c = 0; c < needed && c < columns; c++) {
            const int32_t page = data[b * plane->table.strides[0] + c * plane->table.strides[1]];
            if (page < 0 || page >= pages)
                return error_set(QUERN_ERR_INVALID_ARGUMENT,
                                 "%s[%" PRId64 "][%" PRId64 "] is %d: a page of the pool, 0 to %" PRId64
                                 ", is accepted",
                                 name, b, c, page, pages - 1);
        }
    }
    return QUERN_OK;
}

quern_status step_check_packed(const op_call *call, void *const *data)
{
    const op_step *step = op_program_steps(call);
    for (int32_t i = 0; i < call->program.steps; i++, step = op_step_next(step)) {
        const pack_rows_args *args = op_step_args(step);
        int64_t offset;
        const int32_t table = op_pointed(call, args->table.data, &offset);
        const int64_t rows = args->first + args->count, pages = rows / args->page + (rows % args->page != 0),
                      needed = args->ring > 0 && pages > args->ring ? args->ring : pages;
        for (int64_t c = 0; c < needed; c++) {
            const int32_t page = ((const int32_t *)data[table])[c * args->table.strides[0]];
            if (page < 0 || page >= args->pages.shape[0])
                return error_set(QUERN_ERR_INVALID_ARGUMENT,
                                 "%s[%" PRId64 "] is %d: a page of the pool, 0 to %" PRId64 ", is accepted",
                                 call->family->tensors[table].field, c, page, args->pages.shape[0] - 1);
        }
    }
    return QUERN_OK;
}
