/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* step.c - extents, views and checks of a step over keys and values. */
#include "cache/step.h"

#include "core/error.h"
#include "core/view.h"

#include <inttypes.h>

const char step_symbols[] = "T Hkv D Dv 64(D+Dv) B B+1 pages columns entry_pages entry_columns win_pages "
                            "win_columns H Hs k 3 lD|D lDv|Dv l C 3 bytes Hi D_I 64D_I";

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

void step_pool_roles(op_call *call, int32_t tokens, bool entries, op_role of_pools)
{
    const int32_t shift = tokens - STEP_TOKENS;
    uint8_t *r = call->role + shift;
    const quern_tensor *const *given = call->given + shift;
    const char *beside_block_size = ": without block_size NULL is accepted";
    r[STEP_TOKENS] = of_pools;
    r[STEP_TOKENS_TABLE] = OP_NEEDED;
    r[STEP_SLC] = given[STEP_SLC] != NULL ? of_pools : OP_OPTIONAL;
    op_allow(call, shift + STEP_ENTRIES, entries, of_pools, beside_block_size);
    op_allow(call, shift + STEP_ENTRIES_TABLE, entries, OP_NEEDED, beside_block_size);
    r[STEP_WIN] = given[STEP_WIN] != NULL ? of_pools : OP_OPTIONAL;
    op_allow(call, shift + STEP_WIN_TABLE, given[STEP_WIN] != NULL, OP_NEEDED,
             ": without win NULL is accepted");
}

quern_status step_derive_rows(op_call *call, int32_t rows)
{
    call->varlen = true; /* views of tokens get a leading extent of 1 */
    if (call->symbol[ST_T] <= INT32_MAX) return QUERN_OK;
    return error_argument("%s.shape[0] is %lld: 0 to %d is accepted", call->family->tensors[rows].field,
                          (long long)call->symbol[ST_T], INT32_MAX);
}

quern_status step_derive_index(op_call *call, int32_t index, int32_t rows)
{
    int64_t *s = call->symbol;
    if (rows != OP_NONE) {
        s[ST_INDEX_PAGE] = CACHE_BLOCK * s[ST_DI];
        return view_check_head_dim(call->family->tensors[rows].field, s[ST_DI]);
    }
    s[ST_DI] = s[ST_INDEX_PAGE] / CACHE_BLOCK;
    if (s[ST_INDEX_PAGE] % CACHE_BLOCK == 0) return QUERN_OK;
    return error_argument("%s.shape[2] is %" PRId64 ": 64 times the channels of an index key is accepted",
                          call->family->tensors[index].field, s[ST_INDEX_PAGE]);
}

void step_derive(op_call *call)
{
    int64_t *s = call->symbol;
    s[ST_B1] = s[ST_B] + 1;
    s[ST_PAGE] = CACHE_BLOCK * (s[ST_D] + s[ST_DV]);
}

quern_status step_derive_decode(op_call *call)
{
    const quern_tensor *q = call->given[DD(q)], *o = call->given[DD(o)];
    int64_t *s = call->symbol;
    quern_status status = view_check_order(q, o);
    if (status == QUERN_OK) status = step_derive_rows(call, DD(q));
    if (status == QUERN_OK) status = view_check_head_dim("q", s[ST_D]);
    if (status == QUERN_OK && o != NULL) status = op_check_ndim(call, DD(o), 3);
    if (status != QUERN_OK) return status;
    s[ST_DV] = o != NULL ? o->shape[2] : s[ST_PAGE] / CACHE_BLOCK - s[ST_D];
    s[ST_3] = 3;
    step_derive(call);
    if ((status = view_check_head_dim("o", s[ST_DV])) != QUERN_OK) return status;
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

quern_status step_check_copies(const copy_pages_args *args, const int32_t *copies)
{
    const int64_t pages = args->pages.shape[0];
    for (int64_t i = 0; i < args->copies.shape[0]; i++) {
        const int32_t *copy = copies + i * args->copies.strides[0];
        for (int64_t k = 1; copy[0] == args->pool && k < 3; k++) {
            const int32_t page = copy[k * args->copies.strides[1]];
            if (page < 0 || page >= pages)
                return error_argument("copies[%" PRId64 "][%" PRId64
                                      "] is %d: a page or slot of pool %d, 0 to %" PRId64 ", is accepted",
                                      i, k, page, copy[0], pages - 1);
        }
    }
    return QUERN_OK;
}

quern_status step_check_numbers(const stage_step *step, const int32_t *cu, const int32_t *positions,
                                int64_t batch, int64_t tokens)
{
    int64_t last = 0;
    for (int64_t b = 0; batch > 0 && b <= batch; b++) {
        const int64_t now = number(&step->rows, cu, b);
        if (now < last || (b == 0 && now != 0) || now > tokens)
            return error_argument("cu[%" PRId64 "] is %" PRId64
                                  ": offsets from 0, which do not fall, up to the %" PRId64
                                  " tokens are accepted",
                                  b, now, tokens);
        last = now;
    }
    for (int64_t b = 0; b < batch; b++) {
        const int64_t at = number(&step->positions, positions, b);
        if (at < 0)
            return error_argument("positions[%" PRId64 "] is %" PRId64 ": 0 or more is accepted", b, at);
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
            return error_argument("%s has %" PRId64 " columns: those of sequence %" PRId64
                                  " of the call, which comes to %" PRId64 " rows, are accepted",
                                  name, columns, b, plane->ring > 0 ? count : rows);
        for (int64_t c = 0; c < needed && c < columns; c++) {
            const int32_t page = data[b * plane->table.strides[0] + c * plane->table.strides[1]];
            if (page < 0 || page >= pages)
                return error_argument("%s[%" PRId64 "][%" PRId64 "] is %d: a page of the pool, 0 to %" PRId64
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
                return error_argument("%s[%" PRId64 "] is %d: a page of the pool, 0 to %" PRId64
                                      ", is accepted",
                                      call->family->tensors[table].field, c, page, args->pages.shape[0] - 1);
        }
    }
    return QUERN_OK;
}
