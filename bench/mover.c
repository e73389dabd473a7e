/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* mover.c - runs the mover on its threads; its portable level. */
#include <stdint.h>
#include <string.h>
#include <time.h>

typedef uint64_t word;
#define VECTOR word
#define LOAD(p) (*(const word *)(const void *)(p))
#define STORE(p, v) (*(word *)(void *)(p) = (v))
#define STREAM(p, v) STORE(p, v)
#define FENCE() ((void)0)
#define ABSORB(v) __asm__ volatile("" : : "r"(v))
#define MOVER_NAME mover_lines_plain
#include "mover_lines.h"

static mover_lines *lines_of_this_machine(void)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f")) return mover_lines_avx512;
    if (__builtin_cpu_supports("avx2")) return mover_lines_avx2;
#endif
    return mover_lines_plain;
}

double mover_run(const mover *m, int threads)
{
    enum { PIECE = 1 << 18 }; /* bytes of a stream; threads take pieces as they do in stages */
    mover_lines *const lines = lines_of_this_machine();
    const int64_t pieces = (int64_t)((m->bytes + PIECE - 1) / PIECE);
    struct timespec before, after;
    (void)threads; /* unused without OpenMP */
    clock_gettime(CLOCK_MONOTONIC, &before);
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t i = 0; i < pieces; i++) {
        const size_t from = (size_t)i * PIECE, left = m->bytes - from;
        lines(m, from, from + (left < PIECE ? left : PIECE));
    }
    clock_gettime(CLOCK_MONOTONIC, &after);
    return (double)(after.tv_sec - before.tv_sec) * 1e3 + (double)(after.tv_nsec - before.tv_nsec) * 1e-6;
}
