/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* dsv4_states.h - streams of one compressor for tests: states in the slots of tensors, and what a step says
 * of them. */
#ifndef QUERN_TESTS_SUPPORT_DSV4_STATES_H
#define QUERN_TESTS_SUPPORT_DSV4_STATES_H

#include <quern/dsv4.h>

enum { DSV4_STATES_MOST = 8 };

typedef struct dsv4_states {
    quern_dsv4_compress_params params;
    int64_t count, floats;              /* slots, floats of one */
    float *rows;                        /* begin as NaN */
    int32_t merged[DSV4_STATES_MOST];   /* rows in the sums */
    int32_t position[DSV4_STATES_MOST]; /* of the next token; what tests take back is subtracted */
} dsv4_states;

dsv4_states dsv4_states_make(const quern_dsv4_compress_params *params, int64_t width, int64_t ring,
                             int64_t count);
void dsv4_states_free(dsv4_states *s);
/* How many tokens can be taken back. */
int64_t dsv4_states_held(const dsv4_states *s, int32_t slot);
/* Appends counts[b] tokens to slot slots[b]: `t` with what a step says, out of T / r + batch rows. */
quern_status dsv4_states_append(dsv4_states *s, quern_context *ctx, const int32_t *slots,
                                const int64_t *counts, int64_t batch, const quern_dsv4_append_tensors *t);

#endif
