/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * float_states.h - floating-point states that a caller of the library may have set: flush to zero, another
 * rounding, sticky flags, traps. Under each of them a call gives the same bits and leaves the state as it
 * was.
 */
#ifndef QUERN_TEST_FLOAT_STATES_H
#define QUERN_TEST_FLOAT_STATES_H

#include "tensor.h"

/* How many there are; 0 on processors whose state the tests do not set. */
int test_float_states(void);
const char *test_float_state_name(int i);
/* Runs `call` in state i; fails where it leaves another, flags included. The call may compute nothing
 * itself. */
void test_float_state_run(int i, void (*call)(void *arg), void *arg);

/* A call of the library, and the tensors that it reads and writes. */
typedef struct test_float_case {
    const char *name;
    void (*call)(void *arg, quern_context *ctx);
    void *arg;
    test_tensor *t[64]; /* NULL: ignored */
} test_float_case;
/* Runs the call in the default state, then in every other on one thread and on three. All results have the
 * same bits. */
void test_float_case_check(const test_float_case *c);
/* Multiplies every third value by 1e-39, which makes it subnormal in f32. */
void test_float_scale(test_tensor *t);

#endif
