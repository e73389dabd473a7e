/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * call.h - one NSA call inside the family, and what its program is built from: extents, views as stages take
 * them, the stages' arguments.
 */
#ifndef QUERN_NSA_CALL_H
#define QUERN_NSA_CALL_H

#include "nsa/schema.h"

#include <quern/nsa.h>

/* The steps of a whole backward over passes, which has most: each of its views may move. */
enum {
    NSA_VIEWS_MOST = 160,
    NSA_PROGRAM_BYTES = OP_STEP_BYTES(validate_lists) + 6 * OP_STEP_BYTES(attend) + OP_STEP_BYTES(gate) +
                        OP_STEP_BYTES(compress) + 3 * OP_STEP_BYTES(convert) + OP_STEP_BYTES(block_index) +
                        NSA_VIEWS_MOST * sizeof(int64_t)
};

typedef struct nsa_call {
    op_call head;
    quern_nsa_params params; /* defaults resolved */
    _Alignas(op_step) char program[NSA_PROGRAM_BYTES];
} nsa_call;

/* Every tensor of a call as stages take it; absent where the caller gave none or the operation has no use. */
typedef struct nsa_views {
    /* k_b[NSA_CMP] is k_cmp; the others resolved */
    quern_tensor q, k, v, k_b[NSA_BRANCHES], v_b[NSA_BRANCHES];
    quern_tensor w_k, w_v, pe_k, pe_v, w_gate, gates;
    quern_tensor block_idx, block_count, group_idx, q_index, k_index;
    quern_tensor o, o_b[NSA_BRANCHES], lse_b[NSA_BRANCHES];
    quern_tensor d_o, d_o_b[NSA_BRANCHES], d_q, d_k, d_v, d_k_b[NSA_BRANCHES], d_v_b[NSA_BRANCHES];
    quern_tensor d_w_k, d_w_v, d_pe_k, d_pe_v, d_w_gate, d_gates;
} nsa_views;

/* A call while its program is built. */
typedef struct nsa_build {
    op_build *b;
    const op_call *head;
    const quern_nsa_params *params;
    int64_t batch, n, heads, kv_heads, dim_k, dim_v, n_cmp, list_heads, list_rows;
    int64_t rows_batch;          /* the batch extent of activations: 1 where varlen */
    bool separate[NSA_BRANCHES]; /* the branch has its own k, v */
    int64_t passes;              /* whole forward and backward: of heads/passes heads each */
    int32_t converts;
    convert_args convert[3];       /* of sums that are no results */
    stage_seqs tokens, compressed; /* queries against tokens, against compressed entries */
    nsa_views views;
} nsa_build;

static inline bool nsa_branch_on(const nsa_build *c, int branch)
{
    return (c->params->branches & (1u << branch)) != 0;
}

/* Whether some list of blocks is chosen by scores of compressed entries. */
static inline bool nsa_scores_entries(const quern_nsa_params *p)
{
    return (p->branches & QUERN_NSA_BRANCH_SLC) != 0 && p->selection == QUERN_NSA_LIST_COMPUTED;
}

/* Whether the whole makes, or takes, compressed entries. */
static inline bool nsa_has_entries(const quern_nsa_params *p)
{
    return (p->branches & QUERN_NSA_BRANCH_CMP) != 0 || nsa_scores_entries(p);
}

static inline bool nsa_is_backward(int32_t op)
{
    return op == NSA_BACKWARD || op == NSA_COMPRESS_BACKWARD || op == NSA_ATTEND_BACKWARD ||
           op == NSA_GATE_BACKWARD;
}

/* args.c. `given`, or a tensor in the workspace where it is absent. */
quern_tensor nsa_given_or_room(nsa_build *c, const quern_tensor *given, quern_dtype dtype, int32_t ndim,
                               const int64_t *shape);
/* The f32 tensor in which several stages sum what becomes `out` (a token's row each): `out` itself where
 * it is f32 or absent, else one in the workspace, of `heads` heads, listed in c->convert. */
quern_tensor nsa_sum_for(nsa_build *c, const quern_tensor *out, int64_t heads);
void nsa_add_converts(nsa_build *c, int32_t first);
/* Arguments of the stages, as the forward needs them: the attention stage of a branch; compress; select;
 * gate. */
attend_args nsa_branch_args(const nsa_build *c, int branch);
/* Whether a list that is computed names every block: there is room for all, and each is a candidate. The
 * selected branch then attends to every token that its queries may see; nsa_attend_all() says so. */
bool nsa_selects_all(const nsa_build *c);
void nsa_attend_all(attend_args *args);
compress_args nsa_compress_args(const nsa_build *c);
select_rule nsa_select_rule(const quern_nsa_params *p);
select_args nsa_select_args(const nsa_build *c);
gate_args nsa_gate_args(const nsa_build *c);

/* passes.c. In how many passes `bytes` that they share are at most `most`, as far as passes can. */
int64_t nsa_passes_of(const nsa_build *c, int64_t bytes, int64_t most);
/* The steps that follow are those of a pass, up to op_loop_end(). */
void nsa_passes_begin(nsa_build *c);
/* Cut a step's arguments to a pass's heads. Tensors that the passes share have no more heads. */
void nsa_cut_attend(const nsa_build *c, attend_args *args);
void nsa_cut_select(const nsa_build *c, select_args *args);
void nsa_cut_gate(const nsa_build *c, gate_args *args);

/* The steps of each operation. */
void nsa_build_forward(nsa_build *c);  /* forward.c */
void nsa_build_backward(nsa_build *c); /* backward.c */
void nsa_build_compress(nsa_build *c); /* parts.c */
void nsa_build_compress_backward(nsa_build *c);
void nsa_build_select(nsa_build *c);
void nsa_build_attend(nsa_build *c);
void nsa_build_attend_backward(nsa_build *c);
void nsa_build_gate(nsa_build *c);
void nsa_build_gate_backward(nsa_build *c);

/* index.c. Keys of the block indexer as stages take them: [B,S,D], which all lists share, with one head. */
quern_tensor nsa_key_heads(quern_tensor keys);

extern const op_family nsa_list_family;       /* list.c */
extern const op_family nsa_index_family;      /* index.c */
extern const op_family nsa_index_loss_family; /* index_loss.c */

#endif
