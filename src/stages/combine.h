/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * combine.h - sorted rows back to their tokens:
 *     out[t] = ((sum over j of weights[t][j] y[row of slot (t, j)]) + plus) + plus_too
 * in f32, slots in order, one rounding to out's dtype. permute.h says what a slot is.
 */
#ifndef QUERN_STAGES_COMBINE_H
#define QUERN_STAGES_COMBINE_H

#include "stages/stage.h"

typedef struct combine_args {
    int64_t per;                 /* slots of a token */
    quern_tensor y;              /* f32 [T per, D] */
    quern_tensor permutation;    /* i32 [T per] */
    quern_tensor weights;        /* f32 [T, per]; absent: 1 */
    quern_tensor plus, plus_too; /* f32 [T, D], or absent */
    quern_tensor out;            /* f32, f16, bf16 [.., D] */
} combine_args;
STAGE_DECLARE(combine);
#define COMBINE_TENSORS(IN, OUT, GRAD) IN(y) IN(permutation) IN(weights) IN(plus) IN(plus_too) OUT(out)
#define COMBINE_VALUES(F) F(per)

#endif
