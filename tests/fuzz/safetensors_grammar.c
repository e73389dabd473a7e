/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * safetensors_grammar.c - seeds and mutations of safetensors files. A seed is the text of a header in the
 * corpus; the file is its length, the text and 64 bytes of data. Mutations work on the header's tokens;
 * the length is always that of the text, so that every file reaches the parser.
 */
#include "fuzz.h"

#include <glob.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TOKENS = 1024, DATA_BYTES = 64 };

typedef struct token {
    const char *text;
    size_t size;
} token;

static const char *const words[] = {"0",
                                    "1",
                                    "4",
                                    "64",
                                    "-1",
                                    "-0",
                                    "01",
                                    "9223372036854775807",
                                    "9223372036854775808",
                                    "18446744073709551616",
                                    "1.0",
                                    "1e400",
                                    "{}",
                                    "[]",
                                    "{",
                                    "}",
                                    "[",
                                    "]",
                                    ",",
                                    ":",
                                    "null",
                                    "true",
                                    "false",
                                    "nul",
                                    "\"F32\"",
                                    "\"F4\"",
                                    "\"F6_E2M3\"",
                                    "\"F8_E4M3FNUZ\"",
                                    "\"C64\"",
                                    "\"BOOL\"",
                                    "\"dtype\"",
                                    "\"shape\"",
                                    "\"data_offsets\"",
                                    "\"__metadata__\"",
                                    "\"a\"",
                                    "\"\"",
                                    "\"\\u0000\"",
                                    "\"\\ud83d\\ude00\"",
                                    "\"\\ud800\"",
                                    "\"\\n\\\"\"",
                                    "\"\xc3\xa9\"",
                                    "\"\xff\"",
                                    "\"",
                                    " ",
                                    "\n",
                                    "[0,0]",
                                    "[0,64]",
                                    "[0]",
                                    "[4,4]",
                                    ",\"b\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[64,64]}",
                                    "\"__metadata__\":{\"k\":\"v\"},",
                                    "[[[[[[[[[[[[[[[[",
                                    "{\"x\":{\"x\":{\"x\":1}}}"};

static size_t tokens_of(const char *text, size_t size, token *tokens)
{
    size_t n = 0;
    for (size_t at = 0; at < size && n < TOKENS;) {
        size_t end = at + 1;
        if (text[at] == '"') {
            while (end < size && text[end] != '"') end += text[end] == '\\' ? 2 : 1;
            end = end < size ? end + 1 : size;
        } else if (strchr("+-.0123456789", text[at]) != NULL && text[at] != '\0') {
            while (end < size && text[end] != '\0' && strchr("+-.eE0123456789", text[end]) != NULL) end++;
        }
        tokens[n++] = (token){text + at, end - at};
        at = end;
    }
    return n;
}

/* Puts `count` tokens in before token `at`. */
static size_t insert(token *tokens, size_t n, size_t at, const token *from, size_t count)
{
    token copy[8];
    if (count > 8) count = 8;
    if (n + count > TOKENS) return n;
    memcpy(copy, from, count * sizeof *copy);
    memmove(tokens + at + count, tokens + at, (n - at) * sizeof *tokens);
    memcpy(tokens + at, copy, count * sizeof *copy);
    return n + count;
}

static size_t mutate_tokens(token *tokens, size_t n)
{
    const size_t at = fuzz_random((uint32_t)n), other = fuzz_random((uint32_t)n);
    const char *word = words[fuzz_random(sizeof words / sizeof *words)];
    const token put = {word, strlen(word)}, was = tokens[at];
    size_t count = 1 + fuzz_random(8);
    switch (fuzz_random(5)) {
    case 0: tokens[at] = put; return n;
    case 1: return insert(tokens, n, at, &put, 1);
    case 2:
        tokens[at] = tokens[other];
        tokens[other] = was;
        return n;
    case 3:
        if (count > n - other) count = n - other;
        return insert(tokens, n, at, tokens + other, count);
    default:
        if (count > n - at) count = n - at;
        memmove(tokens + at, tokens + at + count, (n - at - count) * sizeof *tokens);
        return n - count;
    }
}

/* Lets the ranges follow one another, as far as they are of the usual form, and tells where they end. */
static uint64_t tile(token *tokens, size_t n, char numbers[][24], size_t room)
{
    static const char key[] = "\"data_offsets\"";
    uint64_t end = 0;
    size_t used = 0;
    for (size_t i = 0; i + 6 < n && used + 2 <= room; i++) {
        if (tokens[i].size != sizeof key - 1 || memcmp(tokens[i].text, key, sizeof key - 1) != 0) continue;
        const uint64_t from = strtoull(tokens[i + 3].text, NULL, 10),
                       to = strtoull(tokens[i + 5].text, NULL, 10);
        for (int j = 0; j < 2; j++) {
            if (j == 1) end += to - from;
            const int size = snprintf(numbers[used], sizeof numbers[used], "%" PRIu64, end);
            tokens[i + 3 + 2 * (size_t)j] = (token){numbers[used++], (size_t)size};
        }
    }
    return end;
}

size_t fuzz_mutate(uint8_t *file, size_t size, size_t room)
{
    static token tokens[TOKENS];
    static char text[FUZZ_ROOM], numbers[64][24];
    uint64_t length = 0, end = DATA_BYTES;
    for (int i = 7; i >= 0 && size >= 8; i--) length = length << 8 | file[i];
    if (size < 10 || length > size - 8) length = size < 8 ? 0 : size - 8;
    memcpy(text, file + 8, (size_t)length);
    size_t n = tokens_of(text, (size_t)length, tokens);
    for (uint32_t i = 1 + fuzz_random(4); i > 0 && n > 0; i--) n = mutate_tokens(tokens, n);
    if (fuzz_random(2) == 0) end = tile(tokens, n, numbers, 64);
    const size_t data = end <= 256 ? (size_t)end : DATA_BYTES;
    if (room < 8 + data) return size;
    size_t at = 8;
    for (size_t i = 0; i < n && tokens[i].size <= room - at - data; i++) {
        memcpy(file + at, tokens[i].text, tokens[i].size);
        at += tokens[i].size;
    }
    if (at > 8 && fuzz_random(8) == 0) file[8 + fuzz_random((uint32_t)(at - 8))] = (uint8_t)fuzz_random(256);
    for (int i = 0; i < 8; i++) file[i] = (uint8_t)((uint64_t)(at - 8) >> 8 * i);
    for (size_t i = 0; i < data; i++) file[at + i] = (uint8_t)(i * 37);
    return at + data;
}

size_t fuzz_seed(size_t index, uint8_t *file)
{
    glob_t found;
    size_t length = 0;
    if (glob(QUERN_FUZZ_CORPUS "/*.json", 0, NULL, &found) != 0) return 0;
    FILE *f = index < found.gl_pathc ? fopen(found.gl_pathv[index], "rb") : NULL;
    globfree(&found);
    if (f == NULL) return 0;
    length = fread(file + 8, 1, FUZZ_ROOM - 8 - DATA_BYTES, f);
    fclose(f);
    for (int i = 0; i < 8; i++) file[i] = (uint8_t)((uint64_t)length >> 8 * i);
    for (int i = 0; i < DATA_BYTES; i++) file[8 + length + (size_t)i] = (uint8_t)(i * 37);
    return 8 + length + DATA_BYTES;
}
