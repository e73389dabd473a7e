/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* interleave.h - gate and up between two halves of the last dimension and alternating runs; elements of any
 * size. */
#ifndef QUERN_STAGES_INTERLEAVE_H
#define QUERN_STAGES_INTERLEAVE_H

#include "stages/stage.h"

typedef struct interleave_args {
    bool inverse; /* from runs to halves */
    int64_t granularity;
    quern_tensor in, out;
} interleave_args;
STAGE_DECLARE(interleave);
#define INTERLEAVE_TENSORS(IN, OUT, GRAD) IN(in) OUT(out)
#define INTERLEAVE_VALUES(F) F(inverse) F(granularity)

#endif
