/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * nsa_decode_test.c - native sparse attention from a cache: whatever the pieces, subsets of the batch,
 * roll-backs, pages and threads, each row is that of the whole sequence within the bounds, and entries and
 * lists, those of the block indexer too, are the prefill's to the bit; NaN goes where the equations carry it.
 */
#include "cache_case.h"
#include "cmocka_c11.h"
#include "compare.h"
#include "nsa_random.h"
#include "nsa_reference.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { STEP_MOST = 40, SEQUENCES_MOST = NSA_MAX_BATCH + 2, ROWS = 7 /* tensors that are appended */ };

/* A problem, what its prefill gave, and a cache that is being filled with it. */
typedef struct player {
    nsa_case *c;
    quern_context *ctx[2]; /* of one and of three threads */
    cache_case cache;
    int64_t row0[NSA_MAX_BATCH + 1], tokens[NSA_MAX_BATCH], id[NSA_MAX_BATCH]; /* tokens: held */
    double *in[NSA_SLOTS];
    double *o;
    int32_t *lists, *counts; /* of the prefill */
    int64_t steps;
} player;

#ifdef QUERN_TEST_GPU
enum { WIDEST = 256 };
#else
enum { WIDEST = 512 };
#endif

/* The block indexer chooses: for all branches, or for the selected one alone and ungated (preset msa). */
static void set_indexed(nsa_config *c, test_random *random)
{
    quern_nsa_params *p = &c->params;
    p->selection = QUERN_NSA_LIST_INDEXED;
    p->branches |= QUERN_NSA_BRANCH_SLC;
    c->d_index = 8 * (test_random_one_in(random, 2) ? test_random_int(random, 1, 4) : 16);
    c->key_a_list = test_random_one_in(random, 2);
    if (test_random_one_in(random, 2)) {
        p->branches = QUERN_NSA_BRANCH_SLC;
        p->gate = QUERN_NSA_GATE_NONE;
        p->ungated = true;
        if (p->select_block == 0) p->select_block = p->block_size;
    }
    /* a cache always has a pair that some branch reads */
    if (!(p->branches & QUERN_NSA_BRANCH_CMP)) c->separate_win = false;
    if (!(p->branches & (QUERN_NSA_BRANCH_CMP | QUERN_NSA_BRANCH_WIN))) c->separate_slc = false;
}

static nsa_config config_of(test_random *random)
{
    nsa_config c = nsa_config_random(random, test_random_one_in(random, 4) ? 700 : 180);
    quern_nsa_params *p = &c.params;
    p->causal = true;
    p->tile = 1;
    p->compressed_visibility = QUERN_NSA_VISIBLE_COMPLETE;
    p->max_compressed_groups = 0;
    p->selection = p->groups = QUERN_NSA_LIST_COMPUTED;
    if (p->compress == QUERN_NSA_COMPRESS_GIVEN) p->compress = QUERN_NSA_COMPRESS_MEAN;
    if (test_random_one_in(random, 8)) { /* the widths of models, and any up to the most */
        c.d = test_random_one_in(random, 2) ? 64 * test_random_int(random, 1, 2)
                                            : 8 * test_random_int(random, WIDEST / 16 + 1, WIDEST / 8);
        c.dv = test_random_one_in(random, 2) ? c.d : 64 * test_random_int(random, 1, WIDEST / 64);
    }
    if (test_random_one_in(random, 3)) set_indexed(&c, random);
    const int64_t least = nsa_least_selected(p);
    if (p->num_selected < least) p->num_selected = least;
    if (!c.varlen) {
        c.varlen = true;
        for (int64_t b = 0; b < c.batch; b++) c.lens[b] = c.n - 3 * b > 0 ? c.n - 3 * b : 1;
    }
    return c;
}

/* One value of one token's query, key or value becomes NaN. */
static void spoil(nsa_case *c, test_random *random)
{
    const bool indexed = c->tensor[NSA_K_INDEX].buffer != NULL && test_random_one_in(random, 2);
    test_tensor *t = &c->tensor[indexed ? NSA_K_INDEX : test_random_int(random, NSA_Q, NSA_V)];
    const int64_t width = test_tensor_count(t) / c->rows,
                  token = test_random_int(random, 0, c->rows - c->config.spare - 1);
    double *values = test_tensor_get(t);
    values[token * width + test_random_int(random, 0, width - 1)] = NAN;
    test_tensor_set(t, values);
    free(values);
}

static void player_open(player *p, const nsa_config *config, quern_cpu_level level, bool nan,
                        test_random *random)
{
    memset(p, 0, sizeof *p);
    p->c = nsa_case_random(config, random);
    if (nan) spoil(p->c, random);
    for (int i = 0; i < 2; i++) p->ctx[i] = test_context(level, 1 + 2 * i);
    nsa_run(p->c, p->ctx[0], nsa_call_forward, nsa_forward_inputs(p->c), nsa_forward_outputs(p->c));
    for (int64_t b = 0; b < config->batch; b++) p->row0[b + 1] = p->row0[b] + config->lens[b];
    for (int i = 0; i < NSA_SLOTS; i++)
        if (p->c->tensor[i].buffer != NULL && p->c->tensor[i].view.dtype != QUERN_I32)
            p->in[i] = test_tensor_get(&p->c->tensor[i]);
    if (config->params.branches & QUERN_NSA_BRANCH_SLC) {
        p->lists = test_tensor_get_i32(&p->c->tensor[NSA_BLOCK_IDX]);
        p->counts = test_tensor_get_i32(&p->c->tensor[NSA_BLOCK_COUNT]);
    }
    p->o = test_doubles(p->c->rows * config->h * config->dv);

    quern_cache_params cache = QUERN_CACHE_PARAMS_INIT;
    cache.dtype = config->dtype;
    cache.sequences = config->batch + test_random_int(random, 0, SEQUENCES_MOST - NSA_MAX_BATCH);
    cache.kv_heads = config->hkv;
    cache.dim = config->d;
    cache.dim_v = config->dv;
    for (int64_t b = 0; b < config->batch; b++)
        if (config->lens[b] > cache.capacity) cache.capacity = config->lens[b];
    cache.capacity += test_random_int(random, 0, 100);
    cache.page = test_random_one_in(random, 2) ? QUERN_CACHE_PAGE : 0;
    cache.block_size = config->params.block_size;
    cache.stride = config->params.stride;
    cache.compress = config->params.compress;
    cache.separate_slc = config->separate_slc && (config->params.branches & QUERN_NSA_BRANCH_SLC);
    cache.separate_win = config->separate_win && (config->params.branches & QUERN_NSA_BRANCH_WIN);
    cache.window = config->params.window;
    cache.step = STEP_MOST;
    if (p->c->tensor[NSA_K_INDEX].buffer != NULL) {
        const int64_t lists = config->params.scope == QUERN_NSA_SCOPE_HEAD ? config->h : config->hkv;
        cache.index_heads = config->key_a_list ? lists : 1;
        cache.index_dim = config->d_index;
        if (!(config->params.branches & QUERN_NSA_BRANCH_CMP)) cache.block_size = 0;
    }
    cache_case_make(&p->cache, &cache);
    const int64_t shift = test_random_int(random, 0, cache.sequences - 1);
    for (int64_t b = 0; b < config->batch; b++) p->id[b] = (b + shift) % cache.sequences;
}

static void player_close(player *p)
{
    for (int i = 0; i < NSA_SLOTS; i++) free(p->in[i]);
    free(p->lists), free(p->counts), free(p->o);
    cache_case_free(&p->cache);
    for (int i = 0; i < 2; i++) quern_context_destroy(p->ctx[i]);
    nsa_case_free(p->c);
}

/* The rows of a call. */
typedef struct piece {
    int32_t ids[NSA_MAX_BATCH];
    int64_t counts[NSA_MAX_BATCH], rows[NSA_MAX_BATCH * (STEP_MOST + 8)], n;
    quern_cache_batch batch;
} piece;

static void piece_add(const player *p, int64_t b, int64_t first, int64_t count, piece *x)
{
    x->ids[x->batch.batch] = (int32_t)p->id[b];
    x->counts[x->batch.batch++] = count;
    for (int64_t i = 0; i < count; i++) x->rows[x->n++] = p->row0[b] + first + i;
}

static const quern_tensor *weight(const player *p, nsa_slot slot)
{
    return p->c->tensor[slot].buffer != NULL ? &p->c->tensor[slot].view : NULL;
}

static void append(player *p, piece *x, test_random *random)
{
    const nsa_config *g = &p->c->config;
    static const nsa_slot slots[ROWS] = {NSA_K,     NSA_V,     NSA_K_SLC,  NSA_V_SLC,
                                         NSA_K_WIN, NSA_V_WIN, NSA_K_INDEX};
    const quern_cache_params *has = &p->cache.params;
    const bool wanted[ROWS] = {true,
                               true,
                               has->separate_slc,
                               has->separate_slc,
                               has->separate_win,
                               has->separate_win,
                               has->index_heads > 0};
    test_tensor rows[ROWS];
    quern_cache_tensors t = QUERN_CACHE_TENSORS_INIT;
    const quern_tensor **places[ROWS] = {&t.k, &t.v, &t.k_slc, &t.v_slc, &t.k_win, &t.v_win, &t.k_index};
    x->batch.sequences = x->ids;
    x->batch.counts = x->counts;
    for (int i = 0; i < ROWS; i++) {
        if (!wanted[i]) continue;
        const bool index = slots[i] == NSA_K_INDEX;
        rows[i] =
            cache_rows(random, g->dtype, p->in[slots[i]], x->rows, x->n, index ? has->index_heads : g->hkv,
                       index   ? g->d_index
                       : i % 2 ? g->dv
                               : g->d);
        *places[i] = &rows[i].view;
    }
    if (has->block_size > 0) {
        t.w_k = weight(p, NSA_W_K);
        t.w_v = weight(p, NSA_W_V);
        t.pe_k = weight(p, NSA_PE_K);
        t.pe_v = weight(p, NSA_PE_V);
    }
    size_t bytes;
    quern_context *ctx = p->ctx[p->steps % 2];
    if (quern_cache_append_workspace(ctx, p->cache.cache, &x->batch, &t, &bytes) != QUERN_OK)
        fail_msg("%s", quern_last_error(ctx));
    test_workspace w = test_workspace_make(bytes);
    if (quern_cache_append(ctx, NULL, p->cache.cache, &x->batch, &t, w.data, bytes) != QUERN_OK)
        fail_msg("%s", quern_last_error(ctx));
    test_workspace_close(&w);
    for (int i = 0; i < ROWS; i++) {
        if (!wanted[i]) continue;
        test_tensor_check_unchanged(&rows[i], "appended rows");
        test_tensor_free(&rows[i]);
    }
}

/* Results of a decoding call. */
typedef struct results {
    test_tensor o, gates, lists, counts;
} results;

/* gates, q_index: read where the call takes them. */
static void attend(player *p, const piece *x, const test_tensor *q, const test_tensor *gates,
                   const test_tensor *q_index, int threads, test_random *random, results *r)
{
    const nsa_config *g = &p->c->config;
    const int64_t hs = g->params.scope == QUERN_NSA_SCOPE_HEAD ? g->h : g->hkv;
    const int64_t o[] = {x->n, g->h, g->dv}, gate[] = {x->n, g->h, 3},
                  lists[] = {hs, x->n, g->params.num_selected};
    const bool selects = p->lists != NULL, gives = g->params.gate == QUERN_NSA_GATE_GIVEN;
    r->o = test_tensor_make(random, g->dtype, 3, o, TEST_STRIDED);
    r->gates = test_tensor_make(random, QUERN_F32, 3, gate, TEST_UNALIGNED);
    r->lists = test_tensor_make(random, QUERN_I32, 3, lists, TEST_STRIDED);
    r->counts = test_tensor_make(random, QUERN_I32, 2, lists, TEST_CONTIGUOUS);
    quern_decode_tensors t = QUERN_DECODE_TENSORS_INIT;
    t.q = &q->view;
    t.o = &r->o.view;
    t.gates = gives ? &gates->view : &r->gates.view;
    if (q_index->buffer != NULL) t.q_index = &q_index->view;
    if (g->params.gate == QUERN_NSA_GATE_WEIGHTS) t.w_gate = weight(p, NSA_W_GATE);
    if (selects) {
        t.block_idx = &r->lists.view;
        t.block_count = &r->counts.view;
    }
    size_t bytes;
    quern_context *ctx = p->ctx[threads];
    if (quern_nsa_decode_workspace(ctx, &g->params, p->cache.cache, &x->batch, &t, &bytes) != QUERN_OK)
        fail_msg("%s", quern_last_error(ctx));
    test_workspace w = test_workspace_make(bytes);
    if (quern_nsa_decode(ctx, NULL, &g->params, p->cache.cache, &x->batch, &t, w.data, bytes) != QUERN_OK)
        fail_msg("%s", quern_last_error(ctx));
    test_workspace_close(&w);
    test_tensor_check_unchanged(q, "q");
    test_tensor_check_guards(&r->o, "o");
    test_tensor_check_guards(&r->lists, "block_idx");
    test_tensor_check_guards(&r->counts, "block_count");
}

static void results_free(results *r)
{
    test_tensor_free(&r->o), test_tensor_free(&r->gates), test_tensor_free(&r->lists),
        test_tensor_free(&r->counts);
}

static void check_lists(const player *p, const piece *x, const results *r)
{
    const nsa_config *g = &p->c->config;
    const int64_t k = g->params.num_selected, hs = r->lists.view.shape[0];
    int32_t *lists = test_tensor_get_i32(&r->lists), *counts = test_tensor_get_i32(&r->counts);
    for (int64_t h = 0; h < hs; h++)
        for (int64_t i = 0; i < x->n; i++) {
            const int64_t row = h * p->c->list_rows + x->rows[i];
            if (memcmp(lists + (h * x->n + i) * k, p->lists + row * k, (size_t)k * sizeof *lists) != 0 ||
                counts[h * x->n + i] != p->counts[row])
                fail_msg("list head %lld, row %lld: not the prefill's list", (long long)h,
                         (long long)x->rows[i]);
        }
    free(lists), free(counts);
}

static void decode(player *p, piece *x, test_random *random)
{
    const nsa_config *g = &p->c->config;
    test_tensor q = cache_rows(random, g->dtype, p->in[NSA_Q], x->rows, x->n, g->h, g->d),
                gates = {.bytes = 0}, q_index = {.bytes = 0};
    const bool gives = g->params.gate == QUERN_NSA_GATE_GIVEN, gated = !gives && !g->params.ungated;
    if (g->d_index > 0)
        q_index = cache_rows(random, g->dtype, p->in[NSA_Q_INDEX], x->rows, x->n,
                             g->params.scope == QUERN_NSA_SCOPE_HEAD ? g->h : g->hkv, g->d_index);
    if (gives) gates = cache_rows(random, QUERN_F32, p->in[NSA_GATES], x->rows, x->n, g->h, 3);
    results r[2];
    for (int i = 0; i < 2; i++) attend(p, x, &q, &gates, &q_index, i, random, &r[i]);
    assert_true(test_tensor_same_bits(&r[0].o, &r[1].o));
    if (gated) assert_true(test_tensor_same_bits(&r[0].gates, &r[1].gates));
    if (p->lists != NULL)
        for (int i = 0; i < 2; i++) check_lists(p, x, &r[i]);
    double *o = test_tensor_get(&r[0].o);
    const int64_t width = g->h * g->dv;
    for (int64_t i = 0; i < x->n; i++)
        memcpy(p->o + x->rows[i] * width, o + i * width, (size_t)width * sizeof *o);
    free(o);
    if (gated) {
        double *made = test_tensor_get(&r[0].gates);
        for (int64_t i = 0; i < x->n; i++)
            for (int64_t e = 0; e < 3 * g->h; e++) {
                const double gate = made[i * 3 * g->h + e],
                             expected = p->in[NSA_GATES][x->rows[i] * 3 * g->h + e];
                assert_true(gate == expected || (isnan(gate) && isnan(expected)));
            }
        free(made);
    }
    for (int i = 0; i < 2; i++) results_free(&r[i]);
    test_tensor_free(&q);
    if (gives) test_tensor_free(&gates);
    if (q_index.buffer != NULL) test_tensor_free(&q_index);
}

/* Pieces of any size to any subset, with roll-backs on the way, until every sequence is at its end. */
static void play(player *p, test_random *random)
{
    const nsa_config *g = &p->c->config;
    for (bool more = true; more; p->steps++) {
        piece x = {.batch = QUERN_CACHE_BATCH_INIT};
        int64_t room[NSA_MAX_BATCH];
        more = false;
        for (int64_t b = 0; b < g->batch; b++) {
            const int64_t length = g->lens[b], most = test_random_one_in(random, 3) ? STEP_MOST : 3;
            if (p->tokens[b] > 0 && p->tokens[b] < length && test_random_one_in(random, 4)) {
                const int64_t held = p->tokens[b] < 8 ? p->tokens[b] : 8,
                              n = test_random_int(random, 1, held);
                if (quern_cache_rollback(p->cache.cache, p->id[b], n) == QUERN_OK) p->tokens[b] -= n;
                else assert_true(p->cache.params.separate_win);
            }
            more = more || p->tokens[b] < length;
            room[b] = length - p->tokens[b] < most ? length - p->tokens[b] : most;
        }
        for (int64_t i = 0; i < g->batch; i++) {
            const int64_t b = p->steps % 2 ? i : g->batch - 1 - i;
            if (g->batch > 1 && test_random_one_in(random, 3)) continue;
            const int64_t n = test_random_int(random, 0, room[b]);
            piece_add(p, b, p->tokens[b], n, &x);
            p->tokens[b] += n;
        }
        append(p, &x, random);
        decode(p, &x, random);
    }
}

/* The rows that a cache packs of a sequence: entries behind tokens, before those of a ring and index keys. */
static const char *packed_entries(const player *p, const nsa_sequence *s, int64_t b, char **saved)
{
    const quern_cache_params *c = &p->cache.params;
    const int64_t row = c->kv_heads * (c->dim + c->dim_v) * (int64_t)quern_dtype_size(c->dtype),
                  ring = c->separate_win ? (c->window + 8 + c->step + 63) / 64 * 64 : 0,
                  kept = p->tokens[b] < ring ? p->tokens[b] : ring;
    size_t bytes;
    assert_int_equal(quern_cache_save(p->ctx[0], p->cache.cache, p->id[b], NULL, &bytes), QUERN_OK);
    *saved = malloc(bytes);
    assert_int_equal(quern_cache_save(p->ctx[0], p->cache.cache, p->id[b], *saved, &bytes), QUERN_OK);
    const int64_t index = p->tokens[b] * c->index_heads * c->index_dim * (int64_t)quern_dtype_size(c->dtype);
    return *saved + bytes - (size_t)((kept + oracle_nsa_entries(&s->a)) * row + index);
}

/* The cache's entries have the bits of the prefill's. */
static void check_entries(const player *p)
{
    static const nsa_slot slots[] = {NSA_K_CMP, NSA_V_CMP};
    if (!(nsa_forward_outputs(p->c) & NSA_BIT(NSA_K_CMP))) return;
    for (int64_t b = 0; b < p->c->config.batch; b++) {
        const nsa_sequence s = nsa_sequence_of(p->c, b);
        char *saved;
        const char *at = packed_entries(p, &s, b, &saved);
        for (int64_t i = 0; i < 2 * s.a.hkv * oracle_nsa_entries(&s.a); i++) {
            const quern_tensor *t = &p->c->tensor[slots[i % 2]].view;
            const int64_t h = i / 2 % s.a.hkv, e = i / 2 / s.a.hkv,
                          size = (int64_t)quern_dtype_size(t->dtype);
            const size_t bytes = (size_t)(t->shape[2] * size);
            assert_memory_equal((const char *)t->data +
                                    ((s.entry + e) * t->strides[0] + h * t->strides[1]) * size,
                                at, bytes);
            at += bytes;
        }
        free(saved);
    }
}

static void check_play(int trial, bool nan, test_random *random)
{
    const nsa_config config = config_of(random);
    player p;
    char text[600], name[700];
    player_open(&p, &config, test_random_level(random), nan, random);
    play(&p, random);
    if (!nan) check_entries(&p);
    nsa_reference *r = nsa_reference_new(p.c, true);
    nsa_reference_take_lists(r);
    nsa_reference_forward(r);
    snprintf(name, sizeof name, "o [trial %d %s]", trial, nsa_config_describe(&config, text));
    test_check(name, p.o, r->value[config.params.ungated ? NSA_O_SLC : NSA_O],
               p.row0[config.batch] * config.h * config.dv, test_forward_bound(config.dtype));
    nsa_reference_free(r);
    player_close(&p);
}

static void any_pieces_give_the_prefill(void **state)
{
    (void)state;
    const uint64_t seed = test_seed("any_pieces_give_the_prefill", 91);
    for (int trial = 0; trial < test_trials(120); trial++) {
        test_random random;
        if (test_trial(seed, trial, &random)) check_play(trial, false, &random);
    }
}

static void nan_goes_where_the_equations_carry_it(void **state)
{
    (void)state;
    const uint64_t seed = test_seed("nan_goes_where_the_equations_carry_it", 93);
    for (int trial = 0; trial < test_trials(20); trial++) {
        test_random random;
        if (test_trial(seed, trial, &random)) check_play(trial, true, &random);
    }
}

/* A cache with a few tokens, and a call that is right. */
typedef struct fixture {
    quern_context *ctx;
    cache_case cache;
    float rows[24 * 32], out[24 * 32];
    int32_t lists[64];
    char workspace[1 << 20];
    int32_t id;
    int64_t count;
    quern_tensor kv, q, o, idx;
    quern_cache_batch batch;
    quern_cache_tensors t;
    quern_decode_tensors d;
    quern_nsa_params params;
} fixture;

static void fixture_open(fixture *f, int64_t index_heads)
{
    memset(f, 0, sizeof *f);
    const quern_cache_params params = {sizeof params, QUERN_F32, 1,  1,  16,          16, 100, 0, 0, 8, 4, 0,
                                       false,         true,      10, 20, index_heads, 16};
    cache_case_make(&f->cache, &params);
    f->ctx = test_context(QUERN_CPU_LEVEL_AUTO, 1);
    for (int i = 0; i < 24 * 32; i++) f->rows[i] = (float)(i % 7);
    const int64_t kv[] = {20, 1, 16}, q[] = {2, 2, 16}, idx[] = {1, 2, 4};
    f->count = 20;
    f->kv = quern_tensor_contiguous(f->rows, QUERN_F32, 3, kv);
    f->q = quern_tensor_contiguous(f->rows, QUERN_F32, 3, q);
    f->o = quern_tensor_contiguous(f->out, QUERN_F32, 3, q);
    f->idx = quern_tensor_contiguous(f->lists, QUERN_I32, 3, idx);
    f->batch = (quern_cache_batch){sizeof f->batch, 1, &f->id, &f->count};
    f->t = (quern_cache_tensors)QUERN_CACHE_TENSORS_INIT;
    f->d = (quern_decode_tensors)QUERN_DECODE_TENSORS_INIT;
    f->t.k = f->t.v = f->t.k_win = f->t.v_win = &f->kv;
    if (index_heads > 0) f->t.k_index = &f->kv;
    f->d.q = &f->q;
    f->d.o = &f->o;
    f->d.block_idx = &f->idx;
    f->params = (quern_nsa_params)QUERN_NSA_PARAMS_INIT;
    f->params.block_size = 8;
    f->params.stride = 4;
    f->params.num_selected = 4;
    f->params.window = 10;
    if (quern_cache_append(f->ctx, NULL, f->cache.cache, &f->batch, &f->t, f->workspace,
                           sizeof f->workspace) != QUERN_OK)
        fail_msg("%s", quern_last_error(f->ctx));
    f->count = 2;
}

static void refuse(fixture *f, const char *sentence)
{
    void *before = cache_case_copy(&f->cache);
    assert_int_equal(quern_nsa_decode(f->ctx, NULL, &f->params, f->cache.cache, &f->batch, &f->d,
                                      f->workspace, sizeof f->workspace),
                     QUERN_ERR_INVALID_ARGUMENT);
    if (strstr(quern_last_error(f->ctx), sentence) == NULL)
        fail_msg("'%s' is not in '%s'", sentence, quern_last_error(f->ctx));
    cache_case_check_same(&f->cache, before);
    for (int i = 0; i < 24 * 32; i++) assert_true(f->out[i] == 0.0f);
}

static void what_a_decoding_call_refuses(void **state)
{
    (void)state;
    fixture f;
    fixture_open(&f, 0);
    const quern_nsa_params good = f.params;
#define REFUSE(change, sentence)                                                                             \
    f.params = good;                                                                                         \
    f.params.change;                                                                                         \
    refuse(&f, sentence)
    REFUSE(causal = false, "causal is false");
    REFUSE(tile = 2, "tile is 2");
    REFUSE(compressed_visibility = QUERN_NSA_VISIBLE_STARTED, "compressed_visibility is started");
    REFUSE(max_compressed_groups = 1, "max_compressed_groups is 1");
    REFUSE(compress = QUERN_NSA_COMPRESS_GIVEN, "compress is given");
    REFUSE(compress = QUERN_NSA_COMPRESS_LINEAR, "compress is 1: that of the cache, 0");
    REFUSE(selection = QUERN_NSA_LIST_GIVEN, "selection is given");
    REFUSE(selection = QUERN_NSA_LIST_INDEXED, "selection is indexed: a cache with index_heads is accepted");
    REFUSE(ungated = true, "ungated with selection computed");
    REFUSE(block_size = 4, "block_size is 4, stride 4: those of the cache, 8 and 4");
    REFUSE(stride = 8, "block_size is 8, stride 8");
    REFUSE(window = 11, "window is 11: at most that of the cache's ring, 10");
    REFUSE(num_selected = 2, "num_selected is 2: at least the 3 forced blocks");
    REFUSE(metric = QUERN_NSA_METRIC_MEAN_LOGIT, "metric mean-logit with block_size 8");
    REFUSE(gate = QUERN_NSA_GATE_WEIGHTS, "w_gate is NULL");
    REFUSE(gate = QUERN_NSA_GATE_GIVEN, "gates is NULL");
    REFUSE(gate = (quern_nsa_gate_kind)3, "gate");
    REFUSE(scale = -1.0f, "scale");
    REFUSE(branches = QUERN_NSA_BRANCH_WIN, "block_idx is given");
    f.params = good;
    f.d.q_index = &f.q;
    refuse(&f, "q_index is given: with selection indexed it is accepted");
    f.d.q_index = NULL;
    f.d.w_gate = &f.q;
    refuse(&f, "w_gate is given");
    f.d.w_gate = NULL;
    f.d.lse = &f.q;
    refuse(&f, "lse is given");
    f.d.lse = NULL;
    f.q.shape[1] = 0;
    refuse(&f, "q has 0 heads");
    f.q.shape[1] = 2;
    const int64_t heads_first[] = {4, 2, 16}, tokens_first[] = {2, 4, 16};
    const quern_tensor q = f.q, o = f.o;
    f.q = quern_tensor_contiguous(f.rows, QUERN_F32, 3, heads_first);
    f.o = quern_tensor_contiguous(f.out, QUERN_F32, 3, tokens_first);
    refuse(&f, "q has 4 x 2 tokens and heads, o 2 x 4: the order [T, H, D] is accepted");
    f.q = q, f.o = o;
    f.idx.shape[2] = 3;
    refuse(&f, "block_idx.shape[2] is 3: 4 is accepted");
    f.idx.shape[2] = 4;
    /* The ring keeps 8 tokens for roll-backs. */
    assert_int_equal(quern_cache_rollback(f.cache.cache, 0, 5), QUERN_OK);
    assert_int_equal(quern_cache_rollback(f.cache.cache, 0, 4), QUERN_ERR_INVALID_ARGUMENT);
    assert_int_equal(quern_cache_rollback(f.cache.cache, 0, 3), QUERN_OK);
    if (quern_nsa_decode(f.ctx, NULL, &f.params, f.cache.cache, &f.batch, &f.d, f.workspace,
                         sizeof f.workspace) != QUERN_OK)
        fail_msg("%s", quern_last_error(f.ctx));
    f.count = 21;
    assert_int_equal(
        quern_cache_append(f.ctx, NULL, f.cache.cache, &f.batch, &f.t, f.workspace, sizeof f.workspace),
        QUERN_ERR_INVALID_ARGUMENT);
    assert_non_null(strstr(quern_last_error(f.ctx), "counts[0] is 21: 0 to 20"));
    cache_case_free(&f.cache);
    quern_context_destroy(f.ctx);
}

static void what_a_call_by_the_indexer_refuses(void **state)
{
    (void)state;
    fixture f;
    fixture_open(&f, 1);
    const int64_t one_head[] = {2, 1, 16};
    quern_tensor q_index = quern_tensor_contiguous(f.rows, QUERN_F32, 3, one_head);
    const quern_tensor index = q_index;
    f.d.q_index = &q_index;
    f.d.block_idx = NULL;
    f.params.selection = QUERN_NSA_LIST_INDEXED;
    const quern_nsa_params good = f.params;
    REFUSE(num_selected = 2, "num_selected is 2: at least the 3 forced blocks");
    REFUSE(selection = QUERN_NSA_LIST_COMPUTED, "q_index is given");
    REFUSE(scope = QUERN_NSA_SCOPE_HEAD, "q_index.shape[1] is 1: 2 is accepted");
    REFUSE(ungated = true, "ungated with branches 7");
    f.params = good;
    f.d.q_index = NULL;
    refuse(&f, "q_index is NULL");
    f.d.q_index = &q_index;
    q_index.shape[1] = 2;
    refuse(&f, "q_index.shape[1] is 2: 1 is accepted");
    q_index = index;
    q_index.shape[2] = 8;
    refuse(&f, "index.shape[2] is 1024: 512 is accepted");
    q_index = index;
    q_index.dtype = QUERN_BF16;
    refuse(&f, "q_index");
    q_index = index;
    /* An append without the index keys is refused, and nothing moves. */
    f.t.k_index = NULL;
    f.count = 20;
    assert_int_equal(
        quern_cache_append(f.ctx, NULL, f.cache.cache, &f.batch, &f.t, f.workspace, sizeof f.workspace),
        QUERN_ERR_INVALID_ARGUMENT);
    assert_non_null(strstr(quern_last_error(f.ctx), "k_index is NULL"));
    f.count = 2;
    f.params = good;
    if (quern_nsa_decode(f.ctx, NULL, &f.params, f.cache.cache, &f.batch, &f.d, f.workspace,
                         sizeof f.workspace) != QUERN_OK)
        fail_msg("%s", quern_last_error(f.ctx));
    cache_case_free(&f.cache);
    quern_context_destroy(f.ctx);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(any_pieces_give_the_prefill),
                                       cmocka_unit_test(nan_goes_where_the_equations_carry_it),
                                       cmocka_unit_test(what_a_decoding_call_refuses),
                                       cmocka_unit_test(what_a_call_by_the_indexer_refuses)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
