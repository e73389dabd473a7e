/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "core/error.h"

#include <stdarg.h>
#include <stdio.h>

static _Thread_local char last_error[512];

quern_status error_set(quern_status status, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(last_error, sizeof last_error, format, args);
    va_end(args);
    return status;
}

const char *quern_last_error(const quern_context *ctx)
{
    (void)ctx;
    return last_error;
}
