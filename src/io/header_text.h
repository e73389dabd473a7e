/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* header_text.h - the JSON of a safetensors header as it grows. The library and the command both compile
 * it. */
#ifndef QUERN_IO_HEADER_TEXT_H
#define QUERN_IO_HEADER_TEXT_H

#include <stdbool.h>
#include <stddef.h>

typedef struct header_text {
    char *bytes; /* the caller frees them */
    size_t size, room;
    bool failed; /* no memory; or, with a size beyond SAFETENSORS_MAX_HEADER, longer than the format allows */
} header_text;

void header_add_bytes(header_text *t, const char *bytes, size_t size);
/* At most 127 characters. */
void header_add(header_text *t, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Adds a string in quotes: UTF-8, with U+0000 as JSON_ZERO. */
void header_add_string(header_text *t, const char *string);

#endif
