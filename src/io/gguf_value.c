/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* gguf_value.c - values of keys as numbers and text, and 4-bit blocks taken apart. */
#include "io/gguf.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

static const uint8_t value_sizes[GGUF_VALUE_TYPES] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};

/* The bytes as an unsigned integer. */
static uint64_t little(const unsigned char *bytes, size_t size)
{
    uint64_t value = 0;
    for (size_t i = size; i-- > 0;) value = value << 8 | bytes[i];
    return value;
}

/* A number of the type at `bytes`, which is an integer or (*is_real) a double. */
typedef struct number {
    bool is_real;
    int64_t integer;
    double real;
} number;

static number read_number(gguf_value_type type, const unsigned char *bytes)
{
    float single;
    number n = {.is_real = type == GGUF_F32 || type == GGUF_F64};
    if (type == GGUF_F32) {
        const uint32_t word = (uint32_t)little(bytes, 4);
        memcpy(&single, &word, sizeof single);
        n.real = (double)single;
        return n;
    }
    const uint64_t word = little(bytes, value_sizes[type]);
    if (type == GGUF_F64) memcpy(&n.real, &word, sizeof n.real);
    else if (type == GGUF_BOOL) n.integer = word != 0;
    else if (type == GGUF_I8) n.integer = (int64_t)(word ^ 0x80) - 0x80;
    else if (type == GGUF_I16) n.integer = (int16_t)word;
    else if (type == GGUF_I32) n.integer = (int32_t)word;
    else n.integer = (int64_t)word;
    return n;
}

bool gguf_integer(const gguf_pair *pair, int64_t *value)
{
    if (pair->type == GGUF_STRING || pair->type == GGUF_ARRAY) return false;
    const number n = read_number(pair->type, pair->value);
    if (n.is_real || (pair->type == GGUF_U64 && n.integer < 0)) return false;
    *value = n.integer;
    return true;
}

/* Appends what fits. */
static void append(char **text, size_t *room, const char *bytes, size_t size)
{
    const size_t n = size < *room - 1 ? size : *room - 1;
    memcpy(*text, bytes, n);
    (*text)[n] = '\0';
    *text += n;
    *room -= n;
}

/* Appends a value that is no array; its bytes. */
static size_t append_value(gguf_value_type type, const unsigned char *bytes, char **text, size_t *room)
{
    char piece[40];
    if (type == GGUF_STRING) {
        const size_t length = (size_t)little(bytes, 8);
        append(text, room, (const char *)bytes + 8, length);
        return 8 + length;
    }
    const number n = read_number(type, bytes);
    if (n.is_real) snprintf(piece, sizeof piece, "%.*g", type == GGUF_F64 ? 17 : 9, n.real);
    else if (type == GGUF_BOOL) snprintf(piece, sizeof piece, "%s", n.integer != 0 ? "true" : "false");
    else if (type == GGUF_U64) snprintf(piece, sizeof piece, "%" PRIu64, (uint64_t)n.integer);
    else snprintf(piece, sizeof piece, "%" PRId64, n.integer);
    append(text, room, piece, strlen(piece));
    return value_sizes[type];
}

void gguf_text(const gguf_pair *pair, char *text, size_t room)
{
    static const char *const names[GGUF_VALUE_TYPES] = {"u8",   "i8",     "u16",   "i16", "u32", "i32", "f32",
                                                        "bool", "string", "array", "u64", "i64", "f64"};
    char piece[64];
    const unsigned char *at = pair->value;
    *text = '\0';
    if (pair->type != GGUF_ARRAY) {
        append_value(pair->type, at, &text, &room);
        return;
    }
    snprintf(piece, sizeof piece, "[%" PRIu64 " %s", pair->count, names[pair->element]);
    append(&text, &room, piece, strlen(piece));
    for (uint64_t i = 0; i < pair->count && room > 1 && pair->element != GGUF_ARRAY; i++) {
        append(&text, &room, i == 0 ? ": " : ", ", 2);
        at += append_value(pair->element, at, &text, &room);
    }
    append(&text, &room, "]", 1);
}

void gguf_split_nvfp4(const unsigned char *from, size_t blocks, uint8_t *codes, uint8_t *scales)
{
    for (size_t b = 0; b < blocks; b++, from += 36, codes += 32, scales += 4) {
        memcpy(scales, from, 4);
        for (int part = 0; part < 4; part++) { /* 16 elements: byte j holds j and j + 8 */
            const unsigned char *pairs = from + 4 + 8 * part;
            for (int j = 0; j < 4; j++) {
                codes[8 * part + j] = (uint8_t)((pairs[2 * j] & 15) | (pairs[2 * j + 1] & 15) << 4);
                codes[8 * part + 4 + j] = (uint8_t)(pairs[2 * j] >> 4 | (pairs[2 * j + 1] >> 4) << 4);
            }
        }
    }
}

void gguf_split_mxfp4(const unsigned char *from, size_t blocks, uint8_t *codes, uint8_t *exponents)
{
    for (size_t b = 0; b < blocks; b++, from += 17, codes += 16) {
        exponents[b] = from[0];
        for (int j = 0; j < 8; j++) { /* byte j holds elements j and j + 16 */
            const unsigned char first = from[1 + 2 * j], second = from[2 + 2 * j];
            codes[j] = (uint8_t)((first & 15) | (second & 15) << 4);
            codes[8 + j] = (uint8_t)(first >> 4 | (second >> 4) << 4);
        }
    }
}
