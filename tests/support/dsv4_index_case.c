/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "dsv4_index_case.h"

#include "cmocka_c11.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

quern_dsv4_index_params index_case_params(const index_case *c)
{
    quern_dsv4_index_params p = QUERN_DSV4_INDEX_PARAMS_INIT;
    p.ratio = c->shape.ratio;
    p.top_k = c->top_k;
    p.start_abs_pos = c->shape.start;
    p.key_format = c->format;
    p.products = c->products;
    return p;
}

quern_dsv4_index_tensors index_case_tensors(const index_case *c)
{
    quern_dsv4_index_tensors t = QUERN_DSV4_INDEX_TENSORS_INIT;
    t.q = &c->t[INDEX_Q].view;
    t.k = &c->t[INDEX_K].view;
    t.w = &c->t[INDEX_W].view;
    t.idx = &c->t[INDEX_IDX].view;
    t.count = &c->t[INDEX_COUNT].view;
    t.scores = c->t[INDEX_SCORES].buffer != NULL ? &c->t[INDEX_SCORES].view : NULL;
    return t;
}

/* Stores random values as rows of bytes; c->keys gets the values of these bytes. */
static void fill_bytes(index_case *c, test_random *random)
{
    const int64_t width = c->shape.width, entries = c->batch * c->shape.entries,
                  bytes = c->t[INDEX_K].view.shape[2];
    double *values = test_doubles(entries * bytes);
    for (int64_t e = 0; e < entries; e++) {
        float row[256];
        unsigned char codes[256 + 4];
        const double size = exp2((double)test_random_int(random, -6, 6));
        for (int64_t i = 0; i < width; i++)
            row[i] = (float)(size * test_random_normal(random) * (i / 32 % 2 ? 8 : 1));
        if (c->format == QUERN_DSV4_FP4) assert_true(oracle_dsv4_quantise_fp4(row, width, codes));
        else assert_true(oracle_dsv4_quantise_fp8(row, width, c->format == QUERN_DSV4_FP8_POWER, codes));
        for (int64_t i = 0; i < bytes; i++) values[e * bytes + i] = codes[i];
        if (c->format == QUERN_DSV4_FP4) oracle_dsv4_widen_fp4(codes, width, c->keys + e * width);
        else oracle_dsv4_widen_fp8(codes, width, c->keys + e * width);
    }
    for (int64_t b = 0; b < c->batch; b++)
        for (int64_t e = 0; e < c->shape.entries; e++) {
            const quern_tensor *k = &c->t[INDEX_K].view;
            unsigned char *to = (unsigned char *)k->data + b * k->strides[0] + e * k->strides[1];
            for (int64_t i = 0; i < bytes; i++)
                to[i] = (unsigned char)values[(b * c->shape.entries + e) * bytes + i];
        }
    memcpy(c->t[INDEX_K].snapshot, c->t[INDEX_K].buffer, c->t[INDEX_K].bytes);
    free(values);
}

index_case index_case_make(test_random *random, const oracle_indexer *shape, int64_t batch, int64_t top_k,
                           quern_dsv4_format format, quern_dtype dtype, quern_dtype keys, bool scores)
{
    if (INDEX_ON_GPU && (dtype == QUERN_F32 || format != QUERN_DSV4_ROWS)) dtype = QUERN_BF16;
    if (INDEX_ON_GPU) keys = dtype;
    index_case c = {*shape,
                    batch,
                    top_k,
                    format,
                    {{.buffer = NULL}},
                    test_doubles(batch * shape->entries * shape->width),
                    QUERN_DSV4_INDEX_EXACT};
    const int64_t bytes = format == QUERN_DSV4_FP4 ? shape->width / 2 + shape->width / 32 : shape->width + 4;
    const int64_t shapes[INDEX_TENSORS][4] = {
        {batch, shape->queries, shape->heads, shape->width},
        {batch, shape->entries, format == QUERN_DSV4_ROWS ? shape->width : bytes},
        {batch, shape->queries, shape->heads},
        {batch, shape->queries, top_k},
        {batch, shape->queries},
        {batch, shape->queries, shape->entries}};
    const quern_dtype dtypes[INDEX_TENSORS] = {dtype,
                                               format == QUERN_DSV4_ROWS ? keys : QUERN_U8,
                                               test_random_one_in(random, 2) ? dtype : QUERN_F32,
                                               QUERN_I32,
                                               QUERN_I32,
                                               QUERN_F32};
    for (int i = 0; i < (scores ? INDEX_TENSORS : INDEX_SCORES); i++) {
        c.t[i] = test_tensor_make(random, dtypes[i],
                                  i == INDEX_Q       ? 4
                                  : i == INDEX_COUNT ? 2
                                                     : 3,
                                  shapes[i], (test_layout)test_random_int(random, 0, TEST_LAYOUTS - 1));
        if (i <= INDEX_W && !(i == INDEX_K && format != QUERN_DSV4_ROWS))
            test_tensor_normal(&c.t[i], random, 1);
    }
    if (format == QUERN_DSV4_ROWS) {
        free(c.keys);
        c.keys = test_tensor_get(&c.t[INDEX_K]);
    } else {
        fill_bytes(&c, random);
    }
    return c;
}

void index_case_align_keys(index_case *c, test_random *random)
{
    const quern_tensor k = c->t[INDEX_K].view;
    const size_t size = quern_dtype_size(k.dtype), row = (size_t)k.shape[2] * size;
    test_tensor to = test_tensor_make(random, k.dtype, 3, k.shape, TEST_CONTIGUOUS);
    for (int64_t i = 0; i < k.shape[0] * k.shape[1]; i++)
        memcpy((char *)to.view.data + (size_t)i * row,
               (const char *)k.data +
                   (i / k.shape[1] * k.strides[0] + i % k.shape[1] * k.strides[1]) * (int64_t)size,
               row);
    memcpy(to.snapshot, to.buffer, to.bytes);
    test_tensor_free(&c->t[INDEX_K]);
    c->t[INDEX_K] = to;
}

void index_case_free(index_case *c)
{
    for (int i = 0; i < INDEX_TENSORS; i++)
        if (c->t[i].buffer != NULL) test_tensor_free(&c->t[i]);
    free(c->keys);
}

void index_case_run(const index_case *c, quern_context *ctx)
{
    const quern_dsv4_index_params p = index_case_params(c);
    const quern_dsv4_index_tensors t = index_case_tensors(c);
    size_t bytes;
    if (quern_dsv4_index_workspace(ctx, &p, &t, &bytes) != QUERN_OK) fail_msg("%s", quern_last_error(ctx));
    test_workspace w = test_workspace_make(bytes);
    if (quern_dsv4_index(ctx, NULL, &p, &t, w.data, bytes) != QUERN_OK) fail_msg("%s", quern_last_error(ctx));
    test_workspace_close(&w);
}

void index_case_refused(const index_case *c, quern_context *ctx, const quern_dsv4_index_params *p,
                        const quern_dsv4_index_tensors *t, const char *sentence)
{
    char memory[64];
    size_t bytes;
    assert_true(quern_dsv4_index(ctx, NULL, p, t, memory, sizeof memory) != QUERN_OK);
    if (strstr(quern_last_error(ctx), sentence) == NULL)
        fail_msg("'%s' does not say '%s'", quern_last_error(ctx), sentence);
    for (int i = 0; i < INDEX_TENSORS; i++)
        if (c->t[i].buffer != NULL) test_tensor_check_unchanged(&c->t[i], "a tensor of a refused call");
    (void)quern_dsv4_index_workspace(ctx, p, t, &bytes);
}
