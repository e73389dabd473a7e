/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* json_grammar.h - mutations of JSON by its tokens. */
#ifndef TEST_JSON_GRAMMAR_H
#define TEST_JSON_GRAMMAR_H

#include <stddef.h>
#include <stdint.h>

enum { JSON_TOKENS = 1024 };

typedef struct json_token {
    const char *text;
    size_t size;
} json_token;

/* The tokens of a text, into which they point; at most JSON_TOKENS. */
size_t json_tokens(const char *text, size_t size, json_token *tokens);
/* Replaces, inserts, swaps, repeats or removes tokens; how many there are then. */
size_t json_mutate(json_token *tokens, size_t count);

/* A few such mutations of a whole text; its new size, at most room. */
size_t json_mutate_text(uint8_t *text, size_t size, size_t room);
/* Reads file number `index` of those that the pattern names; its bytes, 0 past the last. */
size_t json_seed(const char *pattern, size_t index, uint8_t *text);

#endif
