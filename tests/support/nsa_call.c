/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* nsa_call.c - calls the library on an nsa_case, and checks the whole against the reference. */
#include "cmocka_c11.h"
#include "compare.h"
#include "nsa_reference.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CALL(name)                                                                                           \
    {                                                                                                        \
#name, quern_nsa_##name##_workspace, quern_nsa_##name                                                \
    }
const nsa_call nsa_call_forward = CALL(forward);
const nsa_call nsa_call_backward = CALL(backward);
const nsa_call nsa_call_compress = CALL(compress);
const nsa_call nsa_call_compress_backward = CALL(compress_backward);
const nsa_call nsa_call_select = CALL(select);
const nsa_call nsa_call_attend = CALL(attend);
const nsa_call nsa_call_attend_backward = CALL(attend_backward);
const nsa_call nsa_call_gates = CALL(gates);
const nsa_call nsa_call_combine = CALL(combine);
const nsa_call nsa_call_gate = CALL(gate);
const nsa_call nsa_call_gate_backward = CALL(gate_backward);

quern_status nsa_try(nsa_case *c, quern_context *ctx, nsa_call call, nsa_set set)
{
    const quern_nsa_tensors tensors = nsa_bind(c, nsa_present(c, set));
    size_t bytes = 0;
    quern_status status = call.workspace(ctx, &c->config.params, &tensors, &bytes);
    if (status != QUERN_OK) return status;
    test_workspace workspace = test_workspace_make(bytes);
    status = call.run(ctx, NULL, &c->config.params, &tensors, workspace.data, bytes);
    test_workspace_close(&workspace);
    return status;
}

void nsa_run(nsa_case *c, quern_context *ctx, nsa_call call, nsa_set inputs, nsa_set outputs)
{
    char text[600], name[64];
    inputs = nsa_present(c, inputs);
    outputs = nsa_present(c, outputs);
    for (int i = 0; i < NSA_SLOTS; i++) {
        if (outputs & NSA_BIT(i)) test_tensor_reset(&c->tensor[i]);
        else if (inputs & NSA_BIT(i)) memcpy(c->tensor[i].snapshot, c->tensor[i].buffer, c->tensor[i].bytes);
    }
    if (nsa_try(c, ctx, call, inputs | outputs) != QUERN_OK)
        fail_msg("%s: %s [%s]", call.name, quern_last_error(ctx), nsa_config_describe(&c->config, text));
    for (int i = 0; i < NSA_SLOTS; i++) {
        snprintf(name, sizeof name, "%s: %s", call.name, nsa_slot_name(i));
        if (outputs & NSA_BIT(i)) test_tensor_check_guards(&c->tensor[i], name);
        else if (inputs & NSA_BIT(i)) test_tensor_check_unchanged(&c->tensor[i], name);
    }
}

void nsa_copy(const nsa_case *c, nsa_set set, test_tensor copies[NSA_SLOTS])
{
    for (int i = 0; i < NSA_SLOTS; i++)
        copies[i] = (set & NSA_BIT(i)) != 0 ? test_tensor_copy(&c->tensor[i]) : (test_tensor){.bytes = 0};
}

void nsa_free_copies(test_tensor copies[NSA_SLOTS])
{
    for (int i = 0; i < NSA_SLOTS; i++) test_tensor_free(&copies[i]);
}

void nsa_check_same_bits(const nsa_case *c, nsa_set set, const test_tensor copies[NSA_SLOTS],
                         const char *what)
{
    char text[600];
    for (int i = 0; i < NSA_SLOTS; i++)
        if ((set & NSA_BIT(i)) != 0 && !test_tensor_same_bits(&c->tensor[i], &copies[i]))
            fail_msg("%s: %s differs [%s]", what, nsa_slot_name(i), nsa_config_describe(&c->config, text));
}

/* |d_pe_k| <= 1e-5 sum |terms|: the d_pe_k of the whole vanishes, so a bound relative to it would compare
 * noise. It vanishes because a row's sum of p (dp - delta) does, with delta = d_o . o_cmp. In 16 bits o_cmp
 * is rounded, which puts delta off by as much as any product with a rounded factor, so the gradients' bound
 * replaces 1e-5. */
static void check_vanishing(const nsa_reference *r, const double *out)
{
    const int64_t count = test_tensor_count(&r->c->tensor[NSA_D_PE_K]);
    const double bound = r->c->config.dtype == QUERN_F32 ? 1e-5 : test_gradient_bound(r->c->config.dtype);
    for (int64_t i = 0; i < count; i++)
        if (!(fabs(out[i]) <= bound * r->pe_k_terms[i]))
            fail_msg("d_pe_k: entry %lld is %g, the terms sum to %g", (long long)i, out[i], r->pe_k_terms[i]);
}

void nsa_check_whole(nsa_case *c, quern_context *ctx)
{
    const nsa_set forward = nsa_forward_outputs(c), backward = nsa_backward_outputs(c);
    int32_t cu_expected[NSA_MAX_BATCH + 1] = {0};
    nsa_run(c, ctx, nsa_call_forward, nsa_forward_inputs(c), forward);
    const bool cu_seqlens_cmp = forward & NSA_BIT(NSA_CU_SEQLENS_CMP);
    for (int64_t b = 0; cu_seqlens_cmp && b < c->config.batch; b++) {
        const nsa_sequence s = nsa_sequence_of(c, b);
        cu_expected[b + 1] = cu_expected[b] + (int32_t)oracle_nsa_entries(&s.a);
    }
    if (cu_seqlens_cmp) {
        int32_t *cu = test_tensor_get_i32(&c->tensor[NSA_CU_SEQLENS_CMP]);
        assert_memory_equal(cu, cu_expected, sizeof *cu * (size_t)(c->config.batch + 1));
        free(cu);
    }
    nsa_reference *r = nsa_reference_new(c, true);
    if (forward & NSA_BIT(NSA_BLOCK_IDX)) nsa_check_lists(r, forward & NSA_BIT(NSA_GROUP_IDX));
    nsa_reference_take_lists(r);
    nsa_reference_forward(r);
    nsa_check(r, forward);
    nsa_run(c, ctx, nsa_call_backward, nsa_backward_inputs(c), backward);
    nsa_reference_backward(r);
    nsa_check(r, backward & ~NSA_BIT(NSA_D_PE_K));
    if (backward & NSA_BIT(NSA_D_PE_K)) {
        double *out = test_tensor_get(&c->tensor[NSA_D_PE_K]);
        check_vanishing(r, out);
        free(out);
    }
    nsa_reference_free(r);
}
