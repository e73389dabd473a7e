/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* list_convert.h - lists of blocks of `from` tokens as lists of blocks of `to` tokens. */
#ifndef QUERN_STAGES_LIST_CONVERT_H
#define QUERN_STAGES_LIST_CONVERT_H

#include "stages/stage.h"

typedef struct list_convert_args {
    quern_tensor in, out, count; /* 2-D views [lists, k]; count [lists] or absent */
    int64_t from, to, n;
} list_convert_args;
STAGE_DECLARE(list_convert);
#define LIST_CONVERT_TENSORS(IN, OUT, GRAD) IN(in) OUT(out) OUT(count)
#define LIST_CONVERT_VALUES(F) F(from) F(to) F(n)

#endif
