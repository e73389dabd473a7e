/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * means_test.c - a selection by mean logits over so many lists that a kernel of its own adds their rows,
 * against the same selection a key/value head at a time, where the kernel that fills the lists adds them: the
 * same lists. Those are checked against the oracle elsewhere.
 */
#include "cmocka_c11.h"

#include <stdlib.h>
#include <string.h>

#include <quern/cuda.h>
#include <quern/nsa.h>

enum { HKV = 8, L = 64, SEQUENCES = 4 };

#define OK(call)                                                                                             \
    do {                                                                                                     \
        if ((call) != QUERN_OK) fail_msg("%s: %s", #call, quern_last_error(NULL));                           \
    } while (0)

typedef struct means_case {
    quern_dtype dtype;
    int64_t n, group, dim, tile, groups; /* groups: max_compressed_groups */
    bool by_head, varlen;
} means_case;

/* Where sequences begin, and their entries: one is empty, and one has no whole block. */
static void find_offsets(int64_t n, int32_t *cu, int32_t *entries)
{
    const int32_t offsets[SEQUENCES + 1] = {0, 777, 777, 800, (int32_t)n - 3};
    entries[0] = 0;
    for (int i = 0; i <= SEQUENCES; i++) cu[i] = offsets[i];
    for (int i = 0; i < SEQUENCES; i++) entries[i + 1] = entries[i] + (cu[i + 1] - cu[i]) / L;
}

static quern_tensor on_device(quern_dtype dtype, int32_t ndim, const int64_t *shape, const void *values)
{
    quern_tensor t = quern_tensor_contiguous(NULL, dtype, ndim, shape);
    const size_t bytes = (size_t)(t.strides[0] * shape[0]) * quern_dtype_size(dtype);
    t.device = QUERN_CUDA;
    OK(quern_cuda_allocate(0, bytes, &t.data));
    if (values != NULL) OK(quern_cuda_copy(0, t.data, values, bytes, NULL));
    else OK(quern_cuda_fill(0, t.data, 0xfe, bytes, NULL));
    OK(quern_cuda_synchronize(0, NULL));
    return t;
}

/* Values of 1/8 <= |x| < 2, and every 100003rd is not finite. */
static quern_tensor noise(quern_dtype dtype, int32_t ndim, const int64_t *shape, uint32_t seed)
{
    int64_t count = 1;
    for (int i = 0; i < ndim; i++) count *= shape[i];
    const uint32_t shift = dtype == QUERN_F16 ? 10 : 7, exponent = dtype == QUERN_F16 ? 12 : 124;
    uint32_t *wide = malloc((size_t)count * 4);
    assert_non_null(wide);
    uint16_t *values = (uint16_t *)wide;
    for (int64_t i = 0; i < count; i++) {
        seed = seed * 1664525u + 1013904223u;
        uint32_t x = (exponent + (seed >> 28 & 3)) << shift | (seed >> 8 & ((1u << shift) - 1));
        if (i % 100003 == 50000) x = (dtype == QUERN_F16 ? 31u : 255u) << shift | (seed >> 9 & 1);
        x |= seed >> 31 << 15;
        if (dtype == QUERN_F32) wide[i] = x << 16;
        else values[i] = (uint16_t)x;
    }
    const quern_tensor t = on_device(dtype, ndim, shape, wide);
    free(wide);
    return t;
}

/* Heads [first, first + heads) of dim `dim`. */
static quern_tensor heads_of(quern_tensor t, int32_t dim, int64_t first, int64_t heads)
{
    t.data = (char *)t.data + (size_t)(first * t.strides[dim]) * quern_dtype_size(t.dtype);
    t.shape[dim] = heads;
    return t;
}

typedef struct lists {
    quern_tensor blocks, count, groups;
} lists;

/* The lists of key/value heads [first, first + heads). */
static void choose(quern_context *ctx, const quern_nsa_params *params, quern_nsa_tensors t, lists all,
                   const means_case *c, int64_t first, int64_t heads)
{
    const int32_t at = c->varlen ? 1 : 2, list_at = c->varlen ? 0 : 1;
    const int64_t per = c->by_head ? c->group : 1;
    size_t bytes;
    void *workspace;
    const quern_tensor q = heads_of(*t.q, at, first * c->group, heads * c->group),
                       k = heads_of(*t.k_cmp, at, first, heads);
    all.blocks = heads_of(all.blocks, list_at, first * per, heads * per);
    all.count = heads_of(all.count, list_at, first * per, heads * per);
    all.groups = heads_of(all.groups, list_at, first * per, heads * per);
    t.q = &q;
    t.k_cmp = &k;
    t.block_idx = &all.blocks;
    t.block_count = &all.count;
    if (c->groups > 0) t.group_idx = &all.groups;
    OK(quern_nsa_select_workspace(ctx, params, &t, &bytes));
    OK(quern_cuda_allocate(0, bytes > 0 ? bytes : 1, &workspace));
    OK(quern_nsa_select(ctx, NULL, params, &t, workspace, bytes));
    OK(quern_cuda_synchronize(0, NULL));
    OK(quern_cuda_free(0, workspace));
}

static void agree(const quern_tensor *a, const quern_tensor *b, const char *what)
{
    const size_t bytes = (size_t)(a->strides[0] * a->shape[0]) * 4;
    int32_t *x = malloc(bytes), *y = malloc(bytes);
    assert_true(x != NULL && y != NULL);
    OK(quern_cuda_copy(0, x, a->data, bytes, NULL));
    OK(quern_cuda_copy(0, y, b->data, bytes, NULL));
    OK(quern_cuda_synchronize(0, NULL));
    for (size_t i = 0; i < bytes / 4; i++)
        if (x[i] != y[i] || x[i] < -1) fail_msg("%s: element %zu is %d and %d", what, i, x[i], y[i]);
    free(x);
    free(y);
}

static void check(means_case c)
{
    const int32_t skip = c.varlen ? 1 : 0; /* varlen tensors have no batch */
    const int64_t k = 12, batch = c.varlen || c.groups > 0 ? 1 : 2,
                  rows = c.varlen ? c.n / c.tile + SEQUENCES : (c.n + c.tile - 1) / c.tile;
    const int64_t lists_all = HKV * (c.by_head ? c.group : 1), entries = c.n / L;
    const int64_t q_shape[] = {batch, c.n, HKV * c.group, c.dim}, k_shape[] = {batch, entries, HKV, c.dim},
                  list_shape[] = {batch, lists_all, rows, k}, group_shape[] = {batch, lists_all, rows, 3},
                  count_shape[] = {batch, lists_all, rows}, cu_shape[] = {SEQUENCES + 1};
    int32_t cu[SEQUENCES + 1], cu_entries[SEQUENCES + 1];
    quern_nsa_params params = QUERN_NSA_PARAMS_INIT;
    params.metric = QUERN_NSA_METRIC_MEAN_LOGIT;
    params.scope = c.by_head ? QUERN_NSA_SCOPE_HEAD : QUERN_NSA_SCOPE_GROUP;
    params.tile = c.tile;
    params.num_selected = k;
    params.max_compressed_groups = c.groups;
    find_offsets(c.n, cu, cu_entries);
    const quern_tensor q = noise(c.dtype, 4 - skip, q_shape + skip, 1),
                       k_cmp = noise(c.dtype, 4 - skip, k_shape + skip, 2),
                       offsets = on_device(QUERN_I32, 1, cu_shape, cu),
                       entry_offsets = on_device(QUERN_I32, 1, cu_shape, cu_entries);
    lists made[2];
    for (int i = 0; i < 2; i++) {
        made[i].blocks = on_device(QUERN_I32, 4 - skip, list_shape + skip, NULL);
        made[i].count = on_device(QUERN_I32, 3 - skip, count_shape + skip, NULL);
        made[i].groups = on_device(QUERN_I32, 4 - skip, group_shape + skip, NULL);
    }
    quern_context *ctx;
    OK(quern_context_create(NULL, &ctx));
    quern_nsa_tensors t = QUERN_NSA_TENSORS_INIT;
    t.q = &q;
    t.k_cmp = &k_cmp;
    if (c.varlen) {
        t.cu_seqlens = &offsets;
        t.cu_seqlens_cmp = &entry_offsets;
    }
    choose(ctx, &params, t, made[0], &c, 0, HKV);
    for (int64_t h = 0; h < HKV; h++) choose(ctx, &params, t, made[1], &c, h, 1);
    agree(&made[0].blocks, &made[1].blocks, "blocks");
    agree(&made[0].count, &made[1].count, "counts");
    if (c.groups > 0) agree(&made[0].groups, &made[1].groups, "groups");
    quern_context_destroy(ctx);
    const quern_tensor *const all[] = {&q,
                                       &k_cmp,
                                       &offsets,
                                       &entry_offsets,
                                       &made[0].blocks,
                                       &made[0].count,
                                       &made[0].groups,
                                       &made[1].blocks,
                                       &made[1].count,
                                       &made[1].groups};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) OK(quern_cuda_free(0, all[i]->data));
}

static void lists_of_a_group(void **state)
{
    (void)state;
    check((means_case){QUERN_BF16, 2053, 8, 128, 64, 0, false, false});
    check((means_case){QUERN_F32, 1531, 16, 72, 21, 0, false, true});
}

static void lists_of_a_head(void **state)
{
    (void)state;
    check((means_case){QUERN_F16, 2600, 5, 192, 256, 0, true, true});
}

static void lists_and_groups(void **state)
{
    (void)state;
    check((means_case){QUERN_F16, 26001, 4, 64, 100, 3, false, false});
}

static int start(void **state)
{
    (void)state;
    return quern_cuda_check(0) == QUERN_OK ? 0 : 1;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lists_of_a_group),
        cmocka_unit_test(lists_of_a_head),
        cmocka_unit_test(lists_and_groups),
    };
    return cmocka_run_group_tests(tests, start, NULL);
}
