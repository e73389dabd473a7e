/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* signal_stack_test.c - a program whose signal stack has no room for AMX's tiles: Linux does not give it the
 * tiles, and it computes at the level below. A program of its own, since the library asks once. */
#include "cmocka_c11.h"

#include <quern/quern.h>

#include <signal.h>
#include <stdlib.h>
#include <string.h>

static void tiles_are_left_alone(void **state)
{
    static char stack[4096];
    const stack_t small = {.ss_sp = stack, .ss_size = sizeof stack};
    quern_context *ctx = NULL;
    (void)state;
    unsetenv("QUERN_CPU");
    assert_int_equal(sigaltstack(&small, NULL), 0);
    assert_int_not_equal(quern_cpu_level_detect(), QUERN_CPU_LEVEL_AMX);
    assert_int_equal(quern_context_create(NULL, &ctx), QUERN_OK);
    assert_int_equal(quern_context_cpu_level(ctx), quern_cpu_level_detect());
    quern_context_destroy(ctx);
    setenv("QUERN_CPU", "amx", 1);
    assert_int_equal(quern_context_create(NULL, &ctx), QUERN_ERR_UNSUPPORTED);
    assert_non_null(strstr(quern_last_error(NULL), "CPU level amx: this machine has portable"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(tiles_are_left_alone)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
