/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "io/header_text.h"

#include "io/safetensors.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void header_add_bytes(header_text *t, const char *bytes, size_t size)
{
    if (t->failed) return;
    t->failed = size > SAFETENSORS_MAX_HEADER - t->size;
    if (t->failed) {
        t->size = SAFETENSORS_MAX_HEADER + 1;
        return;
    }
    if (t->size + size > t->room) {
        const size_t room = 2 * (t->size + size) + 256;
        char *grown = realloc(t->bytes, room);
        t->failed = grown == NULL;
        if (t->failed) return;
        t->bytes = grown;
        t->room = room;
    }
    memcpy(t->bytes + t->size, bytes, size);
    t->size += size;
}

void header_add(header_text *t, const char *format, ...)
{
    char piece[128];
    va_list args;
    va_start(args, format);
    const int n = vsnprintf(piece, sizeof piece, format, args);
    va_end(args);
    header_add_bytes(t, piece, (size_t)n);
}

void header_add_string(header_text *t, const char *string)
{
    header_add_bytes(t, "\"", 1);
    for (const char *at = string; *at != '\0';) {
        const size_t plain = strcspn(
            at,
            "\"\\\x01\x02\x03\x04\x05\x06\x07\x08\x09\x0a\x0b\x0c\x0d\x0e\x0f\x10\x11\x12\x13\x14\x15\x16\x17"
            "\x18\x19\x1a\x1b\x1c\x1d\x1e\x1f\xc0");
        header_add_bytes(t, at, plain);
        at += plain;
        if ((unsigned char)*at == 0xc0) { /* JSON_ZERO: no other character begins so */
            header_add(t, "\\u0000");
            at += 2;
        } else if (*at != '\0') {
            header_add(t, "\\u%04x", (unsigned)*at++);
        }
    }
    header_add_bytes(t, "\"", 1);
}
