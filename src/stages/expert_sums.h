/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * expert_sums.h - what the gradient of a bias per expert needs: the sum of each expert's rows, and each row's
 * product with the bias.
 *     sums[e] = sum over the rows r of expert e of weight[r] x[r]
 *     d_weights[slot of r] += x[r] . bias[e]
 * Rows are added in order, in f32.
 */
#ifndef QUERN_STAGES_EXPERT_SUMS_H
#define QUERN_STAGES_EXPERT_SUMS_H

#include "stages/stage.h"

typedef struct expert_sums_args {
    quern_tensor x;               /* f32, f16, bf16 [R, C] */
    quern_tensor offsets;         /* i32 [E]: where each expert's rows end; absent: expert 0 has all rows */
    quern_tensor permutation;     /* i32 [R]: which slot a row holds; for weights and d_weights */
    quern_tensor weights;         /* f32 [T, R / T] by slot; absent: 1 */
    quern_tensor sums;            /* f32 [E, C], or absent */
    quern_tensor bias, d_weights; /* [E, C], f32 [T, R / T]; or absent */
} expert_sums_args;
STAGE_DECLARE(expert_sums);
#define EXPERT_SUMS_TENSORS(IN, OUT, GRAD)                                                                   \
    IN(x) IN(offsets) IN(permutation) IN(weights) OUT(sums) IN(bias) OUT(d_weights)
#define EXPERT_SUMS_VALUES(F)

#endif
