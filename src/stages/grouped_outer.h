/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * grouped_outer.h - the gradient of each expert's matrix:
 *     c[e] = sum over the rows r of expert e of weight[r] a[r]^T b[r]
 * Rows are added in order in f32, and each element is rounded once. An expert without rows gets zeros. Where
 * both operands have the same 16 bits, weight[r] a[r] is rounded to them.
 */
#ifndef QUERN_STAGES_GROUPED_OUTER_H
#define QUERN_STAGES_GROUPED_OUTER_H

#include "stages/stage.h"

typedef struct grouped_outer_args {
    quern_tensor a, b;        /* [R, N], [R, K]; f32, f16, bf16 each */
    quern_tensor offsets;     /* i32 [E]: where each expert's rows end; absent: expert 0 has all rows */
    quern_tensor permutation; /* i32 [R]: which slot a row holds, with weights */
    quern_tensor weights;     /* f32 [T, R / T] by slot; absent: 1 */
    quern_tensor c;           /* f32, f16, bf16 [E, N, K] */
} grouped_outer_args;
STAGE_DECLARE(grouped_outer);
#define GROUPED_OUTER_TENSORS(IN, OUT, GRAD) IN(a) IN(b) IN(offsets) IN(permutation) IN(weights) OUT(c)
#define GROUPED_OUTER_VALUES(F)

#endif
