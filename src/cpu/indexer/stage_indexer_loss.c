/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * stage_indexer_loss.c - the indexer_loss stage.
 *
 * A query goes twice through its entries, 128 at a time: the first pass finds the maxima and sums of every
 * head's scores and of the indexer's, from which the normalisers follow; the second makes T and P, and the
 * gradients. It makes the scores again, but for those of short lists, which a thread keeps. A product's rows
 * are a query's heads, so 64 heads fill the micro-kernel, and packing the entries for one query costs 1/64 of
 * the products.
 *
 *   scores = q keys^T, z = q_index keys_index^T           in bf16 where the level has the product
 *   dz = g w[z > 0],  d_q_index += dz keys_index,  d_keys_index += dz^T q_index             the same
 *
 * Gradients of keys_index are sums over queries: the queries of a sequence are cut into at most 8 shares by
 * their number alone, each share has its own sums, and these are added in order, so the bits do not depend on
 * the threads. Limit: 2 (2 H D + 4 Hi C) operations a query and entry.
 */
#include "core/arena.h"
#include "core/half.h"
#include "core/parallel.h"
#include "cpu/indexer/indexer_kernels.h"
#include "cpu/kernels/nsa_kernels.h"
#include "cpu/levels.h"
#include "cpu/rows_at.h"
#include "cpu/stages.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { ENTRIES = 128, LD = ENTRIES + 16, SHARES = 8, SHARE_QUERIES = 16 };
enum { KEPT_MOST = 1024 }; /* entries of a list whose scores a thread keeps between the passes */
static const float log2_e = 0x1.715476p+0f;

typedef struct loss_job {
    const indexer_loss_args *args;
    const attention_kernels *kernels;
    const nsa_kernels *nsa;
    const indexer_kernels *indexer;
    bool bf16;
    int64_t batch, queries, heads, dim, index_heads, width, entries, listed; /* listed -1: no lists */
    int64_t shares, share_queries;                                           /* of a sequence */
    int64_t ld;                                                              /* floats of a row of scores */
    bool keeps;      /* the scores of all of a query's entries, for the second pass */
    int64_t columns; /* width, up to a multiple of 16 */
    float factor;    /* of all gradients */
    float *d_keys;   /* [batch][shares][entries][columns], or NULL */
    double *losses;  /* [batch][queries] */
    struct loss_thread *threads;
    int32_t *status;
} loss_job;

/* What a thread keeps of a query. */
typedef struct loss_thread {
    void *q, *q_index; /* rows of heads, as the products take them */
    float *q_rows;     /* [index_heads][columns], in f32 */
    int32_t *chosen;   /* the query's entries, where it has a list */
    void *gathered;    /* [ENTRIES] rows of the keys or of the index keys */
    void *panels;      /* of them */
    float *key_rows;   /* [ENTRIES][columns]: index keys in f32 */
    float *scores, *z,
        *sums; /* [heads][ld], [index_heads][ld], [ld]: sums has the indexer's scores, then P - T */
    float *copies, *copied; /* [heads][LD], [LD]: of scores and sums that are kept */
    float *teacher;         /* [LD]: sums of the probabilities */
    float *w, *d_w;         /* [index_heads] */
    float *d_q;             /* [index_heads][columns] */
    float *d_rows;          /* [ENTRIES][columns] */
    /* With the bf16 product: dz by rows and in pairs of rows; the rows of keys and of queries in pairs. */
    uint16_t *dz_words;
    uint32_t *dz_pairs, *key_pairs, *q_pairs;
    float *max, *sum, *shrink, *lse2;
    int32_t *lo, *hi;
} loss_thread;

static loss_job plan(const stage_exec *exec, const indexer_loss_args *args)
{
    const cpu_kernels *level = cpu_kernels_for(exec->cpu_level);
    loss_job job = {.args = args,
                    .kernels = level->attention,
                    .nsa = level->nsa,
                    .indexer = level->indexer,
                    .batch = args->q_index.shape[0],
                    .queries = args->q_index.shape[1],
                    .heads = args->q.shape[2],
                    .dim = args->q.shape[3],
                    .index_heads = args->q_index.shape[2],
                    .width = args->q_index.shape[3],
                    .entries = args->keys_index.shape[1],
                    .listed = is_present(&args->list) ? args->list.shape[2] : -1,
                    .status = exec->status};
    job.bf16 = job.kernels->mm_bf16 != NULL && args->q.dtype == QUERN_BF16;
    job.columns = round_up16(job.width);
    job.keeps = job.listed >= 0 && job.listed <= KEPT_MOST;
    job.ld = job.keeps && job.listed > ENTRIES ? round_up(job.listed, ENTRIES) + 16 : LD;
    if (job.batch == 0) job.queries = 0;
    job.share_queries = (job.queries + SHARES - 1) / SHARES;
    if (job.share_queries < SHARE_QUERIES) job.share_queries = SHARE_QUERIES;
    job.shares = (job.queries + job.share_queries - 1) / job.share_queries;
    return job;
}

/* Panels of a row of index keys or queries. */
static size_t pair_panels(const loss_job *job)
{
    return (size_t)((job->columns + job->kernels->panel - 1) / job->kernels->panel);
}

static loss_thread carve_thread(const loss_job *job, arena *a)
{
    const size_t most = (size_t)(job->heads > job->index_heads ? job->heads : job->index_heads),
                 heads = (size_t)job->heads, index = (size_t)job->index_heads, columns = (size_t)job->columns,
                 row = (size_t)(job->dim > job->width ? job->dim : job->width);
    loss_thread t;
    t.q = arena_take(a, heads * (size_t)job->dim * 4);
    t.q_index = arena_take(a, index * (size_t)job->width * 4);
    t.q_rows = arena_take(a, (index + 1) * columns * 4);
    t.chosen = arena_take(a, (size_t)(job->listed > 0 ? job->listed : 1) * sizeof *t.chosen);
    t.gathered = arena_take(a, ENTRIES * row * 4);
    t.panels = arena_take(a, ENTRIES * row * 4);
    t.key_rows = arena_take(a, ENTRIES * columns * 4);
    t.scores = arena_take(a, heads * (size_t)job->ld * 4);
    t.z = arena_take(a, index * (size_t)job->ld * 4);
    t.sums = arena_take(a, (size_t)job->ld * 4);
    t.copies = arena_take(a, heads * LD * 4);
    t.copied = arena_take(a, LD * 4);
    t.teacher = arena_take(a, LD * 4);
    t.w = arena_take(a, index * 4);
    t.d_w = arena_take(a, index * 4);
    t.d_q = arena_take(a, index * columns * 4);
    t.d_rows = arena_take(a, ENTRIES * columns * 4);
    t.dz_words = arena_take(a, job->bf16 ? (index + 1) * LD * 2 : 0);
    t.dz_pairs = arena_take(a, job->bf16 ? (index + 1) / 2 * LD * 4 : 0);
    t.key_pairs =
        arena_take(a, job->bf16 ? pair_panels(job) * ENTRIES / 2 * (size_t)job->kernels->panel * 4 : 0);
    t.q_pairs =
        arena_take(a, job->bf16 ? pair_panels(job) * (index + 1) / 2 * (size_t)job->kernels->panel * 4 : 0);
    t.max = arena_take(a, (most + 1) * 4);
    t.sum = arena_take(a, (most + 1) * 4);
    t.shrink = arena_take(a, (most + 1) * 4);
    t.lse2 = arena_take(a, heads * 4);
    t.lo = arena_take(a, most * sizeof *t.lo);
    t.hi = arena_take(a, most * sizeof *t.hi);
    return t;
}

static loss_job carve(const stage_exec *exec, const indexer_loss_args *args, arena *a)
{
    loss_job job = plan(exec, args);
    job.threads = arena_take(a, (size_t)exec->threads * sizeof *job.threads);
    for (int32_t i = 0; i < exec->threads && job.queries > 0; i++) {
        const loss_thread t = carve_thread(&job, a);
        if (job.threads != NULL) job.threads[i] = t;
    }
    job.losses = arena_take(a, (size_t)(job.batch * job.queries) * sizeof *job.losses);
    if (is_present(&args->d_keys_index) && job.queries > 0)
        job.d_keys =
            arena_take(a, (size_t)(job.batch * job.shares * job.entries * job.columns) * sizeof(float));
    return job;
}

/* ---- a query's entries ---- */

static int64_t seen_by(const loss_job *job, int64_t t)
{
    const int64_t seen = (job->args->position + t + 1) / job->args->ratio;
    return seen < job->entries ? seen : job->entries;
}

static int ascending(const void *a, const void *b)
{
    const int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return (x > y) - (x < y);
}

/* Fills t.chosen; returns how many entries the query has. */
static int64_t choose(const loss_job *job, loss_thread *t, int64_t b, int64_t query)
{
    const int64_t seen = seen_by(job, query);
    if (job->listed < 0) return seen;
    const quern_tensor *list = &job->args->list;
    const int32_t *given = (const int32_t *)list->data + b * list->strides[0] + query * list->strides[1];
    int64_t n = 0, kept = 0;
    bool bad = false;
    for (int64_t i = 0; i < job->listed; i++) {
        bad = bad || given[i] < -1 || given[i] >= job->entries;
        if (given[i] >= 0 && given[i] < seen) t->chosen[n++] = given[i];
    }
    if (bad && job->status != NULL) __atomic_fetch_or(job->status, QUERN_STATUS_BAD_INDEX, __ATOMIC_RELAXED);
    if (n > 0) qsort(t->chosen, (size_t)n, sizeof *t->chosen, ascending);
    for (int64_t i = 0; i < n; i++)
        if (i == 0 || t->chosen[i] != t->chosen[i - 1]) t->chosen[kept++] = t->chosen[i];
    return kept;
}

/* Queries that have an entry. */
static int64_t count_rows(const loss_job *job)
{
    int64_t rows = 0;
    for (int64_t b = 0; b < job->batch; b++)
        for (int64_t t = 0; t < job->queries; t++) {
            const int64_t seen = seen_by(job, t);
            bool any = job->listed < 0 && seen > 0;
            const quern_tensor *list = &job->args->list;
            for (int64_t i = 0; i < job->listed && !any; i++) {
                const int32_t e =
                    ((const int32_t *)list->data)[b * list->strides[0] + t * list->strides[1] + i];
                any = e >= 0 && e < seen;
            }
            rows += any;
        }
    return rows;
}

/* ---- products ---- */

/* Entries [first, first + n) of the query as rows of `keys` [B, S, dim]. */
static row_source entry_rows(const loss_job *job, loss_thread *t, const quern_tensor *keys, int64_t b,
                             int64_t first, int64_t n)
{
    const size_t element = quern_dtype_size(keys->dtype);
    const int64_t dim = keys->shape[2];
    const char *base = (const char *)keys->data + b * keys->strides[0] * (int64_t)element;
    row_source rows = {base + first * keys->strides[1] * (int64_t)element, keys->dtype, keys->strides[1], n,
                       dim};
    if (job->listed < 0) return rows;
    for (int64_t i = 0; i < n; i++)
        memcpy((char *)t->gathered + (size_t)(i * dim) * element,
               base + t->chosen[first + i] * keys->strides[1] * (int64_t)element, (size_t)dim * element);
    rows.data = t->gathered;
    rows.stride = dim;
    return rows;
}

static void pack_heads(const loss_job *job, const quern_tensor *q, int64_t b, int64_t query, void *to)
{
    const row_source rows = {row_at(q, b, query, 0), q->dtype, q->strides[2], q->shape[2], q->shape[3]};
    if (job->bf16) job->kernels->pack_rows_bf16(&rows, to, q->shape[3]);
    else job->kernels->pack_rows_f32(&rows, 1.0f, to, q->shape[3]);
}

/* out[heads][ld] = the heads' rows times the entries'. */
static void score(const loss_job *job, loss_thread *t, const void *heads, int64_t count,
                  const row_source *rows, float *out)
{
    const int64_t panel = job->kernels->panel, words = job->bf16 ? rows->dim / 2 : rows->dim;
    for (int64_t first = 0; first < rows->rows; first += panel) {
        row_source part = *rows;
        part.rows = rows->rows - first < panel ? rows->rows - first : panel;
        part.data = (const char *)rows->data + first * rows->stride * (int64_t)quern_dtype_size(rows->dtype);
        if (job->bf16) job->kernels->pack_keys_bf16(&part, (int32_t)panel, t->panels);
        else job->kernels->pack_keys_f32(&part, (int32_t)panel, t->panels);
        (job->bf16 ? job->kernels->mm_bf16 : job->kernels->mm_f32)(count, round_up16(part.rows), words, heads,
                                                                   words, 1, t->panels, panel, out + first,
                                                                   job->ld, false);
    }
}

/* Where a tile's scores stand in their rows. */
static int64_t tile_at(const loss_job *job, int64_t first)
{
    return job->keeps ? first : 0;
}

/* The scores of the entries, of the heads in t.scores and of the indexer in t.sums; t.z has its products. */
static void score_both(const loss_job *job, loss_thread *t, int64_t b, int64_t first, int64_t n)
{
    const indexer_loss_args *args = job->args;
    const int64_t at = tile_at(job, first);
    const row_source keys = entry_rows(job, t, &args->keys, b, first, n);
    score(job, t, t->q, job->heads, &keys, t->scores + at);
    const row_source index = entry_rows(job, t, &args->keys_index, b, first, n);
    score(job, t, t->q_index, job->index_heads, &index, t->z + at);
    job->indexer->relu_sum(t->z + at, job->ld, job->index_heads, t->w, args->scale_index, n, t->sums + at);
}

/* ---- the first pass ---- */

static void weigh(const loss_job *job, loss_thread *t, float *scores, int32_t rows, int64_t n, float scale2,
                  float *max, float *sum)
{
    for (int32_t i = 0; i < rows; i++) t->lo[i] = 0, t->hi[i] = (int32_t)n;
    const softmax_tile tile = {scores, LD,  rows,     (int32_t)round_up16(n), t->lo, t->hi, scale2,
                               max,    sum, t->shrink};
    job->kernels->softmax_f32(&tile);
}

static double log_add(double a, double b)
{
    const double most = a > b ? a : b;
    return most == -INFINITY ? most : most + log(exp(a - most) + exp(b - most));
}

/* The heads' normalisers to base 2, the indexer's, and the mass that the entries have of all heads. */
static double normalise(const loss_job *job, loss_thread *t, int64_t b, int64_t query, float *lse)
{
    const indexer_loss_args *args = job->args;
    const double ln_2 = 0.69314718055994531;
    double mass = 0;
    for (int64_t h = 0; h < job->heads; h++) {
        const double own = (double)t->max[h] * (double)args->scale + log((double)t->sum[h]),
                     window = (double)*(const float *)row_at(&args->lse_win, b, h, query),
                     sink = is_present(&args->sink) ? (double)((const float *)args->sink.data)[h] : -INFINITY,
                     all = log_add(own, log_add(window, sink));
        mass += exp(own - all);
        t->lse2[h] = (float)(all / ln_2);
    }
    *lse = (float)((double)t->max[job->heads] + log((double)t->sum[job->heads]));
    return mass;
}

static void first_pass(const loss_job *job, loss_thread *t, int64_t b, int64_t count)
{
    for (int64_t h = 0; h <= job->heads; h++) t->max[h] = -INFINITY, t->sum[h] = 0;
    for (int64_t first = 0, n; first < count; first += n) {
        n = count - first < ENTRIES ? count - first : ENTRIES;
        score_both(job, t, b, first, n);
        float *scores = t->scores, *sums = t->sums;
        if (job->keeps) {
            const int64_t wide = round_up16(n);
            for (int64_t h = 0; h < job->heads; h++)
                memcpy(t->copies + h * LD, t->scores + h * job->ld + first, (size_t)wide * sizeof *scores);
            memcpy(t->copied, t->sums + first, (size_t)wide * sizeof *sums);
            scores = t->copies;
            sums = t->copied;
        }
        weigh(job, t, scores, (int32_t)job->heads, n, job->args->scale * log2_e, t->max, t->sum);
        weigh(job, t, sums, 1, n, log2_e, t->max + job->heads, t->sum + job->heads);
    }
}

/* ---- the second pass ---- */

/* The products of the gradients in bf16. An odd row or column is followed by zeros. */
static void multiply_pairs(const loss_job *job, loss_thread *t, const row_source *rows, const float *z,
                           bool keys)
{
    const attention_kernels *k = job->kernels;
    const int64_t n = rows->rows, heads = job->index_heads, even_heads = round_up(heads, 2),
                  even = round_up(n, 2), wide = round_up16(n), key_stride = ENTRIES / 2 * k->panel,
                  q_stride = even_heads / 2 * k->panel;
    const row_source words = {t->dz_words, QUERN_BF16, LD, even_heads, wide};
    for (int64_t h = 0; h < even_heads; h++) {
        uint16_t *to = t->dz_words + h * LD;
        const int64_t there = h < heads ? n : 0;
        if (there > 0) k->rows->convert(z + h * job->ld, QUERN_F32, to, QUERN_BF16, there);
        memset(to + there, 0, (size_t)(wide - there) * sizeof *to);
    }
    k->pack_values_bf16(rows, k->panel, t->key_pairs, key_stride);
    if (keys) k->pack_values_bf16(&words, LD, t->dz_pairs, 0);
    for (int64_t column = 0, j = 0; column < job->columns; column += k->panel, j++) {
        const int64_t columns = job->columns - column < k->panel ? job->columns - column : k->panel;
        k->mm_bf16(heads, columns, even / 2, t->dz_words, LD / 2, 1, t->key_pairs + j * key_stride, k->panel,
                   t->d_q + column, job->columns, true);
        if (keys)
            k->mm_bf16(n, columns, even_heads / 2, t->dz_pairs, 1, LD, t->q_pairs + j * q_stride, k->panel,
                       t->d_rows + column, job->columns, false);
    }
}

/* Adds the tile's part of the gradients: t.sums has P - T. */
static void add_gradients(const loss_job *job, loss_thread *t, int64_t b, int64_t first, int64_t n,
                          float *d_keys)
{
    const attention_kernels *k = job->kernels;
    const int64_t wide = round_up16(n);
    const row_source rows = entry_rows(job, t, &job->args->keys_index, b, first, n);
    float *z = t->z + tile_at(job, first);
    job->indexer->relu_backward(z, job->ld, job->index_heads, t->w, job->args->scale_index * job->factor,
                                t->sums + tile_at(job, first), n, t->d_w);
    for (int64_t i = 0; i < wide && !job->bf16; i++) {
        float *to = t->key_rows + i * job->columns;
        if (i < n)
            k->rows->convert((const char *)rows.data +
                                 i * rows.stride * (int64_t)quern_dtype_size(rows.dtype),
                             rows.dtype, to, QUERN_F32, job->width);
        memset(to + (i < n ? job->width : 0), 0,
               (size_t)(job->columns - (i < n ? job->width : 0)) * sizeof *to);
    }
    if (job->bf16) multiply_pairs(job, t, &rows, z, d_keys != NULL);
    for (int64_t column = 0; column < job->columns && !job->bf16; column += k->panel) {
        const int64_t columns = job->columns - column < k->panel ? job->columns - column : k->panel;
        k->mm_f32(job->index_heads, columns, n, z, job->ld, 1, t->key_rows + column, job->columns,
                  t->d_q + column, job->columns, true);
        if (d_keys != NULL)
            k->mm_f32(n, columns, job->index_heads, z, 1, job->ld, t->q_rows + column, job->columns,
                      t->d_rows + column, job->columns, false);
    }
    for (int64_t i = 0; i < n && d_keys != NULL; i++) {
        const int64_t entry = job->listed < 0 ? first + i : t->chosen[first + i];
        k->rows->add_scaled(d_keys + entry * job->columns, t->d_rows + i * job->columns, 1.0f, job->columns);
    }
}

static double second_pass(const loss_job *job, loss_thread *t, int64_t b, int64_t count, double mass,
                          float lse, float *d_keys)
{
    double loss = 0;
    for (int64_t first = 0, n; first < count; first += n) {
        float parts[2];
        n = count - first < ENTRIES ? count - first : ENTRIES;
        const int32_t wide = (int32_t)round_up16(n);
        const int64_t at = tile_at(job, first);
        if (!job->keeps) score_both(job, t, b, first, n);
        memset(t->teacher, 0, (size_t)wide * sizeof *t->teacher);
        for (int64_t h = 0; h < job->heads; h++) t->hi[h] = (int32_t)n;
        job->nsa->add_probabilities(t->scores + at, job->ld, (int32_t)job->heads, t->hi, wide,
                                    job->args->scale * log2_e, t->lse2, t->teacher);
        job->nsa->divergence(t->sums + at, t->teacher, 0, (int32_t)n, wide, 1.0f, lse, (float)(1 / mass),
                             parts);
        loss += (double)parts[0];
        add_gradients(job, t, b, first, n, d_keys);
    }
    return loss;
}

/* ---- queries ---- */

static void begin_query(const loss_job *job, loss_thread *t, int64_t b, int64_t query)
{
    const indexer_loss_args *args = job->args;
    const size_t element = quern_dtype_size(args->w.dtype);
    pack_heads(job, &args->q, b, query, t->q);
    pack_heads(job, &args->q_index, b, query, t->q_index);
    job->kernels->rows->convert((const char *)args->w.data +
                                    (size_t)(b * args->w.strides[0] + query * args->w.strides[1]) * element,
                                args->w.dtype, t->w, QUERN_F32, job->index_heads);
    memset(t->q_rows, 0, (size_t)((job->index_heads + 1) * job->columns) * sizeof(float));
    for (int64_t h = 0; h < job->index_heads; h++)
        job->kernels->rows->convert(row_at(&args->q_index, b, query, h), args->q_index.dtype,
                                    t->q_rows + h * job->columns, QUERN_F32, job->width);
    const int64_t even = round_up(job->index_heads, 2);
    const row_source rows = {row_at(&args->q_index, b, query, 0), args->q_index.dtype,
                             args->q_index.strides[2], job->index_heads, job->width};
    if (job->bf16)
        job->kernels->pack_values_bf16(&rows, job->kernels->panel, t->q_pairs,
                                       even / 2 * job->kernels->panel);
}

static void end_query(const loss_job *job, const loss_thread *t, int64_t b, int64_t query)
{
    const quern_tensor *d_q = &job->args->d_q_index, *d_w = &job->args->d_w;
    const row_kernels *rows = job->kernels->rows;
    for (int64_t h = 0; h < job->index_heads && is_present(d_q); h++)
        rows->convert(t->d_q + h * job->columns, QUERN_F32, row_at(d_q, b, query, h), d_q->dtype, job->width);
    if (is_present(d_w))
        rows->convert(t->d_w, QUERN_F32,
                      (char *)d_w->data + (size_t)(b * d_w->strides[0] + query * d_w->strides[1]) *
                                              quern_dtype_size(d_w->dtype),
                      d_w->dtype, job->index_heads);
}

static double run_query(const loss_job *job, loss_thread *t, int64_t b, int64_t query, float *d_keys)
{
    const int64_t count = choose(job, t, b, query);
    double loss = 0;
    float lse;
    memset(t->d_q, 0, (size_t)(job->index_heads * job->columns) * sizeof(float));
    memset(t->d_w, 0, (size_t)job->index_heads * sizeof(float));
    if (count > 0) {
        begin_query(job, t, b, query);
        first_pass(job, t, b, count);
        const double mass = normalise(job, t, b, query, &lse);
        /* Below it T has no normal number, and there is no teacher. */
        if (!(mass < 0x1p-126)) loss = second_pass(job, t, b, count, mass, lse, d_keys);
    }
    end_query(job, t, b, query);
    return loss;
}

static void run_share(void *arg, int64_t index, int32_t thread)
{
    loss_job *job = arg;
    const int64_t b = index / job->shares, first = index % job->shares * job->share_queries,
                  end = first + job->share_queries < job->queries ? first + job->share_queries : job->queries;
    float *d_keys = job->d_keys != NULL ? job->d_keys + index * job->entries * job->columns : NULL;
    if (d_keys != NULL) memset(d_keys, 0, (size_t)(job->entries * job->columns) * sizeof *d_keys);
    for (int64_t t = first; t < end; t++)
        job->losses[b * job->queries + t] = run_query(job, &job->threads[thread], b, t, d_keys);
}

/* A row of the gradient of keys_index, of all shares. */
static void add_keys(void *arg, int64_t index, int32_t thread)
{
    (void)thread;
    const loss_job *job = arg;
    const quern_tensor *out = &job->args->d_keys_index;
    const row_kernels *rows = job->kernels->rows;
    const int64_t b = index / job->entries, entry = index % job->entries;
    float *first = job->d_keys + (b * job->shares * job->entries + entry) * job->columns;
    for (int64_t s = 1; s < job->shares; s++)
        rows->add_scaled(first, first + s * job->entries * job->columns, 1.0f, job->columns);
    rows->convert(first, QUERN_F32,
                  (char *)out->data +
                      (size_t)(b * out->strides[0] + entry * out->strides[1]) * quern_dtype_size(out->dtype),
                  out->dtype, job->width);
}

static void give_losses(const loss_job *job, int64_t rows)
{
    const quern_tensor *out = &job->args->row_loss;
    double sum = 0;
    for (int64_t b = 0; b < job->batch; b++)
        for (int64_t t = 0; t < job->queries; t++) {
            const double loss = job->losses[b * job->queries + t];
            sum += loss;
            if (is_present(out))
                ((float *)out->data)[b * out->strides[0] + t * out->strides[1]] = (float)loss;
        }
    if (is_present(&job->args->loss))
        *(float *)job->args->loss.data =
            (float)((double)job->args->lambda * sum / (double)(rows > 1 ? rows : 1));
}

/* Without queries. */
static void zero_keys(const loss_job *job)
{
    const quern_tensor *out = &job->args->d_keys_index;
    for (int64_t b = 0; b < out->shape[0]; b++)
        for (int64_t s = 0; s < out->shape[1]; s++)
            memset((char *)out->data +
                       (size_t)(b * out->strides[0] + s * out->strides[1]) * quern_dtype_size(out->dtype),
                   0, (size_t)out->shape[2] * quern_dtype_size(out->dtype));
}

void cpu_indexer_loss_kernel(const stage_exec *exec, const indexer_loss_args *args,
                             char text[STAGE_NAME_BYTES])
{
    const loss_job job = plan(exec, args);
    cpu_name_kernels(text, "indexer_loss", job.bf16, job.kernels->level);
}

size_t cpu_indexer_loss_workspace(const stage_exec *exec, const indexer_loss_args *args)
{
    arena a = {NULL, 0};
    carve(exec, args, &a);
    return arena_size(&a);
}

quern_status cpu_indexer_loss(const stage_exec *exec, const indexer_loss_args *args, void *workspace)
{
    arena a = arena_on(workspace);
    loss_job job = carve(exec, args, &a);
    const int64_t rows = job.queries > 0 ? count_rows(&job) : 0;
    job.factor = args->lambda / (float)(rows > 1 ? rows : 1);
    if (job.queries > 0) parallel_for(exec, job.batch * job.shares, run_share, &job);
    if (job.d_keys != NULL) parallel_for(exec, job.batch * job.entries, add_keys, &job);
    else if (is_present(&args->d_keys_index)) zero_keys(&job);
    give_losses(&job, rows);
    return QUERN_OK;
}
