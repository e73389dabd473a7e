/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * memory_failure_test.c - each allocation of every function of the io and context layers, and of making a
 * plan, fails, first alone, then with all that follow it. The function returns OUT_OF_MEMORY and no object,
 * leaks nothing and leaves the old file unchanged.
 *
 * The linker sends the library's allocations through the __wrap functions below.
 */
#include "cmocka_c11.h"
#include "gguf_bytes.h"

#include "core/error.h"
#include "io/gguf.h"

#include <quern/attention.h>
#include <quern/checkpoint.h>
#include <quern/file.h>
#include <quern/plan.h>
#include <quern/safetensors.h>

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static long allocations, fail_at = -1; /* counted from 0 */
static bool fail_on;                   /* from fail_at on, all fail */
static long live;

void *__real_malloc(size_t size);
void *__real_calloc(size_t count, size_t size);
void *__real_realloc(void *old, size_t size);
char *__real_strdup(const char *text);
void *__real_aligned_alloc(size_t alignment, size_t size);
void __real_free(void *p);
void *__wrap_malloc(size_t size);
void *__wrap_calloc(size_t count, size_t size);
void *__wrap_realloc(void *old, size_t size);
char *__wrap_strdup(const char *text);
void *__wrap_aligned_alloc(size_t alignment, size_t size);
void __wrap_free(void *p);

static bool fails(void)
{
    const long i = allocations++;
    return fail_at >= 0 && (i == fail_at || (fail_on && i > fail_at));
}

static void *counted(void *p)
{
    live += p != NULL;
    return p;
}

void *__wrap_malloc(size_t size)
{
    return fails() ? NULL : counted(__real_malloc(size));
}

void *__wrap_calloc(size_t count, size_t size)
{
    return fails() ? NULL : counted(__real_calloc(count, size));
}

void *__wrap_realloc(void *old, size_t size)
{
    if (fails()) return NULL;
    void *p = __real_realloc(old, size);
    live += old == NULL && p != NULL;
    return p;
}

char *__wrap_strdup(const char *text)
{
    return fails() ? NULL : counted(__real_strdup(text));
}

void *__wrap_aligned_alloc(size_t alignment, size_t size)
{
    return fails() ? NULL : counted(__real_aligned_alloc(alignment, size));
}

void __wrap_free(void *p)
{
    live -= p != NULL;
    __real_free(p);
}

static char directory[] = "memory_failure_test.XXXXXX";
static char path[64];

static int make_directory(void **state)
{
    (void)state;
    if (mkdtemp(directory) == NULL) return -1;
    snprintf(path, sizeof path, "%s/file", directory);
    return 0;
}

static int remove_directory(void **state)
{
    (void)state;
    unlink(path);
    return rmdir(directory); /* fails where a test left a file behind */
}

static size_t read_file(char *to, size_t room)
{
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    const size_t n = fread(to, 1, room, f);
    fclose(f);
    return n;
}

/* Calls `work` with each of its allocations failing. */
static void fail_each(quern_status (*work)(void))
{
    static char before[1 << 16], after[1 << 16];
    for (int on = 0; on < 2; on++) {
        for (long at = 0;; at++) {
            const size_t size = read_file(before, sizeof before);
            const long had = live;
            allocations = 0;
            fail_on = on != 0;
            fail_at = at;
            const quern_status status = work();
            fail_at = -1;
            assert_int_equal(live, had);
            if (allocations <= at) { /* every allocation has failed once */
                assert_int_equal(status, QUERN_OK);
                assert_true(at > 0);
                break;
            }
            if (status != QUERN_ERR_OUT_OF_MEMORY)
                fail_msg("allocation %ld of %ld fails: status %d (%s)", at, allocations, (int)status,
                         quern_last_error(NULL));
            assert_non_null(strstr(quern_last_error(NULL), "memory"));
            assert_int_equal(read_file(after, sizeof after), size);
            assert_memory_equal(after, before, size);
        }
    }
}

enum { TENSORS = 40 };
static char names[TENSORS][64];
static quern_tensor tensors[TENSORS];
static quern_safetensors_item items[TENSORS];
static const quern_safetensors_pair pairs[] = {
    {"a key of more than sixteen bytes", "a value \"quoted\"\n of more than thirty-two bytes"}, {"k", "v"}};

static quern_status save(void)
{
    return quern_safetensors_save(path, items, TENSORS, pairs, 2);
}

static void prepare_items(void)
{
    static float data[12] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};
    for (int i = 0; i < TENSORS; i++) {
        snprintf(names[i], sizeof names[i], "layers.%d.a name of more than sixteen bytes", i);
        tensors[i] = quern_tensor_contiguous(data, QUERN_F32, 2, (const int64_t[]){2, 3});
        if (i % 2 == 1) tensors[i].strides[0] = 6;
        items[i] = (quern_safetensors_item){names[i], &tensors[i]};
    }
}

static void saving_fails_whole(void **state)
{
    (void)state;
    prepare_items();
    assert_int_equal(save(), QUERN_OK);
    fail_each(save);
}

static quern_status open_path(void)
{
    quern_safetensors *file = NULL;
    quern_tensor t;
    const quern_status status = quern_safetensors_open(path, &file);
    if (status == QUERN_OK) {
        for (int i = 0; i < TENSORS; i++)
            assert_int_equal(quern_safetensors_get(file, names[i], &t), QUERN_OK);
        assert_string_equal(quern_safetensors_metadata(file, pairs[0].key), pairs[0].value);
        assert_int_equal(quern_safetensors_count(file), TENSORS);
    } else {
        assert_null(file);
    }
    quern_safetensors_close(file);
    return status;
}

static void opening_fails_whole(void **state)
{
    (void)state;
    prepare_items();
    assert_int_equal(save(), QUERN_OK);
    fail_each(open_path);
}

static const char misaligned[] = "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
                                 "\"b\":{\"dtype\":\"I32\",\"shape\":[1,2],\"data_offsets\":[1,9]}}";

static quern_status open_misaligned(void)
{
    uint8_t bytes[8 + sizeof misaligned - 1 + 9] = {sizeof misaligned - 1};
    quern_safetensors *file = NULL;
    memcpy(bytes + 8, misaligned, sizeof misaligned - 1);
    quern_status status = quern_safetensors_open_bytes(bytes, sizeof bytes, &file);
    assert_true((status == QUERN_OK) == (file != NULL));
    quern_tensor t = {.ndim = -77};
    if (status == QUERN_OK) status = quern_safetensors_get(file, "b", &t);
    assert_int_equal(t.ndim, status == QUERN_OK ? 2 : -77);
    quern_safetensors_close(file);
    return status;
}

static void opening_bytes_fails_whole(void **state)
{
    (void)state;
    fail_each(open_misaligned);
}

static gguf_bytes gguf;

static quern_status open_gguf(void)
{
    gguf_file *file = NULL;
    char why[GGUF_SENTENCE] = "";
    const quern_status status = gguf_open_bytes(gguf.bytes, gguf.size, &file, why);
    assert_true((status == QUERN_OK) == (file != NULL));
    if (status != QUERN_OK) error_set(status, "%s", why);
    gguf_close(file);
    return status;
}

static void opening_gguf_fails_whole(void **state)
{
    (void)state;
    enum { MANY = 40 };
    gguf_begin(&gguf, 3, MANY, MANY);
    for (int i = 0; i < MANY; i++) gguf_put_integer(&gguf, names[i], GGUF_U8, 1, 1);
    for (int i = 0; i < MANY; i++) gguf_put_tensor(&gguf, names[i], 0, 1, (const int64_t[]){0}, 0);
    fail_each(open_gguf);
}

static quern_status open_checkpoint(void)
{
    quern_checkpoint *checkpoint = NULL;
    const quern_status status = quern_checkpoint_open(path, &checkpoint);
    assert_true((status == QUERN_OK) == (checkpoint != NULL));
    quern_checkpoint_close(checkpoint);
    return status;
}

static void opening_checkpoints_fails_whole(void **state)
{
    (void)state;
    prepare_items();
    assert_int_equal(save(), QUERN_OK);
    fail_each(open_checkpoint);
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    gguf_begin(&gguf, 3, 1, 1);
    gguf_put_text(&gguf, "general.architecture", "llama");
    gguf_put_tensor(&gguf, "t", 0, 1, (const int64_t[]){0}, 0);
    assert_int_equal(fwrite(gguf.bytes, 1, gguf.size, f), gguf.size);
    assert_int_equal(fclose(f), 0);
    fail_each(open_checkpoint);
}

static quern_status write_text(void)
{
    quern_file *file = NULL;
    quern_status status = quern_file_check(path);
    if (status == QUERN_OK) status = quern_file_create(path, &file);
    if (status != QUERN_OK) return status;
    assert_int_equal(quern_file_write(file, "text", 4), QUERN_OK);
    return quern_file_commit(file);
}

static void writing_fails_whole(void **state)
{
    (void)state;
    fail_each(write_text);
}

static quern_status make_context(void)
{
    quern_context *ctx = NULL;
    const quern_status status = quern_context_create(NULL, &ctx);
    assert_true((status == QUERN_OK) == (ctx != NULL));
    quern_context_destroy(ctx);
    return status;
}

static void contexts_fail_whole(void **state)
{
    (void)state;
    fail_each(make_context);
}

static quern_context *planner; /* made before allocations fail */

static quern_status make_plan(void)
{
    static float data[64];
    static float out[64];
    const int64_t shape[] = {1, 8, 1, 8};
    const quern_tensor q = quern_tensor_contiguous(data, QUERN_F32, 4, shape),
                       o = quern_tensor_contiguous(out, QUERN_F32, 4, shape);
    quern_attention_params params = QUERN_ATTENTION_PARAMS_INIT;
    quern_attention_tensors t = QUERN_ATTENTION_TENSORS_INIT;
    quern_plan *plan = NULL;
    t.q = t.k = t.v = &q;
    t.o = &o;
    const quern_status status = quern_plan_create(planner, QUERN_OP_ATTENTION_FORWARD, &params, &t, &plan);
    assert_true((status == QUERN_OK) == (plan != NULL));
    quern_plan_destroy(plan);
    return status;
}

static void plans_fail_whole(void **state)
{
    (void)state;
    assert_int_equal(quern_context_create(NULL, &planner), QUERN_OK);
    fail_each(make_plan);
    quern_context_destroy(planner);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(saving_fails_whole),
        cmocka_unit_test(opening_fails_whole),
        cmocka_unit_test(opening_bytes_fails_whole),
        cmocka_unit_test(opening_gguf_fails_whole),
        cmocka_unit_test(opening_checkpoints_fails_whole),
        cmocka_unit_test(writing_fails_whole),
        cmocka_unit_test(contexts_fail_whole),
        cmocka_unit_test(plans_fail_whole),
    };
    return cmocka_run_group_tests(tests, make_directory, remove_directory);
}
