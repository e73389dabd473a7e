/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* books.h - a ledger whose steps' tensors stand in a device's memory. */
#ifndef QUERN_TOOLS_BOOKS_H
#define QUERN_TOOLS_BOOKS_H

#include <quern/ledger.h>

/* *b is zero before books_open(); books_close() takes what it has left behind, too. */
typedef struct books {
    quern_ledger_params params;
    quern_ledger *ledger;
    quern_step step; /* of the step that has begun, or of the newest tokens */
    int device;
    void *memory, *host, *block;
    size_t bytes; /* of either block */
} books;

/* Of steps of at most so many sequences. */
quern_status books_open(books *b, const quern_ledger_params *params, int64_t batch, int device);
/* Pages of a whole pool, or slots. */
int64_t books_pages(const books *b, int pool);
quern_status books_begin(books *b, const int32_t *ids, const int64_t *counts, int64_t batch);
quern_status books_newest(books *b, const int32_t *ids, const int64_t *counts, int64_t batch);
void books_close(books *b);

#endif
