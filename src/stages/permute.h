/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * permute.h - rows to other places, their bytes unchanged: a token's row to each of its slots, or every row
 * to its own.
 *
 * Slot j of token t is number t * per + j. A permutation says which slot each sorted row holds.
 */
#ifndef QUERN_STAGES_PERMUTE_H
#define QUERN_STAGES_PERMUTE_H

#include "stages/stage.h"

typedef struct permute_args {
    int64_t per;              /* slots of a token */
    quern_tensor x;           /* [.., D], T rows */
    quern_tensor permutation; /* i32 [T per]; absent: out is x */
    quern_tensor out;         /* x's dtype [T per, D], or any shape of as many rows of D */
} permute_args;
STAGE_DECLARE(permute);
#define PERMUTE_TENSORS(IN, OUT, GRAD) IN(x) IN(permutation) OUT(out)
#define PERMUTE_VALUES(F) F(per)

#endif
