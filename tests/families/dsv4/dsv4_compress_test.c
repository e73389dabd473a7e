/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* dsv4_compress_test.c - the compressors on random calls against the float64 oracle, on golden vectors, in
 * every row format, in long sequences; tables and packing; what is refused. */
#include "cmocka_c11.h"
#include "compare.h"
#include "dsv4_case.h"
#include "dsv4_golden.h"
#include "golden.h"

#include <quern/plan.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static void random_calls(void **state)
{
    (void)state;
    const uint64_t seed = test_seed("random_calls", 21);
    for (int trial = 0; trial < test_trials(400); trial++) {
        test_random random;
        if (!test_trial(seed, trial, &random)) continue;
        dsv4_case c = dsv4_case_random(&random);
        quern_context *ctx =
            test_context((quern_cpu_level)test_random_int(&random, 1, quern_cpu_level_detect()),
                         (int32_t)test_random_int(&random, 1, 3));
        dsv4_case_run(&c, ctx);
        double *pooled = test_tensor_get(&c.t[DSV4_POOLED]);
        dsv4_case_reference(&c, pooled);
        dsv4_case_check(&c);
        free(pooled);
        dsv4_case_free(&c);
        quern_context_destroy(ctx);
    }
}

static void threads_change_no_bit(void **state)
{
    (void)state;
    for (int trial = 0; trial < 20; trial++) {
        test_random random = {(uint64_t)trial + 100};
        dsv4_case c = dsv4_case_random(&random);
        test_tensor first[DSV4_TENSORS] = {{.buffer = NULL}};
        for (int32_t threads = 1; threads <= 4; threads++) {
            quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, threads);
            dsv4_case_run(&c, ctx);
            for (int i = DSV4_POOLED; i < DSV4_TENSORS; i++) {
                if (c.t[i].buffer == NULL) continue;
                if (threads == 1) first[i] = test_tensor_copy(&c.t[i]);
                else assert_true(test_tensor_same_bits(&first[i], &c.t[i]));
            }
            quern_context_destroy(ctx);
        }
        for (int i = 0; i < DSV4_TENSORS; i++)
            if (first[i].buffer != NULL) test_tensor_free(&first[i]);
        dsv4_case_free(&c);
    }
}

/* f32 values of a new contiguous tensor. */
static quern_tensor f32_of(const double *values, int32_t ndim, int64_t rows, int64_t columns)
{
    const int64_t shape[] = {ndim == 2 ? rows : columns, columns};
    float *data = malloc((size_t)(rows * columns) * sizeof *data + 1);
    for (int64_t i = 0; i < rows * columns; i++) data[i] = (float)values[i];
    return quern_tensor_contiguous(data, QUERN_F32, ndim, shape);
}

static void run(quern_context *ctx, const quern_dsv4_compress_params *p, const quern_dsv4_compress_tensors *t)
{
    size_t bytes;
    if (quern_dsv4_compress_workspace(ctx, p, t, &bytes) != QUERN_OK) fail_msg("%s", quern_last_error(ctx));
    test_workspace w = test_workspace_make(bytes);
    if (quern_dsv4_compress(ctx, NULL, p, t, w.data, bytes) != QUERN_OK)
        fail_msg("%s", quern_last_error(ctx));
    test_workspace_close(&w);
}

static void golden_vectors(void **state)
{
    (void)state;
    for (int level = QUERN_CPU_LEVEL_PORTABLE; level <= (int)quern_cpu_level_detect(); level++) {
        quern_context *ctx = test_context((quern_cpu_level)level, 2);
        for (int n = 0; n < DSV4_GOLDEN_CASES; n++) {
            dsv4_golden g = dsv4_golden_case(QUERN_TEST_VECTORS, n);
            const int64_t width = g.shape.width, r = g.shape.ratio, count = g.shape.blocks * width;
            quern_dsv4_compress_params p = QUERN_DSV4_COMPRESS_PARAMS_INIT;
            p.kind = g.shape.overlap ? QUERN_DSV4_CSA : QUERN_DSV4_HCA;
            p.ratio = r;
            p.start_token = g.shape.start_token;
            p.start_abs_pos = g.shape.start_abs_pos;
            p.rope_last = g.shape.rope_last;
            p.n_blocks = g.shape.blocks;
            double *out = test_doubles(count), *pooled = test_doubles(count);
            quern_tensor all[] = {
                f32_of(g.proj, 2, g.tokens, (g.shape.overlap ? 4 : 2) * width),
                f32_of(g.b_a, 2, r, width),
                g.b_b != NULL ? f32_of(g.b_b, 2, r, width) : (quern_tensor){0},
                g.prev_b != NULL ? f32_of(g.prev_b, 2, r, 2 * width) : (quern_tensor){0},
                g.norm_weight != NULL ? f32_of(g.norm_weight, 1, 1, width) : (quern_tensor){0},
                g.cos_sin != NULL ? f32_of(g.cos_sin, 2, g.max_pos, g.shape.rope_dim) : (quern_tensor){0},
                f32_of(out, 2, g.shape.blocks, width),
                f32_of(pooled, 2, g.shape.blocks, width)};
            quern_dsv4_compress_tensors t = QUERN_DSV4_COMPRESS_TENSORS_INIT;
            const quern_tensor **places[] = {&t.proj,        &t.b_a,     &t.b_b, &t.prev_b,
                                             &t.norm_weight, &t.cos_sin, &t.out, &t.pooled};
            for (int i = 0; i < 8; i++) *places[i] = all[i].data != NULL ? &all[i] : NULL;
            run(ctx, &p, &t);
            for (int64_t i = 0; i < count; i++) {
                out[i] = (double)((float *)all[6].data)[i];
                pooled[i] = (double)((float *)all[7].data)[i];
            }
            test_check_golden(g.name, out, g.out, count, g.bound);
            for (int64_t i = 0; g.pooled_tail != NULL && i < g.shape.blocks; i++)
                test_check_golden(g.name, pooled + (i + 1) * width - 64, g.pooled_tail + i * 64, 64, g.bound);
            for (int i = 0; i < 8; i++) free(all[i].data);
            free(out), free(pooled);
            dsv4_golden_free(&g);
        }
        quern_context_destroy(ctx);
    }
}

typedef struct format_case {
    quern_dsv4_format format;
    int64_t width, bytes;
} format_case;
static const format_case formats[] = {{QUERN_DSV4_FP8, 128, 132},     {QUERN_DSV4_FP8, 40, 44},
                                      {QUERN_DSV4_FP8_POWER, 64, 68}, {QUERN_DSV4_FP4, 128, 68},
                                      {QUERN_DSV4_FP4, 32, 17},       {QUERN_DSV4_ROW584, 512, 584}};
enum { FORMATS = sizeof formats / sizeof *formats };

static void expected_bytes(const format_case *f, const float *row, unsigned char *bytes)
{
    bool ok;
    if (f->format == QUERN_DSV4_FP4) ok = oracle_dsv4_quantise_fp4(row, f->width, bytes);
    else if (f->format == QUERN_DSV4_ROW584) ok = oracle_dsv4_quantise_row584(row, bytes);
    else ok = oracle_dsv4_quantise_fp8(row, f->width, f->format == QUERN_DSV4_FP8_POWER, bytes);
    assert_true(ok);
}

/* Formats of bytes hold what the quantiser makes of the rows that ROWS returns, from projections and from
 * hidden states. A NaN is refused. */
static void row_formats(void **state)
{
    (void)state;
    for (int n = 0; n < 4 * FORMATS; n++) {
        const format_case *f = &formats[n / 4];
        const int64_t tokens = 39, entries = 9, proj_shape[] = {tokens, 4 * f->width},
                      x_shape[] = {tokens, 24}, w_shape[] = {24, 4 * f->width};
        const int64_t bias_shape[] = {4, f->width}, row_shape[] = {entries, f->width},
                      byte_shape[] = {entries, f->bytes};
        const bool project = n % 2 == 1;
        test_random random = {(uint64_t)n + 1};
        quern_context *ctx = test_context((quern_cpu_level)(1 + n % (int)quern_cpu_level_detect()), 2);
        test_tensor in = test_tensor_make(&random, n % 4 < 2 ? QUERN_F32 : QUERN_BF16, 2,
                                          project ? x_shape : proj_shape, TEST_UNALIGNED);
        test_tensor w = test_tensor_make(&random, QUERN_F32, 2, w_shape, TEST_UNALIGNED),
                    pooled = test_tensor_make(&random, QUERN_F32, 2, row_shape, TEST_STRIDED);
        test_tensor b_a = test_tensor_make(&random, QUERN_F32, 2, bias_shape, TEST_UNALIGNED),
                    b_b = test_tensor_make(&random, QUERN_F32, 2, bias_shape, TEST_STRIDED);
        test_tensor rows = test_tensor_make(&random, QUERN_F32, 2, row_shape, TEST_CONTIGUOUS),
                    bytes = test_tensor_make(&random, QUERN_U8, 2, byte_shape, TEST_STRIDED);
        test_tensor_normal(&in, &random, n % 3 ? 1 : 1e-3), test_tensor_normal(&w, &random, 1);
        test_tensor_normal(&b_a, &random, 1), test_tensor_normal(&b_b, &random, 1);
        quern_dsv4_compress_params p = QUERN_DSV4_COMPRESS_PARAMS_INIT;
        p.start_token = 3;
        p.hadamard = f->width == 128;
        quern_dsv4_compress_tensors t = QUERN_DSV4_COMPRESS_TENSORS_INIT;
        t.proj = project ? NULL : &in.view;
        t.x = project ? &in.view : NULL;
        t.w = project ? &w.view : NULL;
        t.b_a = &b_a.view;
        t.b_b = &b_b.view;
        t.out = &rows.view;
        run(ctx, &p, &t);
        p.format = f->format;
        t.out = &bytes.view;
        t.pooled = &pooled.view;
        run(ctx, &p, &t);
        test_tensor_check_guards(&bytes, "bytes"), test_tensor_check_guards(&pooled, "pooled");
        for (int64_t i = 0; i < entries; i++) {
            unsigned char expected[600];
            expected_bytes(f, (const float *)rows.view.data + i * f->width, expected);
            assert_memory_equal((unsigned char *)bytes.view.data + i * bytes.view.strides[0], expected,
                                (size_t)f->bytes);
        }
        double *values = test_tensor_get(&in);
        values[(3 + 6 * 4) * in.view.shape[1] + 5] = n % 2 ? NAN : INFINITY;
        test_tensor_set(&in, values);
        test_tensor_reset(&bytes), test_tensor_reset(&pooled);
        size_t need;
        assert_int_equal(quern_dsv4_compress_workspace(ctx, &p, &t, &need), QUERN_OK);
        test_workspace space = test_workspace_make(need);
        assert_int_equal(quern_dsv4_compress(ctx, NULL, &p, &t, space.data, need),
                         QUERN_ERR_INVALID_ARGUMENT);
        assert_non_null(strstr(quern_last_error(ctx), "entry 6 of sequence 0, column"));
        test_workspace_close(&space);
        free(values);
        test_tensor *all[] = {&in, &w, &b_a, &b_b, &rows, &bytes, &pooled};
        for (int i = 0; i < 7; i++) {
            if (i != 4) test_tensor_check_unchanged(all[i], "tensor");
            test_tensor_free(all[i]);
        }
        quern_context_destroy(ctx);
    }
}

/* More tokens than a chunk of projections holds. */
static void long_sequences(void **state)
{
    (void)state;
    for (int kind = 0; kind < 2; kind++) {
        test_random random = {(uint64_t)kind + 40};
        const int64_t tokens = 4096 * 2 + 777, width = 8, in = 5, r = kind == 0 ? 4 : 128,
                      columns = (kind == 0 ? 4 : 2) * width;
        const int64_t x_shape[] = {tokens, in}, w_shape[] = {in, columns}, bias_shape[] = {r, width},
                      out_shape[] = {tokens / r, width};
        dsv4_case c;
        memset(&c, 0, sizeof c);
        c.shape = (oracle_compressor){.ratio = r, .width = width, .overlap = kind == 0, .eps = 1e-6};
        c.kind = DSV4_ONE;
        c.batch = 1;
        c.tokens = tokens;
        c.in = in;
        const struct {
            dsv4_tensor which;
            const int64_t *shape;
        } made[] = {{DSV4_X, x_shape},         {DSV4_W, w_shape},          {DSV4_BIAS_A, bias_shape},
                    {DSV4_POOLED, out_shape},  {DSV4_OUT, out_shape},      {DSV4_D_OUT, out_shape},
                    {DSV4_D_X, x_shape},       {DSV4_D_W, w_shape},        {DSV4_D_BIAS_A, bias_shape},
                    {DSV4_BIAS_B, bias_shape}, {DSV4_D_BIAS_B, bias_shape}};
        for (int i = 0; i < (kind == 0 ? 11 : 9); i++) {
            c.t[made[i].which] = test_tensor_make(&random, QUERN_F32, 2, made[i].shape, TEST_CONTIGUOUS);
            test_tensor_normal(&c.t[made[i].which], &random, 1);
        }
        quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 2);
        dsv4_case_run(&c, ctx);
        dsv4_case_reference(&c, NULL);
        dsv4_case_check(&c);
        dsv4_case_free(&c);
        quern_context_destroy(ctx);
    }
}

/* Rows 2^29 + 8 elements apart reach past 2^31 elements and give the bits of contiguous rows. */
static void offsets_beyond_32_bits(void **state)
{
    (void)state;
    enum { TOKENS = 8, WIDTH = 16, RATIO = 4, COLUMNS = 4 * WIDTH };
    const int64_t stride = ((int64_t)1 << 29) + 8, together[] = {TOKENS, COLUMNS}, bias[] = {RATIO, WIDTH},
                  entries[] = {TOKENS / RATIO, WIDTH};
    const size_t bytes = (size_t)(stride * TOKENS) * sizeof(float);
    float *wide[2], near[2][TOKENS * COLUMNS], b_data[RATIO * WIDTH] = {0}, out_data[2][2 * WIDTH],
                                                              d_data[2 * WIDTH];
    quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 2);
    for (int i = 0; i < 2; i++) {
        wide[i] =
            mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        assert_true(wide[i] != MAP_FAILED);
    }
    for (int i = 0; i < TOKENS * COLUMNS; i++)
        near[0][i] = wide[0][i / COLUMNS * stride + i % COLUMNS] = (float)(i * 37 % 101) * 0.05f;
    for (int i = 0; i < 2 * WIDTH; i++) d_data[i] = (float)(i % 7) - 3;
    const quern_tensor b = quern_tensor_contiguous(b_data, QUERN_F32, 2, bias),
                       d_out = quern_tensor_contiguous(d_data, QUERN_F32, 2, entries);
    for (int far = 0; far < 2; far++) {
        quern_tensor proj = quern_tensor_contiguous(far ? wide[0] : near[0], QUERN_F32, 2, together),
                     d_proj = proj;
        const quern_tensor out = quern_tensor_contiguous(out_data[far], QUERN_F32, 2, entries);
        d_proj.data = far ? wide[1] : near[1];
        if (far) proj.strides[0] = d_proj.strides[0] = stride;
        const quern_dsv4_compress_params p = QUERN_DSV4_COMPRESS_PARAMS_INIT;
        quern_dsv4_compress_tensors t = QUERN_DSV4_COMPRESS_TENSORS_INIT;
        t.proj = &proj;
        t.b_a = t.b_b = &b;
        t.out = &out;
        t.d_out = &d_out;
        t.d_proj = &d_proj;
        run(ctx, &p, &t);
        size_t need;
        assert_int_equal(quern_dsv4_compress_backward_workspace(ctx, &p, &t, &need), QUERN_OK);
        test_workspace w = test_workspace_make(need);
        assert_int_equal(quern_dsv4_compress_backward(ctx, NULL, &p, &t, w.data, need), QUERN_OK);
        test_workspace_close(&w);
    }
    assert_memory_equal(out_data[0], out_data[1], sizeof out_data[0]);
    for (int t = 0; t < TOKENS; t++)
        assert_memory_equal(near[1] + t * COLUMNS, wide[1] + t * stride, COLUMNS * sizeof(float));
    for (int i = 0; i < 2; i++) munmap(wide[i], bytes);
    quern_context_destroy(ctx);
}

static void rope_tables(void **state)
{
    (void)state;
    enum { ROWS = 3000, DIM = 64 };
    const int64_t shape[] = {ROWS, DIM}, tiny[] = {45, 8};
    float *data = malloc(ROWS * DIM * sizeof *data);
    double *expected = test_doubles(ROWS * DIM);
    const quern_tensor table = quern_tensor_contiguous(data, QUERN_F32, 2, shape),
                       small = quern_tensor_contiguous(data, QUERN_F32, 2, tiny);
    quern_dsv4_rope_params p = QUERN_DSV4_ROPE_PARAMS_INIT;
    p.base = 10000;
    for (int yarn = 0; yarn < 2; yarn++) {
        if (yarn) {
            p.base = 160000;
            p.factor = 16;
            p.original_length = 65536;
            p.beta_fast = 32;
            p.beta_slow = 1;
        }
        assert_int_equal(quern_dsv4_rope_table(&p, &table), QUERN_OK);
        oracle_dsv4_rope_table(ROWS, DIM, p.base, p.factor, p.original_length, p.beta_fast, p.beta_slow,
                               expected);
        for (int i = 0; i < ROWS * DIM; i++)
            if ((double)data[i] != expected[i])
                fail_msg("yarn %d, [%d][%d] is %.9g, expected %.9g", yarn, i / DIM, i % DIM, (double)data[i],
                         expected[i]);
    }
    quern_safetensors *file = golden_open(QUERN_TEST_VECTORS, "v4_tiny_csa");
    double *cosines = golden_get(file, "rope.compress.", "cos", 45 * 4),
           *sines = golden_get(file, "rope.main.", "sin", 45 * 4);
    p = (quern_dsv4_rope_params)QUERN_DSV4_ROPE_PARAMS_INIT;
    p.base = 160000;
    assert_int_equal(quern_dsv4_rope_table(&p, &small), QUERN_OK);
    for (int i = 0; i < 45 * 4; i++) assert_true(fabs((double)data[i / 4 * 8 + i % 4] - cosines[i]) < 1e-6);
    p.base = 10000;
    assert_int_equal(quern_dsv4_rope_table(&p, &small), QUERN_OK);
    for (int i = 0; i < 45 * 4; i++) assert_true(fabs((double)data[i / 4 * 8 + 4 + i % 4] - sines[i]) < 4e-6);
    p.base = 1;
    assert_int_equal(quern_dsv4_rope_table(&p, &small), QUERN_ERR_INVALID_ARGUMENT);
    quern_safetensors_close(file);
    free(data), free(expected), free(cosines), free(sines);
}

/* Packing from parts and packing from a checkpoint both give the columns that the header documents. */
static void packing(void **state)
{
    (void)state;
    enum { IN = 3, WIDTH = 2, R = 4 };
    float wkv[2 * WIDTH * IN], wgate[2 * WIDTH * IN], ape[R * 2 * WIDTH], w[IN * 4 * WIDTH], b_a[R * WIDTH],
        b_b[R * WIDTH], parts[4][IN * WIDTH];
    for (int i = 0; i < 2 * WIDTH * IN; i++) {
        wkv[i] = (float)(100 + i);
        wgate[i] = (float)(200 + i);
    }
    for (int i = 0; i < R * 2 * WIDTH; i++) ape[i] = (float)(300 + i);
    const int64_t linear[] = {2 * WIDTH, IN}, bias[] = {R, 2 * WIDTH}, own[] = {R, WIDTH},
                  packed[] = {IN, 4 * WIDTH}, part[] = {IN, WIDTH};
    const quern_tensor kv = quern_tensor_contiguous(wkv, QUERN_F32, 2, linear),
                       gate = quern_tensor_contiguous(wgate, QUERN_F32, 2, linear);
    const quern_tensor place = quern_tensor_contiguous(ape, QUERN_F32, 2, bias),
                       to = quern_tensor_contiguous(w, QUERN_F32, 2, packed);
    const quern_tensor a = quern_tensor_contiguous(b_a, QUERN_F32, 2, own),
                       b = quern_tensor_contiguous(b_b, QUERN_F32, 2, own);
    assert_int_equal(quern_dsv4_pack_checkpoint(QUERN_DSV4_CSA, &kv, &gate, &place, &to, &a, &b), QUERN_OK);
    for (int i = 0; i < IN; i++) {
        for (int c = 0; c < WIDTH; c++) { /* series b first in the checkpoint, last in w */
            assert_true(w[i * 4 * WIDTH + c] == wkv[(WIDTH + c) * IN + i] &&
                        w[i * 4 * WIDTH + WIDTH + c] == wgate[(WIDTH + c) * IN + i]);
            assert_true(w[i * 4 * WIDTH + 2 * WIDTH + c] == wkv[c * IN + i] &&
                        w[i * 4 * WIDTH + 3 * WIDTH + c] == wgate[c * IN + i]);
            for (int k = 0; k < 4; k++) parts[k][i * WIDTH + c] = w[i * 4 * WIDTH + k * WIDTH + c];
        }
    }
    for (int j = 0; j < R; j++)
        for (int c = 0; c < WIDTH; c++)
            assert_true(b_b[j * WIDTH + c] == ape[j * 2 * WIDTH + c] &&
                        b_a[j * WIDTH + c] == ape[j * 2 * WIDTH + WIDTH + c]);
    float again[IN * 4 * WIDTH];
    const quern_tensor second = quern_tensor_contiguous(again, QUERN_F32, 2, packed);
    quern_tensor p[4];
    for (int k = 0; k < 4; k++) p[k] = quern_tensor_contiguous(parts[k], QUERN_F32, 2, part);
    assert_int_equal(quern_dsv4_pack_weights(QUERN_DSV4_CSA, &p[0], &p[1], &p[2], &p[3], &second), QUERN_OK);
    assert_memory_equal(again, w, sizeof w);
    assert_int_equal(quern_dsv4_pack_weights(QUERN_DSV4_HCA, &p[0], &p[1], &p[2], NULL, &second),
                     QUERN_ERR_INVALID_ARGUMENT);
    assert_int_equal(quern_dsv4_pack_checkpoint(QUERN_DSV4_HCA, &kv, &gate, &place, &to, &a, &b),
                     QUERN_ERR_INVALID_ARGUMENT);
    p[1].shape[0] = 2;
    assert_int_equal(quern_dsv4_pack_weights(QUERN_DSV4_CSA, &p[0], &p[1], &p[2], &p[3], &second),
                     QUERN_ERR_INVALID_ARGUMENT);
}

/* A call that is right, of which each test breaks one thing. */
typedef struct fixture {
    quern_context *ctx;
    quern_dsv4_compress_params p;
    quern_dsv4_compress_tensors t;
    float proj_data[20 * 32], b_data[2][4 * 8], prev_data[2 * 4 * 16], table_data[8 * 4], out_data[2][5 * 8],
        d_data[20 * 32];
    int32_t cu_data[3], i32_data[2];
    quern_tensor proj, b_a, b_b, prev_b, table, out, pooled, cu, i32, d_out, d_proj;
} fixture;

static fixture *right_call(void)
{
    fixture *f = calloc(1, sizeof *f);
    f->ctx = test_context(QUERN_CPU_LEVEL_AUTO, 1);
    f->p = (quern_dsv4_compress_params)QUERN_DSV4_COMPRESS_PARAMS_INIT;
    f->t = (quern_dsv4_compress_tensors)QUERN_DSV4_COMPRESS_TENSORS_INIT;
    f->cu_data[1] = 9;
    f->cu_data[2] = 20;
#define MAKE(name, data, dtype, n, ...)                                                                      \
    f->name = quern_tensor_contiguous(f->data, dtype, n, (const int64_t[]){__VA_ARGS__})
    MAKE(proj, proj_data, QUERN_F32, 2, 20, 32), MAKE(b_a, b_data[0], QUERN_F32, 2, 4, 8),
        MAKE(b_b, b_data[1], QUERN_F32, 2, 4, 8);
    MAKE(prev_b, prev_data, QUERN_F32, 3, 2, 4, 16), MAKE(table, table_data, QUERN_F32, 2, 8, 4),
        MAKE(out, out_data[0], QUERN_F32, 2, 5, 8);
    MAKE(pooled, out_data[1], QUERN_F32, 2, 5, 8), MAKE(cu, cu_data, QUERN_I32, 1, 3),
        MAKE(i32, i32_data, QUERN_I32, 1, 2);
    MAKE(d_out, out_data[1], QUERN_F32, 2, 5, 8), MAKE(d_proj, d_data, QUERN_F32, 2, 20, 32);
#undef MAKE
    f->t.proj = &f->proj;
    f->t.b_a = &f->b_a;
    f->t.b_b = &f->b_b;
    f->t.out = &f->out;
    f->t.cu_seqlens = &f->cu;
    return f;
}

static quern_status forward(fixture *f)
{
    static unsigned char workspace[1 << 20];
    return quern_dsv4_compress(f->ctx, NULL, &f->p, &f->t, workspace, sizeof workspace);
}

/* The call is refused with a sentence that holds `word`, and out is as it was. */
static void refused(fixture *f, const char *word)
{
    memset(f->out_data, 0x5a, sizeof f->out_data);
    assert_int_equal(forward(f), QUERN_ERR_INVALID_ARGUMENT);
    if (strstr(quern_last_error(f->ctx), word) == NULL)
        fail_msg("'%s' lacks '%s'", quern_last_error(f->ctx), word);
    for (size_t i = 0; i < sizeof f->out_data; i++) assert_int_equal(((unsigned char *)f->out_data)[i], 0x5a);
    quern_context_destroy(f->ctx);
    free(f);
}

static void bad_parameters(void **state)
{
    (void)state;
#define REFUSED(word, ...)                                                                                   \
    do {                                                                                                     \
        fixture *f = right_call();                                                                           \
        assert_int_equal(forward(f), QUERN_OK);                                                              \
        __VA_ARGS__;                                                                                         \
        refused(f, word);                                                                                    \
    } while (0)
    REFUSED("kind is 2", f->p.kind = (quern_dsv4_kind)2);
    REFUSED("ratio is -1", f->p.ratio = -1);
    REFUSED("start_token is -1", f->p.start_token = -1);
    REFUSED("start_abs_pos is 6: multiples", f->p.start_abs_pos = 6);
    REFUSED("n_blocks is 2 with cu_seqlens", f->p.n_blocks = 2);
    REFUSED("eps is -1", f->p.eps = -1);
    REFUSED("format is 9", f->p.format = (quern_dsv4_format)9);
    REFUSED("out", f->p.format = QUERN_DSV4_FP8);
    REFUSED("8 channels: format fp4", f->p.format = QUERN_DSV4_FP4);
    REFUSED("8 channels, 0 of them rotated: format row584", f->p.format = QUERN_DSV4_ROW584);
    REFUSED("params.size", f->p.size = 3);
}

static void bad_tensors(void **state)
{
    (void)state;
    REFUSED("proj is NULL: proj, or x and w", f->t.proj = NULL);
    REFUSED("proj is given: proj alone", f->t.x = &f->proj);
    REFUSED("w is given: it stands beside x", f->t.w = &f->proj);
    REFUSED("w is NULL", f->t.x = &f->proj; f->t.proj = NULL);
    REFUSED("b_a is NULL", f->t.b_a = NULL);
    REFUSED("b_b is NULL", f->t.b_b = NULL);
    REFUSED("b_b is given: HCA", f->p.kind = QUERN_DSV4_HCA; f->p.ratio = 4);
    REFUSED("has_prev is given: it stands beside prev_b", f->t.has_prev = &f->i32);
    REFUSED("start_tokens is given: it stands beside cu_seqlens", f->t.cu_seqlens = NULL;
            f->t.start_tokens = &f->i32);
    REFUSED("start_token is 21", f->t.cu_seqlens = NULL; f->p.start_token = 21);
    REFUSED("n_blocks is 5: 0 (all) to the 4", f->t.cu_seqlens = NULL; f->p.start_token = 3;
            f->p.n_blocks = 5);
    REFUSED("b_b.shape[0] is 3", f->b_b.shape[0] = 3);
    REFUSED("proj.shape[1] is 31", f->proj.shape[1] = 31);
    REFUSED("out.shape[0] is 4", f->out.shape[0] = 4);
    REFUSED("prev_b.shape[0] is 1", f->prev_b.shape[0] = 1; f->t.prev_b = &f->prev_b);
    REFUSED("cos_sin has 3 columns", f->table.shape[1] = 3; f->t.cos_sin = &f->table);
    REFUSED("shares memory", f->pooled.data = f->out.data; f->t.pooled = &f->pooled);
    REFUSED("shares memory", f->out.data = f->proj.data);
    REFUSED("b_a", f->b_a.dtype = QUERN_BF16);
    REFUSED("out has dtype u8: f32", f->out.dtype = QUERN_U8);
    REFUSED("cu_seqlens", f->cu_data[1] = 21);
    REFUSED("cu_seqlens", f->cu_data[0] = 1);
    REFUSED("sequence 1 starts at token 12", f->i32_data[1] = 12; f->t.start_tokens = &f->i32);
    REFUSED("sequence 0 starts at position -4", f->i32_data[0] = -4; f->t.start_positions = &f->i32);
    REFUSED("sequence 1 starts at position 2", f->i32_data[1] = 2; f->t.start_positions = &f->i32);
    REFUSED("sequence 1 has block count 3", f->i32_data[1] = 3; f->t.block_counts = &f->i32);
    REFUSED("position 8: cos_sin has positions 0 to 7", f->i32_data[1] = 4; f->t.start_positions = &f->i32;
            f->t.cos_sin = &f->table);
#undef REFUSED
}

/* A plan on the same pointers writes the same bits; it checks positions again. */
static void plans(void **state)
{
    (void)state;
    fixture *f = right_call();
    static unsigned char workspace[1 << 20];
    quern_plan *plan;
    float kept[5 * 8];
    char text[200];
    f->t.start_positions = &f->i32;
    f->t.cos_sin = &f->table;
    for (int i = 0; i < 20 * 32; i++) f->proj_data[i] = (float)(i % 37) * 0.1f;
    assert_int_equal(forward(f), QUERN_OK);
    memcpy(kept, f->out_data[0], sizeof kept);
    memset(f->out_data, 0, sizeof f->out_data);
    assert_int_equal(quern_plan_create(f->ctx, QUERN_OP_DSV4_COMPRESS, &f->p, &f->t, &plan), QUERN_OK);
    void *data[24] = {NULL}; /* in the order of the struct */
    data[0] = f->proj_data;
    data[3] = f->b_data[0];
    data[4] = f->b_data[1];
    data[7] = f->table_data;
    data[8] = f->cu_data;
    data[10] = f->i32_data;
    data[15] = f->out_data[0];
    if (quern_plan_run(plan, NULL, data, workspace, sizeof workspace) != QUERN_OK)
        fail_msg("%s", quern_last_error(NULL));
    assert_memory_equal(kept, f->out_data[0], sizeof kept);
    assert_int_equal(quern_plan_describe(plan, text, sizeof text), QUERN_OK);
    assert_non_null(strstr(text, "dsv4_compress on cpu"));
    f->i32_data[1] = 4;
    assert_int_equal(quern_plan_run(plan, NULL, data, workspace, sizeof workspace),
                     QUERN_ERR_INVALID_ARGUMENT);
    assert_non_null(strstr(quern_last_error(f->ctx), "position 8"));
    quern_plan_destroy(plan);
    quern_context_destroy(f->ctx);
    free(f);
}

static void bad_backward(void **state)
{
    (void)state;
    fixture *f = right_call();
    static unsigned char workspace[1 << 20];
    f->t.d_out = &f->d_out;
    f->t.d_proj = &f->d_proj;
    size_t bytes;
    assert_int_equal(quern_dsv4_compress_backward_workspace(f->ctx, &f->p, &f->t, &bytes), QUERN_OK);
    assert_int_equal(quern_dsv4_compress_backward(f->ctx, NULL, &f->p, &f->t, workspace, bytes - 1),
                     QUERN_ERR_WORKSPACE);
    assert_int_equal(quern_dsv4_compress_backward(f->ctx, NULL, &f->p, &f->t, workspace, sizeof workspace),
                     QUERN_OK);
    f->t.d_x = &f->d_proj;
    assert_int_equal(quern_dsv4_compress_backward(f->ctx, NULL, &f->p, &f->t, workspace, sizeof workspace),
                     QUERN_ERR_INVALID_ARGUMENT);
    assert_non_null(strstr(quern_last_error(f->ctx), "d_x is given and x is NULL"));
    f->t.d_x = NULL;
    f->t.d_out = NULL;
    assert_int_equal(quern_dsv4_compress_backward(f->ctx, NULL, &f->p, &f->t, workspace, sizeof workspace),
                     QUERN_ERR_INVALID_ARGUMENT);
    assert_non_null(strstr(quern_last_error(f->ctx), "d_out is NULL"));
    quern_context_destroy(f->ctx);
    free(f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_calls),   cmocka_unit_test(threads_change_no_bit),
        cmocka_unit_test(golden_vectors), cmocka_unit_test(row_formats),
        cmocka_unit_test(long_sequences), cmocka_unit_test(offsets_beyond_32_bits),
        cmocka_unit_test(rope_tables),    cmocka_unit_test(packing),
        cmocka_unit_test(bad_parameters), cmocka_unit_test(bad_tensors),
        cmocka_unit_test(bad_backward),   cmocka_unit_test(plans),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
