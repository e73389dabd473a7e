/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * nsa_input_test.c - bad input to every NSA operation: each row of nsa.h's table of illegal combinations, and
 * each way to spoil each tensor of each operation, gets its status and a sentence that names the argument,
 * what was given and what is accepted, from the call and (where shapes show it) from its workspace query; no
 * byte of any tensor or of the workspace changes.
 */
#include "cmocka_c11.h"
#include "nsa_case.h"

#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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
    OPS = 11
};
enum {
    ALL = 2047,
    WHOLE = FWD | BWD,
    COMPRESS = CMP | CMP_BWD,
    ATTEND = ATT | ATT_BWD,
    GROUPED = WHOLE | SEL | ATTEND
};
enum { TAKE_WORKSPACE = ALL & ~(GATES | COMBINE | GATE) }; /* bytes of it */

typedef enum base { PLAIN, VARLEN, LINEAR, GIVEN, GROUPS, SEPARATE, UNGATED, BASES } base;

static nsa_config config_of(base b)
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

static const nsa_call *const calls[OPS] = {
    &nsa_call_forward, &nsa_call_backward, &nsa_call_compress,        &nsa_call_compress_backward,
    &nsa_call_select,  &nsa_call_attend,   &nsa_call_attend_backward, &nsa_call_gates,
    &nsa_call_combine, &nsa_call_gate,     &nsa_call_gate_backward};

static nsa_set range(nsa_slot first, nsa_slot last)
{
    return (NSA_BIT(last) << 1) - NSA_BIT(first);
}

/* What an operation reads and writes of a case. */
static void sets_of(const nsa_case *c, int op, nsa_set *in, nsa_set *out)
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

/* Whether a base has what an operation cannot do without. */
static bool serves(base b, int op)
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

typedef enum fault {
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
} fault;

typedef struct mistake {
    const char *name;
    base base;
    int ops; /* which refuse it */
    fault fault;
    nsa_slot slot;
    int64_t where, value;
    quern_status status;
    const char *words[3]; /* what the sentence must hold */
} mistake;

static bool needs_run(fault f)
{
    return f == NULL_DATA || f == ODD_DATA || f == ALIAS || f == CU_SEQLEN || f == SHORT_WORKSPACE ||
           f == NO_WORKSPACE;
}

static void spoil(bad_call *b, const mistake *m)
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

static int failures; /* the test prints all of them before it fails */

static void expect(const mistake *m, const char *call, quern_status status)
{
    bool ok = status == m->status;
    for (int i = 0; i < 3 && m->words[i] != NULL; i++)
        ok = ok && strstr(quern_last_error(NULL), m->words[i]) != NULL;
    if (ok) return;
    failures++;
    print_error("%s (fault %d, base %d), %s: status %s, \"%s\"; expected %s and", m->name, m->fault, m->base,
                call, quern_status_name(status), status == QUERN_OK ? "" : quern_last_error(NULL),
                quern_status_name(m->status));
    for (int i = 0; i < 3 && m->words[i] != NULL; i++) print_error(" \"%s\"", m->words[i]);
    print_error("\n");
}

static nsa_case *cases[BASES]; /* every mistake leaves its case as it was */
static test_workspace workspaces[BASES][OPS]; /* and the workspace of its call */

static int make_cases(void **state)
{
    (void)state;
    for (base b = 0; b < BASES; b++) {
        const nsa_config config = config_of(b);
        test_random random = {1};
        cases[b] = nsa_case_new(&config, &random);
    }
    return 0;
}

static int free_cases(void **state)
{
    (void)state;
    for (base b = 0; b < BASES; b++) {
        nsa_case_free(cases[b]);
        for (int op = 0; op < OPS; op++)
            if (workspaces[b][op].buffer != NULL) test_workspace_close(&workspaces[b][op]);
    }
    return 0;
}

static void try(quern_context *ctx, const mistake *m, int op)
{
    const nsa_call *call = calls[op];
    bad_call b = {.c = cases[m->base], .params = cases[m->base]->config.params};
    quern_tensor views[NSA_SLOTS];
    size_t bytes = 4242;
    nsa_set in, out;
    char name[128];
    sets_of(b.c, op, &in, &out);
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

#define P(field) offsetof(quern_nsa_params, field)
#define BAD QUERN_ERR_INVALID_ARGUMENT
#define NUMBER(base, ops, field, value, ...)                                                                 \
    {                                                                                                        \
#field " " #value, base, ops, PARAM, NSA_Q, P(field), value, BAD,                                    \
        {                                                                                                    \
#field, __VA_ARGS__                                                                              \
        }                                                                                                    \
    }
#define CHOICE(base, ops, field, value, ...)                                                                 \
    {                                                                                                        \
#field " " #value, base, ops, PARAM4, NSA_Q, P(field), value, BAD,                                   \
        {                                                                                                    \
#field, __VA_ARGS__                                                                              \
        }                                                                                                    \
    }
#define FORCED(field, value, ...)                                                                            \
    {                                                                                                        \
#field " " #value, PLAIN, FWD | SEL, PARAM, NSA_Q, P(field), value, BAD,                             \
        {                                                                                                    \
            __VA_ARGS__                                                                                      \
        }                                                                                                    \
    }
#define MISSING(base, ops, slot, text)                                                                       \
    {                                                                                                        \
        "no " text, base, ops, ABSENT, slot, 0, 0, BAD,                                                      \
        {                                                                                                    \
            text " is NULL", "needed"                                                                        \
        }                                                                                                    \
    }
#define UNUSED(base, ops, slot, text, ...)                                                                   \
    {                                                                                                        \
        text " out of place", base, ops, OTHER_TENSOR, slot, NSA_Q, 0, BAD,                                  \
        {                                                                                                    \
            text, __VA_ARGS__                                                                                \
        }                                                                                                    \
    }

#define ENTRIES(at, value, ...)                                                                              \
    {                                                                                                        \
        "entries " #at " " #value, VARLEN, BWD | CMP_BWD | SEL | ATTEND, CU_SEQLEN, NSA_CU_SEQLENS_CMP, at,  \
            value, BAD,                                                                                      \
        {                                                                                                    \
            __VA_ARGS__                                                                                      \
        }                                                                                                    \
    }

static const mistake mistakes[] = {
    /* The structs. */
    {"no params", PLAIN, ALL, NO_PARAMS, NSA_Q, 0, 0, BAD, {"params is NULL", "QUERN_NSA_PARAMS_INIT"}},
    {"no tensors", PLAIN, ALL, NO_TENSORS, NSA_Q, 0, 0, BAD, {"tensors is NULL", "QUERN_NSA_TENSORS_INIT"}},
    {"size of params", PLAIN, ALL, PARAMS_SIZE, NSA_Q, 0, 4, BAD, {"params.size is 4", "accepted"}},
    {"size 0 of params", PLAIN, ALL, PARAMS_SIZE, NSA_Q, 0, 0, BAD, {"params.size is 0", "accepted"}},
    {"uncounted params",
     PLAIN,
     ALL,
     PARAMS_SIZE,
     NSA_Q,
     0,
     INT64_MAX - 7,
     BAD,
     {"params.size is 92233720368547758", "accepted"}},
    {"newer params",
     PLAIN,
     ALL,
     PARAMS_SIZE,
     NSA_Q,
     0,
     sizeof(quern_nsa_params) + 8,
     BAD,
     {"params.size is 128 and its byte 120 is set", "accepted"}},
    {"size of tensors", PLAIN, ALL, TENSORS_SIZE, NSA_Q, 0, 12, BAD, {"tensors.size is 12", "accepted"}},
    {"size 0 of tensors", PLAIN, ALL, TENSORS_SIZE, NSA_Q, 0, 0, BAD, {"tensors.size is 0", "accepted"}},
    {"newer tensors",
     PLAIN,
     ALL,
     TENSORS_SIZE,
     NSA_Q,
     0,
     sizeof(quern_nsa_tensors) + 8,
     BAD,
     {"tensors.size is 384 and its byte 383 is set", "accepted"}},
    /* One parameter. */
    NUMBER(PLAIN, ALL, block_size, 0, "is 0", "1 to 2147483647"),
    NUMBER(PLAIN, ALL, block_size, -8, "is -8", "1 to"),
    NUMBER(PLAIN, ALL, block_size, INT64_MAX, "is 9223372036854775807", "to 2147483647"),
    NUMBER(PLAIN, ALL, stride, -1, "is -1", "1 to 8"),
    NUMBER(PLAIN, ALL, stride, 16, "is 16", "1 to 8"),
    NUMBER(PLAIN, ALL, select_block, -1, "is -1", "1 to"),
    NUMBER(PLAIN, ALL, num_selected, 0, "is 0", "1 to"),
    NUMBER(PLAIN, ALL, num_selected, -5, "is -5", "1 to"),
    NUMBER(PLAIN, ALL, num_selected, 1ll << 31, "is 2147483648", "to 2147483647"),
    NUMBER(PLAIN, ALL, tile, 0, "is 0", "1 to 256"),
    NUMBER(PLAIN, ALL, tile, 257, "is 257", "1 to 256"),
    NUMBER(PLAIN, ALL, window, 0, "is 0", "1 to"),
    NUMBER(PLAIN, ALL, window, -1, "is -1", "1 to"),
    NUMBER(PLAIN, ALL, forced_first, -1, "is -1", "0 to"),
    NUMBER(PLAIN, ALL, forced_local, -1, "is -1", "0 to"),
    NUMBER(PLAIN, ALL, max_compressed_groups, -1, "is -1", "0 to"),
    NUMBER(PLAIN, ALL, select_block, 1ll << 31, "is 2147483648", "to 2147483647"),
    NUMBER(PLAIN, ALL, forced_first, 1ll << 31, "is 2147483648", "to 2147483647"),
    NUMBER(PLAIN, ALL, forced_local, 1ll << 31, "is 2147483648", "to 2147483647"),
    NUMBER(PLAIN, ALL, max_compressed_groups, 1ll << 31, "is 2147483648", "to 2147483647"),
    CHOICE(PLAIN, ALL, compress, 3, "is 3", "0 to 2"),
    CHOICE(PLAIN, ALL, scope, 2, "is 2", "0 to 1"),
    CHOICE(PLAIN, ALL, metric, 2, "is 2", "0 to 1"),
    CHOICE(PLAIN, ALL, compressed_visibility, 2, "is 2", "0 to 1"),
    CHOICE(PLAIN, ALL, branches, 0, "is 0", "1 to 7"),
    CHOICE(PLAIN, ALL, branches, 8, "is 8", "1 to 7"),
    CHOICE(PLAIN, ALL, gate, 3, "is 3", "0 to 2"),
    CHOICE(PLAIN, ALL, selection, 2, "is 2", "0 to 1"),
    CHOICE(PLAIN, ALL, groups, 2, "is 2", "0 to 1"),
    {"scale NaN", PLAIN, ALL, SCALE, NSA_Q, 0, 0, BAD, {"scale", "nan", "finite"}},
    {"scale infinite", PLAIN, ALL, SCALE, NSA_Q, 0, 1, BAD, {"scale", "inf", "finite"}},
    {"scale below 0", PLAIN, ALL, SCALE, NSA_Q, 0, 2, BAD, {"scale", "-0.5", "positive"}},
    {"scale of no gradient", PLAIN, BWD | ATT_BWD, SCALE, NSA_Q, 0, 3, BAD, {"scale", "1e+30", "65536"}},
    /* Two parameters. */
    NUMBER(PLAIN, ALL, stride, 3, "is 3", "divisor of block_size 8"),
    NUMBER(PLAIN, ALL, select_block, 12, "is 12", "multiple of stride 8"),
    NUMBER(LINEAR, ALL & ~GATES, select_block, 6, "is 6", "multiple of stride 4"),
    NUMBER(PLAIN, FWD | SEL, num_selected, 2, "is 2", "at least the 3 forced"),
    FORCED(tile, 64, "num_selected is 5", "at least the 10 forced"),
    FORCED(forced_first, 4, "num_selected is 5", "at least the 6 forced"),
    FORCED(forced_local, 5, "num_selected is 5", "at least the 6 forced"),
    {"non-causal forced_first 6",
     UNGATED,
     FWD | SEL,
     PARAM,
     NSA_Q,
     P(forced_first),
     6,
     BAD,
     {"num_selected is 5", "at least the 6 forced"}},
    CHOICE(LINEAR, FWD | SEL, metric, 1, "mean_logit", "three equal"),
    NUMBER(PLAIN, GROUPED, max_compressed_groups, 2, "with metric softmax", "mean_logit is accepted"),
    NUMBER(GROUPS, FWD | SEL, stride, 4, "mean_logit", "three equal"),
    NUMBER(GROUPS, GROUPED, max_compressed_groups, 1, "is 1", "2 to"),
    CHOICE(PLAIN, GROUPED, groups, 1, "max_compressed_groups 0", "1 or more"),
    CHOICE(PLAIN, COMPRESS, compress, 2, "compress is given", "mean or linear"),
    /* Tensors that the parameters need. */
    MISSING(PLAIN, WHOLE | SEL | ATTEND | GATES | GATE | GATE_BWD, NSA_Q, "q"),
    MISSING(PLAIN, WHOLE | COMPRESS | ATTEND, NSA_K, "k"),
    MISSING(PLAIN, WHOLE | COMPRESS | ATTEND, NSA_V, "v"),
    MISSING(SEPARATE, WHOLE | ATTEND, NSA_K_SLC, "k_slc"),
    MISSING(SEPARATE, WHOLE | ATTEND, NSA_V_SLC, "v_slc"),
    MISSING(SEPARATE, WHOLE | ATTEND, NSA_K_WIN, "k_win"),
    MISSING(SEPARATE, WHOLE | ATTEND, NSA_V_WIN, "v_win"),
    MISSING(PLAIN, BWD | CMP | SEL | ATTEND, NSA_K_CMP, "k_cmp"),
    MISSING(PLAIN, BWD | CMP | ATTEND, NSA_V_CMP, "v_cmp"),
    MISSING(GIVEN, WHOLE | SEL | ATTEND, NSA_K_CMP, "k_cmp"),
    MISSING(GIVEN, WHOLE | ATTEND, NSA_V_CMP, "v_cmp"),
    MISSING(VARLEN, BWD | COMPRESS | SEL | ATTEND, NSA_CU_SEQLENS_CMP, "cu_seqlens_cmp"),
    MISSING(LINEAR, WHOLE | COMPRESS, NSA_W_K, "w_k"),
    MISSING(LINEAR, WHOLE | COMPRESS, NSA_W_V, "w_v"),
    MISSING(PLAIN, WHOLE | GATES | GATE | GATE_BWD, NSA_W_GATE, "w_gate"),
    MISSING(GIVEN, WHOLE | GATE | GATE_BWD, NSA_GATES, "gates"),
    MISSING(PLAIN, BWD | GATES | GATE_BWD, NSA_GATES, "gates"),
    MISSING(PLAIN, BWD | SEL | ATTEND, NSA_BLOCK_IDX, "block_idx"),
    MISSING(GIVEN, WHOLE | ATTEND, NSA_BLOCK_IDX, "block_idx"),
    MISSING(GROUPS, BWD | ATTEND, NSA_GROUP_IDX, "group_idx"),
    MISSING(GIVEN, WHOLE | ATTEND, NSA_GROUP_IDX, "group_idx"),
    MISSING(PLAIN, FWD | COMBINE | GATE, NSA_O, "o"),
    MISSING(PLAIN, ATTEND, NSA_O_SLC, "o_slc"),
    MISSING(PLAIN, BWD | ATT_BWD, NSA_LSE_CMP, "lse_cmp"),
    MISSING(PLAIN, BWD | ATT_BWD, NSA_LSE_SLC, "lse_slc"),
    MISSING(PLAIN, BWD | ATT_BWD, NSA_LSE_WIN, "lse_win"),
    MISSING(PLAIN, BWD | GATE_BWD, NSA_D_O, "d_o"),
    MISSING(PLAIN, ATT_BWD, NSA_D_O_WIN, "d_o_win"),
    MISSING(PLAIN, BWD | ATT_BWD, NSA_D_Q, "d_q"),
    MISSING(PLAIN, BWD | ATT_BWD, NSA_D_K, "d_k"),
    MISSING(PLAIN, BWD | ATT_BWD, NSA_D_V, "d_v"),
    MISSING(PLAIN, CMP_BWD | ATT_BWD, NSA_D_K_CMP, "d_k_cmp"),
    MISSING(GIVEN, BWD | ATT_BWD, NSA_D_V_CMP, "d_v_cmp"),
    MISSING(SEPARATE, BWD | ATT_BWD, NSA_D_K_SLC, "d_k_slc"),
    MISSING(SEPARATE, BWD | ATT_BWD, NSA_D_V_WIN, "d_v_win"),
    /* Tensors that the parameters leave unused. */
    UNUSED(PLAIN, WHOLE | COMPRESS, NSA_PE_K, "pe_k", "compress mean", "linear is accepted"),
    UNUSED(PLAIN, WHOLE | COMPRESS, NSA_PE_V, "pe_v", "compress mean", "linear is accepted"),
    UNUSED(GIVEN, WHOLE, NSA_W_K, "w_k", "compress given", "mean or linear is accepted"),
    UNUSED(GIVEN, WHOLE, NSA_W_V, "w_v", "compress given", "mean or linear is accepted"),
    UNUSED(GIVEN, WHOLE | GATE | GATE_BWD, NSA_W_GATE, "w_gate", "gate given", "weights is accepted"),
    UNUSED(UNGATED, WHOLE | GATE | GATE_BWD, NSA_W_GATE, "w_gate", "gate none", "weights is accepted"),
    UNUSED(UNGATED, BWD | GATE_BWD, NSA_D_W_GATE, "d_w_gate", "gate none", "weights is accepted"),
    UNUSED(PLAIN, BWD | GATE_BWD, NSA_D_GATES, "d_gates", "gate weights", "given or none is accepted"),
    UNUSED(PLAIN, BWD, NSA_D_K_CMP, "d_k_cmp", "compress mean", "given is accepted"),
    UNUSED(LINEAR, BWD, NSA_D_V_CMP, "d_v_cmp", "compress linear", "given is accepted"),
    UNUSED(UNGATED, BWD | CMP_BWD, NSA_D_W_K, "d_w_k", "w_k is NULL", "accepted"),
    UNUSED(UNGATED, BWD | CMP_BWD, NSA_D_W_V, "d_w_v", "w_v is NULL", "accepted"),
    UNUSED(UNGATED, BWD | CMP_BWD, NSA_D_PE_K, "d_pe_k", "pe_k is NULL", "accepted"),
    UNUSED(UNGATED, BWD | CMP_BWD, NSA_D_PE_V, "d_pe_v", "pe_v is NULL", "accepted"),
    UNUSED(PLAIN, BWD | ATT_BWD, NSA_D_K_SLC, "d_k_slc", "k_slc is NULL", "accepted"),
    UNUSED(PLAIN, BWD | ATT_BWD, NSA_D_V_SLC, "d_v_slc", "v_slc is NULL", "accepted"),
    UNUSED(PLAIN, BWD | ATT_BWD, NSA_D_K_WIN, "d_k_win", "k_win is NULL", "accepted"),
    UNUSED(PLAIN, BWD | ATT_BWD, NSA_D_V_WIN, "d_v_win", "v_win is NULL", "accepted"),
    /* Extents. */
    {"head dim 12", PLAIN, WHOLE | SEL | ATTEND | GATES, SHAPE, NSA_Q, 3, 12, BAD, {"12", "accepted"}},
    {"head dim 0", PLAIN, WHOLE | SEL | ATTEND | GATES, SHAPE, NSA_Q, 3, 0, BAD, {"0", "accepted"}},
    {"head dim 520",
     PLAIN,
     WHOLE | COMPRESS | ATTEND,
     SHAPE,
     NSA_V,
     3,
     520,
     BAD,
     {"v", "520", "multiple of 8 from 8 to 512"}},
    {"3 kv heads", PLAIN, WHOLE | ATTEND, SHAPE, NSA_K, 2, 3, BAD, {"4 heads", "multiple", "3"}},
    {"no kv heads", PLAIN, WHOLE | ATTEND, SHAPE, NSA_K, 2, 0, BAD, {"4 heads", "multiple", "0"}},
    {"no heads",
     PLAIN,
     WHOLE | SEL | ATTEND,
     SHAPE,
     NSA_Q,
     2,
     0,
     BAD,
     {"q has 0 heads", "positive multiple", "2"}},
    {"2^31 tokens",
     PLAIN,
     WHOLE | SEL | ATTEND | GATES,
     SHAPE,
     NSA_Q,
     1,
     1ll << 31,
     BAD,
     {"2147483648", "at most 2147483647"}},
    {"length -2^63",
     PLAIN,
     WHOLE | COMPRESS | ATTEND,
     SHAPE,
     NSA_K,
     1,
     INT64_MIN,
     BAD,
     {"k.shape[1]", "-9223372036854775808", "0 or more"}},
    {"shape overflows",
     PLAIN,
     WHOLE | SEL | ATTEND | GATES,
     SHAPE,
     NSA_Q,
     0,
     INT64_MAX / 2,
     BAD,
     {"q", "overflow"}},
    {"k for another list",
     PLAIN,
     BWD | SEL | ATTEND,
     SHAPE,
     NSA_BLOCK_IDX,
     3,
     4,
     BAD,
     {"block_idx.shape[3] is 4", "5 is accepted"}},
    {"lists for other heads",
     PLAIN,
     BWD | SEL | ATTEND,
     SHAPE,
     NSA_BLOCK_IDX,
     1,
     1,
     BAD,
     {"block_idx.shape[1] is 1", "2 is accepted"}},
    {"entries of another length",
     PLAIN,
     BWD | CMP | SEL | ATTEND,
     SHAPE,
     NSA_K_CMP,
     1,
     8,
     BAD,
     {"k_cmp.shape[1] is 8", "9 is accepted"}},
    {"weights of another block size",
     LINEAR,
     WHOLE | COMPRESS,
     SHAPE,
     NSA_W_K,
     1,
     16,
     BAD,
     {"w_k.shape[1] is 16", "128 is accepted"}},
    {"gates of two branches",
     GIVEN,
     WHOLE | COMBINE | GATE | GATE_BWD,
     SHAPE,
     NSA_GATES,
     3,
     2,
     BAD,
     {"gates.shape[3] is 2", "3 is accepted"}},
    /* cu_seqlens. */
    {"cu_seqlens empty", VARLEN, ALL, SHAPE, NSA_CU_SEQLENS, 0, 0, BAD, {"cu_seqlens", "0", "accepted"}},
    {"cu_seqlens of 2 dimensions",
     VARLEN,
     ALL,
     NDIM,
     NSA_CU_SEQLENS,
     0,
     2,
     BAD,
     {"cu_seqlens", "2 dimensions", "one"}},
    {"cu_seqlens huge",
     VARLEN,
     ALL,
     SHAPE,
     NSA_CU_SEQLENS,
     0,
     INT64_MAX,
     BAD,
     {"cu_seqlens.shape[0]", "9223372036854775807", "accepted"}},
    {"cu_seqlens of i64",
     VARLEN,
     ALL,
     DTYPE,
     NSA_CU_SEQLENS,
     0,
     QUERN_I64,
     BAD,
     {"cu_seqlens", "i64", "i32"}},
    {"cu_seqlens_cmp of another batch",
     VARLEN,
     BWD | COMPRESS | SEL | ATTEND,
     SHAPE,
     NSA_CU_SEQLENS_CMP,
     0,
     3,
     BAD,
     {"cu_seqlens_cmp.shape[0] is 3", "4"}},
    {"cu_seqlens from 1",
     VARLEN,
     ALL,
     CU_SEQLEN,
     NSA_CU_SEQLENS,
     0,
     1,
     BAD,
     {"cu_seqlens[0] is 1", "0 is accepted"}},
    {"cu_seqlens falls",
     VARLEN,
     ALL,
     CU_SEQLEN,
     NSA_CU_SEQLENS,
     2,
     29,
     BAD,
     {"cu_seqlens[2] is 29", "after 30"}},
    {"cu_seqlens below 0",
     VARLEN,
     ALL,
     CU_SEQLEN,
     NSA_CU_SEQLENS,
     1,
     -1,
     BAD,
     {"cu_seqlens[1] is -1", "after 0"}},
    {"cu_seqlens past the rows",
     VARLEN,
     ALL,
     CU_SEQLEN,
     NSA_CU_SEQLENS,
     3,
     78,
     BAD,
     {"cu_seqlens ends at 78", "77"}},
    ENTRIES(0, 1, "cu_seqlens_cmp[0] is 1", "0 is accepted"),
    ENTRIES(2, 2, "cu_seqlens_cmp[2] is 2", "after 3"),
    ENTRIES(3, 10, "cu_seqlens_cmp ends at 10", "9"),
    ENTRIES(1, 2, "cu_seqlens_cmp[1] is 2 after 0", "3 entries", "30 tokens"),
    ENTRIES(3, 9, "cu_seqlens_cmp[3] is 9 after 3", "5 entries", "45 tokens"),
    /* Workspace and device. */
    {"workspace a byte too small",
     PLAIN,
     TAKE_WORKSPACE,
     SHORT_WORKSPACE,
     NSA_Q,
     0,
     0,
     QUERN_ERR_WORKSPACE,
     {"workspace_bytes", "at least"}},
    {"no workspace", PLAIN, TAKE_WORKSPACE, NO_WORKSPACE, NSA_Q, 0, 0, BAD, {"workspace is NULL", "needed"}},
    {"v elsewhere",
     PLAIN,
     WHOLE | COMPRESS | ATTEND,
     DEVICE,
     NSA_V,
     0,
     QUERN_CUDA,
     BAD,
     {"v is on device 1", "share one device"}},
    {"o_slc elsewhere",
     PLAIN,
     COMBINE | GATE | GATE_BWD,
     DEVICE,
     NSA_O_SLC,
     0,
     QUERN_CUDA,
     BAD,
     {"o_slc is on device 1", "share one device"}},
    {"cuda", PLAIN, ALL, ALL_CUDA, NSA_Q, 0, 0, QUERN_ERR_DEVICE, {"device cuda", "libquern_cuda"}},
};

static void every_illegal_combination_is_named_and_writes_nothing(void **state)
{
    quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 1);
    (void)state;
    failures = 0;
    for (size_t i = 0; i < sizeof mistakes / sizeof *mistakes; i++)
        for (int op = 0; op < OPS; op++)
            if (mistakes[i].ops & 1 << op) try(ctx, &mistakes[i], op);
    assert_int_equal(failures, 0);
    quern_context_destroy(ctx);
}

/* Every tensor of every operation, spoilt in every way that a view can be. */
static void every_tensor_is_checked(void **state)
{
    quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 1);
    int tried = 0;
    failures = 0;
    (void)state;
    for (base b = 0; b < BASES; b++) {
        nsa_case *c = cases[b];
        for (int op = 0; op < OPS; op++) {
            nsa_set in, out;
            if (!serves(b, op)) continue;
            sets_of(c, op, &in, &out);
            int lead = 0;
            while (!(in & ~(NSA_BIT(NSA_GATES) | NSA_BIT(NSA_CU_SEQLENS)) & NSA_BIT(lead))) lead++;
            for (int slot = 0; slot < NSA_SLOTS; slot++) {
                if (!((in | out) & NSA_BIT(slot))) continue;
                const quern_tensor *v = &c->tensor[slot].view;
                const char *name = nsa_slot_name(slot);
                const int last = v->ndim - 1;
                const mistake all[] = {
                    {name, b, 0, DTYPE, slot, 0, QUERN_I64, BAD, {name, "i64", "accepted"}},
                    {name, b, 0, DTYPE, slot, 0, 77, BAD, {name, "dtype", "accepted"}},
                    {name, b, 0, NDIM, slot, 0, v->ndim + 1, BAD, {name, "dimension", "accepted"}},
                    {name, b, 0, SHAPE, slot, 0, -1, BAD, {name, "", "accepted"}},
                    {name, b, 0, STRIDE, slot, last, 2, BAD, {name, "strides", "1 is accepted"}},
                    {name, b, 0, DEVICE, slot, 0, 9, BAD, {name, "device 9", "accepted"}},
                    {name, b, 0, NULL_DATA, slot, 0, 0, BAD, {name, "data is NULL", "needed"}},
                    {name, b, 0, ODD_DATA, slot, 0, 0, BAD, {name, "data", "multiple"}},
                    {name, b, 0, STRIDE, slot, 0, INT64_MAX / 2, BAD, {name, "overflow", "accepted"}},
                    {name, b, 0, MORE, slot, 0, 1, BAD, {name, "shape[0]", "accepted"}},
                    {name, b, 0, STRIDE, slot, 0, 0, BAD, {name, "share memory", "may not"}},
                    {name, b, 0, ALIAS, slot, lead, 0, BAD, {"shares memory with", "own"}},
                };
                int count = sizeof all / sizeof *all;
                if (!(out & NSA_BIT(slot))) count -= 2;
                for (int i = 0; i < count; i++) {
                    const bool single = all[i].fault == STRIDE &&
                                        (last == 0 || v->shape[all[i].where] < 2); /* no stride to spoil */
                    if (single && !(last == 0 && all[i].value != 0)) continue;
                    if (last == 0 && all[i].fault == STRIDE && all[i].value != 2) continue;
                    if (all[i].fault == MORE && (slot == lead || slot == NSA_CU_SEQLENS))
                        continue; /* another tensor's is wrong then */
                    if (slot == NSA_CU_SEQLENS && all[i].fault == SHAPE) continue; /* a row of the table */
                    try(ctx, &all[i], op);
                    tried++;
                }
            }
        }
    }
    assert_int_equal(failures, 0);
    assert_true(tried > 2000);
    quern_context_destroy(ctx);
}

static void null_arguments(void **state)
{
    nsa_case *c = cases[PLAIN];
    quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 1);
    (void)state;
    for (int op = 0; op < OPS; op++) {
        const nsa_call *call = calls[op];
        nsa_set in, out;
        size_t bytes;
        sets_of(c, op, &in, &out);
        const quern_nsa_tensors t = nsa_bind(c, in | out);
        assert_int_equal(call->run(NULL, NULL, &c->config.params, &t, NULL, 0), QUERN_ERR_INVALID_ARGUMENT);
        assert_non_null(strstr(quern_last_error(NULL), "ctx is NULL"));
        assert_int_equal(call->workspace(ctx, &c->config.params, &t, NULL), QUERN_ERR_INVALID_ARGUMENT);
        assert_non_null(strstr(quern_last_error(NULL), "bytes is NULL"));
        assert_int_equal(call->workspace(NULL, &c->config.params, &t, &bytes), QUERN_ERR_INVALID_ARGUMENT);
    }
    quern_context_destroy(ctx);
}

int main(void)
{
    setenv("QUERN_CUDA_LIBRARY", "/nowhere/libquern_cuda.so.0", 1); /* as on a machine without a GPU */
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_illegal_combination_is_named_and_writes_nothing),
        cmocka_unit_test(every_tensor_is_checked),
        cmocka_unit_test(null_arguments),
    };
    return cmocka_run_group_tests(tests, make_cases, free_cases);
}
