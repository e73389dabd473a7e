/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* experts.h - the experts of a layer, routed or shared: which tensors they are, and one matrix of one of
 * them. */
#ifndef QUERN_CHECKPOINT_EXPERTS_H
#define QUERN_CHECKPOINT_EXPERTS_H

#include "checkpoint/checkpoint.h"

enum { PART_GATE, PART_UP, PART_DOWN, PARTS };

/* One projection of all experts: a stack of matrices, or a tensor each, of which one is the example. */
typedef struct expert_part {
    const stored_tensor *tensor; /* the stack, or the example */
    bool stacked;
    bool merged; /* gate and up are one stack */
} expert_part;

typedef struct layer_experts {
    const quern_checkpoint *checkpoint;
    int64_t layer;
    expert_part parts[PARTS];
    int64_t experts, hidden, intermediate; /* E, D, I */
    bool shared;                           /* the shared expert, of which there is one */
    quern_format format;                   /* of all; FP8_BLOCKS stands for any FP8 */
    quern_dtype dtype;                     /* of values: bf16 where the file has FP8 */
    bool turned;                           /* plain stacks [E, D, 2 I], [E, I, D], as some models have them */
    bool paired; /* a merged stack's gate and up alternate, as gpt-oss has them; else they are halves */
} layer_experts;

/* A matrix [rows, columns] where it stands. */
typedef struct expert_matrix {
    int64_t rows, columns;
    const uint8_t *data;   /* codes, blocks or values */
    int64_t row_bytes;     /* from a row to the next */
    int64_t column_bytes;  /* of values: from a column to the next */
    const uint8_t *scales; /* apart from the codes */
    int64_t scales_row_bytes;
    float global; /* G */
    /* FP8: the values that share a scale, and whether that is F8_E8M0, else F32. The row's scales begin
     * scales_row_bytes after those of the row of blocks before. */
    int64_t block_rows, block_columns;
    bool e8m0;
} expert_matrix;

/* Finds the layer's experts. */
quern_status experts_find(const quern_checkpoint *c, int64_t layer, layer_experts *l);
/* Finds the shared expert beside them. l->experts is 0 where the layer has none, or one for whose gate or
 * biases quern_moe_tensors has no place. */
quern_status experts_find_shared(const layer_experts *routed, layer_experts *l);
/* One part of one expert. */
quern_status experts_matrix(const layer_experts *l, int part, int64_t expert, expert_matrix *m);
/* The activations' global of a part, as G. *there is false where the file has none. */
quern_status experts_input_global(const layer_experts *l, int part, int64_t expert, bool *there,
                                  float *global);
/* A part's bias of one expert: f32, f16 or bf16, `stride` elements apart; NULL: it has none. */
const stored_tensor *experts_bias(const layer_experts *l, int part, int64_t expert, const uint8_t **data,
                                  int64_t *stride);
/* The router's weight [E, D] in floats, correction bias f32 [E], and table of experts by token i32 or i64
 * [V, k]; NULL: none. */
const stored_tensor *experts_router(const layer_experts *l);
const stored_tensor *experts_correction(const layer_experts *l);
const stored_tensor *experts_table(const layer_experts *l);

static inline bool experts_are_plain(const layer_experts *l)
{
    return l->format == QUERN_FORMAT_PLAIN;
}

/* Whether they are laid out as values, not as NVFP4. */
static inline bool experts_are_values(const layer_experts *l)
{
    return l->format == QUERN_FORMAT_PLAIN || l->format == QUERN_FORMAT_FP8_BLOCKS;
}

/* FP8: finds the scales of the matrix in tensor t, and what shares one. */
quern_status experts_fp8_scales(const layer_experts *l, const stored_tensor *t, expert_matrix *m);
/* Rows `first` ... `end` - 1 as bf16. False: a value is beyond bf16 or no number, or its scale is not above
 * 0. */
bool experts_fp8_rows(const expert_matrix *m, int64_t first, int64_t end, uint16_t *to);

#endif
