/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "books.h"

#include "device.h"

#include <stdlib.h>

quern_status books_open(books *b, const quern_ledger_params *params, int64_t batch, int device)
{
    size_t bytes;
    b->params = *params;
    b->device = device;
    quern_status status = quern_ledger_size(params, &bytes);
    if (status != QUERN_OK) return status;
    b->memory = malloc(bytes + 1);
    if (b->memory == NULL) return QUERN_ERR_OUT_OF_MEMORY;
    status = quern_ledger_create(params, b->memory, bytes, &b->ledger);
    if (status == QUERN_OK) status = quern_ledger_block_bytes(b->ledger, batch, &b->bytes);
    if (status != QUERN_OK) return status;
    b->host = malloc(b->bytes + 1);
    b->block = device_take(device, b->bytes + 1);
    return b->host != NULL && b->block != NULL ? QUERN_OK : QUERN_ERR_OUT_OF_MEMORY;
}

int64_t books_pages(const books *b, int pool)
{
    int64_t pages = 0;
    (void)quern_ledger_pages(&b->params, pool, 0, NULL, &pages);
    return pages;
}

/* The block as it was filled on the host goes to the device. */
static quern_status publish(books *b, int64_t batch)
{
    b->step = (quern_step)QUERN_STEP_INIT;
    const quern_status status = device_copy(b->device, b->block, b->host, b->bytes);
    return status == QUERN_OK
               ? quern_ledger_step(b->ledger, batch, b->block, (quern_device)b->device, 0, &b->step)
               : status;
}

quern_status books_begin(books *b, const int32_t *ids, const int64_t *counts, int64_t batch)
{
    quern_status status = quern_ledger_begin(b->ledger, ids, counts, batch, b->host, b->bytes);
    if (status == QUERN_OK && (status = publish(b, batch)) != QUERN_OK) (void)quern_ledger_abort(b->ledger);
    return status;
}

quern_status books_newest(books *b, const int32_t *ids, const int64_t *counts, int64_t batch)
{
    const quern_status status = quern_ledger_newest(b->ledger, ids, counts, batch, b->host, b->bytes);
    return status == QUERN_OK ? publish(b, batch) : status;
}

void books_close(books *b)
{
    free(b->memory), free(b->host);
    device_free(b->device, b->block);
}
