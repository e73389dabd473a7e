/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * dsv4_append_wide_test.c - both compressors at the released models' widths, in the formats of their caches,
 * also in pages, and in rows: entries of steps of 0 to 5 tokens, or of mostly one, are those of one call over
 * the whole sequence, to the bit, whichever kernels these widths have.
 */
#include "cmocka_c11.h"
#include "context.h"
#include "random.h"

#include <quern/dsv4.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    BATCH = 3,
    TOKENS = 41,
    RATIO = 4,
    RING = 2,
    ROPE = 64,
    MOST = 5,
    PARTS = 2,
    ENTRIES = TOKENS / RATIO,
    PAGE = 4,
    COLUMNS = (ENTRIES + PAGE - 1) / PAGE
};

typedef struct part {
    int64_t width, row; /* bytes of a stored row */
    quern_dsv4_format format;
    quern_dtype dtype; /* of proj, and of entries that are rows */
    quern_tensor pool, table; /* pages of entries, or absent */
    quern_tensor proj, bias_a, bias_b, norm, states,
        merged;                  /* proj: of all sequences, [BATCH, TOKENS, 4 width] */
    unsigned char *made, *whole; /* [BATCH, ENTRIES, row] */
} part;

static quern_tensor made_of(test_random *random, quern_dtype dtype, int32_t ndim, const int64_t *shape)
{
    quern_tensor t = quern_tensor_contiguous(NULL, dtype, ndim, shape);
    int64_t n = 1;
    for (int32_t i = 0; i < ndim; i++) n *= shape[i];
    t.data = calloc((size_t)n + 1, quern_dtype_size(dtype));
    for (int64_t i = 0; i < n && random != NULL; i++) {
        const float x = (float)test_random_normal(random);
        uint32_t bits;
        memcpy(&bits, &x, sizeof bits);
        if (dtype == QUERN_F32) ((float *)t.data)[i] = x;
        else ((uint16_t *)t.data)[i] = (uint16_t)(bits >> 16);
    }
    return t;
}

/* Bytes of a slot that stand before the page's scales. */
static size_t codes_of(const part *p)
{
    return p->format == QUERN_DSV4_ROW584 ? 576 : (size_t)p->width;
}

/* A pool whose pages stand in another order than the sequences need them. */
static void part_take_pages(part *p)
{
    const int64_t table[] = {BATCH, COLUMNS}, pool[] = {BATCH * COLUMNS, PAGE * p->row};
    p->table = made_of(NULL, QUERN_I32, 2, table);
    p->pool = made_of(NULL, QUERN_U8, 2, pool);
    for (int i = 0; i < BATCH * COLUMNS; i++)
        ((int32_t *)p->table.data)[i] = (i * 4 + 1) % (BATCH * COLUMNS);
}

/* Entry e of sequence b from its page. */
static void copy_from_page(const part *p, int b, int e, unsigned char *to)
{
    const size_t codes = codes_of(p), scale = (size_t)p->row - codes, slot = (size_t)(e % PAGE);
    const int32_t page = ((const int32_t *)p->table.data)[b * COLUMNS + e / PAGE];
    const unsigned char *from = (const unsigned char *)p->pool.data + (size_t)(page * PAGE * p->row);
    memcpy(to, from + slot * codes, codes);
    memcpy(to + codes, from + PAGE * codes + slot * scale, scale);
}

static part part_make(test_random *random, int64_t width, quern_dsv4_format format, quern_dtype dtype)
{
    const int64_t proj[] = {BATCH, TOKENS, 4 * width}, bias[] = {RATIO, width},
                  states[] = {BATCH, (6 + 4 * RING) * width}, merged[] = {BATCH};
    part p = {.width = width, .format = format, .dtype = dtype};
    p.row = format == QUERN_DSV4_ROW584 ? 584
            : format == QUERN_DSV4_FP8  ? width + 4
                                        : width * (int64_t)quern_dtype_size(dtype);
    p.proj = made_of(random, dtype, 3, proj);
    p.bias_a = made_of(random, QUERN_F32, 2, bias);
    p.bias_b = made_of(random, QUERN_F32, 2, bias);
    p.norm = made_of(random, QUERN_BF16, 1, bias + 1);
    p.states = made_of(NULL, QUERN_F32, 2, states);
    memset(p.states.data, 0xff, (size_t)(states[0] * states[1]) * sizeof(float));
    p.merged = made_of(NULL, QUERN_I32, 1, merged);
    p.made = calloc(BATCH * ENTRIES, (size_t)p.row);
    p.whole = calloc(BATCH * ENTRIES, (size_t)p.row);
    return p;
}

static void part_free(part *p)
{
    void *const all[] = {p->proj.data,   p->bias_a.data, p->bias_b.data, p->norm.data,
                         p->states.data, p->merged.data, p->made,        p->whole,
                         p->pool.data,   p->table.data};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

static quern_tensor stored(const part *p, int32_t ndim, int64_t batch, int64_t n, void *data)
{
    const bool bytes = p->format != QUERN_DSV4_ROWS;
    const int64_t shape[] = {batch, n, bytes ? p->row : p->width};
    return quern_tensor_contiguous(data, bytes ? QUERN_U8 : p->dtype, ndim, ndim == 3 ? shape : shape + 1);
}

static void run_whole(const quern_dsv4_compress_params *given, part *p, const quern_tensor *cos_sin,
                      bool index)
{
    quern_dsv4_compress_params params = *given;
    quern_dsv4_compress_tensors t = QUERN_DSV4_COMPRESS_TENSORS_INIT;
    const quern_tensor out = stored(p, 3, BATCH, ENTRIES, p->whole);
    size_t bytes;
    params.format = p->format;
    params.hadamard = index && given->index_hadamard;
    t.proj = &p->proj;
    t.b_a = &p->bias_a;
    t.b_b = &p->bias_b;
    t.norm_weight = &p->norm;
    t.cos_sin = cos_sin;
    t.out = &out;
    assert_int_equal(quern_dsv4_compress_workspace(ctx, &params, &t, &bytes), QUERN_OK);
    void *workspace = malloc(bytes + 1);
    if (quern_dsv4_compress(ctx, NULL, &params, &t, workspace, bytes) != QUERN_OK)
        fail_msg("%s", quern_last_error(ctx));
    free(workspace);
}

/* A step's rows of a compressor: `from` says where each sequence stands, `count` how many it appends. */
static quern_tensor rows_of(const part *p, const int32_t *from, const int32_t *cu)
{
    const int64_t shape[] = {cu[BATCH], 4 * p->width};
    const size_t row = (size_t)(4 * p->width) * quern_dtype_size(p->dtype);
    quern_tensor t = made_of(NULL, p->dtype, 2, shape);
    for (int b = 0; b < BATCH; b++)
        memcpy((char *)t.data + (size_t)cu[b] * row,
               (const char *)p->proj.data + (size_t)(b * TOKENS + from[b]) * row,
               (size_t)(cu[b + 1] - cu[b]) * row);
    return t;
}

static void run_step(const quern_dsv4_compress_params *params, part *parts, const quern_tensor *cos_sin,
                     int32_t *positions, int32_t *cu)
{
    int32_t slots[BATCH] = {2, 0, 1};
    const int64_t batch[] = {BATCH}, more[] = {BATCH + 1}, n = cu[BATCH] / RATIO + BATCH;
    const quern_tensor at[] = {quern_tensor_contiguous(slots, QUERN_I32, 1, batch),
                               quern_tensor_contiguous(positions, QUERN_I32, 1, batch),
                               quern_tensor_contiguous(cu, QUERN_I32, 1, more)};
    quern_tensor proj[PARTS], out[PARTS];
    quern_dsv4_append_tensors t = QUERN_DSV4_APPEND_TENSORS_INIT;
    size_t bytes;
    for (int i = 0; i < PARTS; i++) {
        proj[i] = rows_of(&parts[i], positions, cu);
        out[i] = parts[i].pool.ndim > 0
                     ? parts[i].pool
                     : stored(&parts[i], 2, 1, n, calloc((size_t)n + 1, (size_t)parts[i].row));
    }
    if (parts[0].pool.ndim > 0) t.table = &parts[0].table, t.index_table = &parts[1].table;
    t.slots = &at[0], t.positions = &at[1], t.cu = &at[2], t.cos_sin = cos_sin;
    t.proj = &proj[0], t.b_a = &parts[0].bias_a, t.b_b = &parts[0].bias_b, t.norm_weight = &parts[0].norm;
    t.out = &out[0], t.states = &parts[0].states, t.merged = &parts[0].merged;
    t.index_proj = &proj[1], t.index_b_a = &parts[1].bias_a, t.index_b_b = &parts[1].bias_b;
    t.index_norm_weight = &parts[1].norm, t.index_out = &out[1];
    t.index_states = &parts[1].states, t.index_merged = &parts[1].merged;
    assert_int_equal(quern_dsv4_append_step_workspace(ctx, params, &t, &bytes), QUERN_OK);
    void *workspace = malloc(bytes + 1);
    if (quern_dsv4_append_step(ctx, NULL, params, &t, workspace, bytes) != QUERN_OK)
        fail_msg("%s", quern_last_error(ctx));
    free(workspace);
    for (int i = 0; i < PARTS; i++) {
        const unsigned char *row = out[i].data;
        for (int b = 0; b < BATCH; b++)
            for (int e = positions[b] / RATIO; e < (positions[b] + cu[b + 1] - cu[b]) / RATIO; e++) {
                unsigned char *to = parts[i].made + (b * ENTRIES + e) * parts[i].row;
                if (parts[i].pool.ndim > 0) copy_from_page(&parts[i], b, e, to);
                else memcpy(to, row, (size_t)parts[i].row);
                row += parts[i].row;
            }
        free(proj[i].data);
        if (parts[i].pool.ndim == 0) free(out[i].data);
    }
}

static void entries_are_those_of_one_call(void **state)
{
    static const struct {
        int64_t width[PARTS];
        quern_dsv4_format format[PARTS];
        quern_dtype dtype;
        int32_t most; /* tokens of a step */
        bool pages;
    } cases[] = {{{512, 128}, {QUERN_DSV4_ROWS, QUERN_DSV4_ROWS}, QUERN_BF16, MOST, false},
                 {{512, 128}, {QUERN_DSV4_ROW584, QUERN_DSV4_FP8}, QUERN_BF16, MOST, false},
                 {{256, 64}, {QUERN_DSV4_ROWS, QUERN_DSV4_ROWS}, QUERN_BF16, MOST, false},
                 {{640, 256}, {QUERN_DSV4_ROWS, QUERN_DSV4_ROWS}, QUERN_BF16, MOST, false},
                 {{512, 128}, {QUERN_DSV4_ROW584, QUERN_DSV4_FP8}, QUERN_BF16, 2, true}};
    test_random random = {17};
    (void)state;
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        quern_dsv4_compress_params params = QUERN_DSV4_COMPRESS_PARAMS_INIT;
        const int64_t angles[] = {TOKENS, ROPE};
        const quern_tensor cos_sin = made_of(&random, QUERN_F32, 2, angles);
        part parts[PARTS];
        int32_t positions[BATCH] = {0};
        params.format = cases[c].format[0];
        params.index_format = cases[c].format[1];
        params.index_hadamard = c % 2 == 1;
        for (int i = 0; i < PARTS; i++) {
            parts[i] = part_make(&random, cases[c].width[i], cases[c].format[i], cases[c].dtype);
            if (cases[c].pages) part_take_pages(&parts[i]);
            run_whole(&params, &parts[i], &cos_sin, i > 0);
        }
        for (bool more = true; more;) {
            int32_t cu[BATCH + 1] = {0};
            more = false;
            for (int b = 0; b < BATCH; b++) {
                const int32_t count = (int32_t)test_random_int(&random, 0, cases[c].most),
                              left = TOKENS - positions[b];
                cu[b + 1] = cu[b] + (count < left ? count : left);
            }
            run_step(&params, parts, &cos_sin, positions, cu);
            for (int b = 0; b < BATCH; b++) {
                positions[b] += cu[b + 1] - cu[b];
                more = more || positions[b] < TOKENS;
            }
        }
        for (int i = 0; i < PARTS; i++) {
            assert_memory_equal(parts[i].made, parts[i].whole, (size_t)(BATCH * ENTRIES * parts[i].row));
            part_free(&parts[i]);
        }
        free(cos_sin.data);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(entries_are_those_of_one_call)};
    return cmocka_run_group_tests(tests, test_open_context, test_close_context);
}
