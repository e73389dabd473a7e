/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* safetensors_test.c - what the reader hands out of each dtype, and that the writer never leaves a partial
 * file. */
#include "cmocka_c11.h"
#include "safetensors_bytes.h"

#include <quern/safetensors.h>

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static char directory[] = "safetensors_test.XXXXXX";
static char path[64];

static int make_directory(void **state)
{
    (void)state;
    if (mkdtemp(directory) == NULL) return -1;
    snprintf(path, sizeof path, "%s/file.safetensors", directory);
    return 0;
}

static int remove_directory(void **state)
{
    (void)state;
    unlink(path);
    return rmdir(directory); /* fails where a test left a file behind */
}

static int files_in_directory(void)
{
    int n = 0;
    DIR *d = opendir(directory);
    assert_non_null(d);
    for (const struct dirent *e; (e = readdir(d)) != NULL;) n += e->d_name[0] != '.';
    closedir(d);
    return n;
}

static void misaligned_data_comes_out_aligned(void **state)
{
    (void)state;
    size_t size;
    uint8_t *bytes = safetensors_bytes("{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
                                       "\"b\":{\"dtype\":\"I32\",\"shape\":[1,2],\"data_offsets\":[1,9]}}",
                                       9, &size);
    quern_safetensors *file = NULL;
    quern_tensor t;
    assert_int_equal(quern_safetensors_open_bytes(bytes, size, &file), QUERN_OK);
    assert_int_equal(quern_safetensors_get(file, "b", &t), QUERN_OK);
    assert_int_equal((uintptr_t)t.data % 4, 0);
    assert_int_equal(((const int32_t *)t.data)[0], 0x04030201);
    assert_int_equal(((const int32_t *)t.data)[1], 0x08070605);
    quern_safetensors_close(file);
    free(bytes);
}

static void tensors_that_a_view_cannot_hold_are_unsupported(void **state)
{
    (void)state;
    size_t size;
    uint8_t *bytes =
        safetensors_bytes("{\"a\":{\"dtype\":\"F6_E2M3\",\"shape\":[4],\"data_offsets\":[0,3]},"
                          "\"b\":{\"dtype\":\"U8\",\"shape\":[1,1,1,1,1,1,1],\"data_offsets\":[3,4]},"
                          "\"odd\":{\"dtype\":\"F4\",\"shape\":[2,3],\"data_offsets\":[4,7]}}",
                          7, &size);
    quern_safetensors *file = NULL;
    quern_tensor t = {.ndim = -77};
    assert_int_equal(quern_safetensors_open_bytes(bytes, size, &file), QUERN_OK);
    assert_int_equal(quern_safetensors_get(file, "a", &t), QUERN_ERR_UNSUPPORTED);
    assert_non_null(strstr(quern_last_error(NULL), "F6_E2M3"));
    assert_int_equal(quern_safetensors_get(file, "b", &t), QUERN_ERR_UNSUPPORTED);
    assert_int_equal(quern_safetensors_get(file, "odd", &t), QUERN_ERR_UNSUPPORTED);
    assert_int_equal(quern_safetensors_get(file, "c", &t), QUERN_ERR_INVALID_ARGUMENT);
    assert_int_equal(quern_safetensors_get(file, NULL, &t), QUERN_ERR_INVALID_ARGUMENT);
    assert_int_equal(t.ndim, -77);
    quern_safetensors_close(file);
    free(bytes);
}

/* The file of each dtype, byte by byte, and back; packed 4-bit floats count elements in the file and bytes in
 * a view. */
static void every_dtype_goes_in_and_comes_out(void **state)
{
    static const struct {
        const char *name;
        quern_dtype dtype;
        int bits;
    } all[] = {{"F64", QUERN_F64, 64},
               {"F32", QUERN_F32, 32},
               {"F16", QUERN_F16, 16},
               {"BF16", QUERN_BF16, 16},
               {"F8_E4M3", QUERN_E4M3, 8},
               {"F8_E5M2", QUERN_E5M2, 8},
               {"F8_E8M0", QUERN_E8M0, 8},
               {"F4", QUERN_E2M1X2, 4},
               {"I64", QUERN_I64, 64},
               {"I32", QUERN_I32, 32},
               {"I16", QUERN_I16, 16},
               {"I8", QUERN_I8, 8},
               {"U64", QUERN_U64, 64},
               {"U32", QUERN_U32, 32},
               {"U16", QUERN_U16, 16},
               {"U8", QUERN_U8, 8},
               {"BOOL", QUERN_BOOL, 8},
               {"C64", QUERN_C64, 64},
               {"F8_E4M3FNUZ", QUERN_E4M3FNUZ, 8},
               {"F8_E5M2FNUZ", QUERN_E5M2FNUZ, 8}};
    (void)state;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        char header[160];
        size_t size;
        quern_safetensors *file = NULL;
        quern_tensor t, again;
        snprintf(header, sizeof header, "{\"x\":{\"dtype\":\"%s\",\"shape\":[3,2],\"data_offsets\":[0,%d]}}",
                 all[i].name, 6 * all[i].bits / 8);
        uint8_t *bytes = safetensors_bytes(header, (size_t)(6 * all[i].bits / 8), &size);
        assert_int_equal(quern_safetensors_open_bytes(bytes, size, &file), QUERN_OK);
        assert_int_equal(quern_safetensors_get(file, "x", &t), QUERN_OK);
        assert_int_equal(t.dtype, all[i].dtype);
        assert_true(t.ndim == 2 && t.shape[0] == 3 && t.shape[1] == (all[i].bits == 4 ? 1 : 2));
        assert_memory_equal(t.data, bytes + size - 6 * all[i].bits / 8, (size_t)(6 * all[i].bits / 8));
        const quern_safetensors_item item = {"x", &t};
        assert_int_equal(quern_safetensors_save(path, &item, 1, NULL, 0), QUERN_OK);
        quern_safetensors *saved = NULL;
        assert_int_equal(quern_safetensors_open(path, &saved), QUERN_OK);
        assert_int_equal(quern_safetensors_get(saved, "x", &again), QUERN_OK);
        assert_true(again.dtype == t.dtype && again.shape[0] == 3 && again.shape[1] == t.shape[1]);
        assert_memory_equal(again.data, t.data, (size_t)(6 * all[i].bits / 8));
        quern_safetensors_close(saved);
        quern_safetensors_close(file);
        free(bytes);
    }
    uint8_t pair = 0x21;
    const quern_tensor scalar = quern_tensor_contiguous(&pair, QUERN_E2M1X2, 0, NULL);
    const quern_safetensors_item item = {"x", &scalar};
    assert_int_equal(quern_safetensors_save(path, &item, 1, NULL, 0),
                     QUERN_ERR_INVALID_ARGUMENT); /* a scalar is half a byte */
}

/* torch's 4-bit type is a pair: the bytes say whether a shape counts elements or pairs. */
static void both_counts_of_4_bit_elements_are_read(void **state)
{
    (void)state;
    size_t size;
    uint8_t *bytes =
        safetensors_bytes("{\"elements\":{\"dtype\":\"F4\",\"shape\":[2,6],\"data_offsets\":[0,6]},"
                          "\"pairs\":{\"dtype\":\"F4\",\"shape\":[2,3],\"data_offsets\":[6,12]},"
                          "\"none\":{\"dtype\":\"F4\",\"shape\":[0,6],\"data_offsets\":[12,12]}}",
                          12, &size);
    quern_safetensors *file = NULL;
    quern_tensor t;
    assert_int_equal(quern_safetensors_open_bytes(bytes, size, &file), QUERN_OK);
    assert_int_equal(quern_safetensors_get(file, "elements", &t), QUERN_OK);
    assert_true(t.dtype == QUERN_E2M1X2 && t.ndim == 2 && t.shape[0] == 2 && t.shape[1] == 3);
    assert_int_equal(((const uint8_t *)t.data)[0], 0);
    assert_int_equal(quern_safetensors_get(file, "pairs", &t), QUERN_OK);
    assert_true(t.dtype == QUERN_E2M1X2 && t.ndim == 2 && t.shape[0] == 2 && t.shape[1] == 3);
    assert_int_equal(((const uint8_t *)t.data)[5], 11);
    assert_int_equal(quern_safetensors_get(file, "none", &t), QUERN_OK);
    assert_true(t.shape[0] == 0 && t.shape[1] == 3);
    quern_safetensors_close(file);
    free(bytes);
}

/* Also tensors that no view can hold come out as bytes with their dtype's name. */
static void every_tensor_comes_out_as_bytes(void **state)
{
    (void)state;
    size_t size;
    uint8_t *bytes =
        safetensors_bytes("{\"a\":{\"dtype\":\"F6_E2M3\",\"shape\":[4],\"data_offsets\":[0,3]},"
                          "\"b\":{\"data_offsets\":[3,11],\"dtype\":\"F32\",\"shape\":[1,1,1,1,1,1,1,2]},"
                          "\"c\":{\"dtype\":\"BF16\",\"shape\":[],\"data_offsets\":[11,13]}}",
                          13, &size);
    quern_safetensors *file = NULL;
    quern_safetensors_data data = QUERN_SAFETENSORS_DATA_INIT;
    assert_int_equal(quern_safetensors_open_bytes(bytes, size, &file), QUERN_OK);
    assert_int_equal(quern_safetensors_bytes(file, "a", &data), QUERN_OK);
    assert_string_equal(data.dtype, "F6_E2M3");
    assert_true(data.bytes == 3 && data.ndim == 1 && data.shape[0] == 4);
    assert_ptr_equal(data.data, bytes + size - 13);
    assert_int_equal(quern_safetensors_bytes(file, "b", &data), QUERN_OK);
    assert_string_equal(data.dtype, "F32");
    assert_true(data.bytes == 8 && data.ndim == 8 && data.shape[0] == 1 && data.shape[7] == 2);
    assert_ptr_equal(data.data, bytes + size - 10);
    assert_int_equal(quern_safetensors_bytes(file, "c", &data), QUERN_OK);
    assert_true(data.bytes == 2 && data.ndim == 0);
    assert_int_equal(quern_safetensors_bytes(file, "d", &data), QUERN_ERR_INVALID_ARGUMENT);
    assert_non_null(strstr(quern_last_error(NULL), "'d'"));
    data.size = 0;
    assert_int_equal(quern_safetensors_bytes(file, "a", &data), QUERN_ERR_INVALID_ARGUMENT);
    assert_int_equal(quern_safetensors_bytes(file, "a", NULL), QUERN_ERR_INVALID_ARGUMENT);
    assert_int_equal(data.bytes, 2);
    quern_safetensors_close(file);
    free(bytes);
}

/* Escaped zeros in names, keys and values, and metadata that is null. */
static void zeros_and_null_are_read_and_written(void **state)
{
    (void)state;
    size_t size;
    uint8_t *bytes =
        safetensors_bytes("{\"__metadata__\":{\"k\\u0000\":\"\\u0000v\"},"
                          "\"a\\u0000b\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
                          "\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[1,2]}}",
                          2, &size);
    quern_safetensors *file = NULL;
    quern_tensor t;
    assert_int_equal(quern_safetensors_open_bytes(bytes, size, &file), QUERN_OK);
    assert_string_equal(quern_safetensors_metadata(file, "k\xc0\x80"), "\xc0\x80v");
    assert_int_equal(quern_safetensors_get(file,
                                           "a\xc0\x80"
                                           "b",
                                           &t),
                     QUERN_OK);
    const quern_safetensors_item item = {"a\xc0\x80"
                                         "b",
                                         &t};
    const quern_safetensors_pair pair = {"k\xc0\x80", "\xc0\x80v"};
    assert_int_equal(quern_safetensors_save(path, &item, 1, &pair, 1), QUERN_OK);
    quern_safetensors_close(file);
    free(bytes);
    char text[256] = "";
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    assert_true(fread(text, 1, sizeof text - 1, f) > 8);
    fclose(f);
    assert_non_null(strstr(text + 8, "\"a\\u0000b\""));
    assert_non_null(strstr(text + 8, "{\"k\\u0000\":\"\\u0000v\"}"));
    assert_int_equal(quern_safetensors_open(path, &file), QUERN_OK);
    assert_true(quern_safetensors_has(file, item.name));
    assert_string_equal(quern_safetensors_metadata(file, pair.key), pair.value);
    quern_safetensors_close(file);

    bytes = safetensors_bytes(
        "{\"__metadata__\": null,\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1, &size);
    assert_int_equal(quern_safetensors_open_bytes(bytes, size, &file), QUERN_OK);
    assert_int_equal(quern_safetensors_metadata_count(file), 0);
    assert_int_equal(quern_safetensors_count(file), 1);
    quern_safetensors_close(file);
    free(bytes);
}

/* A name finds its tensor among many, and JSON escapes in names are decoded. */
static void names_are_found(void **state)
{
    enum { MANY = 20000 };
    (void)state;
    char(*names)[16] = malloc(sizeof *names * MANY);
    quern_safetensors_item *items = malloc(sizeof *items * MANY);
    const quern_tensor nothing = quern_tensor_contiguous(NULL, QUERN_U8, 1, (const int64_t[]){0});
    assert_true(names != NULL && items != NULL);
    for (int i = 0; i < MANY; i++) {
        snprintf(names[i], sizeof *names, "t%d", i);
        items[i] = (quern_safetensors_item){names[i], &nothing};
    }
    assert_int_equal(quern_safetensors_save(path, items, MANY, NULL, 0), QUERN_OK);
    quern_safetensors *file = NULL;
    assert_int_equal(quern_safetensors_open(path, &file), QUERN_OK);
    assert_int_equal(quern_safetensors_count(file), MANY);
    for (int i = 0; i < MANY; i++) assert_true(quern_safetensors_has(file, names[i]));
    assert_false(quern_safetensors_has(file, "t20000"));
    quern_safetensors_close(file);
    free(names);
    free(items);
    size_t size;
    uint8_t *bytes =
        safetensors_bytes("{\"\\u00e9\\ud83d\\ude00\\/"
                          "\\n\\\"\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0],\"more\":"
                          "[1.5e3,{\"x\":null},true,false,-0]} } ",
                          0, &size);
    assert_int_equal(quern_safetensors_open_bytes(bytes, size, &file), QUERN_OK);
    assert_true(quern_safetensors_has(file, "\xc3\xa9\xf0\x9f\x98\x80/\n\""));
    quern_safetensors_close(file);
    free(bytes);
}

static void what_is_saved_is_read_back(void **state)
{
    (void)state;
    float matrix[6] = {1, 2, 3, 4, 5, 6};
    int64_t wide[1] = {-5};
    uint16_t halves[3] = {0x3f80, 0, 0xffff};
    int32_t scalar = 42;
    const int64_t shape2[] = {2, 3}, shape1[] = {1}, shape3[] = {3}, none[] = {4, 0};
    quern_tensor transposed = quern_tensor_contiguous(matrix, QUERN_F32, 2, shape2);
    transposed.shape[0] = 3;
    transposed.shape[1] = 2;
    transposed.strides[0] = 1;
    transposed.strides[1] = 3;
    const quern_tensor m = quern_tensor_contiguous(matrix, QUERN_F32, 2, shape2);
    const quern_tensor w = quern_tensor_contiguous(wide, QUERN_I64, 1, shape1);
    const quern_tensor h = quern_tensor_contiguous(halves, QUERN_BF16, 1, shape3);
    const quern_tensor s = quern_tensor_contiguous(&scalar, QUERN_I32, 0, NULL);
    const quern_tensor e = quern_tensor_contiguous(NULL, QUERN_F16, 2, none);
    const quern_safetensors_item items[] = {{"h", &h},          {"m", &m}, {"w \"\xc3\xa9\"", &w},
                                            {"t", &transposed}, {"s", &s}, {"e", &e}};
    const quern_safetensors_pair metadata[] = {{"key", "value\n\"quoted\""}, {"empty", ""}};
    assert_int_equal(quern_safetensors_save(path, items, 6, metadata, 2), QUERN_OK);
    assert_int_equal(files_in_directory(), 1);

    quern_safetensors *file = NULL;
    quern_tensor t;
    assert_int_equal(quern_safetensors_open(path, &file), QUERN_OK);
    assert_int_equal(quern_safetensors_count(file), 6);
    assert_null(quern_safetensors_name(file, 6));
    for (size_t i = 0; i < 6; i++) { /* contiguous ones as they went in */
        assert_int_equal(quern_safetensors_get(file, items[i].name, &t), QUERN_OK);
        assert_int_equal(t.dtype, items[i].tensor->dtype);
        assert_int_equal(t.ndim, items[i].tensor->ndim);
        assert_memory_equal(t.shape, items[i].tensor->shape, sizeof t.shape[0] * (size_t)t.ndim);
        assert_int_equal((uintptr_t)t.data % quern_dtype_size(t.dtype), 0);
    }
    quern_safetensors_get(file, "m", &t);
    assert_memory_equal(t.data, matrix, sizeof matrix);
    quern_safetensors_get(file, "h", &t);
    assert_memory_equal(t.data, halves, sizeof halves);
    quern_safetensors_get(file, "s", &t);
    assert_int_equal(*(int32_t *)t.data, 42);
    quern_safetensors_get(file, "t", &t);
    const float expected[6] = {1, 4, 2, 5, 3, 6};
    assert_memory_equal(t.data, expected, sizeof expected);
    quern_safetensors_get(file, "e", &t);
    assert_null(t.data);
    assert_int_equal(quern_safetensors_metadata_count(file), 2);
    assert_string_equal(quern_safetensors_metadata(file, "key"), "value\n\"quoted\"");
    assert_string_equal(quern_safetensors_metadata(file, "empty"), "");
    assert_null(quern_safetensors_metadata(file, "other"));
    assert_null(quern_safetensors_metadata_key(file, 2));
    quern_safetensors_close(file);
    quern_safetensors_close(NULL);
}

static void a_large_strided_tensor_streams_through(void **state)
{
    (void)state;
    enum { ROWS = 3000, COLUMNS = 100, PITCH = 131 };
    float *data = malloc(sizeof *data * ROWS * PITCH);
    assert_non_null(data);
    for (int i = 0; i < ROWS * PITCH; i++) data[i] = (float)i;
    const int64_t shape[] = {ROWS, COLUMNS};
    quern_tensor t = quern_tensor_contiguous(data, QUERN_F32, 2, shape);
    t.strides[0] = PITCH;
    const quern_safetensors_item item = {"x", &t};
    assert_int_equal(quern_safetensors_save(path, &item, 1, NULL, 0), QUERN_OK);
    quern_safetensors *file = NULL;
    quern_tensor r;
    assert_int_equal(quern_safetensors_open(path, &file), QUERN_OK);
    assert_int_equal(quern_safetensors_get(file, "x", &r), QUERN_OK);
    for (int i = 0; i < ROWS; i++)
        assert_memory_equal((const float *)r.data + i * COLUMNS, data + i * PITCH, sizeof(float) * COLUMNS);
    quern_safetensors_close(file);
    free(data);
}

static void bad_items_are_refused(void **state)
{
    (void)state;
    float x = 1;
    const int64_t shape[] = {1}, negative[] = {-1}, huge[] = {INT64_MAX};
    const quern_tensor good = quern_tensor_contiguous(&x, QUERN_F32, 1, shape);
    const quern_tensor minus = quern_tensor_contiguous(&x, QUERN_F32, 1, negative);
    const quern_tensor large = quern_tensor_contiguous(&x, QUERN_F32, 1, huge);
    const quern_tensor nowhere = quern_tensor_contiguous(NULL, QUERN_F32, 1, shape);
    const quern_tensor strange = quern_tensor_contiguous(&x, (quern_dtype)99, 1, shape);
    quern_tensor gpu = good;
    gpu.device = QUERN_CUDA;
    const quern_safetensors_item bad[] = {
        {NULL, &good}, {"a", NULL},   {"__metadata__", &good}, {"a\xff", &good}, {"a\xc0", &good},
        {"a", &minus}, {"a", &large}, {"a", &nowhere},         {"a", &strange},  {"a", &gpu}};
    unlink(path);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_int_equal(quern_safetensors_save(path, &bad[i], 1, NULL, 0), QUERN_ERR_INVALID_ARGUMENT);
        assert_non_null(strstr(quern_last_error(NULL), "items[0]"));
    }
    const quern_safetensors_item twice[] = {{"a", &good}, {"a", &good}};
    assert_int_equal(quern_safetensors_save(path, twice, 2, NULL, 0), QUERN_ERR_INVALID_ARGUMENT);
    const quern_safetensors_pair pairs[] = {{"k", "1"}, {"k", "2"}}, invalid = {"k", "\xff"},
                                 missing = {"k", NULL};
    assert_int_equal(quern_safetensors_save(path, twice, 1, pairs, 2), QUERN_ERR_INVALID_ARGUMENT);
    assert_int_equal(quern_safetensors_save(path, twice, 1, &invalid, 1), QUERN_ERR_INVALID_ARGUMENT);
    assert_int_equal(quern_safetensors_save(path, twice, 1, &missing, 1), QUERN_ERR_INVALID_ARGUMENT);
    assert_int_equal(quern_safetensors_save(NULL, twice, 1, NULL, 0), QUERN_ERR_INVALID_ARGUMENT);
    assert_int_equal(files_in_directory(), 0);
}

static void unwritable_paths_are_io_errors(void **state)
{
    (void)state;
    assert_int_equal(quern_safetensors_save("no/such/directory/file", NULL, 0, NULL, 0), QUERN_ERR_IO);
    assert_non_null(strstr(quern_last_error(NULL), "no/such/directory"));
    assert_int_equal(quern_safetensors_save(directory, NULL, 0, NULL, 0), QUERN_ERR_IO);
    assert_int_equal(quern_safetensors_save("/dev/full", NULL, 0, NULL, 0), QUERN_ERR_IO);
    struct stat st;
    assert_int_equal(stat("/dev/full", &st), 0);
    assert_true(S_ISCHR(st.st_mode)); /* not renamed over */
}

/* A file size limit simulates a full disk: write() fails half-way. */
static void a_full_disk_leaves_the_old_file(void **state)
{
    (void)state;
    static float data[1 << 18];
    float old = 7;
    const int64_t shape[] = {1 << 18}, one[] = {1};
    const quern_tensor large = quern_tensor_contiguous(data, QUERN_F32, 1, shape);
    const quern_tensor small = quern_tensor_contiguous(&old, QUERN_F32, 1, one);
    const quern_safetensors_item item = {"x", &large}, before = {"x", &small};
    assert_int_equal(quern_safetensors_save(path, &before, 1, NULL, 0), QUERN_OK);
    const pid_t child = fork();
    if (child == 0) {
        const struct rlimit limit = {100000, 100000};
        signal(SIGXFSZ, SIG_IGN);
        if (setrlimit(RLIMIT_FSIZE, &limit) != 0) _exit(9);
        _exit((int)quern_safetensors_save(path, &item, 1, NULL, 0));
    }
    int how;
    assert_int_equal(waitpid(child, &how, 0), child);
    assert_true(WIFEXITED(how));
    assert_int_equal(WEXITSTATUS(how), QUERN_ERR_IO);
    assert_int_equal(files_in_directory(), 1);
    quern_safetensors *file = NULL;
    quern_tensor t;
    assert_int_equal(quern_safetensors_open(path, &file), QUERN_OK);
    assert_int_equal(quern_safetensors_get(file, "x", &t), QUERN_OK);
    assert_int_equal(t.shape[0], 1);
    assert_true(*(const float *)t.data == 7);
    quern_safetensors_close(file);
}

static void a_symbolic_link_is_written_through(void **state)
{
    (void)state;
    char link_path[80];
    struct stat st;
    snprintf(link_path, sizeof link_path, "%s/link", directory);
    assert_int_equal(quern_safetensors_save(path, NULL, 0, NULL, 0), QUERN_OK);
    assert_int_equal(symlink("file.safetensors", link_path), 0);
    assert_int_equal(quern_safetensors_save(link_path, NULL, 0, NULL, 0), QUERN_OK);
    assert_int_equal(lstat(link_path, &st), 0);
    assert_true(S_ISLNK(st.st_mode));
    unlink(link_path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(misaligned_data_comes_out_aligned),
        cmocka_unit_test(tensors_that_a_view_cannot_hold_are_unsupported),
        cmocka_unit_test(every_dtype_goes_in_and_comes_out),
        cmocka_unit_test(both_counts_of_4_bit_elements_are_read),
        cmocka_unit_test(every_tensor_comes_out_as_bytes),
        cmocka_unit_test(zeros_and_null_are_read_and_written),
        cmocka_unit_test(names_are_found),
        cmocka_unit_test(what_is_saved_is_read_back),
        cmocka_unit_test(a_large_strided_tensor_streams_through),
        cmocka_unit_test(bad_items_are_refused),
        cmocka_unit_test(unwritable_paths_are_io_errors),
        cmocka_unit_test(a_full_disk_leaves_the_old_file),
        cmocka_unit_test(a_symbolic_link_is_written_through),
    };
    return cmocka_run_group_tests(tests, make_directory, remove_directory);
}
