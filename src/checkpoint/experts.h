/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* experts.h - the routed experts of a layer: which tensors they are, and one matrix of one of them. */
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
    quern_format format;                   /* of all */
    quern_dtype dtype;                     /* of plain ones */
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
} expert_matrix;

/* Finds the layer's experts. */
quern_status experts_find(const quern_checkpoint *c, int64_t layer, layer_experts *l);
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

#endif
