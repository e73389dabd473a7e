/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* dsv4_compress_test.c - the compressors on random calls against the float64 oracle, on golden vectors, in
 * every row format, in long sequences; tables and packing. */
#include "cmocka_c11.h"
#include "compare.h"
#include "dsv4_case.h"
#include "dsv4_golden.h"
#include "golden.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* Random calls with a wish, each against the oracle. */
static void check_calls(const char *name, uint64_t number, int trials, dsv4_wish wish)
{
    const uint64_t seed = test_seed(name, number);
    for (int trial = 0; trial < test_trials(trials); trial++) {
        test_random random;
        if (!test_trial(seed, trial, &random)) continue;
        dsv4_case c = dsv4_case_random_of(&random, wish);
        quern_context *ctx =
            test_context(test_random_level(&random), (int32_t)test_random_int(&random, 1, 3));
        dsv4_case_run(&c, ctx);
        double *pooled = test_tensor_get(&c.t[DSV4_POOLED]);
        dsv4_case_reference(&c, pooled);
        dsv4_case_check(&c);
        free(pooled);
        dsv4_case_free(&c);
        quern_context_destroy(ctx);
    }
}

static void random_calls(void **state)
{
    (void)state;
    check_calls("random_calls", 21, 400, (dsv4_wish){0});
}

static void entries_of_512_channels(void **state)
{
    (void)state;
    check_calls("entries_of_512_channels", 22, 60, (dsv4_wish){.wide = true});
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
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
        quern_context *ctx = test_context(level, 2);
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
        quern_context *ctx = test_context(test_level(n), 2);
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
#ifdef QUERN_TEST_GPU /* which reads no contents on the host */
        const int same = 4;
#else
        const int same = 7;
        double *values = test_tensor_get(&in);
        values[(3 + 6 * 4) * in.view.shape[1] + 5] = n % 2 ? NAN : INFINITY;
        test_tensor_set(&in, values);
        test_tensor_reset(&bytes), test_tensor_reset(&pooled);
        size_t need;
        assert_int_equal(quern_dsv4_compress_workspace(ctx, &p, &t, &need), QUERN_OK);
        test_workspace space = test_workspace_make(need);
        assert_int_equal(quern_dsv4_compress(ctx, NULL, &p, &t, space.data, need),
                         QUERN_ERR_INVALID_ARGUMENT);
        assert_non_null(strstr(quern_last_error(ctx), "(row 6, column"));
        test_workspace_close(&space);
        free(values);
#endif
        test_tensor *all[] = {&in, &w, &b_a, &b_b, &rows, &bytes, &pooled};
        for (int i = 0; i < 7; i++) {
            if (i != 4 && i < same) test_tensor_check_unchanged(all[i], "tensor");
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

/* Entries of one call of many long blocks, whatever kernel makes so many, are those of calls of a few, to the
 * bit. Where a logit is -inf the value counts for nothing, whatever it is. */
static void check_many_blocks(int64_t batch, int64_t blocks, int64_t gap)
{
    enum { WIDTH = 512, RATIO = 8, FEW = 40, ROPE = 64 };
    const int64_t tokens = blocks * RATIO + (gap > 0 ? 3 : 0), row = 2 * WIDTH + gap, entry = WIDTH * 2,
                  shape[] = {batch, tokens, 2 * WIDTH}, out_shape[] = {batch, blocks, WIDTH},
                  bias_shape[] = {RATIO, WIDTH}, table_shape[] = {tokens, ROPE};
    test_random random = {(uint64_t)(batch * blocks + gap)};
    uint16_t *const rows = calloc((size_t)(batch * tokens * row), 2);
    char *const made[] = {calloc((size_t)(batch * blocks), entry), calloc((size_t)(batch * blocks), entry)};
    for (int64_t i = 0; i < batch * tokens * row; i++) {
        const float x = (float)test_random_normal(&random);
        uint32_t bits;
        memcpy(&bits, &x, sizeof bits);
        rows[i] = (uint16_t)(bits >> 16);
    }
    for (int64_t i = 5; i < batch * tokens; i += 7)
        for (int c = 0; c < WIDTH; c += 3)
            rows[i * row + c] = i % 2 ? 0x7fc0 : 0x7f80,
                           rows[i * row + WIDTH + c] = 0xff80; /* NaN, inf; -inf */
    test_tensor bias = test_tensor_make(&random, QUERN_F32, 2, bias_shape, TEST_CONTIGUOUS),
                table = test_tensor_make(&random, QUERN_F32, 2, table_shape, TEST_CONTIGUOUS);
    test_tensor_normal(&bias, &random, 1), test_tensor_normal(&table, &random, 1);
    quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 2);
    quern_tensor proj = quern_tensor_contiguous(rows, QUERN_BF16, 3, shape),
                 out = quern_tensor_contiguous(made[0], QUERN_BF16, 3, out_shape);
    proj.strides[0] = tokens * row, proj.strides[1] = row;
    quern_dsv4_compress_params p = QUERN_DSV4_COMPRESS_PARAMS_INIT;
    p.kind = QUERN_DSV4_HCA;
    p.ratio = RATIO;
    quern_dsv4_compress_tensors t = QUERN_DSV4_COMPRESS_TENSORS_INIT;
    t.proj = &proj, t.b_a = &bias.view, t.cos_sin = &table.view, t.out = &out;
    run(ctx, &p, &t);
    proj.shape[0] = out.shape[0] = 1;
    for (int64_t e = 0; e < batch * blocks; e += p.n_blocks) {
        const int64_t b = e / blocks, first = e % blocks;
        p.n_blocks = blocks - first < FEW ? blocks - first : FEW;
        p.start_token = p.start_abs_pos = first * RATIO;
        proj.data = rows + b * tokens * row;
        out.data = made[1] + e * entry;
        out.shape[1] = p.n_blocks;
        out.strides[0] = p.n_blocks * WIDTH;
        run(ctx, &p, &t);
    }
    assert_memory_equal(made[0], made[1], (size_t)(batch * blocks * entry));
    quern_context_destroy(ctx);
    test_tensor_free(&bias), test_tensor_free(&table);
    free(rows), free(made[0]), free(made[1]);
}

static void many_long_blocks(void **state)
{
    (void)state;
    check_many_blocks(1, 300, 0);
    check_many_blocks(1, 300, 8);
    check_many_blocks(2, 150, 0);
    check_many_blocks(1, 1100, 0);
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

/* Angles of a million tokens, whose range is reduced in full. */
static void check_far_positions(const quern_dsv4_rope_params *p)
{
    enum { ROWS = 1 << 20, DIM = 4 };
    const int64_t shape[] = {ROWS, DIM};
    float *data = malloc(ROWS * DIM * sizeof *data);
    double *expected = test_doubles(ROWS * DIM);
    const quern_tensor table = quern_tensor_contiguous(data, QUERN_F32, 2, shape);
    assert_int_equal(quern_dsv4_rope_table(p, &table), QUERN_OK);
    oracle_dsv4_rope_table(ROWS, DIM, p->base, p->factor, p->original_length, p->beta_fast, p->beta_slow,
                           expected);
    for (int i = 0; i < ROWS * DIM; i++)
        if ((double)data[i] != expected[i])
            fail_msg("[%d][%d] is %.9g, expected %.9g", i / DIM, i % DIM, (double)data[i], expected[i]);
    free(data), free(expected);
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
    check_far_positions(&p);
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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_calls),
        cmocka_unit_test(entries_of_512_channels),
        cmocka_unit_test(threads_change_no_bit),
        cmocka_unit_test(golden_vectors),
        cmocka_unit_test(row_formats),
        cmocka_unit_test(long_sequences),
        cmocka_unit_test(offsets_beyond_32_bits),
        cmocka_unit_test(rope_tables),
        cmocka_unit_test(packing),
        cmocka_unit_test(many_long_blocks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
