/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * fuzz_replay.c - drives a fuzz target without libFuzzer: every seed as it is, cut at every length, and
 * mutated in a fixed pseudo-random order, byte by byte and within its grammar.
 *
 *   --write FOLDER   writes the seeds, for libFuzzer
 *   --runs N [SEED]  runs N mutations, each of the last few or of a seed, and prints how many went by
 */
#include "cmocka_c11.h"

#include "fuzz.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Flips, overwrites, cuts out. */
static size_t mutate_bytes(uint8_t *file, size_t size)
{
    static const char *const words[] = {
        "-1", "9223372036854775807", "{}", "[]", "\xff\xff\xff\xff\xff\xff\xff\xff", "\\u0000", "[[[[[[[["};
    for (uint32_t n = 1 + fuzz_random(4); n > 0 && size > 0; n--) {
        const size_t at = fuzz_random((uint32_t)size);
        const uint32_t kind = fuzz_random(5);
        const char *word = words[fuzz_random(sizeof words / sizeof *words)];
        const size_t cut = 1 + fuzz_random(8);
        if (kind == 0) file[at] ^= (uint8_t)(1u << fuzz_random(8));
        if (kind == 1) file[at] = (uint8_t)fuzz_random(256);
        if (kind == 2) file[fuzz_random((uint32_t)(size < 8 ? size : 8))] = (uint8_t)fuzz_random(256);
        if (kind == 3 && at + cut < size) {
            memmove(file + at, file + at + cut, size - at - cut);
            size -= cut;
        }
        if (kind == 4 && at + strlen(word) < size) memcpy(file + at, word, strlen(word));
    }
    return size;
}

static size_t mutate(uint8_t *file, size_t size)
{
    return fuzz_random(4) == 0 ? mutate_bytes(file, size) : fuzz_mutate(file, size, FUZZ_ROOM);
}

static void no_input_breaks_the_target(void **unused)
{
    enum { MUTATIONS = 5000 };
    static uint8_t original[FUZZ_ROOM], file[FUZZ_ROOM];
    (void)unused;
    size_t seeds = 0;
    for (size_t size; (size = fuzz_seed(seeds, original)) > 0; seeds++) {
        for (size_t cut = 0; cut <= size; cut++) LLVMFuzzerTestOneInput(original, cut);
        for (int m = 0; m < MUTATIONS; m++) {
            memcpy(file, original, size);
            LLVMFuzzerTestOneInput(file, mutate(file, size));
        }
    }
    assert_true(seeds > 0);
}

static int write_seeds(const char *folder)
{
    static uint8_t file[FUZZ_ROOM];
    char path[4096];
    size_t seeds = 0;
    for (size_t size; (size = fuzz_seed(seeds, file)) > 0; seeds++) {
        snprintf(path, sizeof path, "%s/%zu", folder, seeds);
        FILE *f = fopen(path, "wb");
        const bool written = f != NULL && fwrite(file, 1, size, f) == size;
        if (f == NULL || fclose(f) != 0 || !written) {
            fprintf(stderr, "cannot write %s\n", path);
            return 1;
        }
    }
    return 0;
}

/* Walks away from a seed by mutations of mutations, and starts again from another. */
static int run_many(long long runs, uint64_t seed)
{
    enum { STEPS = 16, SEEDS = 64 };
    static uint8_t file[FUZZ_ROOM], seed_files[SEEDS][FUZZ_ROOM];
    size_t seeds = 0, sizes[SEEDS];
    while (seeds < SEEDS && (sizes[seeds] = fuzz_seed(seeds, seed_files[seeds])) > 0) seeds++;
    fuzz_random_seed(seed);
    const time_t begin = time(NULL);
    for (long long run = 0; run < runs;) {
        const size_t which = fuzz_random((uint32_t)seeds);
        size_t size = sizes[which];
        memcpy(file, seed_files[which], size);
        for (int step = 0; step < STEPS && run < runs && size > 0; step++, run++) {
            size = mutate(file, size);
            LLVMFuzzerTestOneInput(file, size);
        }
    }
    printf("%lld runs of %zu seeds, random seed %llu, %lld s\n", runs, seeds, (unsigned long long)seed,
           (long long)(time(NULL) - begin));
    return 0;
}

int main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[1], "--write") == 0) return write_seeds(argv[2]);
    if (argc >= 3 && strcmp(argv[1], "--runs") == 0)
        return run_many(atoll(argv[2]), argc > 3 ? strtoull(argv[3], NULL, 10) : 1);
    const struct CMUnitTest tests[] = {cmocka_unit_test(no_input_breaks_the_target)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
