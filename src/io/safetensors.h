/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* safetensors.h - what the reader and the writer of safetensors files share. */
#ifndef QUERN_IO_SAFETENSORS_H
#define QUERN_IO_SAFETENSORS_H

#include <quern/safetensors.h>

/* The format's own limit on the JSON header. */
enum { SAFETENSORS_MAX_HEADER = 100000000 };
#define SAFETENSORS_METADATA "__metadata__"

/* A dtype of the format. `ours` is -1 where quern_dtype has none. */
typedef struct format_dtype {
    const char *name;
    uint8_t bits;
    int8_t ours;
} format_dtype;
extern const format_dtype safetensors_dtypes[];
extern const size_t safetensors_dtype_count;

#endif
