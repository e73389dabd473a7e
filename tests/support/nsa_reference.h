/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* nsa_reference.h - the float64 oracle over a whole nsa_case, and the checks of a call against it. */
#ifndef QUERN_TEST_NSA_REFERENCE_H
#define QUERN_TEST_NSA_REFERENCE_H

#include "nsa_case.h"
#include "oracle/nsa.h"

typedef struct nsa_reference {
    const nsa_case *c;
    double *value[NSA_SLOTS]; /* row-major, the whole tensor; NULL: the case lacks it (or it is int32) */
    double *pe_k_terms;       /* sum of |terms| of d_pe_k */
    double *k_cmp, *v_cmp;    /* what scores and attention read */
    int32_t *block_idx, *block_count, *group_idx;
} nsa_reference;

/* Where one sequence's rows start in the tensors of the case. */
typedef struct nsa_sequence {
    oracle_nsa a;
    int64_t row, entry, list, lse, lse_stride, list_rows;
} nsa_sequence;
nsa_sequence nsa_sequence_of(const nsa_case *c, int64_t b);

/* Reads the inputs of the case and compresses. k_cmp and v_cmp are the case's own tensors where they hold
 * what a call wrote or was given (`entries_from_case`), else the reference's. */
nsa_reference *nsa_reference_new(const nsa_case *c, bool entries_from_case);
void nsa_reference_free(nsa_reference *r);
/* Chooses the lists itself, or takes those that stand in the case. */
void nsa_reference_select(nsa_reference *r);
void nsa_reference_take_lists(nsa_reference *r);
/* Everything that the whole writes. */
void nsa_reference_forward(nsa_reference *r);
void nsa_reference_backward(nsa_reference *r); /* after forward */
/* The parts alone, from the case's tensors as they stand. */
void nsa_reference_compress_backward(nsa_reference *r); /* from d_k_cmp, d_v_cmp */
void nsa_reference_attend_backward(nsa_reference *r);   /* from d_o_b */
void nsa_reference_gate(nsa_reference *r);              /* from o_b, gates or w_gate */
void nsa_reference_gate_backward(nsa_reference *r);     /* from o_b, d_o */

/* Fails the test unless the case's tensors of `set` agree with the reference within the bounds. */
void nsa_check(const nsa_reference *r, nsa_set set);
/* Fails the test unless the case's lists obey the test rule of selection, and unused rows are -1.
 * Groups are judged where the call computed them. */
void nsa_check_lists(const nsa_reference *r, bool judge_groups);
/* Forward, then backward, with every output checked, on one context. */
void nsa_check_whole(nsa_case *c, quern_context *ctx);

#endif
