/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * json.h - the JSON of a safetensors header, read in one pass and without a tree.
 *
 * jansson, which the command uses, drops a character where its lexer finds no memory: under memory pressure a
 * file would then show other names than it holds. Here the caller provides one buffer for all strings, and
 * nothing allocates.
 */
#ifndef QUERN_IO_JSON_H
#define QUERN_IO_JSON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* U+0000 in two bytes that no UTF-8 has: such a string still ends at its first zero byte. */
#define JSON_ZERO "\xc0\x80"

typedef struct json_reader {
    const unsigned char *begin, *at, *end;
    char *strings; /* where the next decoded string goes; as many bytes as the text has are enough for all */
    const char *error; /* what is wrong at `at`; NULL: nothing yet */
} json_reader;

/* Each of these skips white space first. False means an error, which is stored; a reader stops at its
 * first error. */

/* The next character, without taking it; 0 at the end. */
int json_peek(json_reader *r);
/* Takes a string that is valid UTF-8. An escaped U+0000 comes out as JSON_ZERO. */
bool json_take_string(json_reader *r, const char **out);
/* Takes any number. *integer: it is one, without fraction or exponent, and stands in *out. */
bool json_take_number(json_reader *r, bool *integer, int64_t *out);
/* Takes a value of any kind. */
bool json_skip(json_reader *r);
/* Nothing but white space is left. */
bool json_end(json_reader *r);

/* Steps through an object or array: begins it with `first`, else takes the comma. *more is false after the
 * closing bracket. For an object the key and its colon are taken too. */
bool json_next_member(json_reader *r, bool first, bool *more, const char **key);
bool json_next_element(json_reader *r, bool first, bool *more);

#endif
