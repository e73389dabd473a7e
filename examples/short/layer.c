/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * layer.c - an attention layer of DeepSeek-V4 (HCA), prefilled with a prompt and decoded token by token from
 * its cache; one call over all tokens must give the same. A CSA layer also takes the indexer's weights.
 *
 *   cc layer.c $(pkg-config --cflags --libs quern) -lm -o layer
 */
#include <quern/dsv4_layer.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { N = 96, PROMPT = 70, WIDTH = 64, H = 4, D = 64, R = 16, ROPE = 16 };
enum { Q_LORA = 32, GROUPS = 2, O_LORA = 32 };

static void need(quern_status status)
{
    if (status == QUERN_OK) return;
    fprintf(stderr, "%s\n", quern_last_error(NULL));
    exit(1);
}

static void *memory(size_t bytes)
{
    void *p = calloc(bytes > 0 ? bytes : 1, 1);
    if (p == NULL) exit(1);
    return p;
}

/* A view in memory of its own, of numbers in -scale ... scale: [a, b], or [b] with a 0. */
static const quern_tensor *make(int64_t a, int64_t b, double scale)
{
    const int64_t shape[] = {a, b}, count = a > 0 ? a * b : b;
    quern_tensor *t = memory(sizeof *t);
    float *data = memory((size_t)count * sizeof *data);
    for (int64_t i = 0; i < count; i++) data[i] = (float)(scale * (2 * (double)rand() / RAND_MAX - 1));
    *t = quern_tensor_contiguous(data, QUERN_F32, a > 0 ? 2 : 1, a > 0 ? shape : shape + 1);
    return t;
}

/* Rows first ... first + n - 1 of x and out; a whole pass takes them as [1, N, WIDTH]. */
static quern_tensor part(const quern_tensor *all, int64_t first, int64_t n)
{
    const int64_t shape[] = {n, WIDTH};
    return quern_tensor_contiguous((float *)all->data + first * WIDTH, QUERN_F32, 2, shape);
}

int main(void)
{
    quern_context *ctx;
    need(quern_context_create(NULL, &ctx));
    const quern_dsv4_layer_params params = {
        .size = sizeof params, .kind = QUERN_DSV4_LAYER_HCA, .window = 32};
    const quern_tensor *x = make(N, WIDTH, 1), *whole = make(N, WIDTH, 0), *steps = make(N, WIDTH, 0);
    const quern_tensor *cos_sin = make(N, ROPE, 0);
    const quern_dsv4_rope_params rope = {.size = sizeof rope,
                                         .base = 10000,
                                         .factor = 1,
                                         .original_length = 65536,
                                         .beta_fast = 32,
                                         .beta_slow = 1}; /* factor 1: no YaRN */
    need(quern_dsv4_rope_table(&rope, cos_sin)); /* positions and channels are the table's own extents */
    quern_dsv4_layer_tensors t = QUERN_DSV4_LAYER_TENSORS_INIT;
    t.cos_sin = cos_sin;
    const quern_tensor **const weights[] =
        {&t.q_a, &t.q_b, &t.kv, &t.o_a, &t.o_b, &t.compressor_bias, &t.compressor_kv, &t.compressor_gate},
                               **const norms[] = {&t.q_a_norm, &t.kv_norm, &t.compressor_norm};
    const int64_t shapes[][2] =
        {{Q_LORA, WIDTH},          {H * D, Q_LORA}, {D, WIDTH}, {GROUPS * O_LORA, H / GROUPS * D},
         {WIDTH, GROUPS * O_LORA}, {R, D},          {D, WIDTH}, {D, WIDTH}},
                  widths[] = {Q_LORA, D, D};
    for (int i = 0; i < 8; i++) *weights[i] = make(shapes[i][0], shapes[i][1], 0.2);
    for (int i = 0; i < 3; i++) *norms[i] = make(0, widths[i], 1);

    const quern_dsv4_layer_cache_params kept = {.size = sizeof kept,
                                                .kind = params.kind,
                                                .window = params.window,
                                                .dtype = QUERN_F32,
                                                .sequences = 1,
                                                .capacity = N,
                                                .dim = D,
                                                .ratio = R};
    size_t books_bytes, rows_bytes, bytes;
    quern_dsv4_layer_cache *cache;
    need(quern_dsv4_layer_cache_size(&kept, &books_bytes, &rows_bytes));
    void *books = memory(books_bytes), *pool = memory(rows_bytes);
    need(quern_dsv4_layer_cache_create(&kept, books, books_bytes, pool, rows_bytes, &cache));

    const int32_t sequence = 0;
    for (int64_t first = 0, n = PROMPT; first < N; first += n, n = 1) { /* the prompt at once, then tokens */
        quern_tensor in = part(x, first, n), out = part(steps, first, n);
        t.x = &in;
        t.out = &out;
        need(quern_dsv4_layer_decode_workspace(ctx, &params, cache, &sequence, &n, 1, &t, &bytes));
        void *workspace = memory(bytes);
        need(quern_dsv4_layer_decode(ctx, NULL, &params, cache, &sequence, &n, 1, &t, workspace, bytes));
        free(workspace);
    }

    const int64_t shape[] = {1, N, WIDTH};
    quern_tensor in = quern_tensor_contiguous(x->data, QUERN_F32, 3, shape),
                 out = quern_tensor_contiguous(whole->data, QUERN_F32, 3, shape);
    t.x = &in;
    t.out = &out;
    need(quern_dsv4_layer_workspace(ctx, &params, &t, &bytes));
    void *workspace = memory(bytes);
    need(quern_dsv4_layer(ctx, NULL, &params, &t, workspace, bytes));
    const bool same = memcmp(whole->data, steps->data, (size_t)(N * WIDTH) * sizeof(float)) == 0;
    printf("%d tokens, the last %d one by one: %s\n", N, N - PROMPT,
           same ? "the bits of one call over all" : "not the bits of one call over all");
    free(workspace);
    free(books);
    free(pool);
    quern_context_destroy(ctx); /* the weights' memory goes with the program */
    return same ? 0 : 1;
}
