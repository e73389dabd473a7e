/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "context.h"

#include "tensor.h"

quern_context *ctx;

int test_open_context(void **state)
{
    (void)state;
    ctx = test_context(QUERN_CPU_LEVEL_AUTO, 2);
    return 0;
}

int test_close_context(void **state)
{
    (void)state;
    quern_context_destroy(ctx);
    return 0;
}
