/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* gemm.h - the arguments of the dense product stage: c = a b, or c += a b, summed in f32. A row of c depends
 * on its row of a alone, not on how many rows there are. */
#ifndef QUERN_STAGES_GEMM_H
#define QUERN_STAGES_GEMM_H

#include "stages/stage.h"

typedef struct gemm_args {
    quern_tensor a, b, c;            /* [m, k], [k, n], [m, n]; transposed operands are [k, m], [n, k] */
    bool a_transposed, b_transposed; /* at most one of them */
    bool accumulate;                 /* c is f32 */
    quern_tensor live;               /* i64 [m]: where one is negative c's row is 0; or absent */
} gemm_args;
STAGE_DECLARE(gemm);
#define GEMM_TENSORS(IN, OUT, GRAD) IN(a) IN(b) IN(live) OUT(c)
#define GEMM_VALUES(F) F(a_transposed) F(b_transposed) F(accumulate)

#endif
