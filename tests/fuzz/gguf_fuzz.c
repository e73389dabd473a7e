/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* gguf_fuzz.c - feeds any bytes to the GGUF reader; whatever it accepts must be readable to the last byte. */
#include "fuzz.h"
#include "gguf_bytes.h"

#include "io/gguf.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

static volatile unsigned sink;

static void read_all(const gguf_file *file, size_t size)
{
    char text[100];
    for (size_t i = 0; i < file->pair_count; i++) {
        const gguf_pair *pair = &file->pairs[i];
        int64_t number;
        if (gguf_find_pair(file, pair->key) != pair || pair->raw_bytes > size) abort();
        gguf_text(pair, text, sizeof text);
        if (strlen(text) >= sizeof text) abort();
        sink += gguf_integer(pair, &number);
        for (size_t b = 0; b < pair->raw_bytes; b++) sink += pair->raw[b];
    }
    for (size_t i = 0; i < file->tensor_count; i++) {
        const gguf_tensor *t = &file->tensors[i];
        const ggml_type *type = &ggml_types[t->type];
        if (gguf_find_tensor(file, t->name) != t || t->bytes > size) abort();
        for (size_t b = 0; b < t->bytes; b++) sink += t->data[b];
        const size_t blocks = t->bytes / type->bytes;
        uint8_t *codes = malloc(32 * blocks + 1), *scales = malloc(4 * blocks + 1);
        if (codes == NULL || scales == NULL) abort();
        if (t->type == GGML_NVFP4) gguf_split_nvfp4(t->data, blocks, codes, scales);
        if (t->type == GGML_MXFP4) gguf_split_mxfp4(t->data, blocks, codes, scales);
        free(codes);
        free(scales);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    gguf_file *file = NULL;
    char why[GGUF_SENTENCE] = "";
    /* A copy of the exact size: reading past it is then seen by AddressSanitizer. */
    uint8_t *exact = malloc(size > 0 ? size : 1);
    if (exact == NULL) return 0;
    if (size > 0) memcpy(exact, data, size);
    if (gguf_open_bytes(exact, size, &file, why) == QUERN_OK) read_all(file, size);
    else if (file != NULL || *why == '\0') abort(); /* an error has a sentence and no file */
    gguf_close(file);
    free(exact);
    return 0;
}

size_t fuzz_seed(size_t index, uint8_t *file)
{
    static gguf_bytes f;
    if (index >= 3) return 0;
    gguf_begin(&f, index == 0 ? 2 : 3, index == 2 ? 3 : 1, index == 2 ? 1 : 3);
    if (index == 2) {
        gguf_put_integer(&f, "general.alignment", GGUF_U32, 64, 4);
        gguf_put_tensor(&f, "a.weight", GGML_NVFP4, 2, (const int64_t[]){1, 64}, 0);
        gguf_put_tensor(&f, "a.scale", 0, 1, (const int64_t[]){1}, 64);
        gguf_put_tensor(&f, "m", GGML_MXFP4, 1, (const int64_t[]){64}, 128);
        gguf_align(&f, 64);
    } else {
        gguf_put_text(&f, "general.architecture", "llama");
        gguf_put_integer(&f, "scale", index == 0 ? GGUF_F32 : GGUF_F64, 0x3f800000, index == 0 ? 4 : 8);
        gguf_put_string(&f, "list");
        gguf_put(&f, GGUF_ARRAY, 4);
        gguf_put(&f, index == 0 ? GGUF_STRING : GGUF_U16, 4);
        gguf_put(&f, 2, 8);
        for (int i = 0; i < 2; i++) {
            if (index == 0) gguf_put_string(&f, "x");
            else gguf_put(&f, 7, 2);
        }
        gguf_put_tensor(&f, "t", 0, 3, (const int64_t[]){2, 1, 4}, 0);
        gguf_align(&f, 32);
    }
    for (int i = 0; i < 162; i++) gguf_put(&f, (uint64_t)i, 1);
    memcpy(file, f.bytes, f.size);
    return f.size;
}

/* ---- the grammar: which spans of the head are pairs, tensors and integers ---- */

typedef struct span {
    size_t at, size;
} span;

enum { SPANS = 64, INTEGERS = 256 };

typedef struct head {
    span pairs[SPANS], tensors[SPANS], integers[INTEGERS];
    size_t pair_count, tensor_count, integer_count, end;
} head;

static uint64_t integer_at(const uint8_t *file, size_t size, size_t at, size_t bytes)
{
    uint64_t value = 0;
    for (size_t i = bytes; i-- > 0 && at + bytes <= size;) value = value << 8 | file[at + i];
    return value;
}

static void note(head *h, size_t at, size_t bytes)
{
    if (h->integer_count < INTEGERS) h->integers[h->integer_count++] = (span){at, bytes};
}

/* Where a value ends, or `size`. */
static size_t value_end(head *h, const uint8_t *file, size_t size, size_t at, uint64_t type, int depth)
{
    static const size_t sizes[13] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
    if (type > 12 || depth > 8 || at >= size) return size;
    if (sizes[type] > 0) {
        note(h, at, sizes[type]);
        return at + sizes[type];
    }
    if (type == GGUF_STRING) {
        const uint64_t length = integer_at(file, size, at, 8);
        note(h, at, 8);
        return length < size ? at + 8 + (size_t)length : size;
    }
    const uint64_t element = integer_at(file, size, at, 4), count = integer_at(file, size, at + 4, 8);
    note(h, at, 4);
    note(h, at + 4, 8);
    at += 12;
    for (uint64_t i = 0; i < count && at < size; i++) at = value_end(h, file, size, at, element, depth + 1);
    return at;
}

static void walk(head *h, const uint8_t *file, size_t size)
{
    const uint64_t tensors = integer_at(file, size, 8, 8), pairs = integer_at(file, size, 16, 8);
    size_t at = 24;
    memset(h, 0, sizeof *h);
    for (uint64_t i = 0; i < pairs && i < SPANS && at < size; i++) {
        const size_t begin = at, after = value_end(h, file, size, at, GGUF_STRING, 0);
        note(h, after, 4);
        at = value_end(h, file, size, after + 4, integer_at(file, size, after, 4), 0);
        if (at <= size) h->pairs[h->pair_count++] = (span){begin, at - begin};
    }
    for (uint64_t i = 0; i < tensors && i < SPANS && at < size; i++) {
        const size_t begin = at, after = value_end(h, file, size, at, GGUF_STRING, 0);
        const uint64_t ndim = integer_at(file, size, after, 4) & 7;
        note(h, after, 4);
        for (uint64_t d = 0; d <= ndim; d++) note(h, after + 4 + 8 * d + (d == ndim ? 4 : 0), 8);
        note(h, after + 4 + 8 * ndim, 4);
        at = after + 16 + 8 * ndim;
        if (at <= size) h->tensors[h->tensor_count++] = (span){begin, at - begin};
    }
    h->end = at < size ? at : size;
}

/* Repeats a span, or removes it, and counts it in the head. */
static size_t change_span(uint8_t *file, size_t size, size_t room, span s, size_t counter)
{
    const bool repeat = fuzz_random(2) == 0;
    if (s.at + s.size > size || (repeat && s.size > room - size)) return size;
    uint64_t count = integer_at(file, size, counter, 8) + (repeat ? 1 : UINT64_MAX);
    for (int i = 0; i < 8; i++) file[counter + (size_t)i] = (uint8_t)(count >> 8 * i);
    if (repeat) {
        memmove(file + s.at + s.size, file + s.at, size - s.at);
        if (fuzz_random(2) == 0 && s.size > 8) file[s.at + 8] ^= 1; /* another name */
        return size + s.size;
    }
    memmove(file + s.at, file + s.at + s.size, size - s.at - s.size);
    return size - s.size;
}

static void change_integer(uint8_t *file, size_t size, span s)
{
    static const uint64_t values[] = {
        0,   1,   2,     3,          4,         8,          9,          12,         13,
        16,  30,  32,    39,         40,        41,         42,         64,         128,
        256, 255, 65535, UINT32_MAX, INT64_MAX, 1ull << 63, UINT64_MAX, 1ull << 32, 1ull << 60};
    uint64_t value = integer_at(file, size, s.at, s.size);
    switch (fuzz_random(4)) {
    case 0: value++; break;
    case 1: value--; break;
    case 2: value ^= 1ull << fuzz_random((uint32_t)(8 * s.size)); break;
    default: value = values[fuzz_random(sizeof values / sizeof *values)];
    }
    for (size_t i = 0; i < s.size && s.at + i < size; i++) file[s.at + i] = (uint8_t)(value >> 8 * i);
}

size_t fuzz_mutate(uint8_t *file, size_t size, size_t room)
{
    static head h;
    if (size < 24) return size;
    for (uint32_t n = 1 + fuzz_random(3); n > 0; n--) {
        walk(&h, file, size);
        const uint32_t kind = fuzz_random(8);
        if (kind == 0 && h.pair_count > 0)
            size = change_span(file, size, room, h.pairs[fuzz_random((uint32_t)h.pair_count)], 16);
        else if (kind == 1 && h.tensor_count > 0)
            size = change_span(file, size, room, h.tensors[fuzz_random((uint32_t)h.tensor_count)], 8);
        else if (kind == 2) file[fuzz_random((uint32_t)size)] = (uint8_t)fuzz_random(256);
        else if (kind == 3 && size < room - 64) size += fuzz_random(64); /* more data */
        else if (kind == 4 && size > 64) size -= fuzz_random(32);
        else if (h.integer_count > 0)
            change_integer(file, size, h.integers[fuzz_random((uint32_t)h.integer_count)]);
    }
    return size;
}
