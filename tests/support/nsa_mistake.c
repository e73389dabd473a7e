/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "nsa_mistake.h"

#include "cmocka_c11.h"

#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static nsa_config config_of(nsa_base b)
{
    nsa_config c = nsa_config_small();
    c.params.gate = QUERN_NSA_GATE_WEIGHTS;
    c.project_k = c.project_v = b == PLAIN;
    if (b == VARLEN) {
        c.varlen = true;
        c.batch = 3;
        c.lens[0] = 30;
        c.lens[2] = 45;
        c.spare = 2;
    }
    if (b == LINEAR) {
        c.params.compress = QUERN_NSA_COMPRESS_LINEAR;
        c.params.stride = 4;
        c.params.select_block = 16;
        c.pe_k = c.pe_v = true;
    }
    if (b == GIVEN) {
        c.params.compress = QUERN_NSA_COMPRESS_GIVEN;
        c.params.gate = QUERN_NSA_GATE_GIVEN;
        c.params.selection = c.params.groups = QUERN_NSA_LIST_GIVEN;
    }
    if (b == GROUPS || b == GIVEN) {
        c.params.metric = QUERN_NSA_METRIC_MEAN_LOGIT;
        c.params.max_compressed_groups = c.params.tile = 2;
    }
    if (b == GROUPS)
        c.params.branches = QUERN_NSA_BRANCH_CMP | QUERN_NSA_BRANCH_WIN; /* groups are the only lists */
    if (b == SEPARATE) c.separate_slc = c.separate_win = true;
    if (b == UNGATED) {
        c.params.gate = QUERN_NSA_GATE_NONE;
        c.params.causal = false;
    }
    return c;
}

const nsa_call *const nsa_calls[NSA_OPS] = {
    &nsa_call_forward, &nsa_call_backward, &nsa_call_compress,        &nsa_call_compress_backward,
    &nsa_call_select,  &nsa_call_attend,   &nsa_call_attend_backward, &nsa_call_gates,
    &nsa_call_combine, &nsa_call_gate,     &nsa_call_gate_backward};

static nsa_set range(nsa_slot first, nsa_slot last)
{
    return (NSA_BIT(last) << 1) - NSA_BIT(first);
}

void nsa_sets_of(const nsa_case *c, int op, nsa_set *in, nsa_set *out)
{
    const nsa_set cu = NSA_BIT(NSA_CU_SEQLENS), cu_seqlens = range(NSA_CU_SEQLENS, NSA_CU_SEQLENS_CMP),
                  weights = range(NSA_W_K, NSA_PE_V);
    const nsa_set entries = range(NSA_K_CMP, NSA_V_CMP), q = NSA_BIT(NSA_Q), given = NSA_BIT(NSA_GATES);
    const nsa_set o_b = range(NSA_O_CMP, NSA_O_WIN) & nsa_attend_outputs(c); /* of the branches that are on */
    const bool weighs = c->config.params.gate == QUERN_NSA_GATE_WEIGHTS;
    const nsa_set w = weighs ? NSA_BIT(NSA_W_GATE) : 0,
                  d_w = weighs ? NSA_BIT(NSA_D_Q) | NSA_BIT(NSA_D_W_GATE) : NSA_BIT(NSA_D_GATES);
    switch (1 << op) {
    case FWD:
        *in = nsa_forward_inputs(c);
        *out = nsa_forward_outputs(c);
        break;
    case BWD:
        *in = nsa_backward_inputs(c) & ~(c->config.params.gate == QUERN_NSA_GATE_NONE ? given : 0);
        *out = nsa_backward_outputs(c);
        break;
    case CMP:
        *in = range(NSA_K, NSA_V) | weights | cu;
        *out = entries | NSA_BIT(NSA_CU_SEQLENS_CMP);
        break;
    case CMP_BWD:
        *in = range(NSA_K, NSA_V) | weights | cu_seqlens | range(NSA_D_K_CMP, NSA_D_V_CMP);
        *out = range(NSA_D_K, NSA_D_V) | range(NSA_D_W_K, NSA_D_PE_V);
        break;
    case SEL:
        *in = q | NSA_BIT(NSA_K_CMP) | cu_seqlens;
        *out = range(NSA_BLOCK_IDX, NSA_GROUP_IDX);
        break;
    case ATT:
        *in = nsa_attend_inputs(c);
        *out = nsa_attend_outputs(c);
        break;
    case ATT_BWD:
        *in = nsa_attend_inputs(c) | nsa_attend_outputs(c) |
              (nsa_attend_outputs(c) & o_b) << (NSA_D_O_CMP - NSA_O_CMP);
        *out = nsa_attend_gradients(c);
        break;
    case GATES:
        *in = q | NSA_BIT(NSA_W_GATE) | cu;
        *out = given;
        break;
    case COMBINE:
        *in = given | o_b | cu;
        *out = NSA_BIT(NSA_O);
        break;
    case GATE:
        *in = (weighs ? q | w : 0) | o_b | cu | (c->config.params.gate == QUERN_NSA_GATE_GIVEN ? given : 0);
        *out = NSA_BIT(NSA_O) | given;
        break;
    default:
        *in = (weighs ? q | w : 0) | (c->config.params.gate != QUERN_NSA_GATE_NONE ? given : 0) | o_b |
              NSA_BIT(NSA_D_O) | cu;
        *out = o_b << (NSA_D_O_CMP - NSA_O_CMP) | d_w;
        break;
    }
    *in = nsa_present(c, *in);
    *out = nsa_present(c, *out) & ~*in;
}

bool nsa_base_serves(nsa_base b, int op)
{
    if ((1 << op) & COMPRESS) return b != GIVEN;
    if (1 << op == GATES) return b != GIVEN && b != UNGATED;
    return true;
}

/* A call about to be spoilt. */
typedef struct bad_call {
    nsa_case *c;
    quern_nsa_params params;
    int64_t params_tail; /* what a newer caller's struct goes on with */
    quern_nsa_tensors tensors;
    int64_t tensors_tail;
    size_t bytes;
    bool no_workspace;
    int32_t *entry, was; /* a spoilt entry of cu_seqlens, and its value before */
} bad_call;

static const quern_tensor **member(quern_nsa_tensors *t, nsa_slot slot)
{
    return (const quern_tensor **)(void *)((char *)t + offsetof(quern_nsa_tensors, q) +
                                           (size_t)slot * sizeof(quern_tensor *));
}

static bool needs_run(nsa_fault f)
{
    return f == NULL_DATA || f == ODD_DATA || f == ALIAS || f == CU_SEQLEN || f == SHORT_WORKSPACE ||
           f == NO_WORKSPACE;
}

static void spoil(bad_call *b, const nsa_mistake *m)
{
    test_tensor *t = &b->c->tensor[m->slot];
    quern_tensor *v = &t->view;
    const int32_t narrow = (int32_t)m->value;
    static const float scales[] = {NAN, INFINITY, -0.5f, 1e30f};
    switch (m->fault) {
    case PARAM: memcpy((char *)&b->params + m->where, &m->value, 8); break;
    case PARAM4: memcpy((char *)&b->params + m->where, &narrow, 4); break;
    case SCALE: b->params.scale = scales[m->value]; break;
    case PARAMS_SIZE:
        b->params.size = (size_t)m->value;
        b->params_tail = 1;
        break;
    case TENSORS_SIZE:
        b->tensors.size = (size_t)m->value;
        b->tensors_tail = (int64_t)1 << 56;
        break;
    case ABSENT: *member(&b->tensors, m->slot) = NULL; break;
    case OTHER_TENSOR: *member(&b->tensors, m->slot) = &b->c->tensor[m->where].view; break;
    case SHAPE: v->shape[m->where] = m->value; break;
    case MORE: v->shape[m->where] += m->value; break;
    case STRIDE: v->strides[m->where] = m->value; break;
    case NDIM: v->ndim = narrow; break;
    case DTYPE: v->dtype = (quern_dtype)narrow; break;
    case DEVICE: v->device = (quern_device)narrow; break;
    case NULL_DATA: v->data = NULL; break;
    case ODD_DATA: v->data = (char *)v->data + 1; break;
    case ALIAS: v->data = b->c->tensor[m->where].view.data; break;
    case CU_SEQLEN:
        b->entry = (int32_t *)v->data + m->where;
        b->was = *b->entry;
        *b->entry = narrow;
        memcpy(t->snapshot, t->buffer, t->bytes);
        break;
    case SHORT_WORKSPACE: b->bytes--; break;
    case NO_WORKSPACE: b->no_workspace = true; break;
    case ALL_CUDA:
        for (int i = 0; i < NSA_SLOTS; i++) b->c->tensor[i].view.device = QUERN_CUDA;
        break;
    default: break;
    }
}

int nsa_failures;

static void expect(const nsa_mistake *m, const char *call, quern_status status)
{
    bool ok = status == m->status;
    for (int i = 0; i < 3 && m->words[i] != NULL; i++)
        ok = ok && strstr(quern_last_error(NULL), m->words[i]) != NULL;
    if (ok) return;
    nsa_failures++;
    print_error("%s (fault %d, base %d), %s: status %s, \"%s\"; expected %s and", m->name, m->fault, m->base,
                call, quern_status_name(status), status == QUERN_OK ? "" : quern_last_error(NULL),
                quern_status_name(m->status));
    for (int i = 0; i < 3 && m->words[i] != NULL; i++) print_error(" \"%s\"", m->words[i]);
    print_error("\n");
}

nsa_case *nsa_bases[NSA_BASES];
static test_workspace workspaces[NSA_BASES][NSA_OPS]; /* of the bases' calls */

int nsa_make_bases(void **state)
{
    (void)state;
    for (nsa_base b = 0; b < NSA_BASES; b++) {
        const nsa_config config = config_of(b);
        test_random random = {1};
        nsa_bases[b] = nsa_case_new(&config, &random);
    }
    return 0;
}

int nsa_free_bases(void **state)
{
    (void)state;
    for (nsa_base b = 0; b < NSA_BASES; b++) {
        nsa_case_free(nsa_bases[b]);
        for (int op = 0; op < NSA_OPS; op++)
            if (workspaces[b][op].buffer != NULL) test_workspace_close(&workspaces[b][op]);
    }
    return 0;
}

void nsa_try_mistake(quern_context *ctx, const nsa_mistake *m, int op)
{
    const nsa_call *call = nsa_calls[op];
    bad_call b = {.c = nsa_bases[m->base], .params = nsa_bases[m->base]->config.params};
    quern_tensor views[NSA_SLOTS];
    size_t bytes = 4242;
    nsa_set in, out;
    char name[128];
    nsa_sets_of(b.c, op, &in, &out);
    b.tensors = nsa_bind(b.c, in | out);
    if (call->workspace(ctx, &b.params, &b.tensors, &b.bytes) != QUERN_OK)
        fail_msg("%s, %s: refused before it was spoilt: %s", m->name, call->name, quern_last_error(NULL));
    test_workspace *workspace = &workspaces[m->base][op];
    if (workspace->buffer == NULL) *workspace = test_workspace_make(b.bytes);
    assert_int_equal(workspace->bytes, b.bytes);
    for (int i = 0; i < NSA_SLOTS; i++) {
        views[i] = b.c->tensor[i].view;
        if (b.c->tensor[i].buffer != NULL)
            memcpy(b.c->tensor[i].snapshot, b.c->tensor[i].buffer, b.c->tensor[i].bytes);
    }
    const bool about_workspace = m->fault == SHORT_WORKSPACE || m->fault == NO_WORKSPACE;
    spoil(&b, m);
    const quern_nsa_params *params = m->fault == NO_PARAMS ? NULL : &b.params;
    const quern_nsa_tensors *tensors = m->fault == NO_TENSORS ? NULL : &b.tensors;
    if (!about_workspace || workspace->bytes > 0)
        expect(m, call->name,
               call->run(ctx, NULL, params, tensors, b.no_workspace ? NULL : workspace->data, b.bytes));
    const quern_status status = call->workspace(ctx, params, tensors, &bytes);
    if (!needs_run(m->fault)) {
        expect(m, "workspace", status);
        assert_int_equal(bytes, 4242);
    } else if (status != QUERN_OK) {
        fail_msg("%s, %s: the workspace query looks at more than shapes: %s", m->name, call->name,
                 quern_last_error(NULL));
    }
    if (!test_workspace_is_new(workspace)) fail_msg("%s, %s: the workspace was written", m->name, call->name);
    for (int i = 0; i < NSA_SLOTS; i++) {
        snprintf(name, sizeof name, "%s, %s: %s", m->name, call->name, nsa_slot_name(i));
        if (b.c->tensor[i].buffer != NULL) test_tensor_check_unchanged(&b.c->tensor[i], name);
        b.c->tensor[i].view = views[i];
    }
    if (b.entry != NULL) *b.entry = b.was;
}
