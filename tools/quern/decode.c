/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* decode.c - `quern run nsa-decode` and `attention-decode`: appends whole sequences to a cache in pieces, and
 * attends each piece's queries from it. */
#include "command.h"
#include "scenario.h"

#include <quern/cache.h>

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

typedef struct decode_run {
    job *j;
    quern_context *ctx;
    bool sparse;
    quern_nsa_tensors nsa;        /* as in the file; dense attention has only q, k, v */
    const quern_tensor *sink;     /* dense attention's, or NULL */
    quern_tensor o;               /* the shape of O */
    const int32_t *cu;            /* NULL: fixed length */
    int64_t batch, length, lists; /* length: of each sequence */
    stream streams[STREAMS];
    quern_tensor *block_idx, idx;
    quern_cache_params params;
    quern_cache *cache;
    void *memory, *cache_rows, *workspace;
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
    r->o = quern_tensor_contiguous(NULL, q->dtype, ndim, r->o.shape);
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
    r->cu = r->nsa.cu_seqlens != NULL ? r->nsa.cu_seqlens->data : NULL;
    for (int64_t b = 0; r->cu != NULL && b < r->batch; b++)
        if (r->cu[0] != 0 || r->cu[b + 1] < r->cu[b] || r->cu[b + 1] > r->length)
            return fail(
                EXIT_INPUT,
                "cu_seqlens[%lld] is %d: offsets from 0 to at most %lld that do not fall are accepted",
                (long long)b + 1, r->cu[b + 1], (long long)r->length);
    return EXIT_DONE;
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

static int make_cache(decode_run *r)
{
    const quern_tensor *k = r->nsa.k, *v = r->nsa.v;
    const quern_nsa_params *p = &r->j->params.nsa;
    quern_cache_params *c = &r->params;
    size_t memory, bytes;
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
    quern_status status = quern_cache_size(c, &memory, &bytes);
    if (status != QUERN_OK) return fail_status(status);
    r->memory = malloc(memory);
    r->cache_rows = malloc(bytes + 1);
    r->ids = malloc((size_t)c->sequences * sizeof *r->ids);
    r->counts = malloc((size_t)c->sequences * sizeof *r->counts);
    r->tokens = calloc((size_t)c->sequences, sizeof *r->tokens);
    if (r->memory == NULL || r->cache_rows == NULL || r->ids == NULL || r->counts == NULL ||
        r->tokens == NULL)
        return fail(EXIT_MACHINE, "no memory for a cache of %zu bytes", bytes);
    status = quern_cache_create(c, r->memory, memory, r->cache_rows, bytes, &r->cache);
    return status == QUERN_OK ? EXIT_DONE : fail_status(status);
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
        s->piece =
            quern_tensor_contiguous(malloc((size_t)most * s->row_bytes + 1), s->whole->dtype, 3, piece);
        ok = s->piece.data != NULL;
    }
    if (ok && r->sparse && (p->branches & QUERN_NSA_BRANCH_SLC)) {
        r->lists = quern_nsa_list_heads(p, r->o.shape[r->o.ndim - 2], r->params.kv_heads);
        const int64_t rows_most = quern_nsa_list_rows(p, r->length, r->batch);
        const int64_t fixed[] = {r->batch, r->lists, r->length, p->num_selected},
                      varlen[] = {r->lists, rows_most, p->num_selected};
        r->block_idx =
            job_add_output(j, "block_idx", QUERN_I32, r->cu != NULL ? 3 : 4, r->cu != NULL ? varlen : fixed);
        if (r->block_idx != NULL)
            memset(r->block_idx->data, 0xff,
                   (size_t)(r->lists * p->num_selected * (r->cu != NULL ? rows_most : r->batch * r->length)) *
                       4);
        r->idx = quern_tensor_contiguous(
            malloc((size_t)(r->lists * most * p->num_selected) * sizeof(int32_t) + 1), QUERN_I32, 3, varlen);
        ok = r->block_idx != NULL && r->idx.data != NULL;
    }
    return ok ? EXIT_DONE : fail(EXIT_MACHINE, "no memory for the calls' rows");
}

/* Room for a call's workspace. */
static bool make_room(decode_run *r, size_t bytes)
{
    if (bytes <= r->workspace_bytes && r->workspace != NULL) return true;
    free(r->workspace);
    r->workspace = malloc(bytes + 1);
    r->workspace_bytes = bytes;
    return r->workspace != NULL;
}

static quern_status append(decode_run *r, const quern_cache_batch *batch)
{
    const stream *s = r->streams;
    const bool entries = r->params.block_size > 0;
    const quern_cache_tensors t = {.size = sizeof t,
                                   .k = &s[K].piece,
                                   .v = &s[V].piece,
                                   .k_slc = s[K_SLC].whole != NULL ? &s[K_SLC].piece : NULL,
                                   .v_slc = s[V_SLC].whole != NULL ? &s[V_SLC].piece : NULL,
                                   .k_win = s[K_WIN].whole != NULL ? &s[K_WIN].piece : NULL,
                                   .v_win = s[V_WIN].whole != NULL ? &s[V_WIN].piece : NULL,
                                   .w_k = entries ? r->nsa.w_k : NULL,
                                   .w_v = entries ? r->nsa.w_v : NULL,
                                   .pe_k = entries ? r->nsa.pe_k : NULL,
                                   .pe_v = entries ? r->nsa.pe_v : NULL,
                                   .k_index = s[K_INDEX].whole != NULL ? &s[K_INDEX].piece : NULL};
    size_t bytes;
    const quern_status status = quern_cache_append_workspace(r->ctx, r->cache, batch, &t, &bytes);
    if (status != QUERN_OK) return status;
    if (!make_room(r, bytes)) return QUERN_ERR_OUT_OF_MEMORY;
    return quern_cache_append(r->ctx, NULL, r->cache, batch, &t, r->workspace, bytes);
}

static quern_status attend(decode_run *r, const quern_cache_batch *batch, int64_t count)
{
    const any_params *p = &r->j->params;
    stream *s = r->streams;
    quern_decode_tensors t = {.size = sizeof t, .q = &s[Q].piece, .o = &s[O].piece};
    size_t bytes;
    if (!r->sparse) {
        t.sink = r->sink;
        const quern_status status =
            quern_attention_decode_workspace(r->ctx, &p->attention, r->cache, batch, &t, &bytes);
        if (status != QUERN_OK) return status;
        if (!make_room(r, bytes)) return QUERN_ERR_OUT_OF_MEMORY;
        return quern_attention_decode(r->ctx, NULL, &p->attention, r->cache, batch, &t, r->workspace, bytes);
    }
    const int64_t lists[] = {r->lists, count, p->nsa.num_selected};
    r->idx = quern_tensor_contiguous(r->idx.data, QUERN_I32, 3, lists);
    if (r->block_idx != NULL) t.block_idx = &r->idx;
    if (p->nsa.gate == QUERN_NSA_GATE_WEIGHTS) t.w_gate = r->nsa.w_gate;
    if (s[GATES].whole != NULL) t.gates = &s[GATES].piece;
    if (s[Q_INDEX].whole != NULL) t.q_index = &s[Q_INDEX].piece;
    quern_nsa_params nsa = p->nsa;
    if (r->params.separate_win && nsa.window > r->params.window)
        nsa.window = r->params.window; /* as many as there are tokens */
    const quern_status status = quern_nsa_decode_workspace(r->ctx, &nsa, r->cache, batch, &t, &bytes);
    if (status != QUERN_OK) return status;
    if (!make_room(r, bytes)) return QUERN_ERR_OUT_OF_MEMORY;
    return quern_nsa_decode(r->ctx, NULL, &nsa, r->cache, batch, &t, r->workspace, bytes);
}

/* Copies the call's rows of a stream from the file's tensor, or back. */
static void move_rows(const decode_run *r, const stream *s, const quern_cache_batch *batch, bool back)
{
    char *piece = s->piece.data;
    for (int64_t i = 0; i < batch->batch; i++) {
        const int64_t b = batch->sequences[i];
        char *whole = (char *)s->whole->data + (size_t)(first_row(r, b) + r->tokens[b]) * s->row_bytes;
        const size_t bytes = (size_t)batch->counts[i] * s->row_bytes;
        memcpy(back ? whole : piece, back ? piece : whole, bytes);
        piece += bytes;
    }
}

static void store_lists(const decode_run *r, const quern_cache_batch *batch, int64_t count)
{
    const int64_t k = r->j->params.nsa.num_selected;
    const quern_tensor *out = r->block_idx;
    for (int64_t h = 0; h < r->lists; h++) {
        const int32_t *from = (const int32_t *)r->idx.data + h * count * k;
        for (int64_t i = 0; i < batch->batch; i++) {
            const int64_t b = batch->sequences[i], n = batch->counts[i];
            const int64_t at = r->cu != NULL ? h * out->strides[0] + (r->cu[b] + r->tokens[b]) * k
                                             : b * out->strides[0] + h * out->strides[1] + r->tokens[b] * k;
            memcpy((int32_t *)out->data + at, from, (size_t)(n * k) * sizeof *from);
            from += n * k;
        }
    }
}

/* Removes the last `back` tokens of each sequence from the cache, then appends and attends the next `most`.
 * *more: some are left. */
static int call(decode_run *r, int64_t most, int64_t back, bool *more)
{
    quern_cache_batch batch = {sizeof batch, 0, r->ids, r->counts};
    int64_t count = 0;
    quern_status status = QUERN_OK;
    *more = false;
    for (int64_t b = 0; b < r->batch && status == QUERN_OK; b++) {
        const int64_t left = length_of(r, b) - r->tokens[b], n = left < most ? left : most,
                      held = r->tokens[b] < back ? r->tokens[b] : back;
        if (n == 0) continue;
        status = quern_cache_rollback(r->cache, b, held);
        r->tokens[b] -= held;
        r->ids[batch.batch] = (int32_t)b;
        r->counts[batch.batch++] = n + held;
        count += n + held;
        *more = *more || left > n;
    }
    if (status != QUERN_OK) return fail_status(status);
    for (int i = 0; i < STREAMS; i++) {
        if (r->streams[i].whole == NULL) continue;
        r->streams[i].piece.shape[0] = count;
        if (i != O) move_rows(r, &r->streams[i], &batch, false);
    }
    if ((status = append(r, &batch)) == QUERN_OK) status = attend(r, &batch, count);
    if (status == QUERN_ERR_OUT_OF_MEMORY)
        return fail(EXIT_MACHINE, "no memory for a workspace of %zu bytes", r->workspace_bytes);
    if (status != QUERN_OK) return fail_status(status);
    move_rows(r, &r->streams[O], &batch, true);
    if (r->block_idx != NULL) store_lists(r, &batch, count);
    for (int64_t i = 0; i < batch.batch; i++) r->tokens[batch.sequences[i]] += batch.counts[i];
    return EXIT_DONE;
}

static int decode(decode_run *r)
{
    bool more = r->batch > 0;
    int64_t held;
    int code = EXIT_DONE;
    const double start = now_ms();
    if (options.prefill > 0) code = call(r, options.prefill, 0, &more);
    for (int64_t step = 0; more && code == EXIT_DONE; step++)
        code = call(r, options.step, step > 0 ? options.rollback : 0, &more);
    if (code != EXIT_DONE) return code;
    job *j = r->j;
    j->forward_ms = now_ms() - start;
    const quern_status status = quern_cache_held(r->cache, &held);
    if (status != QUERN_OK) return fail_status(status);
    quern_tensor *bytes = job_add_output(j, "cache_bytes", QUERN_I64, 0, NULL);
    if (bytes == NULL) return fail(EXIT_MACHINE, "no memory for cache_bytes");
    memcpy(bytes->data, &held, sizeof held);
    return EXIT_DONE;
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
    void *const blocks[] = {r.memory, r.cache_rows, r.workspace, r.ids, r.counts, r.tokens, r.idx.data};
    for (size_t i = 0; i < sizeof blocks / sizeof *blocks; i++) free(blocks[i]);
    for (int i = 0; i < STREAMS; i++) free(r.streams[i].piece.data);
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
    .cpu_only = true,
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
    .cpu_only = true,
    .inputs = forward_alone,
    .compute = compute,
};
