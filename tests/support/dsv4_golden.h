/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* dsv4_golden.h - the compressor calls that the golden vectors raw_csa, raw_hca and v4_tiny_* answer. */
#ifndef QUERN_TEST_DSV4_GOLDEN_H
#define QUERN_TEST_DSV4_GOLDEN_H

#include "oracle/dsv4.h"

/* max |out - expected| / max |expected| that tests/vectors/INDEX.md allows. */
#define DSV4_RAW_BOUND 1e-6
#define DSV4_TINY_BOUND 5e-6

/* One compressor call on one sequence; arrays are owned, NULL where absent. */
typedef struct dsv4_golden {
    oracle_compressor shape;
    int64_t tokens, max_pos;
    double *proj, *b_a, *b_b, *prev_b, *norm_weight, *cos_sin;
    double *out, *pooled_tail; /* [blocks, C]; the last 64 channels before the rotation, or NULL */
    double bound;
    char name[64];
} dsv4_golden;

enum { DSV4_GOLDEN_CASES = 14 };
/* Case i of DSV4_GOLDEN_CASES. `directory` is QUERN_TEST_VECTORS. */
dsv4_golden dsv4_golden_case(const char *directory, int i);
void dsv4_golden_free(dsv4_golden *g);

#endif
