/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* swizzle.h - scales between rows [rows, columns] and the order of tensor cores: 512 bytes a tile of 128 rows
 * and 4 columns. */
#ifndef QUERN_STAGES_SWIZZLE_H
#define QUERN_STAGES_SWIZZLE_H

#include "stages/stage.h"

typedef struct swizzle_args {
    bool inverse;
    bool transposed; /* the linear side is [E, columns, rows], the other [E, bytes] */
    quern_tensor linear, swizzled;
    quern_tensor tokens; /* i32 [E]: rows of each expert, which begin at tiles of their own; or absent */
    quern_tensor pad_row_offsets; /* i32 [E + 1]: where they begin; written, may be absent */
} swizzle_args;
STAGE_DECLARE(swizzle);
#define SWIZZLE_TENSORS(IN, OUT, GRAD) OUT(linear) OUT(swizzled) IN(tokens) OUT(pad_row_offsets)
#define SWIZZLE_VALUES(F) F(inverse) F(transposed)

#endif
