/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* rowdot.h - out = rowsum(a * b), f32 [B,H,N]: delta of a backward whose gradient comes through no gate. */
#ifndef QUERN_STAGES_ROWDOT_H
#define QUERN_STAGES_ROWDOT_H

#include "stages/stage.h"

typedef struct rowdot_args {
    stage_seqs seqs;
    quern_tensor a, b, out;
} rowdot_args;
STAGE_DECLARE(rowdot);
#define ROWDOT_TENSORS(IN, OUT, GRAD) STAGE_SEQS_TENSORS(IN) IN(a) IN(b) OUT(out)
#define ROWDOT_VALUES(F) STAGE_SEQS_VALUES(F)

#endif
