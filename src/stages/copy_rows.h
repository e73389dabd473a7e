/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* copy_rows.h - the arguments of the stage that copies runs of rows from one matrix to another. */
#ifndef QUERN_STAGES_COPY_ROWS_H
#define QUERN_STAGES_COPY_ROWS_H

#include "stages/stage.h"

typedef struct copy_rows_args {
    quern_tensor runs; /* i64 [n, 3]: the first row in x, that in out, and how many; no two of out overlap */
    quern_tensor x, out; /* [rows, D] of one dtype */
} copy_rows_args;
STAGE_DECLARE(copy_rows);
#define COPY_ROWS_TENSORS(IN, OUT, GRAD) IN(runs) IN(x) OUT(out)
#define COPY_ROWS_VALUES(F)

#endif
