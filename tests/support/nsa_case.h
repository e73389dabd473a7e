/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * nsa_case.h - one NSA problem for tests: its tensors in guarded buffers, calls of the library on any
 * subset of them, and the float64 reference for every tensor that a call writes.
 */
#ifndef QUERN_TEST_NSA_CASE_H
#define QUERN_TEST_NSA_CASE_H

#include "tensor.h"

#include <quern/nsa.h>

/* The tensors of a call, in the order of quern_nsa_tensors. */
typedef enum nsa_slot {
    NSA_Q,
    NSA_K,
    NSA_V,
    NSA_K_SLC,
    NSA_V_SLC,
    NSA_K_WIN,
    NSA_V_WIN,
    NSA_K_CMP,
    NSA_V_CMP,
    NSA_CU_SEQLENS,
    NSA_CU_SEQLENS_CMP,
    NSA_W_K,
    NSA_W_V,
    NSA_PE_K,
    NSA_PE_V,
    NSA_W_GATE,
    NSA_GATES,
    NSA_BLOCK_IDX,
    NSA_BLOCK_COUNT,
    NSA_GROUP_IDX,
    NSA_O,
    NSA_O_CMP,
    NSA_O_SLC,
    NSA_O_WIN,
    NSA_LSE_CMP,
    NSA_LSE_SLC,
    NSA_LSE_WIN,
    NSA_D_O,
    NSA_D_O_CMP,
    NSA_D_O_SLC,
    NSA_D_O_WIN,
    NSA_D_Q,
    NSA_D_K,
    NSA_D_V,
    NSA_D_K_SLC,
    NSA_D_V_SLC,
    NSA_D_K_WIN,
    NSA_D_V_WIN,
    NSA_D_K_CMP,
    NSA_D_V_CMP,
    NSA_D_W_K,
    NSA_D_W_V,
    NSA_D_PE_K,
    NSA_D_PE_V,
    NSA_D_W_GATE,
    NSA_D_GATES,
    NSA_Q_INDEX,
    NSA_K_INDEX,
    NSA_SLOTS
} nsa_slot;

/* A set of tensors: one bit per slot. */
typedef uint64_t nsa_set;
#define NSA_BIT(slot) ((nsa_set)1 << (slot))

const char *nsa_slot_name(int slot);

enum { NSA_MAX_BATCH = 8 };

typedef struct nsa_config {
    quern_nsa_params params;
    quern_dtype dtype, weight_dtype; /* f32 is 0: a config starts as f32 */
    test_layout layout;
    int64_t batch, n;            /* fixed length */
    int64_t lens[NSA_MAX_BATCH]; /* varlen: `batch` lengths */
    bool varlen;
    int64_t spare; /* varlen: rows past the last sequence */
    int64_t h, hkv, d, dv;
    bool project_k, project_v; /* mean: with w_k, w_v */
    bool pe_k, pe_v;           /* linear: with position encodings */
    bool separate_slc, separate_win;
    int64_t d_index;   /* of the block indexer, where params.selection is INDEXED */
    bool key_a_list;   /* otherwise its lists share a key */
    bool forward_only; /* without gradients, and results are not drawn */
} nsa_config;

typedef struct nsa_case {
    nsa_config config;
    int64_t rows;      /* B N, or T */
    int64_t entries;   /* rows of k_cmp: B Nc, or T / d */
    int64_t list_rows; /* rows per list head: tiles, or T / Tq + B */
    test_tensor tensor[NSA_SLOTS];
} nsa_case;

/* f32, fixed length, everything at the library's defaults but small blocks: B 2, N 75, H 4/2, D 16. */
nsa_config nsa_config_small(void);
/* One line that says what the case is, for messages. */
const char *nsa_config_describe(const nsa_config *config, char text[600]);
/* Every tensor that the configuration has; inputs random, lists and results sentinels. */
nsa_case *nsa_case_new(const nsa_config *config, test_random *random);
void nsa_case_free(nsa_case *c);

/* Sets of tensors that the calls read and write, as the configuration has them. A tensor that the
 * parameters leave without use (the selected branch's pair where that branch is off) is in none. */
nsa_set nsa_attend_inputs(const nsa_case *c);
nsa_set nsa_attend_outputs(const nsa_case *c);
nsa_set nsa_attend_gradients(const nsa_case *c);
nsa_set nsa_forward_inputs(const nsa_case *c);
nsa_set nsa_forward_outputs(const nsa_case *c);
nsa_set nsa_backward_inputs(const nsa_case *c); /* with o_b */
nsa_set nsa_backward_outputs(const nsa_case *c);
/* The members of `set` that this case has. */
nsa_set nsa_present(const nsa_case *c, nsa_set set);
/* The call struct with the tensors of `set`. */
quern_nsa_tensors nsa_bind(const nsa_case *c, nsa_set set);

typedef struct nsa_call {
    const char *name;
    quern_status (*workspace)(quern_context *, const quern_nsa_params *, const quern_nsa_tensors *, size_t *);
    quern_status (*run)(quern_context *, const quern_exec *, const quern_nsa_params *,
                        const quern_nsa_tensors *, void *, size_t);
} nsa_call;
extern const nsa_call nsa_call_forward, nsa_call_backward, nsa_call_compress, nsa_call_compress_backward,
    nsa_call_select, nsa_call_attend, nsa_call_attend_backward, nsa_call_gates, nsa_call_combine,
    nsa_call_gate, nsa_call_gate_backward;

/* Sets the outputs to sentinels, calls with a workspace of exactly the size asked for, and fails the test
 * unless the call succeeds, leaves its inputs as they were and writes nothing outside outputs and
 * workspace. */
void nsa_run(nsa_case *c, quern_context *ctx, nsa_call call, nsa_set inputs, nsa_set outputs);
/* The same without checks or reset, for failing calls. */
quern_status nsa_try(nsa_case *c, quern_context *ctx, nsa_call call, nsa_set set);

/* Copies of the tensors of `set`, and the end of them. */
void nsa_copy(const nsa_case *c, nsa_set set, test_tensor copies[NSA_SLOTS]);
void nsa_free_copies(test_tensor copies[NSA_SLOTS]);
/* Fails the test unless the tensors of `set` have the bits of their copies. `what` goes into the message. */
void nsa_check_same_bits(const nsa_case *c, nsa_set set, const test_tensor copies[NSA_SLOTS],
                         const char *what);

#endif
