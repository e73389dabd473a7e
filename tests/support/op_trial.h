/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * op_trial.h - random calls of any operation that quern/op.h lists, from what it accepts to anything at all.
 */
#ifndef QUERN_TEST_OP_TRIAL_H
#define QUERN_TEST_OP_TRIAL_H

#include "random.h"

#include <quern/op.h>

typedef struct op_any_tensors {
    size_t size;
    const quern_tensor *t[QUERN_OP_TENSORS_MAX];
} op_any_tensors;

typedef union op_any_params {
    size_t size;
    unsigned char bytes[QUERN_OP_PARAMS_BYTES];
} op_any_params;

/* An operation with its tensors and parameters. */
typedef struct op_subject {
    const quern_op *op;
    quern_op_info info;
    quern_op_tensor tensors[QUERN_OP_TENSORS_MAX];
    quern_op_param params[QUERN_OP_PARAMS_MAX];
} op_subject;

/* The i-th operation; false past the last. */
bool op_subject_read(size_t i, op_subject *s);

/* A call under construction. */
typedef struct op_trial {
    const op_subject *s;
    test_random *random;
    quern_op_pass pass;
    op_any_params params;
    op_any_tensors tensors;
    quern_tensor view[QUERN_OP_TENSORS_MAX];
    bool tame;   /* most of it is what an operation accepts */
    bool hollow; /* extents are 0, or huge: what is accepted has no elements */
    bool contiguous;
    int64_t symbol[64]; /* the extents of names in shapes, by a hash of the name */
} op_trial;

/* Chooses parameters and tensors, without data, for a trial whose operation, pass and kind are set. */
void op_trial_choose(op_trial *t);

/* The bytes of a contiguous view; 0: it has no elements or too many to run. */
size_t op_trial_bytes(const quern_tensor *v);
/* Gives every tensor a block of its own: random values, index lists with entries that are out of range, the
 * results a pattern. False where that is too large. The caller frees each view's data. */
bool op_trial_give_memory(op_trial *t);
enum { OP_TRIAL_PATTERN = 0x5a };

#endif
