/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * fuzz_replay.c - drives a fuzz target without libFuzzer: every corpus file as it is, cut at every length,
 * and mutated in a fixed pseudo-random order.
 *
 * A corpus file is the text of a safetensors header; the file fed to the target is its length, the text and
 * 64 bytes of data. Without arguments the corpus of the source tree is replayed. `--write DIRECTORY` writes
 * its binary files, as seeds for libFuzzer.
 */
#include "cmocka_c11.h"

#include <glob.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { DATA_BYTES = 64, ROOM = 1 << 16 };

static uint64_t state = 1;

static uint32_t next_random(void)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(state >> 33);
}

/* The file of a corpus text; its size, or 0 where it cannot be read. */
static size_t load(const char *path, uint8_t *file)
{
    FILE *f = fopen(path, "rb");
    if (f == NULL) return 0;
    const size_t length = fread(file + 8, 1, ROOM - 8 - DATA_BYTES, f);
    fclose(f);
    for (int i = 0; i < 8; i++) file[i] = (uint8_t)((uint64_t)length >> 8 * i);
    for (int i = 0; i < DATA_BYTES; i++) file[8 + length + (size_t)i] = (uint8_t)(i * 37);
    return 8 + length + DATA_BYTES;
}

static size_t mutate(uint8_t *file, size_t size)
{
    static const char *const words[] = {"[0,64]",
                                        "-1",
                                        "9223372036854775807",
                                        "18446744073709551616",
                                        "1e400",
                                        "{}",
                                        "[]",
                                        "null",
                                        "\"F32\"",
                                        "\"F4\"",
                                        "\"__metadata__\":",
                                        "\\u0000",
                                        "[[[[[[[[",
                                        "\xff\xfe"};
    for (uint32_t n = 1 + next_random() % 4; n > 0; n--) {
        const size_t at = next_random() % size;
        const uint32_t kind = next_random() % 6;
        if (kind == 0) file[at] ^= (uint8_t)(1u << next_random() % 8);
        if (kind == 1) file[at] = (uint8_t)next_random();
        if (kind == 2) file[next_random() % 8] = (uint8_t)next_random();
        if (kind == 3 && size > 16) { /* cut something out */
            const size_t cut = 1 + next_random() % 8;
            if (at + cut < size) {
                memmove(file + at, file + at + cut, size - at - cut);
                size -= cut;
            }
        }
        if (kind == 4) { /* write a word over what is there */
            const char *word = words[next_random() % (sizeof words / sizeof *words)];
            const size_t length = strlen(word);
            if (at + length < size) memcpy(file + at, word, length);
        }
        if (kind == 5 && size > 80 && at >= 8) { /* change a digit */
            for (size_t i = at; i < size - DATA_BYTES; i++) {
                if (file[i] < '0' || file[i] > '9') continue;
                file[i] = (uint8_t)('0' + next_random() % 10);
                break;
            }
        }
    }
    return size;
}

/* Calls visit for every file of the corpus. */
static void each_file(void (*visit)(const char *path))
{
    glob_t found;
    assert_int_equal(glob(QUERN_FUZZ_CORPUS "/*.json", 0, NULL, &found), 0);
    for (size_t i = 0; i < found.gl_pathc; i++) visit(found.gl_pathv[i]);
    globfree(&found);
}

static const char *seed_directory;

static void write_seed(const char *path)
{
    static uint8_t file[ROOM];
    char out[4096];
    snprintf(out, sizeof out, "%s/%s.safetensors", seed_directory, strrchr(path, '/') + 1);
    const size_t size = load(path, file);
    FILE *f = fopen(out, "wb");
    if (f == NULL || fwrite(file, 1, size, f) != size || fclose(f) != 0) {
        fprintf(stderr, "cannot write %s\n", out);
        exit(1);
    }
}

static void replay(const char *path)
{
    enum { MUTATIONS = 5000 };
    static uint8_t original[ROOM], file[ROOM];
    const size_t size = load(path, original);
    assert_true(size > 8 + DATA_BYTES);
    for (size_t cut = 0; cut <= size; cut++) LLVMFuzzerTestOneInput(original, cut);
    for (int m = 0; m < MUTATIONS; m++) {
        memcpy(file, original, size);
        LLVMFuzzerTestOneInput(file, mutate(file, size));
    }
}

static void no_input_breaks_the_target(void **unused)
{
    (void)unused;
    each_file(replay);
}

int main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[1], "--write") == 0) {
        seed_directory = argv[2];
        each_file(write_seed);
        return 0;
    }
    const struct CMUnitTest tests[] = {cmocka_unit_test(no_input_breaks_the_target)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
