/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* decode.c - `quern run nsa-decode` and `attention-decode`: appends whole sequences to a cache in pieces, and
 * attends each piece's queries from it. */
#include "books.h"
#include "command.h"
#include "device.h"
#include "scenario.h"

#include <quern/cache.h>
#include <quern/cuda.h>

#include <stdlib.h>
#include <string.h>

typedef struct decode_options {
    int64_t prefill, step, page, rollback;
} decode_options;

#define AT(member) offsetof(decode_options, member)
static const option_row rows[] = {
    {"prefill", OPTION_INT, AT(prefill), NULL,
     "tokens of each sequence that are appended and attended in one call"},
    {"step", OPTION_INT, AT(step), NULL, "tokens of each sequence in every call afterwards"},
    {"page", OPTION_INT, AT(page), NULL, "tokens of a page: 64; 0: room for all"},
    {"rollback", OPTION_INT, AT(rollback), NULL,
     "0 to 8 tokens that are taken back and appended again before each step but the first"},
};
#undef AT
enum { ROWS = sizeof rows / sizeof *rows };
static decode_options options = {.step = 1};

/* A tensor of the file with a row for each token, an input or a result of the calls. */
typedef struct stream {
    const quern_tensor *whole; /* NULL: absent */
    quern_tensor piece;        /* of a call, [T, ..] */
    size_t row_bytes;
} stream;

enum { Q, K, V, K_SLC, V_SLC, K_WIN, V_WIN, GATES, Q_INDEX, K_INDEX, O, STREAMS };

/* The pools of a cache. */
enum { TOKENS, ENTRIES, WIN, SLC, INDEX, POOLS };

typedef struct decode_run {
    job *j;
    quern_context *ctx;
    bool sparse;
    quern_nsa_tensors nsa;        /* as in the file; dense attention has only q, k, v */
    const quern_tensor *sink;     /* dense attention's, or NULL */
    quern_tensor o;               /* the shape of O */
    int32_t *cu;                  /* of the host; NULL: fixed length */
    int64_t batch, length, lists; /* length: of each sequence */
    stream streams[STREAMS];
    quern_tensor *block_idx, idx;
    quern_cache_params params;
    books books;
    quern_tensor pool[POOLS]; /* ndim 0: there is none */
    void *workspace;
    size_t workspace_bytes;
    int32_t *ids;
    int64_t *counts, *tokens;
} decode_run;

static int64_t first_row(const decode_run *r, int64_t b)
{
    return r->cu != NULL ? r->cu[b] : b * r->length;
}

static int64_t length_of(const decode_run *r, int64_t b)
{
    return r->cu != NULL ? r->cu[b + 1] - r->cu[b] : r->length;
}

/* The offsets, which the host reads. */
static int read_offsets(decode_run *r)
{
    const quern_tensor *cu = r->nsa.cu_seqlens;
    if (cu == NULL) return EXIT_DONE;
    const size_t bytes = (size_t)cu->shape[0] * sizeof *r->cu;
    if ((r->cu = malloc(bytes + 1)) == NULL) return fail(EXIT_MACHINE, "no memory for cu_seqlens");
    const quern_status status = device_copy(r->j->device, r->cu, cu->data, bytes);
    if (status != QUERN_OK) return fail_status(status);
    for (int64_t b = 0; b < r->batch; b++)
        if (r->cu[0] != 0 || r->cu[b + 1] < r->cu[b] || r->cu[b + 1] > r->length)
            return fail(
                EXIT_INPUT,
                "cu_seqlens[%lld] is %d: offsets from 0 to at most %lld that do not fall are accepted",
                (long long)b + 1, r->cu[b + 1], (long long)r->length);
    return EXIT_DONE;
}

/* The tensors and parameters as the whole operation takes them; checks them by its workspace query. */
static int bind(decode_run *r)
{
    const job *j = r->j;
    quern_status status;
    size_t bytes;
    if (r->sparse) {
        quern_nsa_tensors t;
        memcpy(&t, &j->tensors, sizeof t);
        r->nsa = (quern_nsa_tensors){.size = sizeof r->nsa,
                                     .q = t.q,
                                     .k = t.k,
                                     .v = t.v,
                                     .k_slc = t.k_slc,
                                     .v_slc = t.v_slc,
                                     .k_win = t.k_win,
                                     .v_win = t.v_win,
                                     .cu_seqlens = t.cu_seqlens,
                                     .w_k = t.w_k,
                                     .w_v = t.w_v,
                                     .pe_k = t.pe_k,
                                     .pe_v = t.pe_v,
                                     .w_gate = t.w_gate,
                                     .gates = t.gates,
                                     .q_index = t.q_index,
                                     .k_index = t.k_index};
    } else {
        quern_attention_tensors t;
        memcpy(&t, &j->tensors, sizeof t);
        r->nsa = (quern_nsa_tensors){
            .size = sizeof r->nsa, .q = t.q, .k = t.k, .v = t.v, .cu_seqlens = t.cu_seqlens_q};
        if (t.cu_seqlens_kv != NULL)
            return fail(
                EXIT_INPUT,
                "cu_seqlens_kv: a cache holds the queries' own tokens; cu_seqlens_q alone is accepted");
        r->sink = t.sink;
        if (t.kv_first != NULL || t.kv_count != NULL)
            return fail(EXIT_INPUT, "%s: a cache knows its keys itself",
                        t.kv_first != NULL ? "kv_first" : "kv_count");
    }
    const quern_tensor *q = r->nsa.q, *v = r->nsa.v;
    const int32_t ndim = r->nsa.cu_seqlens != NULL ? 3 : 4;
    if (q == NULL || r->nsa.k == NULL || v == NULL) return fail(EXIT_INPUT, "tensors Q, K and V are needed");
    if (q->ndim != ndim || r->nsa.k->ndim != ndim || v->ndim != ndim)
        return fail(EXIT_INPUT, "Q, K and V have %d, %d and %d dimensions: %d are accepted", q->ndim,
                    r->nsa.k->ndim, v->ndim, ndim);
    r->o = *q;
    r->o.shape[ndim - 1] = v->shape[ndim - 1];
    r->o = device_tensor(j->device, NULL, q->dtype, ndim, r->o.shape);
    if (r->sparse) {
        quern_nsa_tensors t = r->nsa;
        t.o = &r->o;
        status = quern_nsa_forward_workspace(r->ctx, &j->params.nsa, &t, &bytes);
    } else {
        const quern_attention_tensors t = {.size = sizeof t,
                                           .q = q,
                                           .k = r->nsa.k,
                                           .v = v,
                                           .cu_seqlens_q = r->nsa.cu_seqlens,
                                           .sink = r->sink,
                                           .o = &r->o};
        status = quern_attention_forward_workspace(r->ctx, &j->params.attention, &t, &bytes);
    }
    if (status != QUERN_OK) return fail_status(status);
    if (r->nsa.k->shape[ndim - 3] != q->shape[ndim - 3])
        return fail(EXIT_INPUT, "K has %lld tokens: Q's %lld are accepted",
                    (long long)r->nsa.k->shape[ndim - 3], (long long)q->shape[ndim - 3]);
    r->batch = r->nsa.cu_seqlens != NULL ? r->nsa.cu_seqlens->shape[0] - 1 : q->shape[0];
    r->length = q->shape[ndim - 3];
    return read_offsets(r);
}

/* The most tokens of a sequence, and of all of them in one call. */
static int64_t longest(const decode_run *r)
{
    int64_t most = 1;
    for (int64_t b = 0; b < r->batch; b++)
        if (length_of(r, b) > most) most = length_of(r, b);
    return most;
}

/* The block indexer chooses. */
static bool is_indexed(const quern_nsa_params *p)
{
    return (p->branches & QUERN_NSA_BRANCH_SLC) != 0 && p->selection == QUERN_NSA_LIST_INDEXED;
}

static bool has_entries(const quern_nsa_params *p)
{
    return (p->branches & QUERN_NSA_BRANCH_CMP) != 0 ||
           ((p->branches & QUERN_NSA_BRANCH_SLC) != 0 && p->selection == QUERN_NSA_LIST_COMPUTED);
}

/* One index key of a token serves all lists. */
static bool shares_keys(const decode_run *r)
{
    return r->nsa.k_index->ndim < r->nsa.k->ndim;
}

/* A pool of pages of 64 tokens or entries, of `heads` whose rows have `width` elements. */
static quern_status take_pool(decode_run *r, int which, int64_t pages, int64_t heads, int64_t width)
{
    const int64_t shape[] = {pages, heads, QUERN_CACHE_PAGE * width};
    size_t bytes;
    if (!job_bytes(r->params.dtype, 3, shape, &bytes)) return QUERN_ERR_OUT_OF_MEMORY;
    void *data = device_take(r->j->device, bytes + 1);
    r->pool[which] = device_tensor(r->j->device, data, r->params.dtype, 3, shape);
    return data != NULL ? QUERN_OK : QUERN_ERR_OUT_OF_MEMORY;
}

static quern_status make_pools(decode_run *r)
{
    const quern_cache_params *c = &r->params;
    const int64_t tokens = books_pages(&r->books, QUERN_CACHE_TOKENS), width = c->dim + c->dim_v;
    quern_status status = take_pool(r, TOKENS, tokens, c->kv_heads, width);
    if (status == QUERN_OK && c->separate_slc) status = take_pool(r, SLC, tokens, c->kv_heads, width);
    if (status == QUERN_OK && c->block_size > 0)
        status = take_pool(r, ENTRIES, books_pages(&r->books, QUERN_CACHE_ENTRIES), c->kv_heads, width);
    if (status == QUERN_OK && c->separate_win)
        status = take_pool(r, WIN, books_pages(&r->books, QUERN_CACHE_WIN), c->kv_heads, width);
    return status == QUERN_OK && c->index_heads > 0
               ? take_pool(r, INDEX, tokens, c->index_heads, c->index_dim)
               : status;
}

/* Bytes of the rows that the sequences hold, with --page of all their pages. */
static int64_t bytes_held(const decode_run *r)
{
    const quern_cache_params *c = &r->params;
    int64_t kept = 0, index_rows = 0;
    for (int64_t s = 0; s < r->batch; s++)
        for (int i = QUERN_CACHE_TOKENS; i <= QUERN_CACHE_WIN; i++) {
            const quern_ledger_pool *p = &r->books.params.pools[i];
            int64_t pages = 0;
            if (p->page == 0) continue;
            (void)quern_ledger_pages(&r->books.params, i, r->tokens[s], &pages, NULL);
            const int64_t all = r->tokens[s] < p->block ? 0 : (r->tokens[s] - p->block) / p->stride + 1,
                          held = c->page != 0 || pages * p->page < all ? pages * p->page : all;
            kept += i == QUERN_CACHE_TOKENS && c->separate_slc ? 2 * held : held;
            if (i == QUERN_CACHE_TOKENS) index_rows += held;
        }
    return (kept * c->kv_heads * (c->dim + c->dim_v) + index_rows * c->index_heads * c->index_dim) *
           (int64_t)quern_dtype_size(c->dtype);
}

static int make_cache(decode_run *r)
{
    const quern_tensor *k = r->nsa.k, *v = r->nsa.v;
    const quern_nsa_params *p = &r->j->params.nsa;
    quern_cache_params *c = &r->params;
    *c = (quern_cache_params)QUERN_CACHE_PARAMS_INIT;
    c->dtype = k->dtype;
    c->sequences = r->batch > 0 ? r->batch : 1;
    c->kv_heads = k->shape[k->ndim - 2];
    c->dim = k->shape[k->ndim - 1];
    c->dim_v = v->shape[v->ndim - 1];
    c->capacity = longest(r);
    c->page = options.page;
    c->pages = options.page != 0 ? c->sequences * ((c->capacity + options.page - 1) / options.page) : 0;
    if (r->sparse) {
        c->block_size = has_entries(p) ? p->block_size : 0;
        c->stride = p->stride;
        c->compress = p->compress;
        if (is_indexed(p)) {
            c->index_heads = shares_keys(r) ? 1 : r->nsa.k_index->shape[k->ndim - 2];
            c->index_dim = r->nsa.k_index->shape[r->nsa.k_index->ndim - 1];
        }
        c->separate_slc = r->nsa.k_slc != NULL && (p->branches & QUERN_NSA_BRANCH_SLC);
        c->separate_win = r->nsa.k_win != NULL && (p->branches & QUERN_NSA_BRANCH_WIN);
        c->window = p->window < c->capacity ? p->window : c->capacity;
        c->step = options.prefill > options.step + options.rollback ? options.prefill
                                                                    : options.step + options.rollback;
        if (c->step > c->capacity) c->step = c->capacity;
    }
    quern_ledger_params ledger = QUERN_LEDGER_PARAMS_INIT;
    quern_status status = quern_cache_ledger_params(c, &ledger);
    if (status == QUERN_OK) status = books_open(&r->books, &ledger, c->sequences, r->j->device);
    if (status == QUERN_OK) status = make_pools(r);
    if (status == QUERN_ERR_OUT_OF_MEMORY) return fail(EXIT_MACHINE, "no memory for a cache");
    if (status != QUERN_OK) return fail_status(status);
    r->ids = malloc((size_t)c->sequences * sizeof *r->ids);
    r->counts = malloc((size_t)c->sequences * sizeof *r->counts);
    r->tokens = calloc((size_t)c->sequences, sizeof *r->tokens);
    return r->ids != NULL && r->counts != NULL && r->tokens != NULL
               ? EXIT_DONE
               : fail(EXIT_MACHINE, "no memory for the sequences");
}

/* Lists that no call writes name no block. */
static quern_status clear_lists(const decode_run *r)
{
    size_t bytes = sizeof(int32_t);
    for (int32_t i = 0; i < r->block_idx->ndim; i++) bytes *= (size_t)r->block_idx->shape[i];
    void *host = malloc(bytes + 1);
    if (host == NULL) return QUERN_ERR_OUT_OF_MEMORY;
    memset(host, 0xff, bytes);
    const quern_status status = device_copy(r->j->device, r->block_idx->data, host, bytes);
    free(host);
    return status;
}

/* Sets up inputs and results, with room for a call of the most tokens. */
static int make_streams(decode_run *r)
{
    const quern_nsa_tensors *t = &r->nsa;
    const quern_nsa_params *p = &r->j->params.nsa;
    const quern_tensor *const wholes[] = {t->q,
                                          t->k,
                                          t->v,
                                          r->params.separate_slc ? t->k_slc : NULL,
                                          r->params.separate_slc ? t->v_slc : NULL,
                                          r->params.separate_win ? t->k_win : NULL,
                                          r->params.separate_win ? t->v_win : NULL,
                                          r->sparse && p->gate == QUERN_NSA_GATE_GIVEN ? t->gates : NULL,
                                          r->sparse && is_indexed(p) ? t->q_index : NULL,
                                          r->sparse && is_indexed(p) ? t->k_index : NULL};
    job *j = r->j;
    const quern_tensor *o = job_add_output(j, "O", r->o.dtype, r->o.ndim, r->o.shape);
    const int64_t most = r->batch * longest(r);
    bool ok = o != NULL;
    for (int i = 0; i < STREAMS && ok; i++) {
        stream *s = &r->streams[i];
        s->whole = i == O ? o : wholes[i];
        if (s->whole == NULL) continue;
        const int64_t *tail = s->whole->shape + s->whole->ndim - 2,
                      heads = i == K_INDEX && shares_keys(r) ? 1 : tail[0], piece[] = {most, heads, tail[1]};
        s->row_bytes = (size_t)(heads * tail[1]) * quern_dtype_size(s->whole->dtype);
        s->piece = device_tensor(j->device, device_take(j->device, (size_t)most * s->row_bytes + 1),
                                 s->whole->dtype, 3, piece);
        ok = s->piece.data != NULL;
    }
    if (ok && r->sparse && (p->branches & QUERN_NSA_BRANCH_SLC)) {
        r->lists = quern_nsa_list_heads(p, r->o.shape[r->o.ndim - 2], r->params.kv_heads);
        const int64_t rows_most = quern_nsa_list_rows(p, r->length, r->batch);
        const int64_t fixed[] = {r->batch, r->lists, r->length, p->num_selected},
                      varlen[] = {r->lists, rows_most, p->num_selected};
        r->block_idx =
            job_add_output(j, "block_idx", QUERN_I32, r->cu != NULL ? 3 : 4, r->cu != NULL ? varlen : fixed);
        r->idx = device_tensor(j->device,
                               device_take(j->device, (size_t)(r->lists * most * p->num_selected) * 4 + 1),
                               QUERN_I32, 3, varlen);
        ok = r->block_idx != NULL && r->idx.data != NULL && clear_lists(r) == QUERN_OK;
    }
    return ok ? EXIT_DONE : fail(EXIT_MACHINE, "no memory for the calls' rows");
}

/* Room for a call's workspace. */
static bool make_room(decode_run *r, size_t bytes)
{
    if (bytes <= r->workspace_bytes && r->workspace != NULL) return true;
    device_free(r->j->device, r->workspace);
    r->workspace = device_take(r->j->device, bytes + 1);
    r->workspace_bytes = bytes;
    return r->workspace != NULL;
}

static const quern_tensor *piece_of(const decode_run *r, int which)
{
    return r->streams[which].whole != NULL ? &r->streams[which].piece : NULL;
}

static const quern_tensor *pool_of(const decode_run *r, int which)
{
    return r->pool[which].ndim > 0 ? &r->pool[which] : NULL;
}

static const quern_tensor *table_of(const decode_run *r, int which)
{
    return r->pool[which].ndim > 0 ? &r->books.step.tables[which] : NULL;
}

static quern_status append(decode_run *r)
{
    const bool entries = r->params.block_size > 0;
    const quern_step *step = &r->books.step;
    const quern_exec exec = job_exec(r->j);
    const quern_cache_step_params p = {.size = sizeof p,
                                       .block_size = r->params.block_size,
                                       .stride = r->params.stride,
                                       .compress = r->params.compress};
    const quern_cache_tensors t = {.size = sizeof t,
                                   .k = piece_of(r, K),
                                   .v = piece_of(r, V),
                                   .k_slc = piece_of(r, K_SLC),
                                   .v_slc = piece_of(r, V_SLC),
                                   .k_win = piece_of(r, K_WIN),
                                   .v_win = piece_of(r, V_WIN),
                                   .w_k = entries ? r->nsa.w_k : NULL,
                                   .w_v = entries ? r->nsa.w_v : NULL,
                                   .pe_k = entries ? r->nsa.pe_k : NULL,
                                   .pe_v = entries ? r->nsa.pe_v : NULL,
                                   .slots = &step->slots,
                                   .positions = &step->positions,
                                   .cu = &step->cu,
                                   .tokens = pool_of(r, TOKENS),
                                   .tokens_table = table_of(r, TOKENS),
                                   .slc = pool_of(r, SLC),
                                   .entries = pool_of(r, ENTRIES),
                                   .entries_table = table_of(r, ENTRIES),
                                   .win = pool_of(r, WIN),
                                   .win_table = table_of(r, WIN),
                                   .copies = &step->copies,
                                   .k_index = piece_of(r, K_INDEX),
                                   .index = pool_of(r, INDEX)};
    size_t bytes;
    const quern_status status = quern_cache_append_step_workspace(r->ctx, &p, &t, &bytes);
    if (status != QUERN_OK) return status;
    if (!make_room(r, bytes)) return QUERN_ERR_OUT_OF_MEMORY;
    return quern_cache_append_step(r->ctx, &exec, &p, &t, r->workspace, bytes);
}

static quern_status attend(decode_run *r, int64_t count)
{
    const any_params *p = &r->j->params;
    const quern_step *step = &r->books.step;
    const quern_exec exec = job_exec(r->j);
    quern_decode_tensors t = {.size = sizeof t,
                              .q = piece_of(r, Q),
                              .o = piece_of(r, O),
                              .slots = &step->slots,
                              .positions = &step->positions,
                              .cu = &step->cu,
                              .tokens = pool_of(r, TOKENS),
                              .tokens_table = table_of(r, TOKENS)};
    size_t bytes;
    if (!r->sparse) {
        t.sink = r->sink;
        const quern_status status =
            quern_attention_decode_step_workspace(r->ctx, &p->attention, &t, &bytes);
        if (status != QUERN_OK) return status;
        if (!make_room(r, bytes)) return QUERN_ERR_OUT_OF_MEMORY;
        return quern_attention_decode_step(r->ctx, &exec, &p->attention, &t, r->workspace, bytes);
    }
    t.slc = pool_of(r, SLC);
    t.entries = pool_of(r, ENTRIES), t.entries_table = table_of(r, ENTRIES);
    t.win = pool_of(r, WIN), t.win_table = table_of(r, WIN);
    t.index = pool_of(r, INDEX);
    const int64_t lists[] = {r->lists, count, p->nsa.num_selected};
    r->idx = device_tensor(r->j->device, r->idx.data, QUERN_I32, 3, lists);
    if (r->block_idx != NULL) t.block_idx = &r->idx;
    if (p->nsa.gate == QUERN_NSA_GATE_WEIGHTS) t.w_gate = r->nsa.w_gate;
    t.gates = piece_of(r, GATES);
    t.q_index = piece_of(r, Q_INDEX);
    quern_nsa_params nsa = p->nsa;
    if (r->params.separate_win && nsa.window > r->params.window)
        nsa.window = r->params.window; /* as many as there are tokens */
    const quern_status status = quern_nsa_decode_step_workspace(r->ctx, &nsa, &t, &bytes);
    if (status != QUERN_OK) return status;
    if (!make_room(r, bytes)) return QUERN_ERR_OUT_OF_MEMORY;
    return quern_nsa_decode_step(r->ctx, &exec, &nsa, &t, r->workspace, bytes);
}

/* The sequences of a call. */
typedef struct members {
    int64_t batch;
    const int32_t *sequences;
    const int64_t *counts;
} members;

/* An append is a step, and attention looks again at its tokens. */
static quern_status step(decode_run *r, const members *of, int64_t count)
{
    quern_status status = books_begin(&r->books, of->sequences, of->counts, of->batch);
    if (status != QUERN_OK) return status;
    status = append(r);
    (void)(status == QUERN_OK ? quern_ledger_commit : quern_ledger_abort)(r->books.ledger);
    if (status == QUERN_OK) status = books_newest(&r->books, of->sequences, of->counts, of->batch);
    if (status == QUERN_OK) status = attend(r, count);
    return status == QUERN_OK && r->j->device == QUERN_CUDA ? quern_cuda_synchronize(0, NULL) : status;
}

/* Copies the call's rows of a stream from the file's tensor, or back. */
static quern_status move_rows(const decode_run *r, const stream *s, const members *batch, bool back)
{
    char *piece = s->piece.data;
    quern_status status = QUERN_OK;
    for (int64_t i = 0; i < batch->batch && status == QUERN_OK; i++) {
        const int64_t b = batch->sequences[i];
        char *whole = (char *)s->whole->data + (size_t)(first_row(r, b) + r->tokens[b]) * s->row_bytes;
        const size_t bytes = (size_t)batch->counts[i] * s->row_bytes;
        status = device_copy(r->j->device, back ? whole : piece, back ? piece : whole, bytes);
        piece += bytes;
    }
    return status;
}

static quern_status store_lists(const decode_run *r, const members *batch, int64_t count)
{
    const int64_t k = r->j->params.nsa.num_selected;
    const quern_tensor *out = r->block_idx;
    quern_status status = QUERN_OK;
    for (int64_t h = 0; h < r->lists; h++) {
        const int32_t *from = (const int32_t *)r->idx.data + h * count * k;
        for (int64_t i = 0; i < batch->batch && status == QUERN_OK; i++) {
            const int64_t b = batch->sequences[i], n = batch->counts[i];
            const int64_t at = r->cu != NULL ? h * out->strides[0] + (r->cu[b] + r->tokens[b]) * k
                                             : b * out->strides[0] + h * out->strides[1] + r->tokens[b] * k;
            status = device_copy(r->j->device, (int32_t *)out->data + at, from,
                                 (size_t)(n * k) * sizeof *from);
            from += n * k;
        }
    }
    return status;
}

/* Removes the last `back` tokens of each sequence from the cache, then appends and attends the next `most`.
 * *more: some are left. */
static int call(decode_run *r, int64_t most, int64_t back, bool *more)
{
    members batch = {0, r->ids, r->counts};
    int64_t count = 0;
    quern_status status = QUERN_OK;
    *more = false;
    for (int64_t b = 0; b < r->batch && status == QUERN_OK; b++) {
        const int64_t left = length_of(r, b) - r->tokens[b], n = left < most ? left : most,
                      held = r->tokens[b] < back ? r->tokens[b] : back;
        if (n == 0) continue;
        status = quern_ledger_rollback(r->books.ledger, b, held);
        r->tokens[b] -= held;
        r->ids[batch.batch] = (int32_t)b;
        r->counts[batch.batch++] = n + held;
        count += n + held;
        *more = *more || left > n;
    }
    if (status != QUERN_OK) return fail_status(status);
    for (int i = 0; i < STREAMS && status == QUERN_OK; i++) {
        if (r->streams[i].whole == NULL) continue;
        r->streams[i].piece.shape[0] = count;
        if (i != O) status = move_rows(r, &r->streams[i], &batch, false);
    }
    if (status == QUERN_OK) status = step(r, &batch, count);
    if (status == QUERN_ERR_OUT_OF_MEMORY)
        return fail(EXIT_MACHINE, "no memory for a workspace of %zu bytes", r->workspace_bytes);
    if (status == QUERN_OK) status = move_rows(r, &r->streams[O], &batch, true);
    if (status == QUERN_OK && r->block_idx != NULL) status = store_lists(r, &batch, count);
    if (status != QUERN_OK) return fail_status(status);
    for (int64_t i = 0; i < batch.batch; i++) r->tokens[batch.sequences[i]] += batch.counts[i];
    return EXIT_DONE;
}

static int decode(decode_run *r)
{
    bool more = r->batch > 0;
    int code = job_watch(r->j);
    const double start = now_ms();
    if (code == EXIT_DONE && options.prefill > 0) code = call(r, options.prefill, 0, &more);
    for (int64_t step = 0; more && code == EXIT_DONE; step++)
        code = call(r, options.step, step > 0 ? options.rollback : 0, &more);
    code = job_faults(r->j, code);
    if (code != EXIT_DONE) return code;
    job *j = r->j;
    j->forward_ms = now_ms() - start;
    const int64_t held = bytes_held(r);
    quern_tensor *bytes = job_add_output(j, "cache_bytes", QUERN_I64, 0, NULL);
    if (bytes == NULL) return fail(EXIT_MACHINE, "no memory for cache_bytes");
    const quern_status status = device_copy(j->device, bytes->data, &held, sizeof held);
    return status == QUERN_OK ? EXIT_DONE : fail_status(status);
}

static int compute(job *j, quern_context *ctx)
{
    decode_run r = {.j = j, .ctx = ctx, .sparse = strcmp(j->op->name, "nsa") == 0};
    if (options.prefill < 0 || options.step < 1 || options.rollback < 0 ||
        options.rollback > QUERN_CACHE_ROLLBACK_MOST)
        return fail(
            EXIT_USAGE,
            "--prefill %lld --step %lld --rollback %lld: 0 or more, 1 or more and 0 to 8 tokens are accepted",
            (long long)options.prefill, (long long)options.step, (long long)options.rollback);
    int code = bind(&r);
    if (code == EXIT_DONE) code = make_cache(&r);
    if (code == EXIT_DONE) code = make_streams(&r);
    if (code == EXIT_DONE) code = decode(&r);
    for (int i = 0; i < STREAMS; i++) device_free(j->device, r.streams[i].piece.data);
    for (int i = 0; i < POOLS; i++) device_free(j->device, r.pool[i].data);
    device_free(j->device, r.workspace);
    device_free(j->device, r.idx.data);
    books_close(&r.books);
    free(r.cu), free(r.ids), free(r.counts), free(r.tokens);
    return code;
}

/* The call computes the lists even if the file has some: by the block indexer, where its tensors are. */
static int compute_lists(job *j)
{
    quern_nsa_tensors t;
    memcpy(&t, &j->tensors, sizeof t);
    j->params.nsa.selection = t.q_index != NULL ? QUERN_NSA_LIST_INDEXED : QUERN_NSA_LIST_COMPUTED;
    j->params.nsa.groups = QUERN_NSA_LIST_COMPUTED;
    j->backward = false;
    return EXIT_DONE;
}

static int forward_alone(job *j)
{
    j->backward = false;
    return EXIT_DONE;
}

static const scenario_output dense_outputs[] = {
    {"O", "act", "B N H Dv"}, {"cache_bytes", "i64", ""}, {NULL, NULL, NULL}};
static const scenario_output sparse_outputs[] = {{"O", "act", "B N H Dv"},
                                                 {"block_idx", "i32", "B Hs N k"},
                                                 {"cache_bytes", "i64", ""},
                                                 {NULL, NULL, NULL}};

const scenario scenario_nsa_decode = {
    .name = "nsa-decode",
    .op = "nsa",
    .help = "native sparse attention from a cache, whole sequences in pieces",
    .rows = rows,
    .row_count = ROWS,
    .options = &options,
    .without = "tile compressed-visibility",
    .outputs = sparse_outputs,
    .inputs = compute_lists,
    .compute = compute,
};
const scenario scenario_attention_decode = {
    .name = "attention-decode",
    .op = "attention",
    .help = "dense attention from a cache, whole sequences in pieces",
    .rows = rows,
    .row_count = ROWS,
    .options = &options,
    .without = "query-offset",
    .outputs = dense_outputs,
    .inputs = forward_alone,
    .compute = compute,
};
