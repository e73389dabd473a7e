/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * dsv4_state_test.c - streaming states: whatever the chunks, subsets of the batch, roll-backs and copies,
 * every entry has the bits of the one-shot call. Sequences that begin elsewhere than at position 0 have a
 * part of the table of angles; those with a block before their first one begin with its rows.
 */
#include "cpu/cpu.h"
#include "cmocka_c11.h"
#include "dsv4_states.h"
#include "tensor.h"

#include <quern/dsv4.h>

#include <stdlib.h>
#include <string.h>

enum { SEQUENCES = 4, WIDTH_MOST = 512, TOKENS_MOST = 60, POSITIONS = 256 };

/* A compressor, and sequences with the entries that the one-shot stage makes of them. */
typedef struct stream {
    quern_dsv4_compress_params params;
    int64_t width, ring, columns, row_bytes, batch, tokens, origin, entries;
    quern_cpu_level level;
    test_tensor proj[SEQUENCES], b_a, b_b, prev_b, norm_weight, cos_sin;
    unsigned char *expected[SEQUENCES];
    float *pooled[SEQUENCES];
} stream;

static test_tensor matrix(test_random *random, quern_dtype dtype, int64_t rows, int64_t columns)
{
    const int64_t shape[] = {rows, columns};
    test_tensor t = test_tensor_make(random, dtype, 2, shape, TEST_UNALIGNED);
    test_tensor_normal(&t, random, 1.5);
    return t;
}

static const quern_tensor *view_or_null(const test_tensor *t)
{
    return t->buffer != NULL ? &t->view : NULL;
}

/* A view with a leading extent of 1. */
static quern_tensor batch_of(quern_tensor v)
{
    for (int i = 2; i > 0; i--) {
        v.shape[i] = v.shape[i - 1];
        v.strides[i] = v.strides[i - 1];
    }
    v.ndim = 3;
    v.shape[0] = 1;
    return v;
}

static void one_shot(stream *s, int64_t b)
{
    static const entry_format formats[] = {ENTRY_ROWS, ENTRY_FP8, ENTRY_FP8_POWER, ENTRY_FP4, ENTRY_ROW584};
    const bool bytes = s->params.format != QUERN_DSV4_ROWS;
    const int64_t rows[] = {1, s->entries, bytes ? s->row_bytes : s->width},
                  pooled[] = {1, s->entries, s->width};
    s->expected[b] = calloc((size_t)(s->entries * s->row_bytes) + 1, 1);
    s->pooled[b] = calloc((size_t)(s->entries * s->width) + 1, sizeof(float));
    const quern_dtype dtype = bytes                          ? QUERN_U8
                              : s->row_bytes == s->width * 4 ? QUERN_F32
                                                             : s->proj[0].view.dtype;
    pool_args args = {.ratio = s->params.ratio,
                      .width = s->width,
                      .overlap = s->params.kind == QUERN_DSV4_CSA,
                      .batch = 1,
                      .start_position = s->origin,
                      .proj = batch_of(s->proj[b].view),
                      .bias_a = s->b_a.view,
                      .pooled = quern_tensor_contiguous(s->pooled[b], QUERN_F32, 3, pooled),
                      .out = quern_tensor_contiguous(s->expected[b], dtype, 3, rows)};
    if (args.overlap) args.bias_b = s->b_b.view;
    if (s->prev_b.buffer != NULL) {
        args.prev_b = s->prev_b.view;
        args.prev_b.data = (char *)args.prev_b.data +
                           b * args.prev_b.strides[0] * (int64_t)quern_dtype_size(args.prev_b.dtype);
    }
    args.entry = (entry_args){.round_bf16 = s->params.round_bf16,
                              .eps = 1e-6f,
                              .rope_last = s->params.rope_last,
                              .hadamard = s->params.hadamard,
                              .format = formats[s->params.format]};
    if (s->norm_weight.buffer != NULL) args.entry.norm_weight = s->norm_weight.view;
    if (s->cos_sin.buffer != NULL) args.entry.cos_sin = s->cos_sin.view;
    const stage_exec exec = {.threads = 2, .cpu_level = s->level};
    test_workspace w = test_workspace_make(quern_backend_cpu.pool_forward.workspace(&exec, &args));
    assert_int_equal(quern_backend_cpu.pool_forward.run(&exec, &args, w.data), QUERN_OK);
    test_workspace_close(&w);
}

static stream stream_make(test_random *random)
{
    static const int64_t widths[] = {1, 8, 16, 33, 64, 128};
    static const quern_dtype dtypes[] = {QUERN_F32, QUERN_BF16, QUERN_F16};
    stream s;
    memset(&s, 0, sizeof s);
    s.params = (quern_dsv4_compress_params)QUERN_DSV4_COMPRESS_PARAMS_INIT;
    s.params.kind = test_random_one_in(random, 2) ? QUERN_DSV4_CSA : QUERN_DSV4_HCA;
    s.params.ratio = test_random_one_in(random, 4) ? 16 : test_random_int(random, 1, 7);
    s.params.rope_last = test_random_one_in(random, 2);
    s.params.round_bf16 = test_random_one_in(random, 3);
    s.params.format = (quern_dsv4_format)(test_random_one_in(random, 2) ? 0 : test_random_int(random, 1, 4));
    s.width = s.params.format == QUERN_DSV4_ROW584 ? 512
              : s.params.format == QUERN_DSV4_FP4  ? 64
                                                   : widths[test_random_int(random, 0, 5)];
    s.params.hadamard = (s.width & (s.width - 1)) == 0 && test_random_one_in(random, 3);
    s.origin = (s.params.rope_last ? 1 : s.params.ratio) * test_random_int(random, 0, 4);
    s.ring = test_random_int(random, 0, 8);
    s.level = test_random_level(random);
    s.batch = test_random_int(random, 1, SEQUENCES);
    s.tokens = test_random_int(random, 0, TOKENS_MOST);
    s.entries = s.tokens / s.params.ratio;
    s.columns = (s.params.kind == QUERN_DSV4_CSA ? 4 : 2) * s.width;
    const quern_dtype dtype = dtypes[test_random_int(random, 0, 2)],
                      weight = test_random_one_in(random, 2) ? dtype : QUERN_F32;
    for (int64_t b = 0; b < s.batch; b++) s.proj[b] = matrix(random, dtype, s.tokens, s.columns);
    s.b_a = matrix(random, weight, s.params.ratio, s.width);
    if (s.params.kind == QUERN_DSV4_CSA) s.b_b = matrix(random, weight, s.params.ratio, s.width);
    const int64_t before[] = {s.batch, s.params.ratio, 2 * s.width};
    if (s.params.kind == QUERN_DSV4_CSA && test_random_one_in(random, 2)) {
        s.prev_b = test_tensor_make(random, weight, 3, before, TEST_CONTIGUOUS);
        test_tensor_normal(&s.prev_b, random, 1);
        s.origin += s.params.ratio;
    }
    if (test_random_one_in(random, 2)) {
        s.norm_weight = test_tensor_make(random, weight, 1, &s.width, TEST_UNALIGNED);
        test_tensor_normal(&s.norm_weight, random, 1);
    }
    const int64_t rope = s.params.format == QUERN_DSV4_ROW584 ? 64 : s.width / 2 * 2;
    if (rope > 0 && test_random_one_in(random, 2)) s.cos_sin = matrix(random, weight, POSITIONS, rope);
    static const int64_t extra[] = {0, 4, 4};
    s.row_bytes = s.params.format == QUERN_DSV4_ROWS
                      ? s.width * (test_random_one_in(random, 2) ? 4 : (int64_t)quern_dtype_size(dtype))
                  : s.params.format == QUERN_DSV4_ROW584 ? 584
                  : s.params.format == QUERN_DSV4_FP4    ? s.width / 2 + s.width / 32
                                                         : s.width + extra[s.params.format];
    for (int64_t b = 0; b < s.batch; b++) one_shot(&s, b);
    return s;
}

static void stream_free(stream *s)
{
    for (int64_t b = 0; b < s->batch; b++) {
        test_tensor_check_unchanged(&s->proj[b], "proj");
        test_tensor_free(&s->proj[b]);
        free(s->expected[b]), free(s->pooled[b]);
    }
    test_tensor *rest[] = {&s->b_a, &s->b_b, &s->prev_b, &s->norm_weight, &s->cos_sin};
    for (int i = 0; i < 5; i++)
        if (rest[i]->buffer != NULL) test_tensor_free(rest[i]);
}

/* The states of the sequences, and which slots they stand in; one slot is free. */
typedef struct held_states {
    dsv4_states all;
    int32_t slot[SEQUENCES + 1];
    int64_t before; /* rows of a block before the first one */
} held_states;

static held_states states_new(const stream *s)
{
    held_states h = {.all = dsv4_states_make(&s->params, s->width, s->ring, SEQUENCES + 1),
                     .before = s->prev_b.buffer != NULL ? s->params.ratio : 0};
    for (int32_t i = 0; i <= SEQUENCES; i++) h.slot[i] = i;
    return h;
}

/* Tokens of sequence b so far. */
static int64_t length(const held_states *h, int64_t b)
{
    return h->all.position[h->slot[b]] - h->before;
}

/* Copies a state to the free slot and overwrites the old one. */
static void move_state(held_states *h, int64_t b)
{
    const int32_t from = h->slot[b], to = h->slot[SEQUENCES];
    float *rows = h->all.rows;
    const size_t bytes = (size_t)h->all.floats * sizeof *rows;
    memcpy(rows + to * h->all.floats, rows + from * h->all.floats, bytes);
    h->all.merged[to] = h->all.merged[from];
    h->all.position[to] = h->all.position[from];
    memset(rows + from * h->all.floats, 0x5a, bytes);
    h->slot[b] = to;
    h->slot[SEQUENCES] = from;
}

static void call(const stream *s, quern_context *ctx, held_states *h, const int32_t *slots,
                 const int64_t *counts, int64_t batch, const quern_tensor *proj, const quern_tensor *out,
                 const quern_tensor *pooled)
{
    const int64_t first = s->origin - h->before;
    quern_tensor cos_sin = s->cos_sin.view;
    cos_sin.data =
        (char *)cos_sin.data + first * cos_sin.strides[0] * (int64_t)quern_dtype_size(cos_sin.dtype);
    cos_sin.shape[0] -= first;
    quern_dsv4_append_tensors t = QUERN_DSV4_APPEND_TENSORS_INIT;
    t.proj = proj;
    t.out = out;
    t.pooled = pooled;
    t.b_a = &s->b_a.view;
    t.b_b = view_or_null(&s->b_b);
    t.norm_weight = view_or_null(&s->norm_weight);
    t.cos_sin = s->cos_sin.buffer != NULL ? &cos_sin : NULL;
    if (dsv4_states_append(&h->all, ctx, slots, counts, batch, &t) != QUERN_OK)
        fail_msg("%s", quern_last_error(ctx));
}

static quern_tensor out_of(const stream *s, int64_t rows, void *data)
{
    const bool bytes = s->params.format != QUERN_DSV4_ROWS;
    const int64_t shape[] = {rows, bytes ? s->row_bytes : s->width};
    const quern_dtype dtype = bytes                          ? QUERN_U8
                              : s->row_bytes == s->width * 4 ? QUERN_F32
                                                             : s->proj[0].view.dtype;
    return quern_tensor_contiguous(data, dtype, 2, shape);
}

/* Appends the rows of the blocks before: 0, but for series b. */
static void append_before(const stream *s, quern_context *ctx, held_states *h)
{
    const quern_tensor *prev = &s->prev_b.view;
    const int64_t rows = s->batch * h->before, shape[] = {rows, s->columns},
                  half = 2 * s->width * (int64_t)quern_dtype_size(prev->dtype);
    char *proj = calloc((size_t)(rows * 2 * half), 1);
    void *entries = malloc((size_t)(2 * s->batch * s->row_bytes));
    int64_t counts[SEQUENCES];
    for (int64_t i = 0; i < rows; i++)
        memcpy(proj + (2 * i + 1) * half, (char *)prev->data + i * half, (size_t)half);
    for (int64_t b = 0; b < s->batch; b++) counts[b] = h->before;
    const quern_tensor p = quern_tensor_contiguous(proj, prev->dtype, 2, shape),
                       out = out_of(s, 2 * s->batch, entries);
    call(s, ctx, h, h->slot, counts, s->batch, &p, &out, NULL);
    free(proj), free(entries);
}

/* Appends the next counts[b] tokens of each sequence in one call and compares the entries. */
static void append(const stream *s, quern_context *ctx, held_states *h, const int64_t *counts)
{
    int32_t slots[SEQUENCES];
    int64_t subset[SEQUENCES], at[SEQUENCES], had[SEQUENCES], batch = 0, tokens = 0, done = 0;
    for (int64_t b = 0; b < s->batch; b++) {
        if (counts[b] < 0) continue;
        slots[batch] = h->slot[b];
        at[batch] = b;
        had[batch] = length(h, b);
        subset[batch++] = counts[b];
        tokens += counts[b];
    }
    const int64_t entries = tokens / s->params.ratio + batch, shape[] = {tokens, s->columns},
                  pooled_shape[] = {entries, s->width};
    const size_t row = (size_t)s->columns * quern_dtype_size(s->proj[0].view.dtype);
    unsigned char *rows = malloc((size_t)tokens * row + 1), *to = rows,
                  *out = malloc((size_t)(entries * s->row_bytes) + 1);
    float *pooled = malloc((size_t)(entries * s->width) * sizeof *pooled + 1);
    for (int64_t i = 0; i < batch; i++) {
        memcpy(to, (char *)s->proj[at[i]].view.data + (size_t)had[i] * row, (size_t)subset[i] * row);
        to += (size_t)subset[i] * row;
    }
    const quern_tensor proj = quern_tensor_contiguous(rows, s->proj[0].view.dtype, 2, shape),
                       o = out_of(s, entries, out),
                       p = quern_tensor_contiguous(pooled, QUERN_F32, 2, pooled_shape);
    call(s, ctx, h, slots, subset, batch, &proj, &o, entries % 2 ? &p : NULL);
    for (int64_t i = 0; i < batch; i++) {
        const int64_t old = had[i] / s->params.ratio, n = (had[i] + subset[i]) / s->params.ratio - old;
        if (n == 0) continue;
        assert_memory_equal(out + done * s->row_bytes, s->expected[at[i]] + old * s->row_bytes,
                            (size_t)(n * s->row_bytes));
        if (entries % 2)
            assert_memory_equal(pooled + done * s->width, s->pooled[at[i]] + old * s->width,
                                (size_t)(n * s->width) * sizeof *pooled);
        done += n;
    }
    free(rows), free(out), free(pooled);
}

/* Appends pieces, with roll-backs and moves between them, until every sequence is complete. */
static void play(const stream *s, test_random *random, quern_context *ctx, held_states *h)
{
    int64_t counts[SEQUENCES];
    if (h->before > 0) append_before(s, ctx, h);
    for (bool more = s->tokens > 0; more;) {
        more = false;
        for (int64_t b = 0; b < s->batch; b++) {
            const int64_t ring = dsv4_states_held(&h->all, h->slot[b]), had = length(h, b),
                          kept = ring < had ? ring : had;
            if (kept > 0 && had < s->tokens && test_random_one_in(random, 4))
                h->all.position[h->slot[b]] -= (int32_t)test_random_int(random, 1, kept);
            if (test_random_one_in(random, 6)) move_state(h, b);
            const int64_t left = s->tokens - length(h, b), most = test_random_one_in(random, 3) ? 20 : 3;
            counts[b] =
                test_random_one_in(random, 3) ? -1 : test_random_int(random, 0, left < most ? left : most);
            more = more || left > 0;
        }
        append(s, ctx, h, counts);
    }
}

static void any_chunking_gives_the_bits_of_one_shot(void **state)
{
    (void)state;
    const uint64_t seed = test_seed("any_chunking", 77);
    for (int trial = 0; trial < test_trials(300); trial++) {
        test_random random;
        if (!test_trial(seed, trial, &random)) continue;
        stream s = stream_make(&random);
        quern_context *ctx = test_context(s.level, (int32_t)test_random_int(&random, 1, 3));
        held_states held = states_new(&s);
        play(&s, &random, ctx, &held);
        dsv4_states_free(&held.all);
        stream_free(&s);
        quern_context_destroy(ctx);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(any_chunking_gives_the_bits_of_one_shot)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
