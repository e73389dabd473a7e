/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* program.h - what the programs that measure NVFP4's figures share: ends on failure, the time, random bits. */
#ifndef QUERN_BENCH_ACCEPT_PROGRAM_H
#define QUERN_BENCH_ACCEPT_PROGRAM_H

#include <quern/quern.h>

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static inline void *need(void *p)
{
    if (p == NULL) {
        fprintf(stderr, "no memory\n");
        exit(4);
    }
    return p;
}

static inline void check(quern_status status)
{
    if (status == QUERN_OK) return;
    fprintf(stderr, "%s\n", quern_last_error(NULL));
    exit(5);
}

static inline double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static inline uint32_t next_random(uint32_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 17;
    *state ^= *state << 5;
    return *state;
}

#endif
