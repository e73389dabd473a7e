/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* dequantise.h - NVFP4 back to values. A scale byte that is no number is a fault (stage.h). */
#ifndef QUERN_STAGES_DEQUANTISE_H
#define QUERN_STAGES_DEQUANTISE_H

#include "stages/quantise.h"

typedef struct dequantise_args {
    quantise_profile profile;
    quantise_global per;
    bool columns;
    quern_tensor codes, scales, global, offsets;
    quern_tensor out; /* a row may end within a block */
} dequantise_args;
STAGE_DECLARE(dequantise);
#define DEQUANTISE_TENSORS(IN, OUT, GRAD) IN(codes) IN(scales) IN(global) IN(offsets) OUT(out)
#define DEQUANTISE_VALUES(F) F(profile) F(per) F(columns)

#endif
