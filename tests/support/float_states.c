/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "float_states.h"

#include "cmocka_c11.h"

#include <stdlib.h>
#include <string.h>
#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

#if defined(__SSE2__)
static const struct {
    const char *name;
    unsigned csr;
} states[] = {{"flush to zero, subnormals are zero", 0x9fc0},
              {"round up", 0x5f80},
              {"round to zero with sticky flags", 0x7fbf},
              {"traps", 0x1f80 & ~0x0e80u}};

int test_float_states(void)
{
    return sizeof states / sizeof *states;
}

const char *test_float_state_name(int i)
{
    return states[i].name;
}

void test_float_state_run(int i, void (*call)(void *arg), void *arg)
{
    const unsigned before = _mm_getcsr();
    _mm_setcsr(states[i].csr);
    call(arg);
    const unsigned after = _mm_getcsr();
    _mm_setcsr(before);
    if (after != states[i].csr)
        fail_msg("%s: MXCSR is %x after a call, %x before", states[i].name, after, states[i].csr);
}
#else
int test_float_states(void)
{
    return 0;
}

const char *test_float_state_name(int i)
{
    (void)i;
    return "";
}

void test_float_state_run(int i, void (*call)(void *arg), void *arg)
{
    (void)i, (void)call, (void)arg;
}
#endif

enum { TENSORS = sizeof(((test_float_case *)0)->t) / sizeof(test_tensor *) };

/* The case with a context, as one argument. */
typedef struct run {
    const test_float_case *c;
    quern_context *ctx;
} run;

static void call_case(void *arg)
{
    const run *r = arg;
    r->c->call(r->c->arg, r->ctx);
}

static bool is_written(const test_tensor *t)
{
    return t != NULL && t->buffer != NULL && memcmp(t->buffer, t->snapshot, t->bytes) != 0;
}

void test_float_case_check(const test_float_case *c)
{
    test_tensor expected[TENSORS] = {{.buffer = NULL}};
    int written = 0;
    run r = {c, test_context(QUERN_CPU_LEVEL_AUTO, 1)};
    call_case(&r);
    quern_context_destroy(r.ctx);
    for (int t = 0; t < TENSORS; t++)
        if (is_written(c->t[t])) {
            expected[t] = test_tensor_copy(c->t[t]);
            written++;
        }
    assert_true(written > 0);
    for (int i = 0; i < test_float_states(); i++)
        for (int32_t threads = 1; threads <= 3; threads += 2) {
            for (int t = 0; t < TENSORS; t++)
                if (expected[t].buffer != NULL) test_tensor_reset(c->t[t]);
            r.ctx = test_context(QUERN_CPU_LEVEL_AUTO, threads);
            test_float_state_run(i, call_case, &r);
            quern_context_destroy(r.ctx);
            for (int t = 0; t < TENSORS; t++)
                if (expected[t].buffer != NULL && !test_tensor_same_bits(c->t[t], &expected[t]))
                    fail_msg("%s: tensor %d has other bits: %s, %d threads", c->name, t,
                             test_float_state_name(i), (int)threads);
        }
    for (int t = 0; t < TENSORS; t++)
        if (expected[t].buffer != NULL) test_tensor_free(&expected[t]);
}

void test_float_scale(test_tensor *t)
{
    double *x = test_tensor_get(t);
    for (int64_t i = 0; i < test_tensor_count(t); i += 3) x[i] *= 1e-39;
    test_tensor_set(t, x);
    free(x);
}
