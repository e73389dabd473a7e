/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* fuzz_mutator.c - random numbers, and the mutator that libFuzzer calls: one time in four its own, which
 * knows no grammar. */
#include "fuzz.h"

/* libFuzzer's, where it drives. */
__attribute__((weak)) size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t room);

static uint64_t state = 1;

void fuzz_random_seed(uint64_t seed)
{
    state = seed;
}

uint32_t fuzz_random(uint32_t bound)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((state >> 32) * bound >> 32);
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t room, unsigned seed)
{
    fuzz_random_seed(seed);
    if (LLVMFuzzerMutate != NULL && fuzz_random(4) == 0) return LLVMFuzzerMutate(data, size, room);
    return fuzz_mutate(data, size, room < FUZZ_ROOM ? room : FUZZ_ROOM);
}
