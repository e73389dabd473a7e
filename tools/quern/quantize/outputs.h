/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * outputs.h - the tensors of each output file: name, dtype, shape, and where the bytes come from. Known for
 * the whole model before anything is computed, so that files are laid out at once and written in any order.
 */
#ifndef QUERN_QUANTIZE_OUTPUTS_H
#define QUERN_QUANTIZE_OUTPUTS_H

#include "quantize/conversion.h"

typedef enum output_kind {
    OUTPUT_COPY,          /* bytes of the source */
    OUTPUT_CODES,         /* NVFP4 */
    OUTPUT_SCALES,        /* of its blocks */
    OUTPUT_GLOBAL,        /* G or R */
    OUTPUT_INPUT_SCALE,   /* of activations, or its reciprocal */
    OUTPUT_VALUES,        /* bf16 */
    OUTPUT_VALUES_TURNED, /* bf16, transposed as gpt-oss stores its stacks */
    OUTPUT_BLOCKS         /* GGUF's type 40: scales and codes together */
} output_kind;

/* A part of an output tensor, along its first dimension where there are several. */
typedef struct output_part {
    size_t module;       /* SIZE_MAX: of COPY */
    const uint8_t *data; /* COPY: `count` elements, `step` bytes apart */
    int64_t count, step, element;
} output_part;

typedef struct output_tensor {
    char *name;
    const char *dtype; /* safetensors' name */
    int32_t ndim;
    const int64_t *source_shape; /* of a tensor that is copied whole; else `shape` */
    int64_t shape[4];
    output_kind kind;
    size_t first_part, part_count;
    int64_t bytes, offset; /* of a part; where the tensor stands in the file */
} output_tensor;

typedef struct output_file {
    const char *name;
    output_tensor *tensors; /* in the order of the file's data once it is laid out */
    output_part *parts;
    size_t count, part_count, room, part_room;
    int64_t header_bytes, bytes; /* of the file; 0 until it is laid out */
} output_file;

/* One output file for each shard. Free each with output_free. Returns an exit code. */
int outputs_plan(const conversion *c, output_file *files);
/* Adds a tensor with room for `parts`, to be filled by the caller; NULL without memory. Takes the name. */
output_tensor *output_add(output_file *f, char *name, size_t parts);
/* Adds the tensors of a chosen weight, or of its bias, or a copy: what source tensor `t` becomes. */
bool output_add_source(const conversion *c, output_file *f, const model_tensor *t);
int64_t output_bytes(const output_tensor *t);
const int64_t *output_shape(const output_tensor *t);
void output_free(output_file *f);

#endif
