/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * safetensors_grammar.c - seeds and mutations of safetensors files. A seed is the text of a header in the
 * corpus; the file is its length, the text and 64 bytes of data. Mutations work on the header's tokens;
 * the length is always that of the text, so that every file reaches the parser.
 */
#include "fuzz.h"
#include "json_grammar.h"

#include <glob.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DATA_BYTES = 64 };

/* Lets the ranges follow one another, as far as they are of the usual form, and tells where they end. */
static uint64_t tile(json_token *tokens, size_t n, char numbers[][24], size_t room)
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
            tokens[i + 3 + 2 * (size_t)j] = (json_token){numbers[used++], (size_t)size};
        }
    }
    return end;
}

size_t fuzz_mutate(uint8_t *file, size_t size, size_t room)
{
    static json_token tokens[JSON_TOKENS];
    static char text[FUZZ_ROOM], numbers[64][24];
    uint64_t length = 0, end = DATA_BYTES;
    for (int i = 7; i >= 0 && size >= 8; i--) length = length << 8 | file[i];
    if (size < 10 || length > size - 8) length = size < 8 ? 0 : size - 8;
    memcpy(text, file + 8, (size_t)length);
    size_t n = json_tokens(text, (size_t)length, tokens);
    for (uint32_t i = 1 + fuzz_random(4); i > 0 && n > 0; i--) n = json_mutate(tokens, n);
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
