/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * nvfp4_layer.c - the time of a whole mixture-of-experts layer over that of its products alone: 32 experts,
 * top 4, hidden and intermediate width 2880, a shared expert of the same width, bf16 activations, repacked
 * NVFP4 weights (449 MB), 2 threads. The products are those of the layer's own routing. A figure is the
 * median over rounds, each of which times both one after the other. Prints a line per figure; exit code 1 if
 * one misses.
 */
#include "ceilings.h"
#include "program.h"

#include <quern/moe.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { EXPERTS = 32, TOP_K = 4, WIDTH = 2880, TOKENS_MOST = 512, ROUNDS = 7 };

/* Weights and activations, made once. `one`: a stack of one, the shared expert. */
typedef struct layer {
    uint8_t *up, *down;
    int64_t up_bytes, down_bytes;
    uint16_t *hidden, *router, *out, *act;
    float *y;
    int32_t ends[EXPERTS];
} layer;

static quern_tensor view(void *data, quern_dtype dtype, int64_t rows, int64_t columns)
{
    const int64_t shape[] = {rows, columns};
    return quern_tensor_contiguous(data, dtype, 2, shape);
}

/* EXPERTS + 1 random matrices [WIDTH, n], the last one the shared expert's. Each is its own copy of the same
 * numbers. */
static uint8_t *random_weights(quern_context *ctx, int64_t n, uint32_t *state, int64_t *bytes)
{
    const int64_t codes_shape[] = {1, WIDTH / 2, n}, scales_shape[] = {1, WIDTH / 16, n};
    uint8_t *codes = need(malloc((size_t)(WIDTH / 2 * n))), *scales = need(malloc((size_t)(WIDTH / 16 * n)));
    *bytes = quern_moe_prepack_bytes(n, WIDTH);
    uint8_t *all = need(bench_allocate((size_t)((EXPERTS + 1) * *bytes)));
    for (int64_t i = 0; i < WIDTH / 2 * n; i++) codes[i] = (uint8_t)(next_random(state) >> 8);
    for (int64_t i = 0; i < WIDTH / 16 * n; i++) scales[i] = (uint8_t)(0x08 + (next_random(state) >> 8) % 16);
    const quern_tensor codes_view = quern_tensor_contiguous(codes, QUERN_U8, 3, codes_shape),
                       scales_view = quern_tensor_contiguous(scales, QUERN_U8, 3, scales_shape),
                       to = view(all, QUERN_U8, 1, *bytes);
    quern_moe_prepack_params p = QUERN_MOE_PREPACK_PARAMS_INIT;
    quern_moe_prepack_tensors t = QUERN_MOE_PREPACK_TENSORS_INIT;
    t.b_codes = &codes_view;
    t.b_scales = &scales_view;
    t.b_repacked = &to;
    check(quern_moe_prepack(ctx, NULL, &p, &t, NULL, 0));
    for (int64_t e = 1; e <= EXPERTS; e++) memcpy(all + e * *bytes, all, (size_t)*bytes);
    free(codes);
    free(scales);
    return all;
}

static uint16_t *random_rows(int64_t count, uint32_t *state)
{
    uint16_t *rows = need(malloc((size_t)count * sizeof *rows));
    for (int64_t i = 0; i < count; i++)
        rows[i] = (uint16_t)(0x3d00 + (next_random(state) >> 8) % 0x200 + (next_random(state) >> 31 << 15));
    return rows;
}

static void make_layer(quern_context *ctx, layer *l)
{
    uint32_t state = 5;
    l->up = random_weights(ctx, 2 * WIDTH, &state, &l->up_bytes);
    l->down = random_weights(ctx, WIDTH, &state, &l->down_bytes);
    l->hidden = random_rows((int64_t)TOKENS_MOST * WIDTH, &state);
    l->router = random_rows((int64_t)EXPERTS * WIDTH, &state);
    l->act = random_rows((int64_t)TOKENS_MOST * TOP_K * WIDTH, &state);
    l->out = need(malloc((size_t)TOKENS_MOST * TOP_K * WIDTH * sizeof *l->out));
    l->y = need(malloc((size_t)TOKENS_MOST * TOP_K * WIDTH * sizeof *l->y));
}

static double time_layer(quern_context *ctx, layer *l, int64_t tokens, void *workspace, size_t *bytes)
{
    const int64_t experts = EXPERTS;
    const quern_tensor hidden = view(l->hidden, QUERN_BF16, tokens, WIDTH),
                       router = view(l->router, QUERN_BF16, EXPERTS, WIDTH),
                       up = view(l->up, QUERN_U8, EXPERTS, l->up_bytes),
                       down = view(l->down, QUERN_U8, EXPERTS, l->down_bytes),
                       out = view(l->out, QUERN_BF16, tokens, WIDTH),
                       shared_up =
                           quern_tensor_contiguous(l->up + EXPERTS * l->up_bytes, QUERN_U8, 1, &l->up_bytes),
                       shared_down = quern_tensor_contiguous(l->down + EXPERTS * l->down_bytes, QUERN_U8, 1,
                                                             &l->down_bytes),
                       offsets = quern_tensor_contiguous(l->ends, QUERN_I32, 1, &experts);
    quern_moe_params p = QUERN_MOE_PARAMS_INIT;
    quern_moe_tensors t = QUERN_MOE_TENSORS_INIT;
    p.top_k = TOP_K;
    p.renormalize = true;
    p.intermediate = p.shared_intermediate = WIDTH;
    t.hidden = &hidden;
    t.weight = &router;
    t.gate_up_repacked = &up;
    t.down_repacked = &down;
    t.out = &out;
    t.offsets = &offsets;
    t.shared_gate_up_repacked = &shared_up;
    t.shared_down_repacked = &shared_down;
    if (workspace == NULL) {
        check(quern_moe_forward_workspace(ctx, &p, &t, bytes));
        return 0;
    }
    const double start = now();
    check(quern_moe_forward(ctx, NULL, &p, &t, workspace, *bytes));
    return now() - start;
}

/* One of the layer's products, of `rows` rows; `ends` holds the end of each expert's. */
static double time_product(quern_context *ctx, layer *l, const int32_t *ends, int64_t experts, int64_t rows,
                           bool down, void *workspace, size_t *bytes)
{
    const int64_t n = down ? WIDTH : 2 * WIDTH, each = down ? l->down_bytes : l->up_bytes,
                  first = experts == 1 ? EXPERTS : 0;
    const quern_tensor a = view(l->act, QUERN_BF16, rows, WIDTH),
                       b = view((down ? l->down : l->up) + first * each, QUERN_U8, experts, each);
    const quern_tensor c = down ? view(l->y, QUERN_F32, rows, WIDTH) : view(l->out, QUERN_BF16, rows, WIDTH);
    const quern_tensor offsets = quern_tensor_contiguous((void *)(uintptr_t)ends, QUERN_I32, 1, &experts);
    quern_nvfp4_gemm_params p = QUERN_NVFP4_GEMM_PARAMS_INIT;
    quern_nvfp4_gemm_tensors t = QUERN_NVFP4_GEMM_TENSORS_INIT;
    size_t needed;
    p.n = n;
    p.activation = down ? QUERN_NVFP4_ACTIVATION_NONE : QUERN_NVFP4_ACTIVATION_SWIGLU;
    t.a = &a;
    t.b_repacked = &b;
    t.offsets = &offsets;
    t.c = &c;
    check(quern_nvfp4_gemm_workspace(ctx, &p, &t, &needed));
    if (needed > *bytes) *bytes = needed;
    if (workspace == NULL) return 0;
    const double start = now();
    check(quern_nvfp4_gemm(ctx, NULL, &p, &t, workspace, *bytes));
    return now() - start;
}

static double time_products(quern_context *ctx, layer *l, int64_t tokens, void *workspace, size_t *bytes)
{
    const int32_t all = (int32_t)tokens;
    double seconds = 0;
    for (int down = 0; down < 2; down++) {
        seconds += time_product(ctx, l, l->ends, EXPERTS, tokens * TOP_K, down, workspace, bytes);
        seconds += time_product(ctx, l, &all, 1, tokens, down, workspace, bytes);
    }
    return seconds;
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

/* Returns whether the figure passes. */
static bool figure(quern_context *ctx, layer *l, int64_t tokens)
{
    double ratios[ROUNDS];
    size_t bytes = 0;
    time_layer(ctx, l, tokens, NULL, &bytes);
    time_products(ctx, l, tokens, NULL, &bytes);
    void *workspace = need(malloc(bytes + 1));
    time_layer(ctx, l, tokens, workspace, &bytes);
    for (int r = 0; r < ROUNDS; r++) {
        const double products = time_products(ctx, l, tokens, workspace, &bytes);
        ratios[r] = time_layer(ctx, l, tokens, workspace, &bytes) / products;
    }
    free(workspace);
    qsort(ratios, ROUNDS, sizeof *ratios, by_value);
    const bool passed = ratios[ROUNDS / 2] <= 1.15;
    char line[80];
    snprintf(line, sizeof line, "MoE layer, M %lld, time over that of its products, 2 threads",
             (long long)tokens);
    printf("%-74s target <= %-8.3g measured %-8.3g %-8s %s\n", line, 1.15, ratios[ROUNDS / 2], "",
           passed ? "PASS" : "FAIL");
    fflush(stdout);
    return passed;
}

int main(void)
{
    static const int64_t tokens[] = {1, 8, 64, TOKENS_MOST};
    static layer l;
    quern_context_params p = QUERN_CONTEXT_PARAMS_INIT;
    quern_context *ctx;
    bool passed = true;
    p.threads = 2;
    check(quern_context_create(&p, &ctx));
    make_layer(ctx, &l);
    for (int i = 0; i < 4; i++) passed = figure(ctx, &l, tokens[i]) && passed;
    quern_context_destroy(ctx);
    return passed ? 0 : 1;
}
