/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "gguf_bytes.h"

#include "cmocka_c11.h"

#include <string.h>

void gguf_put_bytes(gguf_bytes *f, const void *bytes, size_t size)
{
    assert_true(size <= sizeof f->bytes - f->size);
    if (size > 0) memcpy(f->bytes + f->size, bytes, size);
    f->size += size;
}

void gguf_put(gguf_bytes *f, uint64_t value, size_t size)
{
    uint8_t bytes[8];
    for (size_t i = 0; i < size; i++) bytes[i] = (uint8_t)(value >> 8 * i);
    gguf_put_bytes(f, bytes, size);
}

void gguf_begin(gguf_bytes *f, uint32_t version, uint64_t tensors, uint64_t pairs)
{
    f->size = 0;
    gguf_put_bytes(f, "GGUF", 4);
    gguf_put(f, version, 4);
    gguf_put(f, tensors, 8);
    gguf_put(f, pairs, 8);
}

void gguf_put_string(gguf_bytes *f, const char *text)
{
    gguf_put(f, strlen(text), 8);
    gguf_put_bytes(f, text, strlen(text));
}

void gguf_put_integer(gguf_bytes *f, const char *key, uint32_t type, uint64_t value, size_t size)
{
    gguf_put_string(f, key);
    gguf_put(f, type, 4);
    gguf_put(f, value, size);
}

void gguf_put_text(gguf_bytes *f, const char *key, const char *text)
{
    gguf_put_string(f, key);
    gguf_put(f, 8, 4);
    gguf_put_string(f, text);
}

void gguf_put_tensor(gguf_bytes *f, const char *name, uint32_t type, int ndim, const int64_t *shape,
                     uint64_t offset)
{
    gguf_put_string(f, name);
    gguf_put(f, (uint64_t)ndim, 4);
    for (int i = ndim - 1; i >= 0; i--) gguf_put(f, (uint64_t)shape[i], 8);
    gguf_put(f, type, 4);
    gguf_put(f, offset, 8);
}

void gguf_align(gguf_bytes *f, size_t alignment)
{
    while (f->size % alignment != 0) gguf_put(f, 0, 1);
}
