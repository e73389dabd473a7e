/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* save.h - what saved sequences start with; packed rows follow. */
#ifndef QUERN_CACHE_SAVE_H
#define QUERN_CACHE_SAVE_H

#include <quern/quern.h>

enum { SAVED_FIELDS = 14 };

typedef struct saved_header {
    uint64_t magic, version, checksum;
    int64_t tokens, held; /* as in a ledger */
    int64_t field[SAVED_FIELDS];
} saved_header;

/* What a cache is: its fields by name, and the ledger's bounds. */
typedef struct saved_kind {
    uint64_t magic;
    int64_t capacity, rollback;
    const char *const *names; /* of the fields, ends with NULL */
    int64_t field[SAVED_FIELDS];
} saved_kind;

/* Writes the header of `bytes` bytes at `to`, the rest of which is there. */
void saved_write(const saved_kind *kind, int64_t tokens, int64_t held, void *to, size_t bytes);
/* Checks the header alone, which may hold any numbers. */
quern_status saved_read(const saved_kind *kind, const void *from, size_t from_bytes, saved_header *h);
/* Checks the length and the checksum. */
quern_status saved_check(const saved_header *h, const void *from, size_t from_bytes, size_t needed);
/* The checks of a save: *bytes is the room at `to`, which may be NULL. */
quern_status saved_room(const void *to, const size_t *bytes, size_t needed);

#endif
