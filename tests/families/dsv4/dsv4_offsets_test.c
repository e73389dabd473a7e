/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * dsv4_offsets_test.c - the indexer, the attention core and stored rows at element offsets above 2^32: rows
 * that stand 2^29 + 8 elements apart, over mappings that reserve no memory, give the bits of compact ones.
 */
#include "cmocka_c11.h"
#include "dsv4_core.h"
#include "dsv4_index_case.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static const int64_t far = ((int64_t)1 << 29) + 8;

typedef struct mapping {
    void *at;
    size_t bytes;
} mapping;

/* The tensor with its extents of dimension `dim` far apart, with the same values. */
static mapping spread(test_tensor *t, int32_t dim)
{
    quern_tensor *v = &t->view;
    const bool list = v->dtype == QUERN_I32;
    double *values = list ? NULL : test_tensor_get(t);
    int32_t *ints = list ? test_tensor_get_i32(t) : NULL;
    int64_t last = 0;
    *v = quern_tensor_contiguous(NULL, v->dtype, v->ndim, v->shape);
    v->strides[dim] = far;
    for (int32_t d = dim; d > 0; d--) v->strides[d - 1] = v->strides[d] * v->shape[d];
    for (int32_t d = 0; d < v->ndim; d++) last += (v->shape[d] - 1) * v->strides[d];
    mapping m = {NULL, (size_t)(last + 1) * quern_dtype_size(v->dtype)};
    m.at = mmap(NULL, m.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (m.at == MAP_FAILED) {
        print_message("this machine refuses mappings without reserve\n");
        skip();
    }
    v->data = m.at;
    t->bytes = 0; /* no snapshot of this memory */
    if (list) test_tensor_set_i32(t, ints);
    else test_tensor_set(t, values);
    free(values), free(ints);
    return m;
}

static void indexer(void **state)
{
    const oracle_indexer x = {.queries = 11, .heads = 3, .width = 32, .entries = 9, .ratio = 2, .start = 10};
    (void)state;
    for (int format = 0; format < 4; format++) {
        index_case c[2];
        mapping maps[INDEX_TENSORS];
        quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 2);
        for (int i = 0; i < 2; i++) {
            test_random random = {7};
            c[i] =
                index_case_make(&random, &x, 1, 4, (quern_dsv4_format)format, QUERN_BF16, QUERN_BF16, true);
        }
        for (int i = 0; i < INDEX_TENSORS; i++)
            maps[i] = i == INDEX_COUNT ? (mapping){NULL, 0} : spread(&c[1].t[i], 1);
        for (int i = 0; i < 2; i++) index_case_run(&c[i], ctx);
        for (int i = INDEX_IDX; i < INDEX_TENSORS; i++)
            assert_true(test_tensor_same_bits(&c[0].t[i], &c[1].t[i]));
        for (int i = 0; i < INDEX_TENSORS; i++)
            if (maps[i].at != NULL) munmap(maps[i].at, maps[i].bytes);
        index_case_free(&c[0]), index_case_free(&c[1]);
        quern_context_destroy(ctx);
    }
}

static void core(void **state)
{
    const oracle_core x = {.queries = 9,
                           .raw = 12,
                           .entries = 10,
                           .heads = 3,
                           .dim = 16,
                           .window = 5,
                           .ratio = 2,
                           .start = 12,
                           .rope_dim = 4,
                           .chosen = 4};
    (void)state;
    for (int n = 0; n < 4; n++) {
        core_case c[2];
        mapping maps[CORE_TENSORS];
        quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 2);
        for (int i = 0; i < 2; i++) {
            test_random random = {8};
            c[i] = core_case_make(&random, &x, 1, NULL, n % 2 ? QUERN_BF16 : QUERN_F32,
                                  &(core_parts){.entries = true, .list = n < 2, .sink = true, .rope = true});
        }
        for (int i = 0; i < CORE_TENSORS; i++) {
            const bool spreads = c[1].t[i].buffer != NULL && c[1].t[i].view.ndim >= 3;
            maps[i] = spreads ? spread(&c[1].t[i], 1) : (mapping){NULL, 0};
        }
        for (int i = 0; i < 2; i++) core_case_forward(&c[i], ctx), core_case_backward(&c[i], ctx);
        for (int i = CORE_O; i < CORE_TENSORS; i++)
            if (i != CORE_D_O && !test_tensor_same_bits(&c[0].t[i], &c[1].t[i]))
                fail_msg("tensor %d differs", i);
        for (int i = 0; i < CORE_TENSORS; i++)
            if (maps[i].at != NULL) munmap(maps[i].at, maps[i].bytes);
        core_case_free(&c[0]), core_case_free(&c[1]);
        quern_context_destroy(ctx);
    }
}

/* Pages far apart: rows are stored in them, and queries read them. */
static void pages(void **state)
{
    enum { PAGES = 9, PAGE = 4, DIM = 16, ROWS = PAGES * PAGE, QUERIES = 2, HEADS = 2 };
    float x[ROWS * DIM], q[QUERIES * HEADS * DIM], o[2][QUERIES * HEADS * DIM], near[ROWS * DIM];
    int32_t slots[ROWS], table[PAGES];
    test_random random = {9};
    (void)state;
    for (int i = 0; i < ROWS * DIM; i++) x[i] = (float)test_random_normal(&random);
    for (int i = 0; i < QUERIES * HEADS * DIM; i++) q[i] = (float)test_random_normal(&random);
    for (int i = 0; i < PAGES; i++) table[i] = PAGES - 1 - i;
    for (int i = 0; i < ROWS; i++) slots[i] = table[i / PAGE] * PAGE + i % PAGE;
    const size_t bytes = (size_t)(far * PAGES) * sizeof(float);
    void *wide =
        mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    assert_true(wide != MAP_FAILED);
    quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 2);
    const int64_t pool[] = {PAGES, PAGE, DIM}, rows[] = {ROWS, DIM}, columns[] = {1, PAGES},
                  queries[] = {1, QUERIES, HEADS, DIM};
    for (int i = 0; i < 2; i++) {
        static char workspace[1 << 20];
        quern_tensor cache = quern_tensor_contiguous(i == 0 ? near : wide, QUERN_F32, 3, pool);
        const quern_tensor from = quern_tensor_contiguous(x, QUERN_F32, 2, rows),
                           to = quern_tensor_contiguous(slots, QUERN_I32, 1, rows),
                           named = quern_tensor_contiguous(table, QUERN_I32, 2, columns),
                           query = quern_tensor_contiguous(q, QUERN_F32, 4, queries),
                           out = quern_tensor_contiguous(o[i], QUERN_F32, 4, queries);
        if (i == 1) cache.strides[0] = far;
        quern_dsv4_store_params store = QUERN_DSV4_STORE_PARAMS_INIT;
        quern_dsv4_store_tensors s = QUERN_DSV4_STORE_TENSORS_INIT;
        store.page = PAGE;
        s.x = &from;
        s.slots = &to;
        s.cache = &cache;
        if (quern_dsv4_store(ctx, NULL, &store, &s, workspace, sizeof workspace) != QUERN_OK)
            fail_msg("%s", quern_last_error(ctx));
        quern_dsv4_attention_params p = QUERN_DSV4_ATTENTION_PARAMS_INIT;
        quern_dsv4_attention_tensors t = QUERN_DSV4_ATTENTION_TENSORS_INIT;
        p.start_abs_pos = ROWS - QUERIES;
        p.window = ROWS;
        p.page = PAGE;
        t.q = &query;
        t.kv = &cache;
        t.kv_table = &named;
        t.o = &out;
        if (quern_dsv4_attention(ctx, NULL, &p, &t, workspace, sizeof workspace) != QUERN_OK)
            fail_msg("%s", quern_last_error(ctx));
    }
    assert_memory_equal(o[0], o[1], sizeof o[0]);
    munmap(wide, bytes);
    quern_context_destroy(ctx);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(indexer), cmocka_unit_test(core),
                                       cmocka_unit_test(pages)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
