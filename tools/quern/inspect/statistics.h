/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* statistics.h - the values of tensors, whatever their format, in a few numbers. */
#ifndef QUERN_INSPECT_STATISTICS_H
#define QUERN_INSPECT_STATISTICS_H

#include <quern/checkpoint.h>

typedef struct statistics {
    bool known;       /* false: the values cannot be read, or were not */
    int64_t elements; /* values: two a byte of codes */
    int64_t zeros, not_finite;
    double least, greatest, sum, squares; /* of the finite ones */
    int64_t blocks;                       /* of NVFP4 and MXFP4 */
    int64_t saturated;                    /* NVFP4: blocks with the greatest scale */
    int64_t bad_scales;                   /* blocks whose scale is no number of the format */
} statistics;

/* A tensor and what its values depend on. */
typedef struct statistics_source {
    const quern_checkpoint_tensor *tensor;
    const quern_checkpoint_tensor *scales; /* of its blocks; NULL: none, or inside the blocks */
    const quern_checkpoint_tensor *global; /* f32: one, or one an expert */
    statistics *out;
} statistics_source;

/* Fills the statistics of all sources, on `threads` threads (0: all). On a terminal a line tells how far
 * it is. The numbers do not depend on the threads. */
void statistics_of(const statistics_source *sources, size_t count, int threads);

#endif
