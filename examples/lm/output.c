/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* output.c - what the program says and writes: sentences and results; files whole or not at all. */
#include "lm.h"

#include <quern/file.h>

#include <ctype.h>
#include <stdarg.h>
#include <stdio.h>

int failure(const char *format, ...)
{
    char sentence[8192]; /* more than any path */
    va_list args;
    va_start(args, format);
    vsnprintf(sentence, sizeof sentence, format, args);
    va_end(args);
    for (char *c = sentence; *c != '\0'; c++)
        if (iscntrl((unsigned char)*c)) *c = '?';
    fprintf(stderr, "lm: %s\n", sentence);
    return 1; /* so that `condition || failure(...) == 0` is false */
}

bool output_check(const char *path)
{
    return path == NULL || quern_file_check(path) == QUERN_OK || failure("%s", quern_last_error(NULL)) == 0;
}

bool json_write(const char *path, const char *format, ...)
{
    if (path == NULL) return true;
    char text[1024];
    va_list args;
    va_start(args, format);
    const int size = vsnprintf(text, sizeof text, format, args);
    va_end(args);
    quern_file *file = NULL;
    fflush(stdout); /* what was printed comes first where both go to one place */
    bool ok = quern_file_create(path, &file) == QUERN_OK;
    if (ok) (void)quern_file_write(file, text, (size_t)size); /* an error of it is one of the commit too */
    ok = ok && quern_file_commit(file) == QUERN_OK;
    return ok || failure("%s", quern_last_error(NULL)) == 0;
}

int output_finish(int code)
{
    const bool failed = ferror(stdout) != 0 || fflush(stdout) != 0;
    return failed && code == 0 ? 3 * failure("standard output cannot be written") : code;
}
