/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * fuzz_replay.c - drives a fuzz target without libFuzzer: every corpus file as it is, cut at every length, and
 * mutated in a fixed pseudo-random order.
 *
 * A corpus file is the text of a safetensors header; the file fed to the target is its length, the text and
 * 64 bytes of data. usage: fuzz_replay MUTATIONS FILE...   or   fuzz_replay --write DIRECTORY FILE...
 * (writes the binary files, as seeds for libFuzzer).
 */
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
    static const char *const words[] = {"[0,64]", "-1", "9223372036854775807", "18446744073709551616", "1e400", "{}", "[]",
                                        "null", "\"F32\"", "\"F4\"", "\"__metadata__\":", "\\u0000", "[[[[[[[[", "\xff\xfe"};
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

static int write_seeds(int argc, char **argv)
{
    static uint8_t file[ROOM];
    for (int i = 3; i < argc; i++) {
        char path[4096];
        const char *slash = strrchr(argv[i], '/');
        snprintf(path, sizeof path, "%s/%s.safetensors", argv[2], slash != NULL ? slash + 1 : argv[i]);
        const size_t size = load(argv[i], file);
        FILE *f = fopen(path, "wb");
        if (f == NULL || fwrite(file, 1, size, f) != size || fclose(f) != 0) return 1;
    }
    return 0;
}

int main(int argc, char **argv)
{
    static uint8_t original[ROOM], file[ROOM];
    if (argc > 3 && strcmp(argv[1], "--write") == 0) return write_seeds(argc, argv);
    const long mutations = argc > 2 ? strtol(argv[1], NULL, 10) : 0;
    if (mutations <= 0) {
        fprintf(stderr, "usage: %s MUTATIONS FILE...\n", argv[0]);
        return 2;
    }
    long runs = 0;
    for (int i = 2; i < argc; i++) {
        const size_t size = load(argv[i], original);
        if (size == 0) {
            fprintf(stderr, "cannot read %s\n", argv[i]);
            return 1;
        }
        for (size_t cut = 0; cut <= size; cut++, runs++) LLVMFuzzerTestOneInput(original, cut);
        for (long m = 0; m < mutations; m++, runs++) {
            memcpy(file, original, size);
            LLVMFuzzerTestOneInput(file, mutate(file, size));
        }
    }
    printf("%ld inputs of %d corpus files: no fault\n", runs, argc - 2);
    return 0;
}
