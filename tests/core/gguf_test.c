/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* gguf_test.c - the GGUF reader finds every key and tensor, and refuses every malformed file with a
 * sentence. */
#include "cmocka_c11.h"
#include "gguf_bytes.h"

#include "io/gguf.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static gguf_bytes f;
static char why[GGUF_SENTENCE];

/* Opens a copy of the exact size, so that AddressSanitizer sees what reads past it; free both. */
static gguf_file *open_copy(uint8_t **copy)
{
    gguf_file *file = NULL;
    *copy = malloc(f.size > 0 ? f.size : 1);
    assert_non_null(*copy);
    memcpy(*copy, f.bytes, f.size);
    if (gguf_open_bytes(*copy, f.size, &file, why) != QUERN_OK) fail_msg("refused: %s", why);
    return file;
}

static void expect_refused(const char *sentence_part)
{
    gguf_file *file = NULL;
    *why = '\0';
    const quern_status status = gguf_open_bytes(f.bytes, f.size, &file, why);
    if (status != QUERN_ERR_FORMAT || strstr(why, sentence_part) == NULL)
        fail_msg("status %d, \"%s\" lacks \"%s\"", (int)status, why, sentence_part);
    assert_null(file);
}

static void expect_text(const gguf_file *file, const char *key, const char *expected)
{
    char text[64];
    const gguf_pair *pair = gguf_find_pair(file, key);
    assert_non_null(pair);
    gguf_text(pair, text, sizeof text);
    assert_string_equal(text, expected);
}

static void values_of_every_type_are_read(void **state)
{
    static const struct {
        const char *key;
        uint32_t type;
        uint64_t value;
        size_t size;
        const char *text;
        bool integer;
        int64_t number;
    } all[] = {{"u8", 0, 200, 1, "200", true, 200},
               {"i8", 1, 0xfe, 1, "-2", true, -2},
               {"u16", 2, 65535, 2, "65535", true, 65535},
               {"i16", 3, 0xfffd, 2, "-3", true, -3},
               {"u32", 4, 4294967295, 4, "4294967295", true, 4294967295},
               {"i32", 5, 0xfffffffc, 4, "-4", true, -4},
               {"f32", 6, 0x3fc00000, 4, "1.5", false, 0},
               {"true", 7, 1, 1, "true", true, 1},
               {"false", 7, 0, 1, "false", true, 0},
               {"u64", 10, UINT64_MAX, 8, "18446744073709551615", false, 0},
               {"small", 10, 7, 8, "7", true, 7},
               {"i64", 11, (uint64_t)-5, 8, "-5", true, -5},
               {"f64", 12, 0xc004000000000000, 8, "-2.5", false, 0}};
    enum { COUNT = sizeof all / sizeof *all };
    (void)state;
    for (uint32_t version = 2; version <= 3; version++) {
        gguf_begin(&f, version, 0, COUNT + 4);
        for (size_t i = 0; i < COUNT; i++)
            gguf_put_integer(&f, all[i].key, all[i].type, all[i].value, all[i].size);
        gguf_put_text(&f, "text", "a \xff\n");
        gguf_put_string(&f, "floats");
        gguf_put(&f, 9, 4);
        gguf_put(&f, 6, 4);
        gguf_put(&f, 2, 8);
        gguf_put(&f, 0x3f800000, 4);
        gguf_put(&f, 0x40000000, 4);
        gguf_put_string(&f, "words");
        gguf_put(&f, 9, 4);
        gguf_put(&f, 8, 4);
        gguf_put(&f, 2, 8);
        gguf_put_string(&f, "the first");
        gguf_put_string(&f, "a second word, which no longer fits into the room of the text");
        gguf_put_string(&f, "nested");
        gguf_put(&f, 9, 4);
        gguf_put(&f, 9, 4);
        gguf_put(&f, 1, 8);
        gguf_put(&f, 0, 4);
        gguf_put(&f, 3, 8);
        gguf_put_bytes(&f, "abc", 3);
        uint8_t *copy;
        gguf_file *file = open_copy(&copy);
        assert_int_equal(file->version, version);
        assert_int_equal(file->alignment, 32);
        assert_int_equal(file->pair_count, COUNT + 4);
        for (size_t i = 0; i < COUNT; i++) {
            int64_t number = -77;
            expect_text(file, all[i].key, all[i].text);
            assert_int_equal(gguf_integer(gguf_find_pair(file, all[i].key), &number), all[i].integer);
            assert_int_equal(number, all[i].integer ? all[i].number : -77);
        }
        expect_text(file, "text", "a \xff\n");
        expect_text(file, "floats", "[2 f32: 1, 2]");
        expect_text(file, "words", "[2 string: the first, a second word, which no longer fits into ");
        expect_text(file, "nested", "[1 array]");
        assert_null(gguf_find_pair(file, "other"));
        size_t bytes = 24; /* the pairs as they stand tile the file */
        for (size_t i = 0; i < file->pair_count; i++) bytes += file->pairs[i].raw_bytes;
        assert_int_equal(bytes, f.size);
        assert_ptr_equal(file->pairs[0].raw, copy + 24);
        gguf_close(file);
        free(copy);
    }
}

static void tensors_are_found_where_they_lie(void **state)
{
    (void)state;
    gguf_begin(&f, 3, 3, 1);
    gguf_put_integer(&f, "general.alignment", GGUF_U32, 64, 4);
    gguf_put_tensor(&f, "b", 0, 2, (const int64_t[]){2, 3}, 64);
    gguf_put_tensor(&f, "a", 2, 3, (const int64_t[]){2, 1, 32}, 0);
    gguf_put_tensor(&f, "scalar", 24, 0, NULL, 128);
    gguf_align(&f, 64);
    for (int i = 0; i < 129; i++) gguf_put(&f, (uint64_t)i, 1);
    uint8_t *copy;
    gguf_file *file = open_copy(&copy);
    assert_int_equal(file->alignment, 64);
    assert_int_equal(file->tensor_count, 3);
    const gguf_tensor *a = gguf_find_tensor(file, "a"), *b = gguf_find_tensor(file, "b"),
                      *scalar = gguf_find_tensor(file, "scalar");
    assert_true(a != NULL && b != NULL && scalar != NULL);
    assert_ptr_equal(b, &file->tensors[0]);
    assert_true(b->ndim == 2 && b->shape[0] == 2 && b->shape[1] == 3 && b->bytes == 24 && b->data[0] == 64);
    assert_true(a->ndim == 3 && a->shape[2] == 32 && a->bytes == 36 && a->data[0] == 0);
    assert_true(scalar->ndim == 0 && scalar->bytes == 1 && scalar->data[0] == 128);
    assert_null(gguf_find_tensor(file, "c"));
    gguf_close(file);
    free(copy);
    gguf_close(NULL);
}

/* A file with one tensor of one block of each type. */
static void every_type_has_its_bytes(void **state)
{
    (void)state;
    int types = 0;
    for (uint32_t type = 0; type < GGML_TYPES; type++) {
        const ggml_type *of = &ggml_types[type];
        assert_non_null(of->name);
        gguf_begin(&f, 3, 1, 0);
        gguf_put_tensor(&f, "t", type, 2, (const int64_t[]){2, of->block}, 0);
        gguf_align(&f, 32);
        for (int i = 0; i < 2 * of->bytes; i++) gguf_put(&f, 0, 1);
        uint8_t *copy;
        gguf_file *file = open_copy(&copy);
        assert_int_equal(file->tensors[0].bytes, 2 * of->bytes);
        gguf_close(file);
        free(copy);
        f.size--; /* a byte is missing */
        expect_refused("tensor 't'");
        if (of->block == 1) continue;
        gguf_begin(&f, 3, 1, 0);
        gguf_put_tensor(&f, "t", type, 1, (const int64_t[]){of->block - 1}, 0);
        gguf_align(&f, 32);
        expect_refused(of->name);
        types++;
    }
    assert_int_equal(types, 34);
}

static void hostile_files_are_refused(void **state)
{
    (void)state;
    const int64_t one[] = {1}, five[] = {1, 1, 1, 1, 1}, huge[] = {1ll << 40, 1ll << 40}, minus[] = {-1},
                  empty_huge[] = {0, INT64_MAX, 4};
    f.size = 0;
    expect_refused("\"GGUF\"");
    gguf_put_bytes(&f, "GGUP", 4);
    expect_refused("\"GGUF\"");
    gguf_begin(&f, 1, 0, 0);
    expect_refused("version 1:");
    gguf_begin(&f, 0x03000000, 0, 0);
    expect_refused("big-endian");
    gguf_begin(&f, 3, 0, UINT64_MAX); /* counts are not believed */
    expect_refused("key 0");
    gguf_begin(&f, 3, UINT64_MAX, 0);
    expect_refused("tensor 0");
    gguf_begin(&f, 3, 0, 1);
    gguf_put(&f, UINT64_MAX, 8);
    expect_refused("the file ends within key 0");
    gguf_begin(&f, 3, 0, 1);
    gguf_put_integer(&f, "k", 13, 0, 8);
    expect_refused("key 'k'");
    gguf_begin(&f, 3, 0, 1);
    gguf_put(&f, 2, 8);
    gguf_put_bytes(&f, "a\0", 2);
    expect_refused("zero byte");
    gguf_begin(&f, 3, 0, 1);
    gguf_put_integer(&f, "a\xff", 0, 0, 1);
    expect_refused("UTF-8");
    gguf_begin(&f, 3, 0, 2);
    for (int i = 0; i < 2; i++) gguf_put_integer(&f, "k", GGUF_U8, 0, 1);
    expect_refused("key 'k' is a duplicate");
    for (int element = 0; element < 13; element++) { /* as many elements as 64 bits count */
        gguf_begin(&f, 3, 0, 1);
        gguf_put_string(&f, "list");
        gguf_put(&f, GGUF_ARRAY, 4);
        gguf_put(&f, (uint64_t)element, 4);
        gguf_put(&f, UINT64_MAX, 8);
        expect_refused("key 'list'");
    }
    gguf_begin(&f, 3, 0, 1);
    gguf_put_string(&f, "deep");
    for (int depth = 0; depth < 20; depth++) {
        gguf_put(&f, GGUF_ARRAY, 4);
        if (depth > 0) gguf_put(&f, 1, 8);
    }
    expect_refused("key 'deep'");
    static const uint64_t alignments[] = {0, 4, 24, UINT32_MAX};
    for (size_t i = 0; i < sizeof alignments / sizeof *alignments; i++) {
        gguf_begin(&f, 3, 0, 1);
        gguf_put_integer(&f, "general.alignment", GGUF_U32, alignments[i], 4);
        expect_refused("general.alignment");
    }
    gguf_begin(&f, 3, 0, 1);
    gguf_put_text(&f, "general.alignment", "32");
    expect_refused("general.alignment");
    static const struct {
        const char *what;
        uint32_t type;
        int ndim;
        uint64_t offset;
    } bad[] = {{"5 dimensions", 0, 5, 0},
               {"type 42", 42, 1, 0},
               {"a multiple of 32", 0, 1, 8},
               {"within the 64 bytes", 0, 1, 96},
               {"within the 64 bytes", 0, 1, UINT64_MAX - 31}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        gguf_begin(&f, 3, 1, 0);
        gguf_put_tensor(&f, "t", bad[i].type, bad[i].ndim, bad[i].ndim == 5 ? five : one, bad[i].offset);
        gguf_align(&f, 32);
        for (int j = 0; j < 64; j++) gguf_put(&f, 0, 1);
        expect_refused(bad[i].what);
    }
    const int64_t *const overflowing[] = {huge, minus, empty_huge};
    for (int i = 0; i < 3; i++) {
        gguf_begin(&f, 3, 1, 0);
        gguf_put_tensor(&f, "t", 0, i == 0 ? 2 : i == 1 ? 1 : 3, overflowing[i], 0);
        gguf_align(&f, 32);
        expect_refused("64 bits");
    }
    gguf_begin(&f, 3, 2, 0);
    for (int i = 0; i < 2; i++) gguf_put_tensor(&f, "t", 0, 1, one, 0);
    gguf_align(&f, 32);
    gguf_put(&f, 0, 4);
    expect_refused("'t' is a duplicate");
    gguf_begin(&f, 3, 2, 0);
    gguf_put_tensor(&f, "t", 0, 1, (const int64_t[]){16}, 0);
    gguf_put_tensor(&f, "u", 0, 1, one, 32);
    gguf_align(&f, 32);
    for (int j = 0; j < 64; j++) gguf_put(&f, 0, 1);
    expect_refused("'t' and 'u' overlap");
}

static void every_truncation_is_refused(void **state)
{
    (void)state;
    gguf_begin(&f, 2, 1, 2);
    gguf_put_text(&f, "general.architecture", "llama");
    gguf_put_string(&f, "list");
    gguf_put(&f, 9, 4);
    gguf_put(&f, 8, 4);
    gguf_put(&f, 2, 8);
    gguf_put_string(&f, "x");
    gguf_put_string(&f, "yz");
    gguf_put_tensor(&f, "t", 0, 1, (const int64_t[]){3}, 0);
    gguf_align(&f, 32);
    for (int i = 0; i < 12; i++) gguf_put(&f, 0, 1);
    uint8_t *whole;
    gguf_close(open_copy(&whole));
    const size_t size = f.size;
    for (size_t n = 0; n < size; n++) {
        uint8_t *cut = malloc(n > 0 ? n : 1);
        gguf_file *file = NULL;
        assert_non_null(cut);
        memcpy(cut, whole, n);
        assert_int_equal(gguf_open_bytes(cut, n, &file, why), QUERN_ERR_FORMAT);
        assert_null(file);
        free(cut);
    }
    free(whole);
}

/* Blocks taken apart, against the format's own words: byte j holds elements j and j + 8 (or j + 16). */
static void four_bit_blocks_are_taken_apart(void **state)
{
    (void)state;
    uint8_t from[2 * 36], codes[64], scales[8], elements[128];
    for (int i = 0; i < 128; i++) elements[i] = (uint8_t)((i * 7 + i / 16) & 15);
    for (int b = 0; b < 2; b++) {
        for (int s = 0; s < 4; s++) {
            from[36 * b + s] = (uint8_t)(0x30 + 4 * b + s);
            for (int j = 0; j < 8; j++) {
                const uint8_t *e = elements + 64 * b + 16 * s;
                from[36 * b + 4 + 8 * s + j] = (uint8_t)(e[j] | e[j + 8] << 4);
            }
        }
    }
    gguf_split_nvfp4(from, 2, codes, scales);
    for (int i = 0; i < 128; i++) assert_int_equal(codes[i / 2] >> (i % 2 * 4) & 15, elements[i]);
    for (int i = 0; i < 8; i++) assert_int_equal(scales[i], 0x30 + i);
    for (int b = 0; b < 4; b++) {
        from[17 * b] = (uint8_t)(120 + b);
        for (int j = 0; j < 16; j++)
            from[17 * b + 1 + j] = (uint8_t)(elements[32 * b + j] | elements[32 * b + j + 16] << 4);
    }
    gguf_split_mxfp4(from, 4, codes, scales);
    for (int i = 0; i < 128; i++) assert_int_equal(codes[i / 2] >> (i % 2 * 4) & 15, elements[i]);
    for (int i = 0; i < 4; i++) assert_int_equal(scales[i], 120 + i);
}

static void a_file_is_mapped(void **state)
{
    (void)state;
    char path[] = "gguf_test.XXXXXX";
    const int fd = mkstemp(path);
    gguf_file *file = NULL;
    assert_true(fd >= 0);
    FILE *out = fdopen(fd, "wb");
    assert_non_null(out);
    gguf_begin(&f, 3, 0, 1);
    gguf_put_text(&f, "general.architecture", "llama");
    assert_int_equal(fwrite(f.bytes, 1, f.size, out), f.size);
    assert_int_equal(fclose(out), 0);
    assert_int_equal(gguf_open(path, &file, why), QUERN_OK);
    expect_text(file, "general.architecture", "llama");
    gguf_close(file);
    remove(path);
    file = NULL;
    assert_int_equal(gguf_open(path, &file, why), QUERN_ERR_IO);
    assert_non_null(strstr(why, path));
    assert_null(file);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(values_of_every_type_are_read),
        cmocka_unit_test(tensors_are_found_where_they_lie),
        cmocka_unit_test(every_type_has_its_bytes),
        cmocka_unit_test(hostile_files_are_refused),
        cmocka_unit_test(every_truncation_is_refused),
        cmocka_unit_test(four_bit_blocks_are_taken_apart),
        cmocka_unit_test(a_file_is_mapped),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
