/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * command_memory_test.c - each allocation of a run of the command fails, first alone, then with all that
 * follow it. The command says that memory lacks and exits 4, without an output file; or it does without, and
 * its output is that of a whole run. A signal that comes when the result is in place changes nothing.
 */
#include "command.h"

#include <quern/safetensors.h>

#include <unistd.h>

enum { MOST = 1 << 20 };

static size_t read_output(char *bytes)
{
    FILE *f = fopen(path_of("out"), "rb");
    if (f == NULL) return 0;
    const size_t n = fread(bytes, 1, MOST, f);
    fclose(f);
    return n;
}

/* Returns whether the allocation was reached. */
static bool fail_one(const char *arguments, long at, bool on, const char *whole, size_t whole_bytes,
                     const char *text)
{
    static char bytes[MOST];
    char prefix[400];
    unlink(path_of("out"));
    unlink(path_of("failed"));
    snprintf(prefix, sizeof prefix,
             "OMP_NUM_THREADS=1 QUERN_TEST_FAILED=$DIR/failed QUERN_TEST_FAIL_AT=%ld %s LD_PRELOAD='%s'", at,
             on ? "QUERN_TEST_FAIL_ON=1" : "", QUERN_TEST_MEMORY);
    const int code = run_with(prefix, arguments);
    const size_t n = read_output(bytes);
    const bool refused = code == 4 && strstr(output, "no memory") != NULL && n == 0,
               did =
                   code == 0 && n == whole_bytes && memcmp(bytes, whole, n) == 0 && strcmp(output, text) == 0;
    if (!refused && !did)
        fail_msg("quern %s, allocation %ld%s: exit code %d, %zu bytes of %zu: %s", arguments, at,
                 on ? " and all after it" : "", code, n, whole_bytes, output);
    return exists("failed");
}

static void a_lack_of_memory_is_told_as_such(void **state)
{
    static const char *const commands[] = {
        "run nsa $VECTORS/nsa_small.safetensors $DIR/out --block-size 32 --stride 32",
        "run nsa-decode $VECTORS/nsa_small.safetensors $DIR/out --block-size 32 --stride 32",
        "run nvfp4-swizzle $DIR/scales $DIR/out",
        "run --list",
        "compare $DIR/scales $DIR/scales --json",
        "info --file $DIR/scales --json"};
    static char whole[MOST], text[sizeof output];
    static unsigned char bytes_of_scales[8 * 4];
    const int64_t shape[] = {8, 4};
    const quern_tensor scales = quern_tensor_contiguous(bytes_of_scales, QUERN_U8, 2, shape);
    (void)state;
    assert_int_equal(
        quern_safetensors_save(path_of("scales"), &(quern_safetensors_item){"scales", &scales}, 1, NULL, 0),
        QUERN_OK);
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++) {
        unlink(path_of("out"));
        if (run_with("OMP_NUM_THREADS=1", commands[i]) != 0) fail_msg("quern %s: %s", commands[i], output);
        const size_t bytes = read_output(whole);
        memcpy(text, output, sizeof text);
        for (int on = 0; on < 2; on++) {
            long at = 0;
            while (fail_one(commands[i], at, on != 0, whole, bytes, text)) at++;
            assert_true(at > 2);
        }
    }
}

static void a_signal_after_the_result_is_none(void **state)
{
    static const char *const commands[] = {
        "run nsa $VECTORS/nsa_small.safetensors $DIR/out --block-size 32 --stride 32",
        "bench attention --n 64 --reps 1 --no-peer --json $DIR/out"};
    static const int numbers[] = {1, 2, 15};
    static char bytes[MOST];
    (void)state;
    for (size_t i = 0; i < 6; i++)
        for (int older = 0; older < 2; older++) {
            char prefix[200];
            unlink(path_of("out"));
            if (older) write_text("out", "older", 5);
            snprintf(prefix, sizeof prefix, "QUERN_TEST_SIGNAL=%d LD_PRELOAD='%s'", numbers[i % 3],
                     QUERN_TEST_MEMORY);
            const int code = run_with(prefix, commands[i / 3]);
            if (code != 0 || read_output(bytes) < 6)
                fail_msg("quern %s, signal %d: exit code %d: %s", commands[i / 3], numbers[i % 3], code,
                         output);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(a_lack_of_memory_is_told_as_such),
                                       cmocka_unit_test(a_signal_after_the_result_is_none)};
    return cmocka_run_group_tests(tests, make_directory, remove_directory);
}
