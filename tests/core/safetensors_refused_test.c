/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* safetensors_refused_test.c - the reader refuses every malformed file with a sentence. */
#include "cmocka_c11.h"
#include "safetensors_bytes.h"

#include <quern/safetensors.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void expect_refused(const char *header, size_t data_bytes, const char *sentence_part)
{
    size_t size;
    uint8_t *bytes = safetensors_bytes(header, data_bytes, &size);
    quern_safetensors *file = (quern_safetensors *)&size; /* must stay as it is */
    const quern_status status = quern_safetensors_open_bytes(bytes, size, &file);
    if (status != QUERN_ERR_FORMAT || strstr(quern_last_error(NULL), sentence_part) == NULL)
        fail_msg("%s: status %d, \"%s\" lacks \"%s\"", header, status, quern_last_error(NULL), sentence_part);
    assert_ptr_equal(file, &size);
    free(bytes);
}

static void hostile_headers_are_refused(void **state)
{
    (void)state;
    expect_refused("[]", 0, "no safetensors file");
    expect_refused(" {}", 0, "no safetensors file");
    expect_refused("{", 0, "no valid JSON");
    expect_refused("{}x", 0, "no valid JSON");
    expect_refused("{\"a\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]},\"a\":{\"dtype\":\"U8\","
                   "\"shape\":[0],"
                   "\"data_offsets\":[0,0]}}",
                   0, "duplicate");
    expect_refused("{\"a\":{\"dtype\":\"U8\",\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}", 0,
                   "duplicate");
    expect_refused("{\"__metadata__\":{\"k\":\"1\",\"k\":\"2\"}}", 0, "duplicate");
    expect_refused("{\"__metadata__\":{},\"__metadata__\":{}}", 0, "duplicate");
    expect_refused("{\"a\xff\":{}}", 0, "no valid JSON");
    expect_refused("{\"a\xc0\x80\":{}}", 0,
                   "no valid JSON"); /* what an escaped zero comes out as is no UTF-8 */
    expect_refused("{\"a\\u000\":{}}", 0, "no valid JSON");
    expect_refused("{\"__metadata__\":nul}", 0, "no valid JSON");
    expect_refused("{\"__metadata__\":null,\"__metadata__\":null}", 0, "duplicate");
    expect_refused("{\"a\":{\"dtype\":\"F4\",\"shape\":[4],\"data_offsets\":[0,3]}}", 3, "16 bits");
    expect_refused("{\"a\":7}", 0, "no JSON object");
    expect_refused("{\"a\":{}}", 0, "dtype is missing");
    expect_refused("{\"a\":{\"dtype\":3,\"shape\":[],\"data_offsets\":[0,4]}}", 4, "dtype is missing");
    expect_refused("{\"a\":{\"dtype\":\"F31\",\"shape\":[],\"data_offsets\":[0,4]}}", 4, "'F31'");
    expect_refused("{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,4]}}", 4, "shape");
    expect_refused("{\"a\":{\"dtype\":\"F32\",\"shape\":[-1],\"data_offsets\":[0,4]}}", 4, "shape");
    expect_refused("{\"a\":{\"dtype\":\"F32\",\"shape\":[1.0],\"data_offsets\":[0,4]}}", 4, "shape");
    expect_refused("{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}", 4, "data_offsets");
    expect_refused("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0]}}", 4, "data_offsets");
    expect_refused("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,0]}}", 4, "[4, 0]");
    expect_refused("{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", 4, "[0, 8]");
    expect_refused("{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,9223372036854775807]}}", 4,
                   "9223372036854775807");
    expect_refused("{\"a\":{\"dtype\":\"F32\",\"shape\":[99999999999999999999],\"data_offsets\":[0,4]}}", 4,
                   "no valid JSON");
    expect_refused("{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,4]}}", 4, "64 bits");
    expect_refused("{\"a\":{\"dtype\":\"F4\",\"shape\":[3],\"data_offsets\":[0,2]}}", 2, "12 bits");
    expect_refused("{\"a\":{\"dtype\":\"F32\",\"shape\":[4611686018427387904,4],\"data_offsets\":[0,4]}}", 4,
                   "overflows");
    expect_refused("{\"a\":{\"dtype\":\"F32\",\"shape\":[0,4611686018427387904,4],\"data_offsets\":[0,0]}}",
                   0, "overflows");
    expect_refused("{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},\"b\":{\"dtype\":\"U8\","
                   "\"shape\":[4],"
                   "\"data_offsets\":[3,7]}}",
                   7, "overlap");
    expect_refused("{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},\"b\":{\"dtype\":\"U8\","
                   "\"shape\":[4],"
                   "\"data_offsets\":[5,9]}}",
                   9, "hole");
    expect_refused("{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}", 5, "must agree");
    expect_refused("{\"a\":1,}", 0, "no JSON object");
    expect_refused("{\"a\\ud800\":{}}", 0, "no valid JSON");
    expect_refused("{\"a\\udc00\":{}}", 0, "no valid JSON");
    expect_refused("{\"a\\x\":{}}", 0, "no valid JSON");
    expect_refused("{\"a\n\":{}}", 0, "no valid JSON");
    expect_refused("{\"a\xed\xa0\x80\":{}}", 0, "no valid JSON");
    expect_refused("{\"a\":{\"dtype\":\"U8\",\"shape\":[01],\"data_offsets\":[0,1]}}", 1, "no valid JSON");
    expect_refused("{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1],\"x\":[1,]}}", 1,
                   "no valid JSON");
    expect_refused("{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1],\"x\":nul}}", 1,
                   "no valid JSON");
    expect_refused("{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},}", 1, "no valid JSON");
    expect_refused("{\"a\" {}}", 0, "no valid JSON");
    expect_refused("{} {}", 0, "no valid JSON");
    expect_refused("{\"__metadata__\":[]}", 0, "__metadata__");
    expect_refused("{\"__metadata__\":{\"a\":1}}", 0, "no string");
}

static void bad_lengths_are_refused(void **state)
{
    (void)state;
    quern_safetensors *file = NULL;
    uint8_t bytes[16] = {0};
    assert_int_equal(quern_safetensors_open_bytes(NULL, 0, &file), QUERN_ERR_FORMAT);
    for (size_t n = 0; n <= 16; n++)
        assert_int_equal(quern_safetensors_open_bytes(bytes, n, &file), QUERN_ERR_FORMAT);
    memset(bytes, 0xff, sizeof bytes);
    assert_int_equal(quern_safetensors_open_bytes(bytes, sizeof bytes, &file), QUERN_ERR_FORMAT);
    assert_non_null(strstr(quern_last_error(NULL), "no safetensors file"));
    bytes[8] = '{';
    assert_int_equal(quern_safetensors_open_bytes(bytes, sizeof bytes, &file), QUERN_ERR_FORMAT);
    assert_non_null(strstr(quern_last_error(NULL), "18446744073709551615"));
    assert_int_equal(quern_safetensors_open_bytes(NULL, 8, &file), QUERN_ERR_INVALID_ARGUMENT);
    assert_int_equal(quern_safetensors_open_bytes(bytes, 8, NULL), QUERN_ERR_INVALID_ARGUMENT);
    assert_null(file);
}

static void every_truncation_is_refused(void **state)
{
    (void)state;
    size_t size;
    uint8_t *bytes =
        safetensors_bytes("{\"a\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[0,16]}}", 16, &size);
    for (size_t n = 0; n < size; n++) {
        quern_safetensors *file = NULL;
        assert_int_equal(quern_safetensors_open_bytes(bytes, n, &file), QUERN_ERR_FORMAT);
        assert_null(file);
    }
    free(bytes);
}

static void unreadable_paths_are_io_errors(void **state)
{
    (void)state;
    quern_safetensors *file = NULL;
    assert_int_equal(quern_safetensors_open("no/such/file", &file), QUERN_ERR_IO);
    assert_non_null(strstr(quern_last_error(NULL), "no/such/file"));
    assert_int_equal(quern_safetensors_open(".", &file), QUERN_ERR_IO);
    assert_int_equal(quern_safetensors_open("/dev/null", &file), QUERN_ERR_IO);
    assert_int_equal(quern_safetensors_open(NULL, &file), QUERN_ERR_INVALID_ARGUMENT);
    assert_null(file);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(hostile_headers_are_refused),
        cmocka_unit_test(bad_lengths_are_refused),
        cmocka_unit_test(every_truncation_is_refused),
        cmocka_unit_test(unreadable_paths_are_io_errors),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
