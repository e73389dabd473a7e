/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * gguf.h - reads GGUF files, versions 2 and 3: typed keys and values, and tensors.
 *
 * File, little-endian: "GGUF", u32 version, u64 tensors, u64 pairs; each pair a string, a u32 type and a
 * value; each tensor a string, u32 dimensions, u64 extents (the fastest first), u32 type, u64 offset;
 * then, from the next multiple of general.alignment (32), the tensors' data. A string is a u64 length and
 * bytes.
 *
 * Everything points into the file's bytes, which are mapped or the caller's. The library and the command both
 * compile this reader, so a failure comes with its sentence in the caller's buffer.
 */
#ifndef QUERN_IO_GGUF_H
#define QUERN_IO_GGUF_H

#include <quern/quern.h>

enum { GGUF_SENTENCE = 512, GGUF_MAX_DIMS = 4 };

/* The types of values. */
typedef enum gguf_value_type {
    GGUF_U8 = 0,
    GGUF_I8 = 1,
    GGUF_U16 = 2,
    GGUF_I16 = 3,
    GGUF_U32 = 4,
    GGUF_I32 = 5,
    GGUF_F32 = 6,
    GGUF_BOOL = 7,
    GGUF_STRING = 8,
    GGUF_ARRAY = 9,
    GGUF_U64 = 10,
    GGUF_I64 = 11,
    GGUF_F64 = 12,
    GGUF_VALUE_TYPES = 13
} gguf_value_type;

typedef struct gguf_pair {
    const char *key; /* UTF-8 */
    gguf_value_type type;
    gguf_value_type element;    /* of an array; may itself be GGUF_ARRAY */
    uint64_t count;             /* of an array's elements */
    const unsigned char *value; /* after the type; of an array after its count */
    size_t bytes;
    const unsigned char *raw; /* the whole pair as it stands in the file, key included */
    size_t raw_bytes;
} gguf_pair;

/* A type of tensors: `block` elements take `bytes` bytes. */
typedef struct ggml_type {
    const char *name; /* "Q4_K"; NULL: no such type */
    uint16_t block, bytes;
    int8_t dtype; /* the quern_dtype of its elements; -1: none */
} ggml_type;
enum { GGML_MXFP4 = 39, GGML_NVFP4 = 40, GGML_TYPES = 42 };
extern const ggml_type ggml_types[GGML_TYPES];

typedef struct gguf_tensor {
    const char *name; /* UTF-8, unique */
    uint32_t type;    /* of ggml_types */
    int32_t ndim;
    int64_t shape[GGUF_MAX_DIMS]; /* the fastest extent last, as elsewhere in Quern */
    const unsigned char *data;
    size_t bytes;
} gguf_tensor;

typedef struct gguf_file {
    uint32_t version, alignment;
    const gguf_pair *pairs;     /* in the file's order */
    const gguf_tensor *tensors; /* in the file's order */
    size_t pair_count, tensor_count;
} gguf_file;

/* On failure *file is untouched. QUERN_ERR_FORMAT: it is no valid GGUF file. Bytes outlive the file. */
quern_status gguf_open(const char *path, gguf_file **file, char why[GGUF_SENTENCE]);
quern_status gguf_open_bytes(const void *bytes, size_t size, gguf_file **file, char why[GGUF_SENTENCE]);
void gguf_close(gguf_file *file); /* NULL is allowed */

/* NULL: there is none. */
const gguf_pair *gguf_find_pair(const gguf_file *file, const char *key);
const gguf_tensor *gguf_find_tensor(const gguf_file *file, const char *name);
/* A number or a bool that is an integer; false: it is none. */
bool gguf_integer(const gguf_pair *pair, int64_t *value);
/* A value as text: a number, true, a string (control characters as they are), "[3 f32: 1, 2, 0.5]" of an
 * array, whose end is left out where the room ends. Always ends in 0. */
void gguf_text(const gguf_pair *pair, char *text, size_t room);

/* `blocks` blocks of NVFP4 (36 bytes for 64 elements) or MXFP4 (17 for 32) as rows elsewhere have them:
 * two codes a byte, the low nibble first, and the scales or exponents apart. */
void gguf_split_nvfp4(const unsigned char *from, size_t blocks, uint8_t *codes, uint8_t *scales);
void gguf_split_mxfp4(const unsigned char *from, size_t blocks, uint8_t *codes, uint8_t *exponents);

#endif
