/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* nvfp4_golden.h - the quantised tensors of the golden vectors, one after the other. */
#ifndef QUERN_TEST_NVFP4_GOLDEN_H
#define QUERN_TEST_NVFP4_GOLDEN_H

#include "oracle/nvfp4.h"

#include <quern/safetensors.h>

typedef struct nvfp4_golden_file {
    quern_safetensors *file;
    size_t index; /* of the next tensor of the file to look at */
    int profile;  /* that comes next for it */
} nvfp4_golden_file;

/* One input under one profile. */
typedef struct nvfp4_golden {
    const char *name;
    oracle_profile profile;
    quern_tensor in;              /* as stored: f32 or bf16 */
    float *x;                     /* widened */
    int64_t count, rows, columns; /* columns: the last extent */
    float global;
    const uint8_t *codes, *scales;
} nvfp4_golden;

nvfp4_golden_file nvfp4_golden_open(const char *directory, const char *name);
void nvfp4_golden_close(nvfp4_golden_file *file);
/* False past the last one. */
bool nvfp4_golden_next(nvfp4_golden_file *file, nvfp4_golden *golden);
void nvfp4_golden_free(nvfp4_golden *golden);
/* The U8 tensor "prefix" + "name". */
const uint8_t *nvfp4_golden_bytes(const nvfp4_golden_file *file, const char *prefix, const char *name,
                                  int64_t *bytes);

#endif
