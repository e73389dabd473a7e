/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* hash.h - hashes of what the tests' calls wrote, to compare the bits of two builds: tests/hashes.sh. */
#ifndef QUERN_TEST_HASH_H
#define QUERN_TEST_HASH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* What a hash of bytes starts from, and the hash with `bytes` bytes more (FNV-1a). */
#define TEST_HASH_START 0xcbf29ce484222325u
uint64_t test_hash(uint64_t hash, const void *data, size_t bytes);
/* Adds the line `name hash` to the file that QUERN_TEST_HASH names. Where it names none, nothing happens;
 * test_hash_wanted() is then false. */
bool test_hash_wanted(void);
void test_hash_note(const char *name, uint64_t hash);

#endif
