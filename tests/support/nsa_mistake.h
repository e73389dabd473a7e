/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * nsa_mistake.h - bad calls of NSA's operations: a base, what is spoilt of it, and the status and sentence
 * that it must get from the call and (where shapes show it) from its workspace query. No byte of any tensor
 * or of the workspace may change.
 */
#ifndef QUERN_TEST_NSA_MISTAKE_H
#define QUERN_TEST_NSA_MISTAKE_H

#include "nsa_case.h"

enum {
    FWD = 1,
    BWD = 2,
    CMP = 4,
    CMP_BWD = 8,
    SEL = 16,
    ATT = 32,
    ATT_BWD = 64,
    GATES = 128,
    COMBINE = 256,
    GATE = 512,
    GATE_BWD = 1024,
    NSA_OPS = 11
};
enum {
    ALL = 2047,
    WHOLE = FWD | BWD,
    COMPRESS = CMP | CMP_BWD,
    ATTEND = ATT | ATT_BWD,
    GROUPED = WHOLE | SEL | ATTEND
};
enum { TAKE_WORKSPACE = ALL & ~(GATES | COMBINE | GATE) }; /* bytes of it */

typedef enum nsa_base { PLAIN, VARLEN, LINEAR, GIVEN, GROUPS, SEPARATE, UNGATED, NSA_BASES } nsa_base;

typedef enum nsa_fault {
    PARAM,  /* params at `where`, 8 bytes, = value */
    PARAM4, /* the same, 4 bytes */
    SCALE,  /* scale: 0 NaN, 1 infinite, 2 negative, 3 huge */
    PARAMS_SIZE,
    TENSORS_SIZE,
    NO_PARAMS,
    NO_TENSORS,
    ABSENT,       /* the tensor of a slot: not given */
    OTHER_TENSOR, /* the tensor of slot `where` instead */
    SHAPE,        /* shape[where] = value */
    MORE,         /* shape[where] += value */
    STRIDE,       /* strides[where] = value */
    NDIM,         /* = value */
    DTYPE,
    DEVICE,
    NULL_DATA,
    ODD_DATA,  /* a byte off the element */
    ALIAS,     /* the memory of slot `where` */
    CU_SEQLEN, /* the entry at `where` = value */
    SHORT_WORKSPACE,
    NO_WORKSPACE,
    ALL_CUDA
} nsa_fault;

typedef struct nsa_mistake {
    const char *name;
    nsa_base base;
    int ops; /* which refuse it */
    nsa_fault fault;
    nsa_slot slot;
    int64_t where, value;
    quern_status status;
    const char *words[3]; /* what the sentence must hold */
} nsa_mistake;

extern const nsa_call *const nsa_calls[NSA_OPS];
extern nsa_case *nsa_bases[NSA_BASES]; /* every mistake leaves its base as it was */
extern int nsa_failures;               /* a test prints all of them before it fails */

/* Group set-up and tear-down: the bases. */
int nsa_make_bases(void **state);
int nsa_free_bases(void **state);
/* What an operation reads and writes of a case. */
void nsa_sets_of(const nsa_case *c, int op, nsa_set *in, nsa_set *out);
/* Whether a base has what an operation cannot do without. */
bool nsa_base_serves(nsa_base b, int op);
/* Makes the call and its query; adds to nsa_failures where either says something else. */
void nsa_try_mistake(quern_context *ctx, const nsa_mistake *m, int op);

#endif
