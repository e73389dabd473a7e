/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* store_rows.h - the arguments of the stage that writes rows into slots of a cache, in the cache's format. */
#ifndef QUERN_STAGES_STORE_ROWS_H
#define QUERN_STAGES_STORE_ROWS_H

#include "stages/pool.h"
#include "stages/stage.h"

typedef struct store_rows_args {
    entry_format format;
    int64_t page;       /* slots of a page; 0: rows are contiguous */
    quern_tensor x;     /* [n, D] */
    quern_tensor
        slots; /* i32 or i64 [n]: a row's number, or page * slots + slot; -1: the row is not stored */
    quern_tensor cache; /* [rows, D or bytes]; [pages, page, D or bytes]; or [pages, page row bytes], data
                           before scales */
} store_rows_args;
STAGE_DECLARE(store_rows);
#define STORE_ROWS_TENSORS(IN, OUT, GRAD) IN(x) IN(slots) OUT(cache)
#define STORE_ROWS_VALUES(F) F(format) F(page)

#endif
