/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * mover_lines.h - the loop of mover.h, compiled by each level over its own vector, load and store (VECTOR,
 * LOAD, STORE, STREAM, FENCE, ABSORB).
 *
 * The loop takes eight vectors of a stream before the next stream, as the kernels go by rows. Other steps (a
 * line, two to sixteen vectors, with and without prefetches 1 to 8 KiB ahead) are no faster beyond the
 * machine's noise. The loaded values are folded into the stored ones, so that the compiler keeps every load.
 */
#include "mover.h"

enum { LINE = 64, VECTORS = 8, RUN = VECTORS * (int)sizeof(VECTOR), CHUNK = 8192 };

static inline __attribute__((always_inline)) void move_runs(const char *const *read, char *const *write,
                                                            size_t from, size_t to, const int reads,
                                                            const int writes)
{
    for (size_t at = from; at < to; at += RUN) {
        VECTOR v[VECTORS];
#pragma GCC unroll 8
        for (int k = 0; k < VECTORS; k++) v[k] = LOAD(read[0] + at + (size_t)k * sizeof(VECTOR));
#pragma GCC unroll 4
        for (int r = 1; r < reads; r++) {
#pragma GCC unroll 8
            for (int k = 0; k < VECTORS; k++) v[k] ^= LOAD(read[r] + at + (size_t)k * sizeof(VECTOR));
        }
#pragma GCC unroll 4
        for (int w = 0; w < writes; w++) {
#pragma GCC unroll 8
            for (int k = 0; k < VECTORS; k++) STREAM(write[w] + at + (size_t)k * sizeof(VECTOR), v[k]);
        }
        for (int k = 0; writes == 0 && k < VECTORS; k++) ABSORB(v[k]);
    }
}

static inline __attribute__((always_inline)) void move_few(const mover *m, size_t from, size_t to)
{
    VECTOR v = {0};
    for (size_t i = from; i < to; i += sizeof(VECTOR)) {
        if (m->read_few != NULL) v ^= LOAD(m->read_few + i);
        if (m->write_few != NULL) STORE(m->write_few + i, v);
    }
    ABSORB(v);
}

static inline __attribute__((always_inline)) void move_all(const mover *m, size_t from, size_t to,
                                                           const int reads, const int writes)
{
    const char *read[MOVER_STREAMS];
    char *write[MOVER_STREAMS];
    for (int r = 0; r < reads; r++) read[r] = m->read[r];
    for (int w = 0; w < writes; w++) write[w] = m->write[w];
    const double share = (double)m->few_bytes / (double)m->bytes;
    for (size_t at = from; at < to; at += CHUNK) {
        const size_t end = to - at < CHUNK ? to : at + CHUNK;
        move_runs(read, write, at, end, reads, writes);
        move_few(m, (size_t)((double)at * share) / LINE * LINE, (size_t)((double)end * share) / LINE * LINE);
    }
    FENCE();
}

void MOVER_NAME(const mover *m, size_t from, size_t to)
{
    if (m->writes == 0 && m->reads == 1) move_all(m, from, to, 1, 0);
    else if (m->writes == 0) move_all(m, from, to, 4, 0);
    else if (m->reads == 4) move_all(m, from, to, 4, 1);
    else move_all(m, from, to, 5, 4);
}
