/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * nsa.c - how an engine decodes native sparse attention: one ledger has the books of the sequences, each
 * layer has pools of pages, and all layers take the tensors of the ledger's step: a prompt, then a token a
 * step. The output is compared with one call over the whole sequence.
 *
 *   cc nsa.c $(pkg-config --cflags --libs quern) -lm -o nsa
 */
#include <quern/cache.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { LAYERS = 2, PROMPT = 150, N = 200, H = 4, HKV = 2, D = 32, BLOCK = 16, PAGES = 4 };
enum { PAGE = QUERN_CACHE_PAGE, ROWS = PAGE * 2 * D }; /* a page of a head: keys, then values */

static void need(quern_status status)
{
    if (status == QUERN_OK) return;
    fprintf(stderr, "%s\n", quern_last_error(NULL));
    exit(1);
}

static quern_tensor make(int32_t ndim, int64_t a, int64_t b, int64_t c, int64_t d)
{
    const int64_t shape[] = {a, b, c, d};
    float *data = malloc((size_t)(a * b * c * d) * sizeof *data);
    if (data == NULL) exit(1);
    for (int64_t i = 0; i < a * b * c * d; i++) data[i] = 2 * (float)rand() / (float)RAND_MAX - 1;
    return quern_tensor_contiguous(data, QUERN_F32, ndim, shape);
}

/* A layer's tokens [1, N, heads, D], as a model would compute them, and its pools of pages. */
typedef struct {
    quern_tensor q, k, v, o, tokens, entries;
} layer;

static quern_tensor view(const quern_tensor *all, int64_t token, int64_t count)
{
    const int64_t shape[] = {count, all->shape[2], D};
    return quern_tensor_contiguous((float *)all->data + token * shape[1] * D, QUERN_F32, 3, shape);
}

static void attend(quern_context *ctx, const layer *l, const quern_nsa_params *params, const quern_step *step,
                   int64_t token, int64_t count)
{
    const quern_tensor q = view(&l->q, token, count), k = view(&l->k, token, count),
                       v = view(&l->v, token, count), o = view(&l->o, token, count);
    quern_cache_step_params compress = QUERN_CACHE_STEP_PARAMS_INIT;
    compress.block_size = BLOCK;
    quern_cache_tensors a = QUERN_CACHE_TENSORS_INIT;
    a.k = &k, a.v = &v, a.slots = &step->slots, a.positions = &step->positions, a.cu = &step->cu;
    a.tokens = &l->tokens, a.tokens_table = &step->tables[QUERN_CACHE_TOKENS];
    a.entries = &l->entries, a.entries_table = &step->tables[QUERN_CACHE_ENTRIES], a.copies = &step->copies;
    quern_decode_tensors t = QUERN_DECODE_TENSORS_INIT;
    t.q = &q, t.o = &o, t.slots = a.slots, t.positions = a.positions, t.cu = a.cu, t.tokens = a.tokens;
    t.tokens_table = a.tokens_table, t.entries = a.entries, t.entries_table = a.entries_table;
    size_t append, decode;
    need(quern_cache_append_step_workspace(ctx, &compress, &a, &append));
    need(quern_nsa_decode_step_workspace(ctx, params, &t, &decode));
    void *workspace = malloc(append > decode ? append : decode);
    need(quern_cache_append_step(ctx, NULL, &compress, &a, workspace, append));
    need(quern_nsa_decode_step(ctx, NULL, params, &t, workspace, decode));
    free(workspace);
}

/* The largest difference of a layer's outputs from those of one call over the whole sequence. */
static double difference(quern_context *ctx, const layer *l, const quern_nsa_params *params)
{
    const quern_tensor o = make(4, 1, N, H, D);
    quern_nsa_tensors t = QUERN_NSA_TENSORS_INIT;
    size_t bytes;
    t.q = &l->q, t.k = &l->k, t.v = &l->v, t.o = &o;
    need(quern_nsa_forward_workspace(ctx, params, &t, &bytes));
    need(quern_nsa_forward(ctx, NULL, params, &t, malloc(bytes), bytes));
    double most = 0;
    for (int64_t i = 0; i < N * H * D; i++)
        most = fmax(most, fabsf(((float *)o.data)[i] - ((float *)l->o.data)[i]));
    return most;
}

int main(void)
{
    quern_context *ctx;
    quern_ledger *ledger;
    layer layers[LAYERS];
    size_t bytes;
    quern_nsa_params params = QUERN_NSA_PARAMS_INIT;
    params.block_size = BLOCK, params.num_selected = 4, params.window = 32;
    quern_ledger_params books = QUERN_LEDGER_PARAMS_INIT;
    books.sequences = 1, books.capacity = N, books.rollback = 1;
    books.pools[QUERN_CACHE_TOKENS] = (quern_ledger_pool){.page = PAGE, .pages = PAGES};
    books.pools[QUERN_CACHE_ENTRIES] = (quern_ledger_pool){.page = PAGE, .pages = 1, .block = BLOCK};
    need(quern_context_create(NULL, &ctx));
    need(quern_ledger_size(&books, &bytes));
    need(quern_ledger_create(&books, malloc(bytes), bytes, &ledger));
    need(quern_ledger_block_bytes(ledger, 1, &bytes));
    void *block = malloc(bytes);
    for (layer *l = layers; l < layers + LAYERS; l++) {
        l->q = make(4, 1, N, H, D), l->k = make(4, 1, N, HKV, D), l->v = make(4, 1, N, HKV, D);
        l->o = make(4, 1, N, H, D), l->tokens = make(3, PAGES, HKV, ROWS, 1);
        l->entries = make(3, 1, HKV, ROWS, 1);
    }
    for (int64_t token = 0, count = PROMPT, taken = 0; token < N; token += count, count = 1) {
        quern_step step = QUERN_STEP_INIT;
        need(quern_ledger_begin(ledger, (int32_t[]){0}, &count, 1, block, bytes));
        need(quern_ledger_step(ledger, 1, block, QUERN_CPU, 0, &step));
        for (int l = 0; l < LAYERS; l++) attend(ctx, &layers[l], &params, &step, token, count);
        need(quern_ledger_commit(ledger));
        if (token % 20 != 19 || taken == token) continue;
        need(quern_ledger_rollback(ledger, 0, 1)); /* a wrong guess: the token is given again */
        taken = token--;
    }
    const double most = fmax(difference(ctx, &layers[0], &params), difference(ctx, &layers[1], &params));
    printf("%d layers of %d tokens: |decoded - whole| <= %.1e\n", LAYERS, N, most);
    quern_context_destroy(ctx);
    return most < 1e-5 ? 0 : 1;
}
