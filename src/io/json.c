/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "io/json.h"

#include "core/text.h"

#include <string.h>

enum { DEPTH_MAX = 64 };

static bool bad(json_reader *r, const char *what)
{
    if (r->error == NULL) r->error = what;
    return false;
}

int json_peek(json_reader *r)
{
    while (r->at < r->end && (*r->at == ' ' || *r->at == '\t' || *r->at == '\n' || *r->at == '\r')) r->at++;
    return r->at < r->end ? *r->at : 0;
}

static bool take(json_reader *r, int character, const char *what)
{
    if (r->error != NULL) return false;
    if (json_peek(r) != character) return bad(r, what);
    r->at++;
    return true;
}

/* Four hexadecimal digits, or -1. */
static int32_t hexadecimal(json_reader *r)
{
    int32_t value = 0;
    for (int i = 0; i < 4; i++) {
        const int c = r->at < r->end ? *r->at : 0;
        int digit = -1;
        if (c >= '0' && c <= '9') digit = c - '0';
        if (c >= 'a' && c <= 'f') digit = c - 'a' + 10;
        if (c >= 'A' && c <= 'F') digit = c - 'A' + 10;
        if (digit < 0) return -1;
        value = value * 16 + digit;
        r->at++;
    }
    return value;
}

/* What follows \u, and the second half of a pair; -1 where it is no character. */
static int32_t unicode(json_reader *r)
{
    const int32_t first = hexadecimal(r);
    if (first >= 0xdc00 && first <= 0xdfff) return -1;
    if (first < 0xd800 || first > 0xdbff) return first;
    if (r->end - r->at < 2 || r->at[0] != '\\' || r->at[1] != 'u') return -1;
    r->at += 2;
    const int32_t second = hexadecimal(r);
    if (second < 0xdc00 || second > 0xdfff) return -1;
    return 0x10000 + (first - 0xd800) * 0x400 + (second - 0xdc00);
}

static char *encode(uint32_t code, char *out)
{
    if (code == 0) {
        *out++ = JSON_ZERO[0];
        *out++ = JSON_ZERO[1];
    } else if (code < 0x80) {
        *out++ = (char)code;
    } else if (code < 0x800) {
        *out++ = (char)(0xc0 | code >> 6);
        *out++ = (char)(0x80 | (code & 63));
    } else {
        if (code < 0x10000) {
            *out++ = (char)(0xe0 | code >> 12);
        } else {
            *out++ = (char)(0xf0 | code >> 18);
            *out++ = (char)(0x80 | (code >> 12 & 63));
        }
        *out++ = (char)(0x80 | (code >> 6 & 63));
        *out++ = (char)(0x80 | (code & 63));
    }
    return out;
}

bool json_take_string(json_reader *r, const char **out)
{
    static const char letters[] = "\"\\/bfnrt", characters[] = "\"\\/\b\f\n\r\t";
    if (!take(r, '"', "a string is due")) return false;
    char *to = r->strings;
    *out = to;
    while (r->at < r->end && *r->at != '"') {
        if (*r->at < 0x20) return bad(r, "a control character in a string");
        if (*r->at != '\\') {
            const size_t n = text_character(r->at, r->end);
            if (n == 0) return bad(r, "a string that is no UTF-8");
            memcpy(to, r->at, n);
            to += n;
            r->at += n;
            continue;
        }
        const int letter = ++r->at < r->end ? *r->at : 0;
        const char *found = letter != 0 ? strchr(letters, letter) : NULL;
        r->at += r->at < r->end;
        const int32_t code = letter == 'u' ? unicode(r) : found != NULL ? characters[found - letters] : -1;
        if (code < 0) return bad(r, "an escape that is none, or no character of a string");
        to = encode((uint32_t)code, to);
    }
    if (r->at == r->end) return bad(r, "a string without end");
    r->at++;
    *to++ = '\0';
    r->strings = to;
    return true;
}

static bool digit(const json_reader *r)
{
    return r->at < r->end && *r->at >= '0' && *r->at <= '9';
}

bool json_take_number(json_reader *r, bool *integer, int64_t *out)
{
    if (r->error != NULL) return false;
    const bool negative = json_peek(r) == '-';
    int64_t value = 0;
    bool overflow = false;
    r->at += negative;
    if (!digit(r)) return bad(r, "a number is due");
    const bool zero = *r->at == '0';
    for (; digit(r); r->at++) {
        overflow = __builtin_mul_overflow(value, 10, &value) || overflow;
        overflow = __builtin_add_overflow(value, *r->at - '0', &value) || overflow;
        if (zero) {
            r->at++;
            break;
        }
    }
    if (digit(r)) return bad(r, "a number with a leading 0");
    *integer = true;
    if (r->at < r->end && *r->at == '.') {
        *integer = false;
        r->at++;
        if (!digit(r)) return bad(r, "a number that ends in its point");
        while (digit(r)) r->at++;
    }
    if (r->at < r->end && (*r->at == 'e' || *r->at == 'E')) {
        *integer = false;
        r->at++;
        if (r->at < r->end && (*r->at == '+' || *r->at == '-')) r->at++;
        if (!digit(r)) return bad(r, "a number without its exponent");
        while (digit(r)) r->at++;
    }
    if (*integer && overflow) return bad(r, "an integer of more than 64 bits");
    *out = negative ? -value : value;
    return true;
}

bool json_next_member(json_reader *r, bool first, bool *more, const char **key)
{
    if (first && !take(r, '{', "an object is due")) return false;
    *more = !(json_peek(r) == '}');
    if (!*more) {
        r->at++;
        return true;
    }
    if (!first && !take(r, ',', "',' or '}' is due")) return false;
    return json_take_string(r, key) && take(r, ':', "':' is due");
}

bool json_next_element(json_reader *r, bool first, bool *more)
{
    if (first && !take(r, '[', "an array is due")) return false;
    *more = !(json_peek(r) == ']');
    if (!*more) {
        r->at++;
        return true;
    }
    return first || take(r, ',', "',' or ']' is due");
}

static bool skip_word(json_reader *r, const char *word)
{
    const size_t n = strlen(word);
    if ((size_t)(r->end - r->at) < n || memcmp(r->at, word, n) != 0) return bad(r, "a value is due");
    r->at += n;
    return true;
}

static bool skip(json_reader *r, int depth)
{
    const char *text;
    bool more = true, integer;
    int64_t value;
    const int next = json_peek(r);
    if (depth > DEPTH_MAX) return bad(r, "values that are nested too deep");
    if (next == '{') {
        for (bool first = true; more; first = false)
            if (!json_next_member(r, first, &more, &text) || (more && !skip(r, depth + 1))) return false;
        return true;
    }
    if (next == '[') {
        for (bool first = true; more; first = false)
            if (!json_next_element(r, first, &more) || (more && !skip(r, depth + 1))) return false;
        return true;
    }
    if (next == '"') return json_take_string(r, &text);
    if (next == 't') return skip_word(r, "true");
    if (next == 'f') return skip_word(r, "false");
    if (next == 'n') return skip_word(r, "null");
    return json_take_number(r, &integer, &value);
}

bool json_skip(json_reader *r)
{
    return r->error == NULL && skip(r, 1);
}

bool json_end(json_reader *r)
{
    if (r->error != NULL) return false;
    return json_peek(r) == 0 && r->at == r->end ? true : bad(r, "something after its end");
}
