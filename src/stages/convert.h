/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* convert.h - out = in, converted; rows past the last sequence (varlen) are written as 0. */
#ifndef QUERN_STAGES_CONVERT_H
#define QUERN_STAGES_CONVERT_H

#include "stages/stage.h"

typedef struct convert_args {
    stage_seqs seqs;
    quern_tensor in, out;
} convert_args;
STAGE_DECLARE(convert);
#define CONVERT_TENSORS(IN, OUT, GRAD) STAGE_SEQS_TENSORS(IN) IN(in) OUT(out)
#define CONVERT_VALUES(F) STAGE_SEQS_VALUES(F)

#endif
