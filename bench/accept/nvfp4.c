/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * nvfp4.c - the targets of NVFP4's products and quantisers on the CPU, as fractions of the machine's
 * ceilings. A figure is the median over rounds, each of which measures the ceiling and the operation one
 * after the other, so that other load slows both. Prints a line per figure; exit code 1 if one misses.
 *
 * Weights: 16 experts of 4096 x 4096, 151 MB repacked. Work: 2 M N K operations a product; 9/16 byte a
 * weight; 4 9/16 bytes a value quantised (read for the largest magnitude, read again, written) or made of a
 * gate and an up value.
 */
#include "ceilings.h"
#include "program.h"

#include <quern/moe.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { EXPERTS = 16, N = 4096, K = 4096, ROWS_MOST = 256, ROUNDS = 5, ELEMENTS = 1 << 26 };

static const double weight_bytes = (double)EXPERTS * N * K * 9 / 16;

/* All operands, made once. */
typedef struct operands {
    uint8_t *repacked, *a_codes, *a_scales, *c_codes, *c_scales;
    uint16_t *a;
    void *c;
    float one;
    int32_t ends[EXPERTS];
} operands;

/* A figure to measure. */
typedef struct figure {
    const char *what;
    quern_cpu_level level;
    int threads;
    int64_t rows; /* of each expert */
    bool integers, quantised;
    ceiling compute;
    double target;
} figure;

static int failed;

static void report(const char *what, int threads, double target, double measured)
{
    char line[120];
    const bool passed = measured >= target;
    snprintf(line, sizeof line, "%s, %d thread%s", what, threads, threads > 1 ? "s" : "");
    printf("%-74s target >= %-8.3g measured %-8.3g %-8s %s\n", line, target, measured, "",
           passed ? "PASS" : "FAIL");
    fflush(stdout);
    if (!passed) failed = 1;
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static double median(double values[ROUNDS])
{
    qsort(values, ROUNDS, sizeof *values, by_value);
    return values[ROUNDS / 2];
}

static quern_context *context_of(quern_cpu_level level, int threads)
{
    quern_context_params p = QUERN_CONTEXT_PARAMS_INIT;
    quern_context *ctx;
    p.cpu_level = level;
    p.threads = threads;
    check(quern_context_create(&p, &ctx));
    return ctx;
}

static void repack(operands *o)
{
    const int64_t codes_shape[] = {1, K / 2, N}, scales_shape[] = {1, K / 16, N},
                  repacked_shape[] = {1, quern_moe_prepack_bytes(N, K)};
    uint8_t *codes = need(malloc((size_t)K / 2 * N)), *scales = need(malloc((size_t)K / 16 * N));
    const quern_tensor codes_view = quern_tensor_contiguous(codes, QUERN_U8, 3, codes_shape);
    const quern_tensor scales_view = quern_tensor_contiguous(scales, QUERN_U8, 3, scales_shape);
    quern_context *ctx = context_of(QUERN_CPU_LEVEL_AUTO, 2);
    uint32_t state = 1;
    o->repacked = need(bench_allocate((size_t)(EXPERTS * repacked_shape[1])));
    for (int e = 0; e < EXPERTS; e++) {
        for (int64_t i = 0; i < (int64_t)K / 2 * N; i++) codes[i] = (uint8_t)(next_random(&state) >> 8);
        for (int64_t i = 0; i < (int64_t)K / 16 * N; i++)
            scales[i] = (uint8_t)(0x28 + (next_random(&state) >> 8) % 32);
        const quern_tensor view =
            quern_tensor_contiguous(o->repacked + e * repacked_shape[1], QUERN_U8, 2, repacked_shape);
        quern_moe_prepack_params p = QUERN_MOE_PREPACK_PARAMS_INIT;
        quern_moe_prepack_tensors t = QUERN_MOE_PREPACK_TENSORS_INIT;
        t.b_codes = &codes_view;
        t.b_scales = &scales_view;
        t.b_repacked = &view;
        check(quern_moe_prepack(ctx, NULL, &p, &t, NULL, 0));
    }
    quern_context_destroy(ctx);
    free(codes);
    free(scales);
}

static void make_operands(operands *o)
{
    const size_t rows = (size_t)EXPERTS * ROWS_MOST;
    uint32_t state = 7;
    o->one = 1.0f;
    o->a = need(malloc(rows * K * sizeof *o->a));
    o->a_codes = need(malloc(rows * K / 2));
    o->a_scales = need(malloc(rows * K / 16));
    o->c = need(malloc(rows * N * sizeof(float)));
    o->c_codes = need(malloc(rows * N / 2));
    o->c_scales = need(malloc(rows * N / 16));
    for (size_t i = 0; i < rows * K; i++)
        o->a[i] = (uint16_t)(0x3d00 + (next_random(&state) >> 8) % 0x300 + (next_random(&state) >> 31 << 15));
    for (size_t i = 0; i < rows * K / 2; i++) o->a_codes[i] = (uint8_t)(next_random(&state) >> 8);
    for (size_t i = 0; i < rows * K / 16; i++)
        o->a_scales[i] = (uint8_t)(0x28 + (next_random(&state) >> 8) % 32);
    repack(o);
}

/* Seconds of one call; workspace NULL only sets *bytes. */
static double time_product(quern_context *ctx, operands *o, const figure *f, void *workspace, size_t *bytes)
{
    const int64_t tokens = EXPERTS * f->rows, a[] = {tokens, K}, a_codes[] = {tokens, K / 2},
                  a_scales[] = {tokens, K / 16}, c[] = {tokens, N};
    const int64_t c_codes[] = {tokens, N / 2}, c_scales[] = {tokens, N / 16},
                  repacked[] = {EXPERTS, quern_moe_prepack_bytes(N, K)}, experts = EXPERTS;
    for (int e = 0; e < EXPERTS; e++) o->ends[e] = (int32_t)((e + 1) * f->rows);
    const quern_tensor a_view = quern_tensor_contiguous(o->a, QUERN_BF16, 2, a),
                       a_codes_view = quern_tensor_contiguous(o->a_codes, QUERN_U8, 2, a_codes);
    const quern_tensor a_scales_view = quern_tensor_contiguous(o->a_scales, QUERN_U8, 2, a_scales),
                       c_view = quern_tensor_contiguous(o->c, QUERN_BF16, 2, c);
    const quern_tensor c_codes_view = quern_tensor_contiguous(o->c_codes, QUERN_U8, 2, c_codes);
    const quern_tensor c_scales_view = quern_tensor_contiguous(o->c_scales, QUERN_U8, 2, c_scales),
                       one = quern_tensor_contiguous(&o->one, QUERN_F32, 0, NULL);
    const quern_tensor b_view = quern_tensor_contiguous(o->repacked, QUERN_U8, 2, repacked),
                       offsets = quern_tensor_contiguous(o->ends, QUERN_I32, 1, &experts);
    quern_nvfp4_gemm_params p = QUERN_NVFP4_GEMM_PARAMS_INIT;
    quern_nvfp4_gemm_tensors t = QUERN_NVFP4_GEMM_TENSORS_INIT;
    p.n = N;
    t.b_repacked = &b_view;
    t.offsets = &offsets;
    if (f->integers) {
        t.a_codes = &a_codes_view;
        t.a_scales = &a_scales_view;
    } else t.a = &a_view;
    if (f->quantised) {
        t.c_codes = &c_codes_view;
        t.c_scales = &c_scales_view;
        t.c_global = &one;
    } else t.c = &c_view;
    if (workspace == NULL) {
        check(quern_nvfp4_gemm_workspace(ctx, &p, &t, bytes));
        return 0;
    }
    const double start = now();
    check(quern_nvfp4_gemm(ctx, NULL, &p, &t, workspace, *bytes));
    return now() - start;
}

/* The least time that the ceilings allow, over the time taken. */
static void product_figure(operands *o, const figure *f)
{
    quern_context *ctx = context_of(f->level, f->threads);
    const double operations = 2.0 * EXPERTS * (double)f->rows * N * K;
    double fractions[ROUNDS];
    size_t bytes;
    time_product(ctx, o, f, NULL, &bytes);
    void *workspace = need(malloc(bytes + 1));
    time_product(ctx, o, f, workspace, &bytes);
    for (int r = 0; r < ROUNDS; r++) {
        const double compute = operations / (ceiling_measure(f->compute, f->threads) * 1e9);
        const double read =
            f->rows <= 32 ? weight_bytes / (ceiling_measure(CEILING_READ, f->threads) * 1e9) : 0;
        const double seconds = time_product(ctx, o, f, workspace, &bytes);
        fractions[r] = (compute > read ? compute : read) / seconds;
    }
    report(f->what, f->threads, f->target, median(fractions));
    free(workspace);
    quern_context_destroy(ctx);
}

static double time_quantise(quern_context *ctx, const quern_tensor *x, operands *o, bool fused,
                            void *workspace, size_t *bytes)
{
    const int64_t rows = x->shape[0], width = fused ? x->shape[1] / 2 : x->shape[1],
                  codes[] = {rows, width / 2}, scales[] = {rows, width / 16};
    float global = 0.01f;
    const quern_tensor codes_view = quern_tensor_contiguous(o->c, QUERN_U8, 2, codes),
                       scales_view = quern_tensor_contiguous(o->a_codes, QUERN_U8, 2, scales);
    const quern_tensor global_view = quern_tensor_contiguous(&global, QUERN_F32, 0, NULL);
    quern_nvfp4_quantize_params p = QUERN_NVFP4_QUANTIZE_PARAMS_INIT;
    quern_nvfp4_quantize_tensors t = QUERN_NVFP4_QUANTIZE_TENSORS_INIT;
    quern_nvfp4_fused_quantize_params fp = QUERN_NVFP4_FUSED_QUANTIZE_PARAMS_INIT;
    quern_nvfp4_fused_quantize_tensors ft = QUERN_NVFP4_FUSED_QUANTIZE_TENSORS_INIT;
    t.x = ft.x = x;
    t.codes = ft.gate_codes = &codes_view;
    t.scales = ft.gate_scales = &scales_view;
    t.global = ft.gate_global = &global_view;
    fp.swiglu = true;
    if (workspace == NULL) {
        check(fused ? quern_nvfp4_fused_quantize_workspace(ctx, &fp, &ft, bytes)
                    : quern_nvfp4_quantize_workspace(ctx, &p, &t, bytes));
        return 0;
    }
    const double start = now();
    check(fused ? quern_nvfp4_fused_quantize(ctx, NULL, &fp, &ft, workspace, *bytes)
                : quern_nvfp4_quantize(ctx, NULL, &p, &t, workspace, *bytes));
    return now() - start;
}

static void quantise_figure(operands *o, bool fused, double target)
{
    const int64_t shape[] = {ELEMENTS / 4096, 4096};
    const double bytes_moved = (fused ? ELEMENTS / 2.0 : (double)ELEMENTS) * 4.5625;
    uint16_t *values = need(bench_allocate((size_t)ELEMENTS * sizeof *values));
    quern_context *ctx = context_of(QUERN_CPU_LEVEL_AUTO, 2);
    const quern_tensor x = quern_tensor_contiguous(values, QUERN_BF16, 2, shape);
    double fractions[ROUNDS];
    size_t bytes;
    for (size_t i = 0; i < ELEMENTS; i++) values[i] = o->a[i % ((size_t)EXPERTS * ROWS_MOST * K)];
    time_quantise(ctx, &x, o, fused, NULL, &bytes);
    void *workspace = need(malloc(bytes + 1));
    time_quantise(ctx, &x, o, fused, workspace, &bytes);
    for (int r = 0; r < ROUNDS; r++) {
        const double copy = bytes_moved / (ceiling_measure(CEILING_COPY, 2) * 1e9);
        fractions[r] = copy / time_quantise(ctx, &x, o, fused, workspace, &bytes);
    }
    report(fused ? "de-interleave, SwiGLU, quantise, bf16, of the copy bandwidth"
                 : "quantise rne bf16, computed global, of the copy bandwidth",
           2, target, median(fractions));
    free(workspace);
    free(values);
    quern_context_destroy(ctx);
}

/* The gradient of A: the operations of the product itself. */
static double time_backward(quern_context *ctx, operands *o, void *workspace, size_t *bytes)
{
    const int64_t tokens = (int64_t)EXPERTS * ROWS_MOST, rows[] = {tokens, K}, experts = EXPERTS,
                  repacked[] = {EXPERTS, quern_moe_prepack_bytes(N, K)};
    for (int e = 0; e < EXPERTS; e++) o->ends[e] = (e + 1) * ROWS_MOST;
    const quern_tensor a = quern_tensor_contiguous(o->a, QUERN_BF16, 2, rows),
                       d_a = quern_tensor_contiguous(o->c, QUERN_BF16, 2, rows);
    const quern_tensor b = quern_tensor_contiguous(o->repacked, QUERN_U8, 2, repacked),
                       offsets = quern_tensor_contiguous(o->ends, QUERN_I32, 1, &experts);
    quern_nvfp4_gemm_params p = QUERN_NVFP4_GEMM_PARAMS_INIT;
    quern_nvfp4_gemm_tensors t = QUERN_NVFP4_GEMM_TENSORS_INIT;
    p.n = N;
    t.a = t.d_c = &a;
    t.b_repacked = &b;
    t.offsets = &offsets;
    t.d_a = &d_a;
    if (workspace == NULL) {
        check(quern_nvfp4_gemm_backward_workspace(ctx, &p, &t, bytes));
        return 0;
    }
    const double start = now();
    check(quern_nvfp4_gemm_backward(ctx, NULL, &p, &t, workspace, *bytes));
    return now() - start;
}

static void backward_figure(operands *o, double target)
{
    quern_context *ctx = context_of(QUERN_CPU_LEVEL_AUTO, 2);
    double fractions[ROUNDS];
    size_t bytes;
    time_backward(ctx, o, NULL, &bytes);
    void *workspace = need(malloc(bytes + 1));
    time_backward(ctx, o, workspace, &bytes);
    for (int r = 0; r < ROUNDS; r++) {
        const double compute = 2.0 * EXPERTS * ROWS_MOST * N * K / (ceiling_measure(CEILING_BF16, 2) * 1e9);
        fractions[r] = compute / time_backward(ctx, o, workspace, &bytes);
    }
    report("backward through frozen weights, M 256, of bf16 peak", 2, target, median(fractions));
    free(workspace);
    quern_context_destroy(ctx);
}

int main(void)
{
    static operands o;
    const quern_cpu_level best = QUERN_CPU_LEVEL_AUTO, avx2 = QUERN_CPU_LEVEL_AVX2;
    const figure figures[] = {
        {"W4A16, M 1, of read", best, 1, 1, false, false, CEILING_BF16, 0.85},
        {"W4A16, M 1, of read", best, 2, 1, false, false, CEILING_BF16, 0.85},
        {"W4A16, M 8, of min(read, bf16 peak)", best, 2, 8, false, false, CEILING_BF16, 0.6},
        {"W4A16, M 32, of min(read, bf16 peak)", best, 2, 32, false, false, CEILING_BF16, 0.75},
        {"W4A16, M 256, of bf16 peak", best, 2, 256, false, false, CEILING_BF16, 0.88},
        {"W4A4, M 64, of VNNI peak", best, 2, 64, true, false, CEILING_VNNI, 0.46},
        {"W4A4, M 64, requantised output, of VNNI peak", best, 2, 64, true, true, CEILING_VNNI, 0.42},
        {"AVX2: W4A16, M 1, of read", avx2, 1, 1, false, false, CEILING_FMA256, 0.4},
        {"AVX2: W4A16, M 1, of read", avx2, 2, 1, false, false, CEILING_FMA256, 0.6},
        {"AVX2: W4A16, M 256, of the 256-bit FMA peak", avx2, 2, 256, false, false, CEILING_FMA256, 0.7},
    };
    if (quern_cpu_level_detect() < QUERN_CPU_LEVEL_AVX512BF16) {
        fprintf(stderr, "these figures are for machines with AVX-512, BF16 and VNNI\n");
        return 3;
    }
    make_operands(&o);
    for (size_t i = 0; i < sizeof figures / sizeof *figures; i++) product_figure(&o, &figures[i]);
    backward_figure(&o, 0.8);
    quantise_figure(&o, false, 0.6);
    quantise_figure(&o, true, 0.6);
    return failed;
}
