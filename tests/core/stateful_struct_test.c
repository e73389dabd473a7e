/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * stateful_struct_test.c - the size rule of the structs that are no operation's: those of caches, states,
 * RoPE tables and devices. Meant to run under the sanitizers, too.
 */
#include "cmocka_c11.h"
#include "context.h"

#include <quern/attention.h>
#include <quern/cache.h>
#include <quern/cuda.h>
#include <quern/dsv4_layer.h>
#include <quern/nsa.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TAIL = 24, VALUES = 8 };

/* What a call says and writes. */
typedef struct outcome {
    quern_status status;
    int64_t value[VALUES];
} outcome;

typedef outcome caller(void *given);

typedef struct subject {
    const char *name; /* in sentences */
    size_t known;
    const void *defaults; /* the _INIT macro's */
    const void *given;    /* a struct that is accepted */
    caller *call;
} subject;

/* ---- what the calls are given beside the struct ---- */

static const quern_cache_params cache_params = {
    sizeof cache_params,     QUERN_F32, 2,     1, 16, 16, 100, 0, 0, 0, 0,
    QUERN_NSA_COMPRESS_MEAN, false,     false, 0, 0,  0,  0};
static const quern_cache_params sparse_params = {
    sizeof sparse_params,    QUERN_F32, 2,    1,  16, 24, 300, 64, 40, 32, 16,
    QUERN_NSA_COMPRESS_MEAN, true,      true, 20, 5,  0,  0};
static const quern_dsv4_compress_params compress_params = {
    .size = sizeof compress_params, .kind = QUERN_DSV4_CSA, .ratio = 4};
static const quern_dsv4_layer_cache_params layer_params = {.size = sizeof layer_params,
                                                           .kind = QUERN_DSV4_LAYER_SWA,
                                                           .sequences = 2,
                                                           .capacity = 50,
                                                           .dim = 16,
                                                           .window = 4,
                                                           .ring = 3};
static const int32_t ids[] = {1};
static const int64_t counts[] = {3};
static float rows[3 * 16 * 4], more[3 * 16 * 4], sums[6 * 8];
static int32_t numbers[4];
static const quern_tensor key = {rows, QUERN_F32, QUERN_CPU, 0, 3, {3, 1, 16}, {16, 16, 1}},
                          query = {more, QUERN_F32, QUERN_CPU, 0, 3, {3, 1, 16}, {16, 16, 1}},
                          proj = {rows, QUERN_F32, QUERN_CPU, 0, 2, {3, 32}, {32, 1}},
                          bias = {rows, QUERN_F32, QUERN_CPU, 0, 2, {4, 8}, {8, 1}},
                          entries = {more, QUERN_F32, QUERN_CPU, 0, 2, {1, 8}, {8, 1}},
                          one = {numbers, QUERN_I32, QUERN_CPU, 0, 1, {1}, {1}},
                          offsets = {numbers + 1, QUERN_I32, QUERN_CPU, 0, 1, {2}, {1}},
                          merged = {numbers + 3, QUERN_I32, QUERN_CPU, 0, 1, {1}, {1}},
                          states = {sums, QUERN_F32, QUERN_CPU, 0, 2, {1, 6 * 8}, {6 * 8, 1}};
static quern_cache *cache;
static const quern_cache_batch batch = {sizeof batch, 1, ids, counts};
static const quern_cache_tensors tensors = {.size = sizeof tensors, .k = &key, .v = &key};
static const quern_decode_tensors decode_tensors = {.size = sizeof decode_tensors, .q = &query, .o = &query};
static const quern_dsv4_append_tensors append_tensors = {.size = sizeof append_tensors,
                                                         .proj = &proj,
                                                         .b_a = &bias,
                                                         .b_b = &bias,
                                                         .out = &entries,
                                                         .slots = &one,
                                                         .positions = &one,
                                                         .cu = &offsets,
                                                         .states = &states,
                                                         .merged = &merged};
static const quern_attention_params attention_params = QUERN_ATTENTION_PARAMS_INIT;

static void *memory_of(size_t bytes)
{
    void *p = calloc(1, bytes + 1);
    assert_non_null(p);
    return p;
}

static int open_all(void **state)
{
    size_t bytes, row_bytes;
    if (test_open_context(state) != 0) return -1;
    assert_int_equal(quern_cache_size(&cache_params, &bytes, &row_bytes), QUERN_OK);
    assert_int_equal(
        quern_cache_create(&cache_params, memory_of(bytes), bytes, memory_of(row_bytes), row_bytes, &cache),
        QUERN_OK);
    assert_int_equal(quern_cache_append_workspace(ctx, cache, &batch, &tensors, &bytes), QUERN_OK);
    void *workspace = memory_of(bytes);
    assert_int_equal(quern_cache_append(ctx, NULL, cache, &batch, &tensors, workspace, bytes), QUERN_OK);
    free(workspace);
    return 0;
}

/* ---- the calls ---- */

static outcome cache_size(void *given)
{
    size_t bytes[2] = {0, 0};
    const quern_status status = quern_cache_size(given, &bytes[0], &bytes[1]);
    return (outcome){status, {(int64_t)bytes[0], (int64_t)bytes[1]}};
}

static outcome cache_ledger(void *given)
{
    return (outcome){quern_cache_ledger_params(&sparse_params, given), {0}};
}

static outcome ledger_size(void *given)
{
    size_t bytes = 0;
    const quern_status status = quern_ledger_size(given, &bytes);
    return (outcome){status, {(int64_t)bytes}};
}

static outcome append_by_batch(void *given)
{
    size_t bytes = 0;
    const quern_status status = quern_cache_append_workspace(ctx, cache, given, &tensors, &bytes);
    return (outcome){status, {(int64_t)bytes}};
}

static outcome append_by_tensors(void *given)
{
    size_t bytes = 0;
    const quern_status status = quern_cache_append_workspace(ctx, cache, &batch, given, &bytes);
    return (outcome){status, {(int64_t)bytes}};
}

static outcome decode(void *given)
{
    size_t bytes = 0;
    const quern_status status =
        quern_attention_decode_workspace(ctx, &attention_params, cache, &batch, given, &bytes);
    return (outcome){status, {(int64_t)bytes}};
}

static outcome decode_by_params(void *given)
{
    size_t bytes = 0;
    const quern_status status =
        quern_attention_decode_workspace(ctx, given, cache, &batch, &decode_tensors, &bytes);
    return (outcome){status, {(int64_t)bytes}};
}

static outcome append_by(const void *params, const void *tensors_of_it)
{
    size_t bytes = 0;
    const quern_status status = quern_dsv4_append_step_workspace(ctx, params, tensors_of_it, &bytes);
    return (outcome){status, {(int64_t)bytes}};
}

static outcome append_by_params(void *given)
{
    return append_by(given, &append_tensors);
}

static outcome append_to_states(void *given)
{
    return append_by(&compress_params, given);
}

static outcome rope(void *given)
{
    float table[4 * 4] = {0};
    int64_t shape[] = {4, 4};
    const quern_tensor t = quern_tensor_contiguous(table, QUERN_F32, 2, shape);
    outcome out = {quern_dsv4_rope_table(given, &t), {0}};
    memcpy(out.value, &table[4], 4 * sizeof *table);
    return out;
}

static outcome layer_cache_size(void *given)
{
    size_t bytes[2] = {0, 0};
    const quern_status status = quern_dsv4_layer_cache_size(given, &bytes[0], &bytes[1]);
    return (outcome){status, {(int64_t)bytes[0], (int64_t)bytes[1]}};
}

static outcome layer_ledger(void *given)
{
    quern_ledger_params l = QUERN_LEDGER_PARAMS_INIT;
    const quern_status status = quern_dsv4_layer_ledger_params(given, &l);
    return (outcome){status, {l.sequences, l.pools[QUERN_DSV4_RAW].page}};
}

static outcome ledger_of_layer(void *given)
{
    return (outcome){quern_dsv4_layer_ledger_params(&layer_params, given), {0}};
}

static outcome device(void *given)
{
    return (outcome){quern_cuda_device_get(0, given), {0}};
}

/* ---- the rule ---- */

/* A copy of `bytes` at the end of a block of its own, so that a sanitizer sees a read past it. */
static void *resized(const void *from, size_t known, size_t bytes)
{
    unsigned char *p = calloc(1, bytes);
    assert_non_null(p);
    memcpy(p, from, bytes < known ? bytes : known);
    memcpy(p, &bytes, sizeof bytes);
    return p;
}

/* What the call says of the struct whose first `bytes` were given and the others have their defaults. */
static outcome expected(const subject *s, size_t bytes)
{
    unsigned char *whole = resized(s->defaults, s->known, s->known);
    memcpy(whole, s->given, bytes < s->known ? bytes : s->known);
    memcpy(whole, &s->known, sizeof s->known);
    const outcome out = s->call(whole);
    free(whole);
    return out;
}

static void check(const subject *s)
{
    char words[32];
    snprintf(words, sizeof words, "%s.size", s->name);
    for (size_t bytes = 8; bytes <= s->known + TAIL; bytes += 8) {
        const outcome want = expected(s, bytes);
        unsigned char *given = resized(s->given, s->known, bytes);
        const outcome got = s->call(given);
        if (got.status != want.status || memcmp(got.value, want.value, sizeof got.value) != 0)
            fail_msg("%s of %zu bytes: status %d instead of %d: %s", s->name, bytes, (int)got.status,
                     (int)want.status, quern_last_error(NULL));
        assert_memory_equal(given, &bytes, sizeof bytes);
        for (size_t at = s->known; at < bytes; at++) {
            given[at] = 1;
            const quern_status status = s->call(given).status;
            if (status != QUERN_ERR_INVALID_ARGUMENT || strstr(quern_last_error(NULL), words) == NULL)
                fail_msg("byte %zu of %s: %s", at, s->name, quern_last_error(NULL));
            given[at] = 0;
        }
        free(given);
    }
    static const size_t wrong[] = {0, 7, 9, SIZE_MAX - 7};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        unsigned char *given = resized(s->given, s->known, s->known);
        memcpy(given, &wrong[i], sizeof wrong[i]);
        assert_int_equal(s->call(given).status, QUERN_ERR_INVALID_ARGUMENT);
        assert_non_null(strstr(quern_last_error(NULL), words));
        free(given);
    }
}

#define SUBJECT(name, type, init, given, call)                                                               \
    {                                                                                                        \
        const type defaults = init;                                                                          \
        const subject s = {name, sizeof(type), &defaults, given, call};                                      \
        check(&s);                                                                                           \
    }

static void structs_may_be_older_or_newer(void **state)
{
    (void)state;
    const quern_ledger_params no_ledger = QUERN_LEDGER_PARAMS_INIT,
                              ledger = {.size = sizeof ledger,
                                        .sequences = 3,
                                        .capacity = 70,
                                        .pools = {{.page = 8}, {.page = 4, .block = 4, .stride = 2}}};
    const quern_dsv4_rope_params rope_params = {.size = sizeof rope_params,
                                                .base = 160000,
                                                .factor = 16,
                                                .original_length = 64,
                                                .beta_fast = 32,
                                                .beta_slow = 1};
    const quern_cuda_device info = QUERN_CUDA_DEVICE_INIT;
    SUBJECT("params", quern_cache_params, QUERN_CACHE_PARAMS_INIT, &sparse_params, cache_size)
    SUBJECT("ledger", quern_ledger_params, QUERN_LEDGER_PARAMS_INIT, &no_ledger, cache_ledger)
    SUBJECT("params", quern_ledger_params, QUERN_LEDGER_PARAMS_INIT, &ledger, ledger_size)
    SUBJECT("batch", quern_cache_batch, QUERN_CACHE_BATCH_INIT, &batch, append_by_batch)
    SUBJECT("tensors", quern_cache_tensors, QUERN_CACHE_TENSORS_INIT, &tensors, append_by_tensors)
    SUBJECT("tensors", quern_decode_tensors, QUERN_DECODE_TENSORS_INIT, &decode_tensors, decode)
    SUBJECT("params", quern_attention_params, QUERN_ATTENTION_PARAMS_INIT, &attention_params,
            decode_by_params)
    SUBJECT("params", quern_dsv4_compress_params, QUERN_DSV4_COMPRESS_PARAMS_INIT, &compress_params,
            append_by_params)
    SUBJECT("tensors", quern_dsv4_append_tensors, QUERN_DSV4_APPEND_TENSORS_INIT, &append_tensors,
            append_to_states)
    SUBJECT("params", quern_dsv4_rope_params, QUERN_DSV4_ROPE_PARAMS_INIT, &rope_params, rope)
    SUBJECT("params", quern_dsv4_layer_cache_params, QUERN_DSV4_LAYER_CACHE_PARAMS_INIT, &layer_params,
            layer_cache_size)
    SUBJECT("params", quern_dsv4_layer_cache_params, QUERN_DSV4_LAYER_CACHE_PARAMS_INIT, &layer_params,
            layer_ledger)
    SUBJECT("ledger", quern_ledger_params, QUERN_LEDGER_PARAMS_INIT, &no_ledger, ledger_of_layer)
    SUBJECT("info", quern_cuda_device, QUERN_CUDA_DEVICE_INIT, &info, device)
}

/* The calls above are accepted with whole structs: their defaults alone would prove little. */
static void whole_structs_are_accepted(void **state)
{
    (void)state;
    assert_int_equal(cache_size((void *)(uintptr_t)&sparse_params).status, QUERN_OK);
    assert_int_equal(append_by_batch((void *)(uintptr_t)&batch).status, QUERN_OK);
    assert_int_equal(append_by_tensors((void *)(uintptr_t)&tensors).status, QUERN_OK);
    assert_int_equal(decode((void *)(uintptr_t)&decode_tensors).status, QUERN_OK);
    assert_int_equal(append_by_params((void *)(uintptr_t)&compress_params).status, QUERN_OK);
    assert_int_equal(append_to_states((void *)(uintptr_t)&append_tensors).status, QUERN_OK);
    assert_int_equal(layer_cache_size((void *)(uintptr_t)&layer_params).status, QUERN_OK);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(whole_structs_are_accepted),
        cmocka_unit_test(structs_may_be_older_or_newer),
    };
    return cmocka_run_group_tests(tests, open_all, test_close_context);
}
