/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* schema.c - the layer's tensors and parameters, the extents that follow from them, and the host's checks of
 * globals. */
#include "core/error.h"
#include "core/view.h"
#include "moe/call.h"

#include <math.h>
#include <stddef.h>

static const op_tensor tensors[] = {
    {"hidden", "hidden", OP_ACTIVATION, OP_NONE, {ML_TOKENS, MS_D}, {0}},
    {"logits", "logits", OP_FLOAT, OP_NONE, {ML_TOKENS, MS_E}, {0}},
    {"weight", "weight", OP_FLOAT, OP_NONE, {MS_E, MS_D}, {0}},
    {"bias", "bias", OP_F32, OP_NONE, {MS_E}, {0}},
    {"input_ids", "input_ids", OP_INDEX, OP_NONE, {ML_TOKENS}, {0}},
    {"tid2eid", "tid2eid", OP_INDEX, OP_NONE, {MS_V, MS_K}, {0}},
    {"gate_up_codes", "gate_up_codes", OP_CODES, OP_NONE, {MS_E, OP_HALF + MS_D, MS_2I}, {0}},
    {"gate_up_scales", "gate_up_scales", OP_SCALE, OP_NONE, {MS_E, OP_SIXTEENTH + MS_D, MS_2I}, {0}},
    {"gate_up_repacked", "gate_up_repacked", OP_U8, OP_NONE, {MS_E, MS_UP_BYTES}, {0}},
    {"gate_up_global", "gate_up_global", OP_GLOBAL, OP_NONE, {ML_UP_GLOBAL}, {0}},
    {"down_codes", "down_codes", OP_CODES, OP_NONE, {MS_E, OP_HALF + MS_I, MS_D}, {0}},
    {"down_scales", "down_scales", OP_SCALE, OP_NONE, {MS_E, OP_SIXTEENTH + MS_I, MS_D}, {0}},
    {"down_repacked", "down_repacked", OP_U8, OP_NONE, {MS_E, MS_DOWN_BYTES}, {0}},
    {"down_global", "down_global", OP_GLOBAL, OP_NONE, {ML_DOWN_GLOBAL}, {0}},
    {"gate_up", "gate_up", OP_FLOAT, OP_NONE, {MS_E, MS_2I, MS_D}, {0}},
    {"down", "down", OP_FLOAT, OP_NONE, {MS_E, MS_D, MS_I}, {0}},
    {"gate_up_bias", "gate_up_bias", OP_FLOAT, OP_NONE, {MS_E, MS_2I}, {0}},
    {"down_bias", "down_bias", OP_FLOAT, OP_NONE, {MS_E, MS_D}, {0}},
    {"gate_up_input_global", "gate_up_input_global", OP_GLOBAL, OP_NONE, {ML_UP_INPUT}, {0}},
    {"down_input_global", "down_input_global", OP_GLOBAL, OP_NONE, {ML_DOWN_INPUT}, {0}},
    {"shared_gate", "shared_gate", OP_FLOAT, OP_NONE, {MS_IS, MS_D}, {0}},
    {"shared_up", "shared_up", OP_FLOAT, OP_NONE, {MS_IS, MS_D}, {0}},
    {"shared_down", "shared_down", OP_FLOAT, OP_NONE, {MS_D, MS_IS}, {0}},
    {"shared_gate_up_codes", "shared_gate_up_codes", OP_CODES, OP_NONE, {OP_HALF + MS_D, MS_2IS}, {0}},
    {"shared_gate_up_scales", "shared_gate_up_scales", OP_SCALE, OP_NONE, {OP_SIXTEENTH + MS_D, MS_2IS}, {0}},
    {"shared_gate_up_repacked", "shared_gate_up_repacked", OP_U8, OP_NONE, {MS_SHARED_UP_BYTES}, {0}},
    {"shared_gate_up_global", "shared_gate_up_global", OP_GLOBAL, OP_NONE, {ML_SHARED_GLOBAL}, {0}},
    {"shared_down_codes", "shared_down_codes", OP_CODES, OP_NONE, {OP_HALF + MS_IS, MS_D}, {0}},
    {"shared_down_scales", "shared_down_scales", OP_SCALE, OP_NONE, {OP_SIXTEENTH + MS_IS, MS_D}, {0}},
    {"shared_down_repacked", "shared_down_repacked", OP_U8, OP_NONE, {MS_SHARED_DOWN_BYTES}, {0}},
    {"shared_down_global", "shared_down_global", OP_GLOBAL, OP_NONE, {0}, {0}},
    {"out", "out", OP_ACTIVATION, OP_NONE, {ML_TOKENS, MS_D}, {0}},
    {"experts", "experts", OP_I32, OP_NONE, {MS_T, MS_K}, {0}},
    {"weights", "weights", OP_F32, OP_NONE, {MS_T, MS_K}, {0}},
    {"offsets", "offsets", OP_I32, OP_NONE, {MS_E}, {0}},
    {"permutation", "permutation", OP_I32, OP_NONE, {MS_TK}, {0}},
    {"d_out", "d_out", OP_ACTIVATION, M(out), {ML_TOKENS, MS_D}, {0}},
    {"d_hidden", "d_hidden", OP_ACTIVATION, M(hidden), {ML_TOKENS, MS_D}, {0}},
    {"d_logits", "d_logits", OP_SOURCE, M(logits), {ML_TOKENS, MS_E}, {0}},
    {"d_weight", "d_weight", OP_F32, M(weight), {MS_E, MS_D}, {0}},
    {"d_weights", "d_weights", OP_F32, M(weights), {MS_T, MS_K}, {0}},
    {"d_gate_up_bias", "d_gate_up_bias", OP_F32, M(gate_up_bias), {MS_E, MS_2I}, {0}},
    {"d_down_bias", "d_down_bias", OP_F32, M(down_bias), {MS_E, MS_D}, {0}},
    {"d_gate_up", "d_gate_up", OP_SOURCE_OR_F32, M(gate_up), {MS_E, MS_2I, MS_D}, {0}},
    {"d_down", "d_down", OP_SOURCE_OR_F32, M(down), {MS_E, MS_D, MS_I}, {0}},
};

static const char *const scores[] = {"softmax", "sqrtsoftplus", "sigmoid", NULL};
#define FIELD(member) OP_FIELD(quern_moe_params, member)
static const op_param params[] = {
    {FIELD(score), OP_CHOICE, 0, 2, scores, "what the router makes of logits"},
    {FIELD(top_k), OP_INTEGER, 1, INT32_MAX, NULL, "experts of a token"},
    {FIELD(renormalize), OP_FLAG, 0, 1, NULL, "divide the chosen experts' scores by their sum"},
    {FIELD(route_scale), OP_NUMBER, 0, 0, NULL, "multiplies routing weights"},
    {FIELD(limit), OP_LIMIT, 0, 0, NULL, "of gate and up; 0: none"},
    {FIELD(alpha), OP_NUMBER, 0, 0, NULL, "of the gate's sigmoid"},
    {FIELD(beta), OP_NUMBER, 0, 0, NULL, "added to up"},
    {FIELD(granularity), OP_INTEGER, 1, 32, NULL, "runs of gate and up in NVFP4 columns; divides 32"},
    {FIELD(a4), OP_FLAG, 0, 1, NULL, "quantise the activations of the experts' products to NVFP4"},
    {FIELD(intermediate), OP_INTEGER, 0, INT32_MAX / 2, NULL, "I; 0: from the tensors"},
    {FIELD(shared_intermediate), OP_INTEGER, 0, INT32_MAX / 2, NULL,
     "I of the shared expert; 0: from the tensors"},
};
static const char *const operations[] = {"moe_forward", "moe_backward"};
static const char symbols[] = "T D E k Tk V I 2I bytes bytes Is 2Is bytes bytes";
static const char *const leads[] = {"...", "|E|E 2...", "|E...", "|2...", "|E...", "|E...", NULL};
static const int8_t routing[] = {M(experts), M(weights), M(offsets), M(permutation), OP_NONE};
static const op_entry ops[] = {
    {.name = "moe",
     .help = "a mixture-of-experts layer: router, experts, shared expert; with d_out also its backward",
     .forward = MOE_FORWARD,
     .backward = MOE_BACKWARD,
     .aside = "save-routing",
     .aside_valued = true,
     .aside_tensors = routing},
};

#define PARAMS(call) ((quern_moe_params *)op_params(call))

static quern_status check_params(op_call *call)
{
    return op_check_granularity(PARAMS(call)->granularity);
}

/* Weights are codes with scales, or repacked. `there`: NVFP4 weights are expected. */
static void weight_roles(op_call *call, int32_t codes, bool there)
{
    const bool repacked = call->given[codes + 2] != NULL;
    call->role[codes] = call->role[codes + 1] = there && !repacked ? OP_NEEDED : OP_REFUSED;
    if (there && !repacked && codes == M(gate_up_codes))
        op_reason(call, codes, ": experts' weights, in one of their forms, are needed");
    call->role[codes + 2] = there ? OP_OPTIONAL : OP_REFUSED;
    call->role[codes + 3] = there ? OP_OPTIONAL : OP_REFUSED; /* the global */
}

static bool any_given(const op_call *call, int32_t first, int32_t last)
{
    for (int i = first; i <= (int)last; i++)
        if (call->given[i] != NULL) return true;
    return false;
}

static void expert_roles(op_call *call)
{
    const bool floats = any_given(call, M(gate_up), M(down)),
               shared_floats = any_given(call, M(shared_gate), M(shared_down));
    const bool shared_codes =
        !shared_floats && any_given(call, M(shared_gate_up_codes), M(shared_down_global));
    uint8_t *r = call->role;
    weight_roles(call, M(gate_up_codes), !floats);
    weight_roles(call, M(down_codes), !floats);
    r[M(gate_up)] = r[M(down)] = floats ? OP_NEEDED : OP_UNUSED;
    r[M(gate_up_bias)] = r[M(down_bias)] = OP_OPTIONAL;
    r[M(gate_up_input_global)] = r[M(down_input_global)] = PARAMS(call)->a4 ? OP_OPTIONAL : OP_REFUSED;
    r[M(shared_gate)] = r[M(shared_up)] = r[M(shared_down)] = shared_floats ? OP_NEEDED : OP_UNUSED;
    weight_roles(call, M(shared_gate_up_codes), shared_codes);
    weight_roles(call, M(shared_down_codes), shared_codes);
}

static void roles(op_call *call)
{
    const bool backward = call->operation == MOE_BACKWARD, table = call->given[M(tid2eid)] != NULL;
    uint8_t *r = call->role;
    const bool routed = moe_is_routed(call);
    r[M(hidden)] = OP_NEEDED;
    r[M(weight)] = routed ? OP_UNUSED : call->given[M(logits)] != NULL ? OP_REFUSED : OP_NEEDED;
    if (r[M(weight)] == OP_NEEDED)
        op_reason(call, M(weight), ": the router's weight, or logits, or experts and weights, are needed");
    r[M(logits)] = OP_OPTIONAL;
    r[M(tid2eid)] = routed ? OP_REFUSED : OP_OPTIONAL;
    r[M(bias)] = routed || table ? OP_REFUSED : OP_OPTIONAL;
    r[M(input_ids)] = table && !routed ? OP_NEEDED : OP_REFUSED;
    expert_roles(call);
    r[M(out)] = backward ? OP_UNUSED : OP_RESULT;
    r[M(offsets)] = r[M(permutation)] = backward ? OP_UNUSED : OP_OPTIONAL_RESULT;
    r[M(experts)] = r[M(weights)] = routed ? OP_NEEDED : r[M(offsets)];
    r[M(d_out)] = backward ? OP_NEEDED : OP_UNUSED;
    op_gradient_roles(call, M(d_hidden), M(d_down), backward);
    r[M(d_weights)] = backward ? OP_OPTIONAL_RESULT : OP_UNUSED;
}

static const char *refuse(const op_call *call, int32_t tensor, char text[OP_REASON])
{
    const bool shared = tensor >= M(shared_gate),
               floats =
                   any_given(call, shared ? M(shared_gate) : M(gate_up), shared ? M(shared_down) : M(down));
    (void)text;
    if (moe_is_routed(call) && tensor >= M(bias) && tensor <= M(tid2eid))
        return " with experts and weights, and without a router: a router's weight or logits, or routing "
               "alone, are accepted";
    switch (tensor) {
    case M(weight): return " with logits: one or the other is accepted";
    case M(bias): return " with tid2eid: one or the other is accepted";
    case M(input_ids): return " without tid2eid: both or neither are accepted";
    case M(gate_up_input_global):
    case M(down_input_global): return " and a4 is false: it is accepted with a4";
    default: break;
    }
    if (!floats) return " with repacked weights: one or the other is accepted";
    return shared ? " with a shared expert in floats: one or the other is accepted"
                  : " with experts in floats: one or the other is accepted";
}

/* The extents of a global: with or without one for each expert, and for gate and up. */
static void global_lead(op_call *call, int32_t lead, int32_t tensor, const int64_t whole[2], int32_t most)
{
    const quern_tensor *g = call->given[tensor];
    op_extents *to = &call->lead[lead - OP_LEAD];
    to->count = g == NULL || g->ndim < 0 || op_is_one(g) ? 0 : g->ndim < most ? g->ndim : most;
    for (int32_t i = 0; i < to->count; i++) to->extent[i] = whole[i];
}

/* Whose extent says how many experts there are: the router, or, where routing is handed in, experts'
 * weights. */
static int32_t counts_experts(const op_call *call)
{
    static const int32_t matrices[] = {M(gate_up), M(gate_up_codes), M(gate_up_repacked)};
    if (!moe_is_routed(call)) return call->given[M(logits)] != NULL ? M(logits) : M(weight);
    const int32_t found = op_first_used(call, matrices, 3);
    return found != OP_NONE ? found : M(gate_up_codes);
}

/* T and D from hidden, E from the router or the experts. */
static quern_status derive_tokens(op_call *call)
{
    const quern_tensor *hidden = call->given[M(hidden)];
    const int32_t router = counts_experts(call);
    op_extents *lead = &call->lead[0];
    int64_t *s = call->symbol;
    quern_status status;
    const int32_t ndim = hidden->ndim < 2 ? 2 : hidden->ndim < QUERN_MAX_DIMS ? hidden->ndim : QUERN_MAX_DIMS;
    if ((status = op_check_ndim(call, M(hidden), ndim)) != QUERN_OK ||
        (status = op_check_ndim(call, router,
                                router == M(logits)                                  ? ndim
                                : router == M(gate_up) || router == M(gate_up_codes) ? 3
                                                                                     : 2)) != QUERN_OK)
        return status;
    lead->count = ndim - 1;
    s[MS_T] = 1;
    for (int32_t i = 0; i < lead->count; i++) {
        lead->extent[i] = hidden->shape[i];
        if (__builtin_mul_overflow(s[MS_T], hidden->shape[i], &s[MS_T])) s[MS_T] = INT64_MAX;
    }
    s[MS_D] = hidden->shape[ndim - 1];
    s[MS_E] = router == M(logits) ? call->given[router]->shape[ndim - 1] : call->given[router]->shape[0];
    return QUERN_OK;
}

/* I from the parameter, or from the first present tensor, whose dimension `at` is `times` I. */
static quern_status derive_width(const op_call *call, int64_t given, int32_t codes, int32_t floats,
                                 int32_t ndim, int64_t *width, const char *field)
{
    const bool in_floats = call->given[floats] != NULL;
    const int32_t tensor = in_floats ? floats : codes;
    const int32_t dims = in_floats && floats == M(shared_gate) ? 2 : ndim;
    quern_status status;
    *width = given;
    if (given > 0) return QUERN_OK;
    if (call->given[tensor] == NULL)
        return error_argument("%s is NULL and %s is 0: one of them is needed", tensors[tensor].field, field);
    if ((status = op_check_ndim(call, tensor, dims)) != QUERN_OK) return status;
    const int64_t *shape = call->given[tensor]->shape;
    *width = !in_floats ? shape[ndim - 1] / 2 : floats == M(shared_gate) ? shape[0] : shape[1] / 2;
    return QUERN_OK;
}

/* Checks the widths of NVFP4 weights. */
static quern_status check_width(const char *what, int64_t width, int64_t multiple)
{
    if (width % multiple == 0) return QUERN_OK;
    return error_argument("%s is %lld: a multiple of %lld is accepted by NVFP4 weights", what,
                          (long long)width, (long long)multiple);
}

static quern_status check_widths(const op_call *call, bool shared)
{
    const int64_t *s = call->symbol, q = PARAMS(call)->granularity, block = QUERN_NVFP4_BLOCK;
    const quern_status status = check_width("hidden's last extent", s[MS_D], block);
    return status != QUERN_OK ? status
                              : check_width(shared ? "shared_intermediate" : "intermediate",
                                            s[shared ? MS_IS : MS_I], q > block ? q : block);
}

/* Whether the sizes of weights and of what the workspace holds a slot fit 64 bits. */
static quern_status check_extents(const op_call *call)
{
    const int64_t *s = call->symbol, most = (int64_t)1 << 28;
    int64_t widest = s[MS_D];
    if (s[MS_I] > widest) widest = s[MS_I];
    if (s[MS_IS] > widest) widest = s[MS_IS];
    if (widest <= most) return QUERN_OK;
    return error_argument("hidden's last extent is %lld, intermediate %lld, shared_intermediate %lld: at "
                          "most %lld are accepted, above it sizes overflow",
                          (long long)s[MS_D], (long long)s[MS_I], (long long)s[MS_IS], (long long)most);
}

/* The bytes of repacked weights. */
static quern_status derive_repacked(op_call *call)
{
    int64_t *s = call->symbol;
    const struct {
        int32_t tensor, bytes;
        int64_t n, k;
    } weights[] = {{M(gate_up_repacked), MS_UP_BYTES, s[MS_2I], s[MS_D]},
                   {M(down_repacked), MS_DOWN_BYTES, s[MS_D], s[MS_I]},
                   {M(shared_gate_up_repacked), MS_SHARED_UP_BYTES, s[MS_2IS], s[MS_D]},
                   {M(shared_down_repacked), MS_SHARED_DOWN_BYTES, s[MS_D], s[MS_IS]}};
    quern_status status = QUERN_OK;
    for (size_t i = 0; i < sizeof weights / sizeof *weights && status == QUERN_OK; i++)
        if (op_uses(call, weights[i].tensor))
            status = op_repacked_bytes(call, weights[i].n, weights[i].k, &s[weights[i].bytes]);
    return status;
}

static quern_status derive(op_call *call)
{
    const quern_moe_params *p = op_params(call);
    int64_t *s = call->symbol;
    quern_status status = derive_tokens(call);
    if (status != QUERN_OK) return status;
    const bool floats = call->role[M(gate_up)] == OP_NEEDED,
               shared_floats = call->role[M(shared_gate)] == OP_NEEDED;
    const bool shared = shared_floats || call->role[M(shared_gate_up_repacked)] == OP_OPTIONAL;
    if ((status = derive_width(call, p->intermediate, M(gate_up_codes), M(gate_up), 3, &s[MS_I],
                               "intermediate")) != QUERN_OK)
        return status;
    if (shared && (status = derive_width(call, p->shared_intermediate, M(shared_gate_up_codes),
                                         M(shared_gate), 2, &s[MS_IS], "shared_intermediate")) != QUERN_OK)
        return status;
    if ((status = check_extents(call)) != QUERN_OK) return status;
    if (p->top_k > s[MS_E])
        return error_argument("top_k is %lld: 1 to the %lld experts is accepted", (long long)p->top_k,
                              (long long)s[MS_E]);
    if (s[MS_E] > INT32_MAX || s[MS_T] > INT32_MAX / p->top_k)
        return error_argument("%lld tokens of %lld experts each: at most %d slots are accepted",
                              (long long)s[MS_T], (long long)p->top_k, INT32_MAX);
    if (p->a4 && floats)
        return error_argument("a4 is true with gate_up in floats: NVFP4 weights are accepted");
    if ((!floats && (status = check_widths(call, false)) != QUERN_OK) ||
        (shared && !shared_floats && (status = check_widths(call, true)) != QUERN_OK))
        return status;
    s[MS_K] = p->top_k;
    s[MS_TK] = s[MS_T] * p->top_k;
    s[MS_2I] = 2 * s[MS_I];
    s[MS_2IS] = 2 * s[MS_IS];
    const int64_t by_expert[] = {s[MS_E], 2}, by_part[] = {2, 0};
    global_lead(call, ML_UP_GLOBAL, M(gate_up_global), by_expert, 2);
    global_lead(call, ML_DOWN_GLOBAL, M(down_global), by_expert, 1);
    global_lead(call, ML_SHARED_GLOBAL, M(shared_gate_up_global), by_part, 1);
    global_lead(call, ML_UP_INPUT, M(gate_up_input_global), by_expert, 1);
    global_lead(call, ML_DOWN_INPUT, M(down_input_global), by_expert, 1);
    return derive_repacked(call);
}

const op_family moe_family = {
    OP_TABLES(operations, params, symbols, ops),
    OP_ROWS(tensors, quern_moe_tensors, QUERN_MOE_TENSORS_INIT),
    OP_OWN_CALL(moe_call, QUERN_MOE_PARAMS_INIT),
    .first = QUERN_OP_MOE_FORWARD,
    .leads = leads,
    .group = "mixture of experts",
    .check_params = check_params,
    .roles = roles,
    .refuse = refuse,
    .derive = derive,
    .build = moe_build,
};
