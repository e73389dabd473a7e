/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * grouped_dense.h - c = a b + bias, each expert's rows of a by its own matrix of floats, summed in f32 and
 * rounded once. A row of c depends on its row of a alone.
 */
#ifndef QUERN_STAGES_GROUPED_DENSE_H
#define QUERN_STAGES_GROUPED_DENSE_H

#include "stages/stage.h"

typedef struct grouped_dense_args {
    bool b_transposed;    /* b is [E, N, K], else [E, K, N] */
    bool accumulate;      /* c, in f32, is added to */
    quern_tensor a, b;    /* [T, K]; f32, f16, bf16 each */
    quern_tensor offsets; /* i32 [E]: where each expert's rows end; absent: all rows are expert 0's */
    quern_tensor bias;    /* f32, f16, bf16 [E, N], or absent */
    quern_tensor c;       /* f32, f16, bf16 [T, N]; rows past the last offset are left alone */
} grouped_dense_args;
STAGE_DECLARE(grouped_dense);
#define GROUPED_DENSE_TENSORS(IN, OUT, GRAD) IN(a) IN(b) IN(offsets) IN(bias) OUT(c)
#define GROUPED_DENSE_VALUES(F) F(b_transposed) F(accumulate)

#endif
