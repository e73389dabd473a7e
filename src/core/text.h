/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * text.h - names as sentences show them. A name may hold anything: control characters would reach the
 * reader's terminal, and a long path would push the reason out of the sentence.
 */
#ifndef QUERN_CORE_TEXT_H
#define QUERN_CORE_TEXT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Bytes of the UTF-8 character at `text`, which ends at `end`; 0 where there is none. */
static inline size_t text_character(const unsigned char *text, const unsigned char *end)
{
    const size_t left = (size_t)(end - text);
    if (left == 0) return 0;
    if (text[0] < 0x80) return 1;
    const size_t n = text[0] >= 0xf0 ? 4 : text[0] >= 0xe0 ? 3 : 2;
    if (text[0] < 0xc2 || text[0] > 0xf4 || left < n) return 0;
    for (size_t i = 1; i < n; i++)
        if ((text[i] & 0xc0) != 0x80) return 0;
    if (text[0] == 0xe0 && text[1] < 0xa0) return 0; /* longer than needed */
    if (text[0] == 0xed && text[1] > 0x9f) return 0; /* a surrogate */
    if (text[0] == 0xf0 && text[1] < 0x90) return 0;
    if (text[0] == 0xf4 && text[1] > 0x8f) return 0; /* beyond U+10FFFF */
    return n;
}

/* Copies `text`, with control characters and invalid UTF-8 as \xNN, cut at a character where `room` ends. */
static inline void text_escape(const char *text, char *out, size_t room)
{
    static const char digits[] = "0123456789abcdef";
    const unsigned char *at = (const unsigned char *)text, *end = at + strlen(text);
    size_t used = 0;
    while (at < end) {
        size_t n = text_character(at, end);
        const bool control = *at < 0x20 || *at == 0x7f || (*at == 0xc2 && n == 2 && at[1] < 0xa0);
        const bool escape = n == 0 || control;
        if (n == 0) n = 1;
        if (used + (escape ? 4 * n : n) >= room) break;
        for (size_t i = 0; i < n; i++) {
            if (!escape) {
                out[used++] = (char)at[i];
                continue;
            }
            out[used++] = '\\';
            out[used++] = 'x';
            out[used++] = digits[at[i] >> 4];
            out[used++] = digits[at[i] & 15];
        }
        at += n;
    }
    out[used] = '\0';
}

/* A name of at most a sentence's share: of a long one the beginning and, longer, the end. */
typedef struct text_name {
    char text[200];
} text_name;

static inline const char *text_shorten(const char *name, text_name *out)
{
    enum { HEAD = 50, TAIL = 140 };
    const size_t n = strlen(name);
    if (n < sizeof out->text) {
        memcpy(out->text, name, n + 1);
        return out->text;
    }
    memcpy(out->text, name, HEAD);
    memcpy(out->text + HEAD, " ... ", 5);
    memcpy(out->text + HEAD + 5, name + n - TAIL, TAIL + 1);
    return out->text;
}

/* The name for one sentence: TEXT_NAME(path). */
#define TEXT_NAME(name) text_shorten((name), &(text_name){{0}})

#endif
