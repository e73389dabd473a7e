/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "core/error.h"

#include <stdarg.h>
#include <stdio.h>

enum { SENTENCE = 1024 };

static _Thread_local char last_error[SENTENCE];
static _Thread_local quern_status last_status;

static quern_status keep(quern_status status, const char *format, va_list args)
{
    char sentence[SENTENCE];
    vsnprintf(sentence, sizeof sentence, format, args);
    text_escape(sentence, last_error, sizeof last_error);
    last_status = status;
    return status;
}

quern_status error_set(quern_status status, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    (void)keep(status, format, args);
    va_end(args);
    return status;
}

quern_status error_argument(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    (void)keep(QUERN_ERR_INVALID_ARGUMENT, format, args);
    va_end(args);
    return QUERN_ERR_INVALID_ARGUMENT;
}

quern_status error_in_range(const char *name, int64_t given, int64_t least, int64_t most)
{
    if (given >= least && given <= most) return QUERN_OK;
    return error_argument("%s is %lld: %lld to %lld is accepted", name, (long long)given, (long long)least,
                          (long long)most);
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
