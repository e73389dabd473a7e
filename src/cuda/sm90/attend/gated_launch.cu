/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* gated_launch.cu - which calls of NSA's branches and gate Hopper's one kernel takes, and which instance. */
#include "any/attend/attend_any.cuh"
#include "common/tail.cuh"
#include "sm90/attend/gated.cuh"
#include "stages.cuh"

/* The selection, where the stage has to make it: before any branch, so without the compressed one's lse. */
static select_args select_of(const attend_gate_args *args)
{
    select_args select = args->select;
    select.lse = {};
    return select;
}

/* Measured (docs/performance.md): short sequences gain the launches and the gate's pass, long ones nothing.
 * Of several heads a piece the gates cost more than they save. Where a list has room for every block, other
 * kernels need not select, and two branches are one. A softmax over entries takes the compressed branch's
 * lse, which only separate stages have at that time. */
static bool pays(const stage_exec *exec, const attend_gate_args *args)
{
    enum { LONGEST = 8192 };
    if (exec->variant != NULL && strcmp(exec->variant, "attend_gate_sm90") == 0) return true;
    const attend_args *const listed = &args->branch[1];
    const int64_t n = listed->seqs.n_q;
    if (!args->select_given && args->select.scorer != SELECT_MEAN_LOGIT) return false;
    return listed->scope == LIST_BY_HEAD && n > listed->block_size * listed->list.shape[3] && n <= LONGEST;
}

bool attend_gate_sm90_supports(const stage_exec *exec, const attend_gate_args *args, char *)
{
    const uint32_t all = (1u << SM90_BRANCHES) - 1;
    char limits[STAGE_WHY_BYTES];
    if (args->branches != all || !present(args->gate.o) || !rows_aligned16(args->gate.o)) return false;
    for (int i = 0; i < SM90_BRANCHES; i++) {
        const attend_args &b = args->branch[i];
        if (present(b.o) || present(b.list) != (i == 1) || b.q.shape[3] > 128 || b.v.shape[3] > 128 ||
            b.k.shape[1] == 0 || !attend_forward_sm90_supports(exec, &b, limits))
            return false;
    }
    const select_args select = select_of(args);
    return args->branch[1].list.shape[3] <= SM90_GATED_LIST && pays(exec, args) &&
           (args->select_given || choose(select_variants, exec, &select, limits) != NULL);
}

size_t attend_gate_sm90_bytes(const stage_exec *exec, const attend_gate_args *args)
{
    const select_args select = select_of(args);
    const size_t bytes = args->select_given ? 0 : workspace_of(select_variants, exec, &select);
    return bytes > (size_t)SM90_COUNT_BYTES ? bytes : (size_t)SM90_COUNT_BYTES;
}

/* The branches without lists have the rows of the one with lists. */
static sm90_gated gated_of(const attend_gate_args *args)
{
    sm90_gated a = {};
    const attend_kernel listed = attend_launch_of(&args->branch[1]).kernel;
    for (int i = 0; i < SM90_BRANCHES; i++) {
        a.branch[i] = attend_launch_of(&args->branch[i]).kernel;
        a.branch[i].hs = listed.hs;
        a.branch[i].units = listed.units;
        a.branch[i].by_hs = listed.by_hs;
    }
    a.o = view4_of(args->gate.o);
    a.gates = view4_of(args->gate.gates);
    a.gate = args->gate.kind;
    a.w = args->gate.w_gate.data;
    a.w_stride[0] = args->gate.w_gate.strides[0];
    a.w_stride[1] = args->gate.w_gate.strides[1];
    a.w_f32 = args->gate.w_gate.dtype == QUERN_F32;
    a.w_vec = rows_aligned16(args->gate.w_gate);
    return a;
}

quern_status attend_gate_sm90_run(const stage_exec *exec, const attend_gate_args *args, void *workspace)
{
    static sm90_attend_gated *const table[2][2] = {{sm90_gated_bf16_64, sm90_gated_bf16_128},
                                                   {sm90_gated_f16_64, sm90_gated_f16_128}};
    const select_args select = select_of(args);
    const attend_args &listed = args->branch[1];
    const sm90_gated a = gated_of(args);
    const bool f16 = listed.q.dtype == QUERN_F16, wide = listed.q.shape[3] > 64 || listed.v.shape[3] > 64;
    quern_status status = QUERN_OK;
    if (!args->select_given) status = run_chosen(select_variants, exec, &select, workspace);
    if (status == QUERN_OK)
        status = table[f16][wide](args, a, {exec->multiprocessors}, workspace, (cudaStream_t)exec->stream);
    for (int i = 0; i < SM90_BRANCHES && status == QUERN_OK; i++) status = attend_end(exec, &args->branch[i]);
    if (status == QUERN_OK) status = fill_tail(exec, &listed.seqs, true, &args->gate.o, 0.0f);
    if (status == QUERN_OK && args->gate.kind != GATE_GIVEN)
        status = fill_tail(exec, &listed.seqs, true, &args->gate.gates, 0.0f);
    return status;
}
