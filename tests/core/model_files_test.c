/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* model_files_test.c - a model is opened as a file, a folder with one file, or an index with shards; an index
 * that lies and a missing shard are errors with a sentence. */
#include "io/model_files.h"

#include "cmocka_c11.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char directory[] = "model_files_test.XXXXXX";

static const char *in(const char *name)
{
    static char path[4][128];
    static int next;
    next = (next + 1) % 4;
    snprintf(path[next], sizeof path[next], "%s/%s", directory, name);
    return path[next];
}

static void clear(void)
{
    char command[64];
    snprintf(command, sizeof command, "rm -rf %s/*", directory);
    assert_int_equal(system(command), 0);
}

static int make_directory(void **state)
{
    (void)state;
    return mkdtemp(directory) == NULL ? -1 : 0;
}

static int remove_directory(void **state)
{
    (void)state;
    clear();
    return rmdir(directory);
}

static void write_text(const char *name, const char *text)
{
    FILE *f = fopen(in(name), "w");
    assert_non_null(f);
    assert_true(fputs(text, f) >= 0);
    assert_int_equal(fclose(f), 0);
}

/* A shard of one f32 tensor. */
static void write_shard(const char *name, const char *tensor, float value)
{
    const int64_t shape[] = {1};
    const quern_tensor t = quern_tensor_contiguous(&value, QUERN_F32, 1, shape);
    const quern_safetensors_item item = {tensor, &t};
    assert_int_equal(quern_safetensors_save(in(name), &item, 1, NULL, 0), QUERN_OK);
}

static void write_model(const char *index)
{
    clear();
    write_shard("1.safetensors", "b", 1.0f);
    write_shard("2.safetensors", "a", 2.0f);
    write_text("model.safetensors.index.json", index);
}

static float value_of(const model_tensor *t)
{
    float value;
    assert_non_null(t);
    assert_string_equal(t->dtype, "F32");
    assert_int_equal(t->bytes, 4);
    memcpy(&value, t->data, sizeof value);
    return value;
}

static void models_are_opened(void **state)
{
    (void)state;
    char why[MODEL_SENTENCE] = "";
    model_files *m = NULL;
    write_model(
        "{\"metadata\":{\"total_size\":8},\"weight_map\":{\"a\":\"2.safetensors\",\"b\":\"1.safetensors\"}}");
    assert_int_equal(model_files_open(directory, &m, why), QUERN_OK);
    assert_int_equal(m->shard_count, 2);
    assert_int_equal(m->count, 2);
    assert_string_equal(m->shards[0].name, "1.safetensors");
    assert_string_equal(m->index, "model.safetensors.index.json");
    assert_true(value_of(model_files_find(m, "a")) == 2.0f && value_of(model_files_find(m, "b")) == 1.0f);
    assert_int_equal(model_files_find(m, "a")->shard, 1);
    assert_null(model_files_find(m, "c"));
    model_files_close(m);
    assert_int_equal(model_files_open(in("1.safetensors"), &m, why), QUERN_OK);
    assert_true(m->folder == NULL && m->count == 1 && value_of(model_files_find(m, "b")) == 1.0f);
    model_files_close(m);
    clear();
    write_shard("other.safetensors", "c", 3.0f);
    assert_int_equal(symlink("other.safetensors", in("model.safetensors")), 0);
    assert_int_equal(model_files_open(directory, &m, why), QUERN_OK);
    assert_string_equal(m->shards[0].name, "model.safetensors");
    assert_true(m->index == NULL && value_of(model_files_find(m, "c")) == 3.0f);
    model_files_close(m);
}

static void expect(const char *path, quern_status status, const char *part)
{
    char why[MODEL_SENTENCE] = "";
    model_files *m = NULL;
    const quern_status got = model_files_open(path, &m, why);
    if (got != status || m != NULL || strstr(why, part) == NULL)
        fail_msg("status %d instead of %d, or no \"%s\" in: %s", got, status, part, why);
}

static void what_lies_is_refused(void **state)
{
    (void)state;
    write_model("{\"weight_map\":{\"a\":\"2.safetensors\",\"b\":\"3.safetensors\"}}");
    expect(directory, QUERN_ERR_IO, "3.safetensors");
    write_model("{\"weight_map\":{\"a\":\"1.safetensors\",\"b\":\"1.safetensors\"}}");
    expect(directory, QUERN_ERR_FORMAT, "tensor 'a' is not in shard '1.safetensors'");
    write_model("{\"weight_map\":{\"a\":\"2.safetensors\",\"b\":\"1.safetensors\",\"c\":\"1.safetensors\"}}");
    expect(directory, QUERN_ERR_FORMAT, "tensor 'c' is not in shard");
    write_model("{\"weight_map\":{\"a\":\"2.safetensors\",\"b\":\"1.safetensors\"}}");
    write_shard("2.safetensors", "d", 0.0f);
    expect(directory, QUERN_ERR_FORMAT, "tensor 'a'");
    write_model("{\"weight_map\":{\"a\":\"2.safetensors\",\"a\":\"2.safetensors\"}}");
    expect(directory, QUERN_ERR_FORMAT, "duplicate");
    write_model("{\"weight_map\":{\"a\":\"../2.safetensors\"}}");
    expect(directory, QUERN_ERR_FORMAT, "no file of the folder");
    write_model("{\"weight_map\":{\"a\":2}}");
    expect(directory, QUERN_ERR_FORMAT, "index");
    write_model("{\"weight_map\":{}}");
    expect(directory, QUERN_ERR_FORMAT, "weight_map");
    write_model("{\"weight_map\":");
    expect(directory, QUERN_ERR_FORMAT, "index");
    clear();
    expect(directory, QUERN_ERR_FORMAT, "no index and 0 files");
    write_shard("1.safetensors", "a", 1.0f);
    write_shard("2.safetensors", "b", 1.0f);
    expect(directory, QUERN_ERR_FORMAT, "no index and 2 files");
    write_text("1.safetensors", "nothing");
    expect(in("1.safetensors"), QUERN_ERR_FORMAT, "shard");
    expect(in("none"), QUERN_ERR_IO, "none");
    /* a tensor that stands in two shards, of which the index names one */
    clear();
    write_shard("1.safetensors", "a", 1.0f);
    const float two[] = {1, 2};
    const int64_t shape[] = {1};
    const quern_tensor t[] = {quern_tensor_contiguous((void *)(uintptr_t)two, QUERN_F32, 1, shape),
                              quern_tensor_contiguous((void *)(uintptr_t)(two + 1), QUERN_F32, 1, shape)};
    const quern_safetensors_item items[] = {{"a", &t[0]}, {"b", &t[1]}};
    assert_int_equal(quern_safetensors_save(in("2.safetensors"), items, 2, NULL, 0), QUERN_OK);
    write_text("model.safetensors.index.json",
               "{\"weight_map\":{\"a\":\"1.safetensors\",\"b\":\"2.safetensors\"}}");
    expect(directory, QUERN_ERR_FORMAT, "and in shard");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(models_are_opened),
        cmocka_unit_test(what_lies_is_refused),
    };
    return cmocka_run_group_tests(tests, make_directory, remove_directory);
}
