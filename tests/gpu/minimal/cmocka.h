/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * cmocka.h - what this project's tests use of cmocka, for machines that have a GPU but no cmocka: the same
 * sources then build against this file. A failure names the test and ends it, not the program; the last line
 * is "N passed, N failed". One program includes it in several files, so the state is common and weak.
 */
#ifndef QUERN_MINIMAL_CMOCKA_H
#define QUERN_MINIMAL_CMOCKA_H

#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MINIMAL __attribute__((weak, unused))

MINIMAL jmp_buf minimal_failed;
MINIMAL const char *minimal_name = "setup";

struct CMUnitTest {
    const char *name;
    void (*run)(void **state);
};

#define fail_msg(...)                                                                                        \
    (printf("FAILED %s: ", minimal_name), printf(__VA_ARGS__), printf("\n  at %s:%d\n", __FILE__, __LINE__), \
     fflush(stdout), longjmp(minimal_failed, 1))
#define skip() longjmp(minimal_failed, 2)
#define print_message printf
#define print_error printf
#define assert_true(x) ((x) ? (void)0 : fail_msg("%s is false", #x))
#define assert_false(x) assert_true(!(x))
#define assert_null(x) assert_true((x) == NULL)
#define assert_non_null(x) assert_true((x) != NULL)
#define assert_ptr_equal(a, b) assert_true((a) == (b))
#define assert_int_equal(a, b)                                                                               \
    ((long long)(a) == (long long)(b)                                                                        \
         ? (void)0                                                                                           \
         : fail_msg("%s is %lld, not %lld", #a, (long long)(a), (long long)(b)))
#define assert_string_equal(a, b) (strcmp(a, b) == 0 ? (void)0 : fail_msg("%s is '%s', not '%s'", #a, a, b))
#define assert_memory_equal(a, b, n) (memcmp(a, b, n) == 0 ? (void)0 : fail_msg("%s differs from %s", #a, #b))

#define cmocka_unit_test(f)                                                                                  \
    {                                                                                                        \
#f, f                                                                                                \
    }
#define cmocka_run_group_tests(tests, setup, teardown)                                                       \
    minimal_run(tests, sizeof(tests) / sizeof *(tests), setup, teardown)

MINIMAL int minimal_run(const struct CMUnitTest *tests, size_t count, int (*setup)(void **),
                        int (*teardown)(void **))
{
    static volatile size_t i, passed, failed;
    static void *state;
    const char *only = getenv("QUERN_TEST_ONLY");
    if (setup != NULL && setup(&state) != 0) return 1;
    for (i = 0; i < count; i++) {
        if (only != NULL && strstr(tests[i].name, only) == NULL) continue;
        minimal_name = tests[i].name;
        switch (setjmp(minimal_failed)) {
        case 0:
            tests[i].run(&state);
            passed++;
            break;
        case 1: failed++; break;
        default: printf("SKIPPED %s\n", tests[i].name);
        }
    }
    if (teardown != NULL) teardown(&state);
    printf("%zu passed, %zu failed\n", passed, failed);
    return failed != 0;
}

#endif
