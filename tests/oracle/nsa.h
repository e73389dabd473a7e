/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * nsa.h - native sparse attention in double, straight from the equations, for one sequence.
 *
 * Arrays are contiguous: q [n,h,d], k [n,hkv,d], v [n,hkv,dv], k_cmp [Nc,hkv,d], gates [n,h,3], o [n,h,dv],
 * lse [h,n] (rows of lse_stride), lists [Hs,tiles,k] (tiles rows of list_rows per list head). A batch or a
 * varlen batch is a loop by the caller. Every gradient is added to what is there.
 */
#ifndef QUERN_ORACLE_NSA_H
#define QUERN_ORACLE_NSA_H

#include <quern/nsa.h>

typedef struct oracle_nsa {
    quern_nsa_params params; /* as a caller of the library fills them */
    int64_t n, h, hkv, d, dv;
} oracle_nsa;

int64_t oracle_nsa_stride(const oracle_nsa *a);
int64_t oracle_nsa_select_block(const oracle_nsa *a);
int64_t oracle_nsa_entries(const oracle_nsa *a); /* Nc */
int64_t oracle_nsa_blocks(const oracle_nsa *a);  /* ceil(n / l') */
int64_t oracle_nsa_tiles(const oracle_nsa *a);   /* ceil(n / Tq) */
int64_t oracle_nsa_lists(const oracle_nsa *a);   /* Hs */

/* Compress one of k, v (dim: d or dv). w, pe may be NULL as params.compress allows. */
void oracle_nsa_compress(const oracle_nsa *a, int64_t dim, const double *x, const double *w, const double *pe,
                         double *y);
/* d_w, d_pe, pe_terms may be NULL; pe_terms gets the sum of |w * d_y| over all that d_pe sums. */
void oracle_nsa_compress_backward(const oracle_nsa *a, int64_t dim, const double *x, const double *w,
                                  const double *pe, const double *d_y, double *d_x, double *d_w, double *d_pe,
                                  double *pe_terms);

/* A selection block (or group of compressed entries) as one tile's list may choose it. */
typedef struct oracle_choice {
    double score;
    bool candidate, forced;
    bool counts; /* some compressed entry that counts stands behind the score */
} oracle_choice;

/* Scores of the blocks (oracle_nsa_blocks) or groups (ceil(Nc / 128)) for one list head and tile. */
void oracle_nsa_block_choices(const oracle_nsa *a, const double *q, const double *k_cmp, int64_t list,
                              int64_t tile, oracle_choice *choices);
void oracle_nsa_group_choices(const oracle_nsa *a, const double *q, const double *k_cmp, int64_t list,
                              int64_t tile, oracle_choice *choices);
/* The k best: ascending, padded with -1. Returns how many. */
int32_t oracle_nsa_pick(const oracle_choice *choices, int64_t count, int64_t k, int32_t *list);
/* The test rule: equal to oracle_nsa_pick's list where the gap at rank k is above 1e-5 of the largest
 * score; else any blocks within 1e-5 of rank k's score, those that count for nothing lowest index first. */
bool oracle_nsa_accepts(const oracle_choice *choices, int64_t count, int64_t k, const int32_t *list,
                        char why[200]);

/* Lists of the whole sequence; group_idx may be NULL. */
void oracle_nsa_select(const oracle_nsa *a, const double *q, const double *k_cmp, int64_t list_rows,
                       int32_t *block_idx, int32_t *block_count, int32_t *group_idx);
/* Judges the library's lists by the test rule; block_count, group_idx may be NULL. */
bool oracle_nsa_judge(const oracle_nsa *a, const double *q, const double *k_cmp, int64_t list_rows,
                      const int32_t *block_idx, const int32_t *block_count, const int32_t *group_idx,
                      char why[200]);

typedef struct oracle_nsa_arrays {
    const double *q, *k, *v, *k_slc, *v_slc, *k_win, *v_win; /* pairs absent: k, v */
    const double *k_cmp, *v_cmp;
    const double *w_k, *w_v, *pe_k, *pe_v, *w_gate;
    double *gates; /* read where the gate is given, else written */
    const int32_t *block_idx, *group_idx;
    int64_t list_rows, lse_stride; /* 0: tiles; 0: n */
    double *o, *o_b[3], *lse_b[3]; /* all written by forward, o_b read by backward */
    const double *d_o;
    double *d_q, *d_k, *d_v, *d_k_slc, *d_v_slc, *d_k_win, *d_v_win, *d_k_cmp, *d_v_cmp;
    double *d_w_k, *d_w_v, *d_pe_k, *d_pe_v, *pe_k_terms, *d_w_gate, *d_gates;
} oracle_nsa_arrays;

/* Branches and gate, from k_cmp, v_cmp and the lists. */
void oracle_nsa_forward(const oracle_nsa *a, const oracle_nsa_arrays *x);
/* One branch alone: o and lse of queries first ... first + count - 1 of one head. */
void oracle_nsa_branch_rows(const oracle_nsa *a, const oracle_nsa_arrays *x, int branch, int64_t head,
                            int64_t first, int64_t count, double *o, double *lse);
/* Gradients of sum(o * d_o), through the compression unless it is given. */
void oracle_nsa_backward(const oracle_nsa *a, const oracle_nsa_arrays *x);
/* The parts: one branch's gradients from its own d_o_b, and the gate's. */
void oracle_nsa_branch_backward(const oracle_nsa *a, const oracle_nsa_arrays *x, int branch,
                                const double *d_o_b, double *d_q, double *d_k, double *d_v);
void oracle_nsa_gate_backward(const oracle_nsa *a, const oracle_nsa_arrays *x, double *const d_o_b[3]);
/* gates (unless given) and o from x->o_b. */
void oracle_nsa_gate(const oracle_nsa *a, const oracle_nsa_arrays *x);

/* The block indexer on one sequence: q [n,lists,d], k [s,d] where all lists share it, else [s,lists,d]. */
typedef struct oracle_nsa_index {
    quern_nsa_index_params params;
    int64_t n, s, lists, d;
    bool shared;
} oracle_nsa_index;
/* The blocks (ceil(s / l')) as the list of row t may choose them; the score of one that is no candidate is
 * -inf. */
void oracle_nsa_index_choices(const oracle_nsa_index *a, const double *q, const double *k, int64_t list,
                              int64_t t, oracle_choice *choices);

/* The indexer's loss on one sequence: q_index [n,lists,d_index], k_index [s,d_index] or [s,lists,d_index], q
 * [n,heads,d], k [s,lists,d], blocks [lists][list_rows][length]. */
typedef struct oracle_index_loss {
    int64_t block_size, query_offset, n, s, lists, heads, d_index, d;
    bool shared;
    double scale, scale_index;
    const double *q_index, *k_index, *q, *k;
    const int32_t *blocks;
    int64_t list_rows, length;
} oracle_index_loss;
/* Whether some list of row t has a token that it sees. */
bool oracle_index_loss_counts(const oracle_index_loss *a, int64_t t);
/* row_loss [lists][list_rows] is written for the n rows, and into row_size the root of the sum of its terms'
 * squares; factor (P - T) are the gradients of the scores, of which d_q and d_k, like q_index and k_index,
 * get those of the inputs added. */
void oracle_index_loss_rows(const oracle_index_loss *a, double factor, double *row_loss, double *row_size,
                            double *d_q, double *d_k);

/* One list from blocks of `from` tokens to blocks of `to`; returns the count. */
int32_t oracle_nsa_list_convert(const int32_t *in, int64_t k_in, int64_t from, int32_t *out, int64_t k_out,
                                int64_t to, int64_t n);

#endif
