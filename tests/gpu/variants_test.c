/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * variants_test.c - the variants of attention's and compression's stages: the first that takes a call runs,
 * the hook forces one, and all that take a call agree. Each is forced in turn on the same tensors; results
 * are compared with those of the most general one, whose own are checked against the oracle by the other
 * tests.
 */
#include "one_stage.h"
#include "tensor.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { N = 300, H = 16, HKV = 2, BLOCK = 32, TILE = 64, PICKS = 4 };
enum { RESULTS = 5 }; /* o, lse, d_q, d_k, d_v */

static quern_tensor make(quern_dtype dtype, int32_t ndim, const int64_t *shape)
{
    quern_tensor t = quern_tensor_contiguous(NULL, dtype, ndim, shape);
    t.device = QUERN_CUDA;
    CHECK(cudaMalloc(&t.data, (size_t)(t.strides[0] * shape[0]) * quern_dtype_size(dtype)));
    return t;
}

static quern_tensor noise_of(test_random *random, quern_dtype dtype, int64_t n, int64_t heads, int64_t dim)
{
    const int64_t shape[] = {1, n, heads, dim};
    test_tensor one = test_tensor_make(random, dtype, 4, shape, TEST_CONTIGUOUS);
    test_tensor_normal(&one, random, 1);
    const quern_tensor t = make(dtype, 4, shape);
    CHECK(cudaMemcpy(t.data, one.view.data, (size_t)(n * heads * dim) * quern_dtype_size(dtype),
                     cudaMemcpyHostToDevice));
    test_tensor_free(&one);
    return t;
}

static quern_tensor noise(test_random *random, quern_dtype dtype, int64_t heads, int64_t dim)
{
    return noise_of(random, dtype, N, heads, dim);
}

/* Blocks 0, the tile's own, and two between. */
static quern_tensor lists(void)
{
    const int64_t tiles = (N + TILE - 1) / TILE, shape[] = {1, HKV, tiles, PICKS};
    int32_t list[HKV * ((N + TILE - 1) / TILE) * PICKS];
    for (int64_t i = 0; i < HKV * tiles; i++) {
        const int32_t own = (int32_t)(i % tiles) * (TILE / BLOCK);
        const int32_t row[PICKS] = {own + 1, 0, own, own / 2};
        memcpy(list + i * PICKS, row, sizeof row);
    }
    const quern_tensor t = make(QUERN_I32, 4, shape);
    CHECK(cudaMemcpy(t.data, list, sizeof list, cudaMemcpyHostToDevice));
    return t;
}

static void results_of(const attend_args *a, const quern_tensor *all[RESULTS])
{
    const quern_tensor *const here[RESULTS] = {&a->o, &a->lse, &a->d_q, &a->d_k, &a->d_v};
    memcpy(all, here, sizeof here);
}

static float *fetch(const quern_tensor *t, size_t *count)
{
    *count = (size_t)(t->strides[0] * t->shape[0]);
    float *x = malloc(*count * sizeof *x);
    if (x == NULL) fail_msg("the test is out of memory");
    CHECK(cudaMemcpy(x, t->data, *count * quern_dtype_size(t->dtype), cudaMemcpyDeviceToHost));
    for (size_t i = *count; t->dtype == QUERN_BF16 && i-- > 0;) {
        uint16_t half;
        memcpy(&half, (const char *)x + i * sizeof half, sizeof half);
        const uint32_t bits = (uint32_t)half << 16;
        memcpy(x + i, &bits, sizeof bits);
    }
    return x;
}

/* Runs a stage as `name` has it; false where it does not take the call. */
static bool run_as(const attend_stage *stage, const attend_args *a, const char *name)
{
    char why[STAGE_WHY_BYTES] = "", kernel[STAGE_NAME_BYTES] = "";
    stage_exec exec = exec_here;
    void *workspace;
    exec.variant = name;
    if (!stage->supports(&exec, a, why)) return false;
    stage->kernel(&exec, a, kernel);
    assert_string_equal(kernel, name);
    const size_t bytes = stage->workspace(&exec, a) + 1;
    CHECK(cudaMalloc(&workspace, bytes));
    CHECK(cudaMemset(workspace, 0xff, bytes)); /* NaN, whatever it is read as */
    if (stage->run(&exec, a, workspace) != QUERN_OK) fail_msg("%s: %s", name, quern_last_error(NULL));
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaFree(workspace));
    return true;
}

/* Keeps the results of the first, compares those of the others. */
static void compare(const attend_args *a, float *first[RESULTS], const char *name, int from, int end)
{
    const quern_tensor *all[RESULTS];
    results_of(a, all);
    for (int i = from; i < end; i++) {
        size_t count;
        float *x = fetch(all[i], &count), most = 0.0f, off = 0.0f;
        for (size_t k = 0; first[i] != NULL && k < count; k++) {
            if (!isfinite(x[k]) != !isfinite(first[i][k]))
                fail_msg("%s: result %d has %g for %g", name, i, (double)x[k], (double)first[i][k]);
            if (!isfinite(x[k])) continue;
            most = fmaxf(most, fabsf(first[i][k]));
            off = fmaxf(off, fabsf(x[k] - first[i][k]));
        }
        if (!(off <= most / 64))
            fail_msg("%s: result %d is off by %g of %g", name, i, (double)off, (double)most);
        if (first[i] == NULL) first[i] = x;
        else free(x);
    }
}

/* Returns how many variants took the call. */
static int try_all(const attend_stage *stage, const attend_args *a, const char *const *names, int from,
                   int end)
{
    float *first[RESULTS] = {NULL};
    int taken = 0;
    for (int i = 0; names[i] != NULL; i++) {
        const quern_tensor *all[RESULTS];
        results_of(a, all);
        for (int k = from; k < end; k++)
            CHECK(cudaMemset(all[k]->data, 0xff,
                             (size_t)(all[k]->strides[0] * all[k]->shape[0]) *
                                 quern_dtype_size(all[k]->dtype)));
        if (!run_as(stage, a, names[i])) continue;
        compare(a, first, names[i], from, end);
        taken++;
    }
    for (int i = 0; i < RESULTS; i++) free(first[i]);
    return taken;
}

static void variants_agree(void **state)
{
    (void)state;
    static const char *const forward[] = {"attend_forward_any", "attend_forward_sm90", "attend_forward_wgmma",
                                          NULL};
    static const char *const backward[] = {"attend_backward_any", "attend_backward_sm90",
                                           "attend_backward_sm90_lists", "attend_backward_wgmma", NULL};
    static const int64_t dims[][2] = {{64, 64}, {128, 128}, {192, 128}, {256, 256}};
    test_random random = {test_seed("variants_agree", 3)};
    for (size_t i = 0; i < sizeof dims / sizeof *dims; i++)
        for (int listed = 0; listed < 2; listed++) {
            const int64_t d = dims[i][0], dv = dims[i][1], statistics[] = {1, H, N}, q[] = {1, N, H, d},
                          o[] = {1, N, H, dv}, k[] = {1, N, HKV, d}, v[] = {1, N, HKV, dv};
            attend_args a = {.mask = listed ? ATTEND_BLOCKS : ATTEND_RANGE,
                             .seqs = {1, N, N, {0}, {0}},
                             .causal = true,
                             .scale = 1.0f / sqrtf((float)d),
                             .query_offset = -1,
                             .block_size = BLOCK,
                             .stride = BLOCK,
                             .tile = listed ? TILE : 1};
            if (listed) a.list = lists();
            a.q = noise(&random, QUERN_BF16, H, d);
            a.k = noise(&random, QUERN_BF16, HKV, d);
            a.v = noise(&random, QUERN_BF16, HKV, dv);
            a.d_o = noise(&random, QUERN_BF16, H, dv);
            a.lse = make(QUERN_F32, 3, statistics);
            a.delta = make(QUERN_F32, 3, statistics);
            a.d_q = make(QUERN_F32, 4, q);
            a.d_k = make(QUERN_F32, 4, k);
            a.d_v = make(QUERN_F32, 4, v);
            a.o = make(QUERN_BF16, 4, o);
            CHECK(cudaMemset(a.delta.data, 0, (size_t)(H * N) * 4));
            /* o is bf16: lse stands for it here */
            const int forwards = try_all(&cuda->attend_forward, &a, forward, 1, 2),
                      backwards = try_all(&cuda->attend_backward, &a, backward, 2, 5);
            if (exec_here.compute == 90 && (forwards < 2 || backwards < 2))
                fail_msg("dim %d, listed %d: %d forwards and %d backwards on compute capability 9.0", (int)d,
                         listed, forwards, backwards);
            quern_tensor *const made[] = {&a.q,   &a.k,   &a.v,   &a.d_o, &a.lse, &a.delta,
                                          &a.d_q, &a.d_k, &a.d_v, &a.o,   &a.list};
            for (size_t t = 0; t < sizeof made / sizeof *made; t++) CHECK(cudaFree(made[t]->data));
        }
}

/* Lists of few rows; `listed` 0: compressed entries, of `block` tokens. near: neighbours' lists are alike;
 * else they are noise. odd: some operands hold what is not finite. */
typedef struct token_case {
    int64_t n, heads, kv_heads, d, dv, block, tile, listed;
    bool near, odd;
} token_case;

static quern_tensor token_lists(test_random *random, const token_case *c)
{
    const int64_t tiles = (c->n + c->tile - 1) / c->tile, shape[] = {1, c->kv_heads, tiles, c->listed};
    const size_t bytes = (size_t)(c->kv_heads * tiles * c->listed) * sizeof(int32_t);
    int32_t *list = malloc(bytes);
    if (list == NULL) fail_msg("the test is out of memory");
    for (int64_t i = 0; i < c->kv_heads * tiles; i++) {
        const int64_t own = i % tiles * c->tile / c->block;
        for (int64_t e = 0; e < c->listed; e++)
            list[i * c->listed + e] = (int32_t)(e == 0    ? own
                                                : c->near ? own * e / c->listed
                                                          : test_random_int(random, -1, own));
    }
    const quern_tensor t = make(QUERN_I32, 4, shape);
    CHECK(cudaMemcpy(t.data, list, bytes, cudaMemcpyHostToDevice));
    free(list);
    return t;
}

static void set_bits(const quern_tensor *t, int64_t token, int64_t column, uint16_t bits)
{
    uint16_t *at = (uint16_t *)t->data + token * t->strides[1] + (t->shape[2] - 1) * t->strides[2] + column;
    CHECK(cudaMemcpy(at, &bits, sizeof bits, cudaMemcpyHostToDevice));
}

static void token_variants_agree(test_random *random, const token_case *c)
{
    enum { NOT_A_NUMBER = 0x7fc0, INFINITE = 0xff80 };
    static const char *const forward[] = {"attend_forward_any", "attend_forward_sm90_tokens",
                                          "attend_forward_sm90_by_block", "attend_forward_sm90", NULL};
    static const char *const backward[] = {"attend_backward_any", "attend_backward_sm90_tokens",
                                           "attend_backward_sm90", NULL};
    const int64_t n = c->n, keys = c->listed > 0 ? n : n / c->block, statistics[] = {1, c->heads, n},
                  q[] = {1, n, c->heads, c->d}, o[] = {1, n, c->heads, c->dv},
                  k[] = {1, keys, c->kv_heads, c->d}, v[] = {1, keys, c->kv_heads, c->dv};
    attend_args a = {.mask = c->listed > 0 ? ATTEND_BLOCKS : ATTEND_COMPRESSED,
                     .seqs = {1, n, keys, {0}, {0}},
                     .causal = true,
                     .scale = 1.0f / sqrtf((float)c->d),
                     .query_offset = -1,
                     .block_size = c->block,
                     .stride = c->block,
                     .tile = c->tile};
    if (c->listed > 0) a.list = token_lists(random, c);
    a.q = noise_of(random, QUERN_BF16, n, c->heads, c->d);
    a.k = noise_of(random, QUERN_BF16, keys, c->kv_heads, c->d);
    a.v = noise_of(random, QUERN_BF16, keys, c->kv_heads, c->dv);
    a.d_o = noise_of(random, QUERN_BF16, n, c->heads, c->dv);
    a.lse = make(QUERN_F32, 3, statistics);
    a.delta = make(QUERN_F32, 3, statistics);
    a.d_q = make(QUERN_F32, 4, q);
    a.d_k = make(QUERN_F32, 4, k);
    a.d_v = make(QUERN_F32, 4, v);
    a.o = make(QUERN_BF16, 4, o);
    CHECK(cudaMemset(a.delta.data, 0, (size_t)(c->heads * n) * 4));
    if (c->odd) {
        set_bits(&a.k, n - 40, 3, NOT_A_NUMBER);
        set_bits(&a.v, n - 20, 5, INFINITE);
        set_bits(&a.v, n / 2, 7, NOT_A_NUMBER);
        set_bits(&a.q, n - 70, 1, NOT_A_NUMBER);
        set_bits(&a.d_o, n / 2 + 3, 2, INFINITE);
    }
    const int forwards = try_all(&cuda->attend_forward, &a, forward, 0, 2),
              backwards = c->d > 128 ? 2 : try_all(&cuda->attend_backward, &a, backward, 2, 5);
    if (exec_here.compute == 90 && (forwards < 2 || backwards < 2))
        fail_msg("%d heads of %d: %d forwards and %d backwards on compute capability 9.0", (int)c->heads,
                 (int)c->d, forwards, backwards);
    quern_tensor *const made[] = {&a.q,   &a.k,   &a.v,   &a.d_o, &a.lse, &a.delta,
                                  &a.d_q, &a.d_k, &a.d_v, &a.o,   &a.list};
    for (size_t t = 0; t < sizeof made / sizeof *made; t++) CHECK(cudaFree(made[t]->data));
}

/* Lists of a warp's rows, and the union of neighbours' lists; blocks of 64 and 128 keys, short last pieces
 * and blocks, 4 to 32 rows a list; as many entries as a piece's lists may have for one stage more, and one
 * more of each list; tokens of several slices. */
static void lists_of_few_rows_agree(void **state)
{
    (void)state;
    static const token_case cases[] = {
        {6001, 16, 1, 128, 128, 128, 1, 16, false, true}, {6001, 32, 2, 64, 64, 128, 1, 8, false, false},
        {3001, 16, 1, 128, 128, 128, 1, 32, true, true},  {6001, 16, 1, 128, 128, 64, 1, 64, false, true},
        {6001, 32, 2, 64, 64, 128, 1, 40, false, false},  {3001, 8, 2, 128, 128, 64, 1, 33, true, true},
        {700, 16, 1, 128, 128, 64, 1, 2, false, true},    {650, 32, 2, 64, 64, 64, 1, 6, true, true},
        {500, 8, 2, 128, 128, 64, 1, 4, false, true},     {5, 16, 1, 128, 128, 64, 1, 1, false, false},
        {3001, 32, 2, 128, 128, 64, 1, 8, false, false},  {3001, 32, 2, 128, 128, 64, 1, 8, true, false},
        {3001, 32, 2, 128, 128, 64, 1, 8, false, true},   {3001, 32, 2, 128, 128, 64, 1, 8, true, true},
        {1990, 16, 1, 64, 64, 64, 1, 8, false, true},     {5003, 16, 1, 96, 80, 128, 1, 8, false, true},
        {2500, 32, 2, 192, 128, 64, 1, 8, false, true},   {777, 16, 2, 128, 128, 64, 1, 8, false, true},
        {1500, 16, 2, 64, 64, 128, 2, 8, false, true},    {1500, 32, 1, 128, 64, 64, 1, 8, false, true},
        {6001, 8, 2, 128, 128, 64, 1, 2, false, true},    {6001, 8, 2, 128, 128, 64, 1, 2, false, false},
        {3001, 16, 2, 64, 64, 64, 1, 4, false, true},     {6001, 8, 2, 192, 128, 64, 1, 3, false, true},
        {3001, 8, 2, 128, 128, 64, 2, 3, false, true},    {3001, 8, 2, 64, 64, 64, 4, 8, false, true},
        {3001, 32, 2, 128, 128, 64, 1, 16, false, true},  {3001, 32, 2, 128, 128, 64, 1, 17, false, true},
        {6001, 8, 2, 128, 128, 64, 1, 16, false, true},   {6001, 8, 2, 128, 128, 64, 1, 17, false, true},
        {9001, 8, 2, 128, 128, 64, 1, 32, false, true},   {2000, 8, 1, 96, 80, 64, 1, 8, false, true}};
    const int count = (int)(sizeof cases / sizeof *cases), trials = test_trials(count);
    test_random random = {test_seed("lists_of_few_rows_agree", 5)};
    for (int i = 0; i < trials && i < count; i++) {
        const token_case *c = &cases[i];
        print_message("%d tokens, heads %d/%d, D %d/%d, blocks of %d, tile %d, %s%s\n", (int)c->n,
                      (int)c->heads, (int)c->kv_heads, (int)c->d, (int)c->dv, (int)c->block, (int)c->tile,
                      c->near ? "alike" : "noise", c->odd ? ", not finite" : "");
        token_variants_agree(&random, c);
    }
}

/* So many blocks of threads that the first rows' shares are short, with a last tile and a last piece of keys
 * that are not whole. */
static void short_shares_agree(void **state)
{
    (void)state;
    static const token_case cases[] = {{4165, 112, 16, 64, 64, 8, 1, 0, false, false},
                                       {4165, 112, 16, 128, 128, 8, 1, 0, false, false}};
    test_random random = {test_seed("short_shares_agree", 6)};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) token_variants_agree(&random, &cases[i]);
}

/* Sequences with fewer tiles of queries than there are shares of the rows: some shares between others leave
 * nothing of a piece of keys. */
static void few_tiles_agree(void **state)
{
    enum { TOKENS = 1500, SEQUENCES = 5, HEADS = 8 };
    (void)state;
    static const char *const backward[] = {"attend_backward_any", "attend_backward_sm90", NULL};
    static const int dims[][2] = {{64, 64}, {128, 128}, {192, 128}};
    static const int32_t offsets[SEQUENCES + 1] = {0, 1, 130, 131, 700, TOKENS};
    test_random random = {test_seed("few_tiles_agree", 7)};
    for (size_t i = 0; i < sizeof dims / sizeof *dims; i++) {
        const int64_t d = dims[i][0], dv = dims[i][1], q[] = {1, TOKENS, HEADS, d},
                      o[] = {1, TOKENS, HEADS, dv}, k[] = {1, TOKENS, HKV, d}, v[] = {1, TOKENS, HKV, dv},
                      statistics[] = {1, HEADS, TOKENS}, count[] = {SEQUENCES + 1};
        attend_args a = {.mask = ATTEND_RANGE,
                         .seqs = {SEQUENCES, TOKENS, TOKENS, {0}, {0}},
                         .causal = true,
                         .scale = 0.125f,
                         .query_offset = -1,
                         .tile = 1};
        a.seqs.cu_q = make(QUERN_I32, 1, count);
        CHECK(cudaMemcpy(a.seqs.cu_q.data, offsets, sizeof offsets, cudaMemcpyHostToDevice));
        a.q = noise_of(&random, QUERN_BF16, TOKENS, HEADS, d);
        a.k = noise_of(&random, QUERN_BF16, TOKENS, HKV, d);
        a.v = noise_of(&random, QUERN_BF16, TOKENS, HKV, dv);
        a.d_o = noise_of(&random, QUERN_BF16, TOKENS, HEADS, dv);
        a.o = make(QUERN_BF16, 4, o);
        a.lse = make(QUERN_F32, 3, statistics);
        a.delta = make(QUERN_F32, 3, statistics);
        a.d_q = make(QUERN_BF16, 4, q);
        a.d_k = make(QUERN_BF16, 4, k);
        a.d_v = make(QUERN_BF16, 4, v);
        CHECK(cudaMemset(a.delta.data, 0, (size_t)(HEADS * TOKENS) * 4));
        assert_true(run_as(&cuda->attend_forward, &a, "attend_forward_any"));
        assert_int_equal(try_all(&cuda->attend_backward, &a, backward, 2, 5),
                         exec_here.compute == 90 ? 2 : 1);
        quern_tensor *const made[] = {&a.q, &a.k,   &a.v,   &a.d_o, &a.lse,      &a.delta,
                                      &a.o, &a.d_q, &a.d_k, &a.d_v, &a.seqs.cu_q};
        for (size_t t = 0; t < sizeof made / sizeof *made; t++) CHECK(cudaFree(made[t]->data));
    }
}

/* Projected means of bf16 by f32 multiply-adds and, where there is a cuBLASLt, on tensor cores. */
static void products_of_compression_agree(void **state)
{
    enum { ENTRIES = N / BLOCK, D = 64, ROWS = HKV * D };
    static const char *const names[] = {"compress_forward_any", "compress_forward_cublaslt"};
    const int64_t cmp[] = {1, ENTRIES, HKV, D}, w[] = {HKV, D, D};
    test_random random = {test_seed("products_of_compression_agree", 4)};
    compress_args a = {
        .seqs = {1, N, N, {0}, {0}}, .kind = COMPRESS_MEAN, .block_size = BLOCK, .stride = BLOCK};
    float weights[ROWS * D], *first = NULL;
    char why[STAGE_WHY_BYTES] = "", kernel[STAGE_NAME_BYTES] = "";
    (void)state;
    for (int i = 0; i < ROWS * D; i++) weights[i] = (float)(i * 37 % 101) / 50 - 1;
    a.k = noise(&random, QUERN_BF16, HKV, D);
    a.v = noise(&random, QUERN_BF16, HKV, D);
    a.w_k = make(QUERN_F32, 3, w);
    CHECK(cudaMemcpy(a.w_k.data, weights, sizeof weights, cudaMemcpyHostToDevice));
    a.k_cmp = make(QUERN_BF16, 4, cmp);
    a.v_cmp = make(QUERN_BF16, 4, cmp);
    for (int i = 0; i < 2; i++) {
        stage_exec exec = exec_here;
        void *workspace;
        exec.variant = names[i];
        CHECK(cudaMemset(a.k_cmp.data, 0xff, sizeof(uint16_t) * ENTRIES * ROWS));
        if (!cuda->compress_forward.supports(&exec, &a, why)) continue; /* without cuBLASLt */
        cuda->compress_forward.kernel(&exec, &a, kernel);
        assert_string_equal(kernel, names[i]);
        CHECK(cudaMalloc(&workspace, cuda->compress_forward.workspace(&exec, &a) + 1));
        if (cuda->compress_forward.run(&exec, &a, workspace) != QUERN_OK)
            fail_msg("%s: %s", names[i], quern_last_error(NULL));
        CHECK(cudaDeviceSynchronize());
        CHECK(cudaFree(workspace));
        uint16_t made[ENTRIES * ROWS];
        CHECK(cudaMemcpy(made, a.k_cmp.data, sizeof made, cudaMemcpyDeviceToHost));
        float *x = malloc(sizeof *x * ENTRIES * ROWS), most = 0.0f, off = 0.0f;
        assert_non_null(x);
        for (int count = 0; count < ENTRIES * ROWS; count++) {
            const uint32_t bits = (uint32_t)made[count] << 16;
            memcpy(&x[count], &bits, sizeof bits);
            most = fmaxf(most, fabsf(x[count]));
            if (first != NULL) off = fmaxf(off, fabsf(x[count] - first[count]));
        }
        if (!(most > 0 && off <= most / 64))
            fail_msg("%s: off by %g of %g", names[i], (double)off, (double)most);
        if (first == NULL) first = x;
        else free(x);
    }
    assert_non_null(first);
    free(first);
    quern_tensor *const all[] = {&a.k, &a.v, &a.w_k, &a.k_cmp, &a.v_cmp};
    for (size_t t = 0; t < sizeof all / sizeof *all; t++) CHECK(cudaFree(all[t]->data));
}

/* Lists that neighbours share, and for the later half of the last piece's tokens lists of noise: what those
 * choose changes no bit of the tokens before them, whichever way the piece is multiplied. */
static void later_lists_change_no_bit(void **state)
{
    (void)state;
    enum { LONG = 8192, LISTED = 8, D = 128 };
    if (exec_here.compute != 90) return;
    test_random random = {test_seed("later_lists_change_no_bit", 6)};
    static const struct {
        int64_t heads, size; /* size: of a block */
        const char *variant;
    } cases[] = {{4, 64, "attend_forward_sm90_tokens"},   {8, 64, "attend_forward_sm90_tokens"},
                 {16, 64, "attend_forward_sm90_tokens"},  {4, 64, "attend_forward_sm90_by_block"},
                 {8, 64, "attend_forward_sm90_by_block"}, {16, 128, "attend_forward_sm90_by_block"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const int64_t heads = cases[i].heads, size = cases[i].size;
        const int64_t later = LONG - 64 / heads; /* 128 rows a piece */
        const int64_t q[] = {1, LONG, heads, D}, lists[] = {1, 1, LONG, LISTED}, lse[] = {1, heads, LONG};
        attend_args a = {.mask = ATTEND_BLOCKS,
                         .seqs = {1, LONG, LONG, {0}, {0}},
                         .causal = true,
                         .scale = 0.09f,
                         .query_offset = -1,
                         .block_size = size,
                         .stride = size,
                         .tile = 1};
        a.q = noise_of(&random, QUERN_BF16, LONG, heads, D);
        a.k = noise_of(&random, QUERN_BF16, LONG, 1, D);
        a.v = noise_of(&random, QUERN_BF16, LONG, 1, D);
        a.o = make(QUERN_BF16, 4, q);
        a.lse = make(QUERN_F32, 3, lse);
        a.list = make(QUERN_I32, 4, lists);
        const size_t bytes = (size_t)(LONG * heads * D) * 2, token = (size_t)(heads * D) * 2;
        int32_t *list = malloc(LONG * LISTED * sizeof *list);
        char *results[2] = {malloc(bytes), malloc(bytes)};
        if (list == NULL || results[0] == NULL || results[1] == NULL) fail_msg("the test is out of memory");
        for (int noise = 0; noise < 2; noise++) {
            for (int64_t n = 0; n < LONG; n++)
                for (int64_t e = 0; e < LISTED; e++)
                    list[n * LISTED + e] = noise && n >= later
                                               ? (int32_t)test_random_int(&random, 0, n / size)
                                               : (int32_t)(n / size * e / LISTED);
            CHECK(cudaMemcpy(a.list.data, list, LONG * LISTED * sizeof *list, cudaMemcpyHostToDevice));
            assert_true(run_as(&cuda->attend_forward, &a, cases[i].variant));
            CHECK(cudaMemcpy(results[noise], a.o.data, bytes, cudaMemcpyDeviceToHost));
        }
        for (int64_t n = 0; n < later; n++)
            if (memcmp(results[0] + (size_t)n * token, results[1] + (size_t)n * token, token) != 0)
                fail_msg("%s, %d heads: lists of later tokens change the bits of token %d", cases[i].variant,
                         (int)heads, (int)n);
        free(list);
        free(results[0]);
        free(results[1]);
        quern_tensor *const made[] = {&a.q, &a.k, &a.v, &a.o, &a.lse, &a.list};
        for (size_t t = 0; t < sizeof made / sizeof *made; t++) CHECK(cudaFree(made[t]->data));
    }
}

/* Lists whose shares of dK and dV take more memory than there is at a time: for some of the key/value heads,
 * and for a part of their list rows. */
static void lists_in_parts(void **state)
{
    enum { LONG = 81920, HEADS = 16, D = 64, LISTED = 32, SIZE = 64 };
    (void)state;
    static const char *const backward[] = {"attend_backward_wgmma", "attend_backward_sm90_lists", NULL};
    const int64_t tiles = LONG / TILE, list[] = {1, HKV, tiles, LISTED}, q[] = {1, LONG, HEADS, D},
                  k[] = {1, LONG, HKV, D}, statistics[] = {1, HEADS, LONG};
    if (exec_here.compute != 90) return;
    test_random random = {test_seed("lists_in_parts", 4)};
    attend_args a = {.mask = ATTEND_BLOCKS,
                     .seqs = {1, LONG, LONG, {0}, {0}},
                     .causal = true,
                     .scale = 0.125f,
                     .query_offset = -1,
                     .block_size = SIZE,
                     .stride = SIZE,
                     .tile = TILE};
    int32_t *blocks = malloc((size_t)(HKV * tiles) * LISTED * sizeof *blocks);
    if (blocks == NULL) fail_msg("the test is out of memory");
    for (int64_t i = 0; i < HKV * tiles; i++)
        for (int64_t e = 0; e < LISTED; e++)
            blocks[i * LISTED + e] =
                e == 0 ? (int32_t)(i % tiles) : (int32_t)test_random_int(&random, -1, i % tiles);
    a.list = make(QUERN_I32, 4, list);
    CHECK(cudaMemcpy(a.list.data, blocks, (size_t)(HKV * tiles) * LISTED * sizeof *blocks,
                     cudaMemcpyHostToDevice));
    free(blocks);
    a.q = noise_of(&random, QUERN_BF16, LONG, HEADS, D);
    a.k = noise_of(&random, QUERN_BF16, LONG, HKV, D);
    a.v = noise_of(&random, QUERN_BF16, LONG, HKV, D);
    a.d_o = noise_of(&random, QUERN_BF16, LONG, HEADS, D);
    a.o = make(QUERN_BF16, 4, q);
    a.lse = make(QUERN_F32, 3, statistics);
    a.delta = make(QUERN_F32, 3, statistics);
    a.d_q = make(QUERN_F32, 4, q);
    a.d_k = make(QUERN_F32, 4, k);
    a.d_v = make(QUERN_F32, 4, k);
    CHECK(cudaMemset(a.delta.data, 0, (size_t)(HEADS * LONG) * 4));
    assert_true(run_as(&cuda->attend_forward, &a, "attend_forward_sm90"));
    assert_int_equal(try_all(&cuda->attend_backward, &a, backward, 2, 5), 2);
    quern_tensor *const made[] = {&a.q,   &a.k,   &a.v,   &a.d_o, &a.lse, &a.delta,
                                  &a.d_q, &a.d_k, &a.d_v, &a.o,   &a.list};
    for (size_t t = 0; t < sizeof made / sizeof *made; t++) CHECK(cudaFree(made[t]->data));
}

static void names_that_no_stage_has_force_nothing(void **state)
{
    (void)state;
    const int64_t shape[] = {1, N, H, 64};
    attend_args a = {.mask = ATTEND_RANGE,
                     .seqs = {1, N, N, {0}, {0}},
                     .causal = true,
                     .scale = 1,
                     .query_offset = -1,
                     .tile = 1};
    stage_exec exec = exec_here;
    char why[STAGE_WHY_BYTES] = "", kernel[STAGE_NAME_BYTES] = "";
    a.q = quern_tensor_contiguous((void *)(uintptr_t)4096, QUERN_BF16, 4,
                                  shape); // NOLINT(performance-no-int-to-ptr)
    a.k = a.v = a.o = a.q;
    cuda->attend_forward.kernel(&exec, &a, kernel);
    assert_string_equal(kernel, exec.compute == 90 ? "attend_forward_sm90" : "attend_forward_any");
    exec.variant = "select_any";
    cuda->attend_forward.kernel(&exec, &a, kernel);
    assert_string_equal(kernel, exec.compute == 90 ? "attend_forward_sm90" : "attend_forward_any");
    exec.variant = "attend_forward_f32";
    assert_false(cuda->attend_forward.supports(&exec, &a, why));
    assert_true(why[0] != '\0');
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(variants_agree),
                                       cmocka_unit_test(lists_in_parts),
                                       cmocka_unit_test(lists_of_few_rows_agree),
                                       cmocka_unit_test(short_shares_agree),
                                       cmocka_unit_test(few_tiles_agree),
                                       cmocka_unit_test(later_lists_change_no_bit),
                                       cmocka_unit_test(products_of_compression_agree),
                                       cmocka_unit_test(names_that_no_stage_has_force_nothing)};
    return cmocka_run_group_tests(tests, open_backend, NULL);
}
