/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* gguf_bytes.h - puts a GGUF file together in memory, piece by piece, right or wrong. */
#ifndef TEST_GGUF_BYTES_H
#define TEST_GGUF_BYTES_H

#include <stddef.h>
#include <stdint.h>

typedef struct gguf_bytes {
    uint8_t bytes[1 << 16];
    size_t size;
} gguf_bytes;

/* "GGUF", version and the two counts. */
void gguf_begin(gguf_bytes *f, uint32_t version, uint64_t tensors, uint64_t pairs);
void gguf_put(gguf_bytes *f, uint64_t value, size_t size); /* little-endian */
void gguf_put_bytes(gguf_bytes *f, const void *bytes, size_t size);
void gguf_put_string(gguf_bytes *f, const char *text);
/* A pair whose value is an integer of `size` bytes, or a string. */
void gguf_put_integer(gguf_bytes *f, const char *key, uint32_t type, uint64_t value, size_t size);
void gguf_put_text(gguf_bytes *f, const char *key, const char *text);
/* A tensor's description; the fastest extent is the last of `shape`. */
void gguf_put_tensor(gguf_bytes *f, const char *name, uint32_t type, int ndim, const int64_t *shape,
                     uint64_t offset);
/* Zeros to the next multiple. */
void gguf_align(gguf_bytes *f, size_t alignment);

#endif
