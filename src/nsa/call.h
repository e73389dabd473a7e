/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * call.h - one NSA call inside the family: checked (op.h), with its views normalised and its stages'
 * arguments filled. An operation is three functions: `carve` lays out the workspace and fills the stages'
 * arguments, `run` calls the stages, `stages` names them. Nothing changes after carve, so several threads may
 * run a plan.
 */
#ifndef QUERN_NSA_CALL_H
#define QUERN_NSA_CALL_H

#include "nsa/schema.h"

#include <quern/nsa.h>

/* Every tensor of a call as stages take it; absent where the caller gave none or the operation has no use. */
typedef struct nsa_views {
    /* k_b[NSA_CMP] is k_cmp; the others resolved */
    quern_tensor q, k, v, k_b[NSA_BRANCHES], v_b[NSA_BRANCHES];
    quern_tensor w_k, w_v, pe_k, pe_v, w_gate, gates;
    quern_tensor block_idx, block_count, group_idx;
    quern_tensor o, o_b[NSA_BRANCHES], lse_b[NSA_BRANCHES];
    quern_tensor d_o, d_o_b[NSA_BRANCHES], d_q, d_k, d_v, d_k_b[NSA_BRANCHES], d_v_b[NSA_BRANCHES];
    quern_tensor d_w_k, d_w_v, d_pe_k, d_pe_v, d_w_gate, d_gates;
} nsa_views;

/* The stages of a forward; NSA_STEP_ATTEND + i attends to branch i. */
enum {
    NSA_STEP_ATTEND,
    NSA_STEP_COMPRESS = NSA_STEP_ATTEND + NSA_BRANCHES,
    NSA_STEP_SELECT,
    NSA_STEP_GATE,
    NSA_STEPS
};

typedef struct nsa_call {
    op_call head;
    quern_nsa_params params; /* defaults resolved */
    /* From here to `compress` nsa_plan() starts at 0. */
    int64_t batch, n, heads, kv_heads, dim_k, dim_v, n_cmp, list_heads, list_rows;
    bool separate[NSA_BRANCHES]; /* the branch has its own k, v */
    bool use_compress, use_select, use_attend[NSA_BRANCHES], recompute[NSA_BRANCHES], use_gate, use_fused;
    int32_t converts, pass_converts; /* the first so many are a pass's */
    int64_t passes;                  /* whole forward and backward: of heads/passes heads each */
    const void *scratch; /* what the stages share, one after the other */
    bool beside;         /* forward: stages may run beside each other, each with its own scratch */
    const void *step_scratch[NSA_STEPS];
    stage_seqs tokens, compressed; /* queries against tokens, against compressed entries */
    nsa_views views;
    validate_lists_args lists;
    /* Filled by carve, where they are used. */
    compress_args compress;
    select_args select;
    attend_args attend[NSA_BRANCHES];
    gate_args gate;
    attend_gate_args fused;
    rowdot_args rowdot[NSA_BRANCHES];
    convert_args convert[5];
} nsa_call;

static inline bool nsa_branch_on(const nsa_call *call, int branch)
{
    return (call->params.branches & (1u << branch)) != 0;
}

static inline bool nsa_is_backward(int32_t op)
{
    return op == NSA_BACKWARD || op == NSA_COMPRESS_BACKWARD || op == NSA_ATTEND_BACKWARD ||
           op == NSA_GATE_BACKWARD;
}

/* args.c. A fresh tensor in the workspace, shaped like an activation [B, N, heads, dim] and so on. */
quern_tensor nsa_take(const nsa_call *call, arena *a, quern_dtype dtype, int32_t ndim, const int64_t *shape);
/* `given`, or one in the workspace where it is absent. */
quern_tensor nsa_given_or_take(const nsa_call *call, const quern_tensor *given, arena *a, quern_dtype dtype,
                               int32_t ndim, const int64_t *shape);
/* The f32 tensor in which several stages sum what becomes `out` (a token's row each): `out` itself where
 * it is f32 or absent, else one in the workspace, listed in call->convert. */
quern_tensor nsa_sum_for(nsa_call *call, const quern_tensor *out, arena *a);
/* Makes room for a stage's `bytes` in a place of *most bytes that stages use in turn. */
static inline void nsa_make_room(size_t *most, size_t bytes)
{
    if (bytes > *most) *most = bytes;
}
/* passes.c. In how many passes `bytes` that they share are at most `most`, as far as passes can. */
int64_t nsa_passes_of(const nsa_call *call, int64_t bytes, int64_t most);
/* A pass's heads of a tensor. A tensor with all `heads` along `dim` is narrowed; one that the passes share
 * has fewer. */
quern_tensor nsa_of_pass(const nsa_call *call, quern_tensor t, int32_t dim, int64_t heads, int64_t pass);
attend_args nsa_attend_of_pass(const nsa_call *call, int branch, int64_t pass);
gate_args nsa_gate_of_pass(const nsa_call *call, int64_t pass);
/* Arguments of the stages, as the forward needs them: the attention stage of a branch; compress; select;
 * gate. */
attend_args nsa_branch_args(const nsa_call *call, int branch);
/* Whether a list that is computed names every block: there is room for all, and each is a candidate. The
 * selected branch then attends to every token that its queries may see; nsa_attend_all() says so. */
bool nsa_selects_all(const nsa_call *call);
void nsa_attend_all(attend_args *args);
compress_args nsa_compress_args(const nsa_call *call);
select_args nsa_select_args(const nsa_call *call);
gate_args nsa_gate_args(const nsa_call *call);

typedef struct nsa_operation {
    void (*carve)(nsa_call *call, arena *a);
    quern_status (*run)(const nsa_call *call, const op_frame *frame);
} nsa_operation;
extern const nsa_operation nsa_forward_operation, nsa_backward_operation, nsa_compress_operation,
    nsa_compress_backward_operation, nsa_select_operation, nsa_attend_operation,
    nsa_attend_backward_operation, nsa_gate_operation, nsa_gate_backward_operation;

extern const op_family nsa_list_family; /* list.c */

#endif
