/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* output.c - what the program says, and a checksum. */
#include "v4.h"

#include <ctype.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int exit_code = 2;
static bool line_open; /* a line of progress stands on the terminal */
static void say(const char *end, const char *format, va_list args)
{
    char sentence[8192]; /* more than any path */
    vsnprintf(sentence, sizeof sentence, format, args);
    for (char *c = sentence; *c != '\0'; c++)
        if (iscntrl((unsigned char)*c)) *c = '?';
    fprintf(stderr, "%sv4: %s%s", line_open ? "\r\033[K" : "", sentence, end);
    line_open = *end == '\0';
}

void fail(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    say("\n", format, args);
    va_end(args);
    exit(exit_code);
}

void check(quern_status status)
{
    if (status != QUERN_OK) fail("%s", quern_last_error(NULL));
}

void note(const v4_model *m, bool passing, const char *format, ...)
{
    if (m->quiet || (passing && !isatty(STDERR_FILENO))) return;
    va_list args;
    va_start(args, format);
    say(passing ? "" : "\n", format, args);
    va_end(args);
}

uint64_t checksum(uint64_t start, const void *bytes, size_t size)
{
    uint64_t sum = start ^ size * 0x9e3779b97f4a7c15u;
    for (size_t at = 0; at < size; at += 8) {
        uint64_t word = 0;
        memcpy(&word, (const char *)bytes + at, size - at < 8 ? size - at : 8);
        sum = (sum ^ word) * 0x9e3779b97f4a7c15u;
        sum ^= sum >> 32;
    }
    return sum;
}
