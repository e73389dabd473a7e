/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* context.h - one context for all tests of a program: cmocka's set-up and tear-down of the group. */
#ifndef QUERN_TEST_CONTEXT_H
#define QUERN_TEST_CONTEXT_H

#include <quern/quern.h>

/* The best level of the machine, two threads. */
extern quern_context *ctx;

int test_open_context(void **state);
int test_close_context(void **state);

#endif
