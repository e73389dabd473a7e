/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* save.c - headers and checksums of saved sequences. */
#include "cache/save.h"

#include "core/error.h"

#include <inttypes.h>
#include <stddef.h>
#include <string.h>

static const uint64_t saved_version = 2;

/* Of the bytes, with zeros in the checksum's place. Eight chains, because one would wait for every
 * multiplication. A change of one word always changes it. */
static uint64_t checksum_of(const char *bytes, size_t count)
{
    enum { CHAINS = 8, WORD = sizeof(uint64_t) };
    const size_t skipped = offsetof(saved_header, checksum) / WORD;
    uint64_t chain[CHAINS], sum = count;
    for (uint64_t i = 0; i < CHAINS; i++) chain[i] = 0xcbf29ce484222325u + i;
    for (size_t i = 0; i * WORD < count; i++) {
        const size_t left = count - i * WORD;
        uint64_t word = 0;
        memcpy(&word, bytes + i * WORD, left < WORD ? left : WORD);
        uint64_t *c = &chain[i % CHAINS];
        *c = (*c ^ (i == skipped ? 0 : word)) * 0x9e3779b97f4a7c15u;
        *c ^= *c >> 32;
    }
    for (int i = 0; i < CHAINS; i++) sum = (sum ^ chain[i]) * 0x9e3779b97f4a7c15u + (sum >> 29);
    return sum;
}

void saved_write(const saved_kind *kind, int64_t tokens, int64_t held, void *to, size_t bytes)
{
    saved_header h = {.magic = kind->magic, .version = saved_version, .tokens = tokens, .held = held};
    memcpy(h.field, kind->field, sizeof h.field);
    memcpy(to, &h, sizeof h);
    h.checksum = checksum_of(to, bytes);
    memcpy(to, &h, sizeof h);
}

quern_status saved_room(const void *to, const size_t *bytes, size_t needed)
{
    if (bytes == NULL) return error_argument("bytes is NULL: the size of `to`, or a place for it, is needed");
    if (to != NULL && *bytes < needed)
        return error_set(QUERN_ERR_WORKSPACE, "bytes is %zu: at least %zu are accepted", *bytes, needed);
    return QUERN_OK;
}

quern_status saved_read(const saved_kind *kind, const void *from, size_t from_bytes, saved_header *h)
{
    if (from == NULL) return error_argument("from is NULL: a saved sequence is needed");
    if (from_bytes < sizeof *h)
        return error_set(QUERN_ERR_FORMAT, "from has %zu bytes: a saved sequence has at least %zu",
                         from_bytes, sizeof *h);
    memcpy(h, from, sizeof *h);
    if (h->magic != kind->magic || h->version != saved_version)
        return error_set(QUERN_ERR_FORMAT,
                         "from starts with %016" PRIx64 ", version %" PRIu64
                         ": a saved sequence starts with %016" PRIx64 ", version %" PRIu64,
                         h->magic, h->version, kind->magic, saved_version);
    int i = 0;
    for (; kind->names[i] != NULL; i++)
        if (h->field[i] != kind->field[i])
            return error_set(QUERN_ERR_FORMAT,
                             "from has %s %" PRId64 ": that of the cache, %" PRId64 ", is accepted",
                             kind->names[i], h->field[i], kind->field[i]);
    if (h->tokens < 0 || h->tokens > kind->capacity)
        return error_set(QUERN_ERR_FORMAT,
                         "from has %" PRId64 " tokens: 0 to the capacity %" PRId64 " is accepted", h->tokens,
                         kind->capacity);
    if (h->held < 0 || h->held > kind->rollback || h->held > h->tokens)
        return error_set(QUERN_ERR_FORMAT, "from is damaged: %" PRId64 " of %" PRId64 " tokens to take back",
                         h->held, h->tokens);
    return QUERN_OK;
}

quern_status saved_check(const saved_header *h, const void *from, size_t from_bytes, size_t needed)
{
    if (from_bytes != needed)
        return error_set(QUERN_ERR_FORMAT, "from has %zu bytes: %zu are accepted", from_bytes, needed);
    if (checksum_of(from, from_bytes) != h->checksum)
        return error_set(QUERN_ERR_FORMAT, "from is damaged: its checksum is not that of its %zu bytes",
                         from_bytes);
    return QUERN_OK;
}
