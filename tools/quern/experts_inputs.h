/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* experts_inputs.h - random inputs of NVFP4's operations, by rows. */
#ifndef QUERN_TOOLS_EXPERTS_INPUTS_H
#define QUERN_TOOLS_EXPERTS_INPUTS_H

#include "bench_experts.h"
#include "formula.h"

typedef enum input_kind {
    NORMAL,   /* N(0, 1) in the activations' dtype */
    CODES,    /* random bytes */
    SCALES,   /* random bytes of E4M3 from 2^-6 to 2^-4 */
    POWERS,   /* random bytes of E8M0 over 14 binades */
    REPACKED, /* each expert's weight [depth, width], repacked */
    ENDS,     /* as many rows for each expert */
    SMALL     /* 0.01 in f32 */
} input_kind;

typedef enum input_when { ALWAYS, OF_FLOATS, OF_CODES, BACKWARD, WHERE_NEEDED } input_when;

typedef struct input_row {
    const char *tensor, *shape;
    input_kind kind;
    input_when when;
    const char *depth, *width; /* REPACKED */
} input_row;

/* Allocates and fills an input of the job. An exit code. */
int experts_input(job *j, const experts_case *c, const input_row *row, const formula_symbol *symbols,
                  quern_context *ctx);

#endif
