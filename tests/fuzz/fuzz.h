/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * fuzz.h - what a fuzz target gives its driver, libFuzzer or fuzz_replay.c.
 *
 * With libFuzzer: clang -fsanitize=fuzzer,address over the target, fuzz_mutator.c,
 * tests/support/gguf_bytes.c and the library; `TARGET_fuzz_test --write FOLDER` writes the seeds.
 */
#ifndef TEST_FUZZ_H
#define TEST_FUZZ_H

#include <stddef.h>
#include <stdint.h>

enum { FUZZ_ROOM = 1 << 16 }; /* bytes of a file at most */

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t room, unsigned seed);

/* Seed number `index`; its bytes, 0 past the last. */
size_t fuzz_seed(size_t index, uint8_t *file);
/* Changes a file within its grammar: lengths and counts that frame it stay valid. Its new size, at most
 * room. */
size_t fuzz_mutate(uint8_t *file, size_t size, size_t room);

/* A pseudo-random number below `bound`, of a state that all share. */
void fuzz_random_seed(uint64_t seed);
uint32_t fuzz_random(uint32_t bound);

#endif
