/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * decode.c - two answers to one prompt, from a paged cache in which they share the prompt's pages: prefill,
 * a fork, then a token of both sequences a step, by dense attention.
 *
 *   cc decode.c $(pkg-config --cflags --libs quern) -lm -o decode
 */
#include <quern/cache.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { PROMPT = 200, STEPS = 40, H = 4, HKV = 2, D = 64, PAGES = 6 };

static void need(quern_status status)
{
    if (status == QUERN_OK) return;
    fprintf(stderr, "%s\n", quern_last_error(NULL));
    exit(1);
}

static void *memory(size_t bytes)
{
    void *p = malloc(bytes > 0 ? bytes : 1);
    if (p == NULL) exit(1);
    return p;
}

static quern_tensor rows(int64_t tokens, int64_t heads)
{
    const int64_t shape[] = {tokens, heads, D};
    float *data = memory((size_t)(tokens * heads * D) * sizeof *data);
    for (int64_t i = 0; i < tokens * heads * D; i++) data[i] = 2 * (float)rand() / (float)RAND_MAX - 1;
    return quern_tensor_contiguous(data, QUERN_F32, 3, shape);
}

/* Appends the newest tokens of the batch's sequences, and attends for them. Returns the sum of the output. */
static double step(quern_context *ctx, quern_cache *cache, const quern_cache_batch *batch)
{
    const quern_attention_params causal = QUERN_ATTENTION_PARAMS_INIT;
    int64_t tokens = 0;
    for (int64_t i = 0; i < batch->batch; i++) tokens += batch->counts[i];
    quern_tensor q = rows(tokens, H), k = rows(tokens, HKV), v = rows(tokens, HKV), o = rows(tokens, H);
    quern_cache_tensors new_rows = QUERN_CACHE_TENSORS_INIT;
    new_rows.k = &k;
    new_rows.v = &v;
    quern_decode_tensors t = QUERN_DECODE_TENSORS_INIT;
    t.q = &q;
    t.o = &o;
    size_t append, attend;
    need(quern_cache_append_workspace(ctx, cache, batch, &new_rows, &append));
    void *workspace = memory(append);
    need(quern_cache_append(ctx, NULL, cache, batch, &new_rows, workspace, append));
    free(workspace);
    need(quern_attention_decode_workspace(ctx, &causal, cache, batch, &t, &attend));
    workspace = memory(attend);
    need(quern_attention_decode(ctx, NULL, &causal, cache, batch, &t, workspace, attend));
    free(workspace);
    double sum = 0;
    for (int64_t i = 0; i < tokens * H * D; i++) sum += ((const float *)o.data)[i];
    free(q.data);
    free(k.data);
    free(v.data);
    free(o.data);
    return sum;
}

int main(void)
{
    quern_context *ctx;
    need(quern_context_create(NULL, &ctx));
    quern_cache_params params = QUERN_CACHE_PARAMS_INIT;
    params.dtype = QUERN_F32;
    params.sequences = 2;
    params.kv_heads = HKV;
    params.dim = params.dim_v = D;
    params.capacity = PROMPT + STEPS;
    params.page = QUERN_CACHE_PAGE;
    params.pages = PAGES;
    size_t books_bytes, rows_bytes;
    quern_cache *cache;
    need(quern_cache_size(&params, &books_bytes, &rows_bytes));
    void *books = memory(books_bytes), *pool = memory(rows_bytes);
    need(quern_cache_create(&params, books, books_bytes, pool, rows_bytes, &cache));

    /* 200 tokens fill three pages of 64, which both sequences hold, and 8 rows of a fourth. The step after
     * the fork writes that one: one sequence gets a copy. */
    const int32_t both[] = {0, 1};
    const int64_t prompt = PROMPT, one[] = {1, 1};
    quern_cache_batch batch = QUERN_CACHE_BATCH_INIT;
    batch.sequences = both;
    batch.batch = 1;
    batch.counts = &prompt;
    double sum = step(ctx, cache, &batch);
    need(quern_cache_fork(cache, 0, 1));
    batch.batch = 2;
    batch.counts = one;
    for (int i = 0; i < STEPS; i++) sum += step(ctx, cache, &batch);

    int64_t tokens[2], held;
    for (int64_t s = 0; s < 2; s++) need(quern_cache_length(cache, s, &tokens[s], NULL));
    need(quern_cache_held(cache, &held));
    printf("%lld and %lld tokens, %.1f KB held; sum of outputs %.4f\n", (long long)tokens[0],
           (long long)tokens[1], (double)held / 1e3, sum);
    free(books);
    free(pool);
    quern_context_destroy(ctx);
    return isfinite(sum) && tokens[0] == PROMPT + STEPS && tokens[1] == tokens[0] ? 0 : 1;
}
