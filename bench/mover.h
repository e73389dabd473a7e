/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * mover.h - a loop that only moves lines of memory: the lines that a kernel reads and writes, in its own
 * tensors, with non-temporal stores where the kernel has them, and nothing computed. A kernel whose limit is
 * memory is divided by it: unlike a copy it has as many streams as the kernel, and the same share of reads.
 */
#ifndef QUERN_BENCH_MOVER_H
#define QUERN_BENCH_MOVER_H

#include <stddef.h>

enum { MOVER_STREAMS = 5 };

/* Streams of `bytes` bytes each, a multiple of 512, walked side by side; all at multiples of 64. */
typedef struct mover {
    int reads, writes; /* 4 and 1, or 5 and 4 */
    const char *read[MOVER_STREAMS];
    char *write[MOVER_STREAMS]; /* by non-temporal stores */
    size_t bytes;
    /* A narrow tensor beside them (a row's gates): read, or written by ordinary stores; NULL: there is none.
     */
    const char *read_few;
    char *write_few;
    size_t few_bytes;
} mover;

/* Moves all lines once with `threads` threads; milliseconds. What is written is garbage. */
double mover_run(const mover *m, int threads);

/* Bytes [from, to) of the streams, and their share of the narrow tensor: one a level. Multiples of 512. */
typedef void mover_lines(const mover *m, size_t from, size_t to);
mover_lines mover_lines_plain, mover_lines_avx2, mover_lines_avx512;

#endif
