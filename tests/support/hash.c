/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "hash.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

uint64_t test_hash(uint64_t hash, const void *data, size_t bytes)
{
    for (const unsigned char *p = data, *end = p + bytes; p < end; p++) hash = (hash ^ *p) * 0x100000001b3u;
    return hash;
}

bool test_hash_wanted(void)
{
    return getenv("QUERN_TEST_HASH") != NULL;
}

void test_hash_note(const char *name, uint64_t hash)
{
    static FILE *file; /* closed when the program ends */
    const char *path = getenv("QUERN_TEST_HASH");
    if (path == NULL) return;
    if (file == NULL && (file = fopen(path, "a")) == NULL) {
        perror(path);
        abort();
    }
    fprintf(file, "%s %016" PRIx64 "\n", name, hash);
}
