/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "core/error.h"

#include <stdarg.h>
#include <stdio.h>

static _Thread_local char last_error[512];
static _Thread_local quern_status last_status;

quern_status error_set(quern_status status, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(last_error, sizeof last_error, format, args);
    va_end(args);
    last_status = status;
    return status;
}

quern_status error_status(void)
{
    return last_status;
}

const char *quern_last_error(const quern_context *ctx)
{
    (void)ctx;
    return last_error;
}
