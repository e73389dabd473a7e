/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* copy_rows.h - the arguments of the stage that copies runs of rows between matrices. */
#ifndef QUERN_STAGES_COPY_ROWS_H
#define QUERN_STAGES_COPY_ROWS_H

#include "stages/stage.h"

enum { COPY_ROWS_PAIRS = 4 };
typedef struct copy_rows_args {
    quern_tensor runs; /* i64 [n, 3]: the first row in x, that in out, and how many; no two of out overlap */
    struct {
        quern_tensor x, out; /* [rows, D] of one dtype */
    } pair[COPY_ROWS_PAIRS]; /* the last ones may be absent */
} copy_rows_args;
STAGE_DECLARE(copy_rows);
#define COPY_ROWS_TENSORS(IN, OUT, GRAD)                                                                     \
    IN(runs)                                                                                                 \
    IN(pair[0].x)                                                                                            \
    OUT(pair[0].out)                                                                                         \
    IN(pair[1].x) OUT(pair[1].out) IN(pair[2].x) OUT(pair[2].out) IN(pair[3].x) OUT(pair[3].out)
#define COPY_ROWS_VALUES(F)

#endif
