/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * mover.h - a loop that reads and writes the lines of a kernel's tensors and computes nothing, with
 * non-temporal stores where the kernel has them. It is the limit of a kernel that memory bounds: unlike a
 * copy it has the kernel's number of streams and share of reads.
 */
#ifndef QUERN_BENCH_MOVER_H
#define QUERN_BENCH_MOVER_H

#include <stddef.h>

enum { MOVER_STREAMS = 5 };

/* Streams of `bytes` bytes each, a multiple of 512, walked side by side; all at multiples of 64. */
typedef struct mover {
    int reads, writes; /* 1 or 4 and none, 4 and 1, or 5 and 4 */
    const char *read[MOVER_STREAMS];
    char *write[MOVER_STREAMS]; /* by non-temporal stores */
    size_t bytes;
    /* A narrow tensor beside them (a row's gates): read, or written by ordinary stores; NULL: none. */
    const char *read_few;
    char *write_few;
    size_t few_bytes;
} mover;

/* Moves all lines once on `threads` threads; returns milliseconds. The written tensors hold garbage
 * afterwards. */
double mover_run(const mover *m, int threads);

/* Moves bytes [from, to), multiples of 512, of the streams, and their share of the narrow tensor. One
 * function for each level. */
typedef void mover_lines(const mover *m, size_t from, size_t to);
mover_lines mover_lines_plain, mover_lines_avx2, mover_lines_avx512;

#endif
