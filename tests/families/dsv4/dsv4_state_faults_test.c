/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* dsv4_state_faults_test.c - appends that are refused, and saved states that are damaged or forged: states
 * and outputs stay as they were. */
#include "cmocka_c11.h"
#include "context.h"
#include "tensor.h"

#include <quern/dsv4.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* A state in memory of exactly its size, at an odd address. */
typedef struct held_state {
    unsigned char *memory;
    quern_dsv4_state *state;
} held_state;

/* A CSA state of 16 channels, ratio 4, ring 2, and what an append of a few tokens takes. */
typedef struct fixture {
    quern_context *ctx;
    quern_dsv4_compress_params params;
    test_tensor b_a, b_b;
    held_state held;
    float rows[8 * 64], pooled[2 * 16];
    unsigned char out[2 * 20];
    quern_tensor proj, out_view, pooled_view;
    quern_dsv4_append_tensors t;
} fixture;

enum { WIDTH = 16, RING = 2 };

static test_tensor bias(test_random *random)
{
    static const int64_t shape[] = {4, WIDTH};
    test_tensor t = test_tensor_make(random, QUERN_F32, 2, shape, TEST_UNALIGNED);
    test_tensor_normal(&t, random, 1.5);
    return t;
}

static size_t state_bytes(const fixture *f)
{
    size_t bytes;
    assert_int_equal(quern_dsv4_state_size(&f->params, WIDTH, RING, &bytes), QUERN_OK);
    return bytes;
}

static held_state state_new(const fixture *f)
{
    held_state h = {malloc(state_bytes(f) + 1), NULL};
    assert_int_equal(quern_dsv4_state_create(&f->params, WIDTH, RING, h.memory + 1, state_bytes(f), &h.state),
                     QUERN_OK);
    return h;
}

static void fixture_open(fixture *f, int64_t tokens)
{
    test_random random = {3};
    memset(f, 0, sizeof *f);
    f->ctx = test_context(QUERN_CPU_LEVEL_AUTO, 1);
    f->params = (quern_dsv4_compress_params)QUERN_DSV4_COMPRESS_PARAMS_INIT;
    f->params.format = QUERN_DSV4_FP8;
    f->b_a = bias(&random);
    f->b_b = bias(&random);
    f->held = state_new(f);
    for (int i = 0; i < 8 * 64; i++) f->rows[i] = (float)test_random_normal(&random);
    const int64_t proj[] = {tokens, 64}, out[] = {tokens / 4, 20}, pooled[] = {tokens / 4, 16};
    f->proj = quern_tensor_contiguous(f->rows, QUERN_F32, 2, proj);
    f->out_view = quern_tensor_contiguous(f->out, QUERN_U8, 2, out);
    f->pooled_view = quern_tensor_contiguous(f->pooled, QUERN_F32, 2, pooled);
    f->t = (quern_dsv4_append_tensors)QUERN_DSV4_APPEND_TENSORS_INIT;
    f->t.proj = &f->proj;
    f->t.out = &f->out_view;
    f->t.pooled = &f->pooled_view;
    f->t.b_a = &f->b_a.view;
    f->t.b_b = &f->b_b.view;
}

static void fixture_close(fixture *f)
{
    free(f->held.memory);
    test_tensor_free(&f->b_a), test_tensor_free(&f->b_b);
    quern_context_destroy(f->ctx);
}

static quern_status call(fixture *f, quern_dsv4_state *const *states, const int64_t *counts, int64_t batch)
{
    static unsigned char workspace[1 << 16];
    return quern_dsv4_append(f->ctx, NULL, &f->params, states, counts, batch, &f->t, workspace,
                             sizeof workspace);
}

/* The call fails with a sentence that holds `word`; state and outputs are as they were. */
static void refused(fixture *f, quern_dsv4_state *const *states, const int64_t *counts, int64_t batch,
                    const char *word)
{
    const size_t bytes = state_bytes(f);
    unsigned char *kept = malloc(bytes);
    memcpy(kept, f->held.memory + 1, bytes);
    memset(f->out, 0x5a, sizeof f->out), memset(f->pooled, 0x5a, sizeof f->pooled);
    assert_int_not_equal(call(f, states, counts, batch), QUERN_OK);
    if (strstr(quern_last_error(f->ctx), word) == NULL)
        fail_msg("'%s' lacks '%s'", quern_last_error(f->ctx), word);
    assert_memory_equal(kept, f->held.memory + 1, bytes);
    for (size_t i = 0; i < sizeof f->out; i++) assert_int_equal(f->out[i], 0x5a);
    for (size_t i = 0; i < sizeof f->pooled; i++) assert_int_equal(((unsigned char *)f->pooled)[i], 0x5a);
    free(kept);
}

static void faults_leave_states_unchanged(void **state)
{
    (void)state;
    fixture f;
    fixture_open(&f, 8);
    quern_dsv4_state *const twice[] = {f.held.state, f.held.state};
    const int64_t all = 8, halves[] = {4, 4}, negative = -1;
    refused(&f, twice, halves, 2, "once");
    refused(&f, &f.held.state, &negative, 1, "counts[0] is -1");
    f.rows[5 * 64 + 3] = NAN; /* the second entry */
    refused(&f, &f.held.state, &all, 1, "(row 1, column 3)");
    f.rows[5 * 64 + 3] = INFINITY;
    refused(&f, &f.held.state, &all, 1, "column 3) is");
    f.rows[5 * 64 + 3] = 1;
    f.proj.shape[0] = 7;
    refused(&f, &f.held.state, &all, 1, "proj.shape[0] is 7");
    f.proj.shape[0] = 8;
    float table[4 * 8] = {0};
    const int64_t table_shape[] = {4, 8};
    const quern_tensor cos_sin = quern_tensor_contiguous(table, QUERN_F32, 2, table_shape);
    f.t.cos_sin = &cos_sin; /* the second entry stands at position 4 */
    refused(&f, &f.held.state, &all, 1, "position 4");
    f.t.cos_sin = NULL;
    float prev[4 * 32] = {0};
    const int64_t prev_shape[] = {1, 4, 32};
    const quern_tensor prev_b = quern_tensor_contiguous(prev, QUERN_F32, 3, prev_shape);
    assert_int_equal(call(&f, &f.held.state, &all, 1), QUERN_OK);
    f.t.prev_b = &prev_b;
    refused(&f, &f.held.state, &all, 1, "begun");
    assert_int_not_equal(quern_dsv4_state_rollback(f.held.state, 3), QUERN_OK);
    assert_non_null(strstr(quern_last_error(f.ctx), "0 to 2 tokens"));
    int64_t position;
    assert_int_equal(quern_dsv4_state_position(f.held.state, &position, NULL), QUERN_OK);
    assert_int_equal(position, 8);
    fixture_close(&f);
}

/* Every bit of a saved state that flips, every length, and other dims are noticed. */
static void damaged_states_are_refused(void **state)
{
    (void)state;
    fixture f;
    fixture_open(&f, 8);
    const int64_t all = 8;
    size_t bytes;
    quern_dsv4_state *other = f.held.state;
    assert_int_equal(call(&f, &f.held.state, &all, 1), QUERN_OK);
    assert_int_equal(quern_dsv4_state_save(f.held.state, NULL, &bytes), QUERN_OK);
    unsigned char *saved = malloc(bytes), *memory = malloc(state_bytes(&f));
    assert_int_equal(quern_dsv4_state_save(f.held.state, saved, &bytes), QUERN_OK);
    for (size_t i = 0; i < bytes; i++) {
        saved[i] ^= (unsigned char)(1 << i % 8);
        assert_int_equal(
            quern_dsv4_state_restore(&f.params, 16, 2, saved, bytes, memory, state_bytes(&f), &other),
            QUERN_ERR_FORMAT);
        saved[i] ^= (unsigned char)(1 << i % 8);
    }
    for (size_t n = 0; n < bytes; n += 7)
        assert_int_equal(
            quern_dsv4_state_restore(&f.params, 16, 2, saved, n, memory, state_bytes(&f), &other),
            QUERN_ERR_FORMAT);
    quern_dsv4_compress_params p = f.params;
    p.ratio = 5;
    assert_int_equal(quern_dsv4_state_restore(&p, 16, 2, saved, bytes, memory, state_bytes(&f), &other),
                     QUERN_ERR_FORMAT);
    unsigned char *large = malloc(1 << 16);
    assert_int_equal(quern_dsv4_state_restore(&f.params, 32, 2, saved, bytes, large, 1 << 16, &other),
                     QUERN_ERR_FORMAT);
    assert_int_equal(quern_dsv4_state_restore(&f.params, 16, 3, saved, bytes, large, 1 << 16, &other),
                     QUERN_ERR_FORMAT);
    assert_int_equal(
        quern_dsv4_state_restore(&f.params, 16, 2, saved, bytes, memory, state_bytes(&f) - 1, &other),
        QUERN_ERR_WORKSPACE);
    assert_ptr_equal(other, f.held.state);
    assert_int_equal(
        quern_dsv4_state_restore(&f.params, 16, 2, saved, bytes, memory, state_bytes(&f), &other), QUERN_OK);
    free(saved), free(memory), free(large);
    fixture_close(&f);
}

/* A saved state whose header has `value` at a byte, with the checksum of the bytes: FNV-1a, its own place
 * read as 0. */
static void forge(unsigned char *saved, size_t bytes, size_t at, int64_t value, size_t size)
{
    enum { CHECKSUM = 8 };
    uint64_t hash = 0xcbf29ce484222325u;
    memcpy(saved + at, &value, size);
    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ (i >= CHECKSUM && i < CHECKSUM + sizeof hash ? 0 : saved[i])) * 0x100000001b3u;
    memcpy(saved + CHECKSUM, &hash, sizeof hash);
}

/* Headers that no state has, though their checksum is right: of 8 tokens, 2 of them in the ring. */
static void forged_states_are_refused(void **state)
{
    enum { BEGUN = 22, ORIGIN = 40, POSITION = 48, HELD = 56 };
    static const struct {
        size_t at, size;
        int64_t value;
    } forged[] = {{ORIGIN, 8, -4},
                  {ORIGIN, 8, 9},
                  {ORIGIN, 8, 7},
                  {POSITION, 8, 1},
                  {POSITION, 8, -1},
                  {HELD, 8, 3},
                  {HELD, 8, -1},
                  {BEGUN, 2, 0},
                  {BEGUN, 2, 2},
                  {ORIGIN, 8, INT64_MAX},
                  {ORIGIN, 8, INT64_MIN},
                  {POSITION, 8, INT64_MIN},
                  {POSITION, 8, INT64_MAX},
                  {POSITION, 8, (int64_t)INT32_MAX + 1}};
    (void)state;
    fixture f;
    fixture_open(&f, 8);
    const int64_t all = 8;
    size_t bytes;
    assert_int_equal(call(&f, &f.held.state, &all, 1), QUERN_OK);
    assert_int_equal(quern_dsv4_state_save(f.held.state, NULL, &bytes), QUERN_OK);
    unsigned char *saved = malloc(bytes), *good = malloc(bytes), *memory = malloc(state_bytes(&f)),
                  *before = malloc(state_bytes(&f));
    assert_int_equal(quern_dsv4_state_save(f.held.state, good, &bytes), QUERN_OK);
    memcpy(saved, good, bytes);
    forge(saved, bytes, HELD, 2, 8);
    assert_memory_equal(saved, good, bytes); /* the checksum here is the library's */
    quern_dsv4_state *other = NULL;
    memset(memory, 0x5a, state_bytes(&f));
    memcpy(before, memory, state_bytes(&f));
    for (size_t i = 0; i < sizeof forged / sizeof *forged; i++) {
        memcpy(saved, good, bytes);
        forge(saved, bytes, forged[i].at, forged[i].value, forged[i].size);
        if (quern_dsv4_state_restore(&f.params, 16, 2, saved, bytes, memory, state_bytes(&f), &other) !=
            QUERN_ERR_FORMAT)
            fail_msg("%lld at byte %zu is accepted", (long long)forged[i].value, forged[i].at);
        assert_null(other);
        assert_memory_equal(memory, before, state_bytes(&f));
    }
    free(saved), free(good), free(memory), free(before);
    fixture_close(&f);
}

/* The second of two states cannot store its entry: the first, whose entry can be stored, stays as it was. */
static void a_fault_in_one_state_leaves_the_other(void **state)
{
    (void)state;
    fixture f;
    fixture_open(&f, 8);
    held_state second = state_new(&f);
    quern_dsv4_state *const both[] = {f.held.state, second.state};
    const int64_t halves[] = {4, 4};
    const size_t bytes = state_bytes(&f);
    unsigned char *kept = malloc(bytes);
    memcpy(kept, second.memory + 1, bytes);
    f.rows[5 * 64 + 3] = NAN;
    refused(&f, both, halves, 2, "(row 1, column 3)");
    assert_memory_equal(kept, second.memory + 1, bytes);
    f.rows[5 * 64 + 3] = 1;
    assert_int_equal(call(&f, both, halves, 2), QUERN_OK);
    free(kept), free(second.memory);
    fixture_close(&f);
}

/* A fork and a restored state go on without the first one, and it without them: what one takes in or takes
 * back changes no byte of another, and the same tokens bring all to the same entries. */
static void copies_are_independent(void **state)
{
    (void)state;
    fixture f;
    fixture_open(&f, 4);
    const int64_t four = 4, one = 1;
    assert_int_equal(call(&f, &f.held.state, &four, 1), QUERN_OK);
    const size_t size = state_bytes(&f);
    held_state held[3] = {f.held, {malloc(size + 1), NULL}, {malloc(size + 1), NULL}};
    size_t bytes;
    assert_int_equal(quern_dsv4_state_save(f.held.state, NULL, &bytes), QUERN_OK);
    unsigned char *saved = malloc(bytes), *kept = malloc(3 * size), first[20];
    assert_int_equal(quern_dsv4_state_save(f.held.state, saved, &bytes), QUERN_OK);
    assert_int_equal(quern_dsv4_state_fork(f.held.state, held[1].memory + 1, size, &held[1].state), QUERN_OK);
    assert_int_equal(quern_dsv4_state_restore(&f.params, WIDTH, RING, saved, bytes, held[2].memory + 1, size,
                                              &held[2].state),
                     QUERN_OK);
    for (int i = 0; i < 3; i++) {
        for (int k = 0; k < 3; k++) memcpy(kept + (size_t)k * size, held[k].memory + 1, size);
        f.proj.shape[0] = 1; /* a token that is taken back again */
        f.out_view.shape[0] = f.pooled_view.shape[0] = 0;
        f.proj.data = f.rows + 7 * 64;
        assert_int_equal(call(&f, &held[i].state, &one, 1), QUERN_OK);
        assert_int_equal(quern_dsv4_state_rollback(held[i].state, 1), QUERN_OK);
        f.proj.shape[0] = 4;
        f.out_view.shape[0] = f.pooled_view.shape[0] = 1;
        f.proj.data = f.rows + 4 * 64;
        assert_int_equal(call(&f, &held[i].state, &four, 1), QUERN_OK);
        if (i == 0) memcpy(first, f.out, sizeof first);
        assert_memory_equal(f.out, first, sizeof first);
        for (int k = 0; k < 3; k++)
            if (k != i) assert_memory_equal(kept + (size_t)k * size, held[k].memory + 1, size);
    }
    free(saved), free(kept), free(held[1].memory), free(held[2].memory);
    fixture_close(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(faults_leave_states_unchanged), cmocka_unit_test(damaged_states_are_refused),
        cmocka_unit_test(forged_states_are_refused), cmocka_unit_test(a_fault_in_one_state_leaves_the_other),
        cmocka_unit_test(copies_are_independent)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
