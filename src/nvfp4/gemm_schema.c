/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* gemm_schema.c - the grouped product's tensors and parameters, the extents that follow from them, and the
 * host's checks of offsets and globals. */
#include "core/error.h"
#include "core/view.h"
#include "nvfp4/call.h"
#include "nvfp4/gemm.h"

#include <stddef.h>

static const op_tensor tensors[] = {
    {"a", "A", OP_FLOAT, OP_NONE, {GS_T, GS_K}, {0}},
    {"a_codes", "A_codes", OP_CODES, OP_NONE, {GS_T, OP_HALF + GS_K}, {0}},
    {"a_scales", "A_scales", OP_SCALE, OP_NONE, {GL_A_SCALES}, {0}},
    {"pad_row_offsets", "pad_row_offsets", OP_I32, OP_NONE, {GS_E1}, {0}},
    {"a_global", "A_global", OP_GLOBAL, OP_NONE, {GL_A_GLOBAL}, {0}},
    {"b_codes", "B_codes", OP_CODES, OP_NONE, {GS_E, GS_CODES_0, GS_CODES_1}, {0}},
    {"b_scales", "B_scales", OP_SCALE, OP_NONE, {GL_B_SCALES}, {0}},
    {"b_repacked", "B_repacked", OP_U8, OP_NONE, {GS_E, GS_BYTES}, {0}},
    {"b_global", "B_global", OP_GLOBAL, OP_NONE, {GL_B_GLOBAL}, {0}},
    {"offsets", "offsets", OP_I32, OP_NONE, {GS_E}, {0}},
    {"bias", "bias", OP_FLOAT, OP_NONE, {GS_E, GS_N}, {0}},
    {"c", "C", OP_STORED, OP_NONE, {GS_T, GS_OUT}, {0}},
    {"c_codes", "C_codes", OP_CODES, OP_NONE, {GS_T, GS_CODE_COLUMNS}, {0}},
    {"c_scales", "C_scales", OP_SCALE, OP_NONE, {GS_T, GS_CODE_BLOCKS}, {0}},
    {"c_global", "C_global", OP_GLOBAL, OP_NONE, {GL_C_GLOBAL}, {0}},
    {"c_old", "C", OP_STORED, OP_NONE, {GS_T, GS_OUT}, {0}},
    {"d_c", "d_out", OP_FLOAT, OP_NONE, {GS_T, GS_OUT}, {0}},
    {"d_a", "dA", OP_FLOAT, OP_NONE, {GS_T, GS_K}, {0}},
};

static const char *const a8_words[] = {"none", "int8", "fp8", NULL};
static const char *const a_layouts[] = {"linear", "swizzled", NULL};
static const char *const activations[] = {"none", "swiglu", NULL}, *const outputs[] = {"input", "f32",
                                                                                       "bf16",  "f16",
                                                                                       "nvfp4", NULL};
#define FIELD(member) OP_FIELD(quern_nvfp4_gemm_params, member)
static const op_param params[] = {
    {FIELD(b_codes), OP_CHOICE, 0, 1, nvfp4_codes_words, "layout of B's codes: [E, K/2, N] or [E, N, K/2]"},
    {FIELD(b_scales), OP_CHOICE, 0, 2, nvfp4_scales_words, "layout of B's scales"},
    {FIELD(n), OP_INTEGER, 0, INT32_MAX, NULL, "columns of B; 0: from B_codes"},
    {FIELD(a_global_per), OP_CHOICE, 0, 2, nvfp4_global_words, "what shares a global of A"},
    {FIELD(a8), OP_CHOICE, 0, 2, a8_words,
     "round A: to int8, a scale a row; or to e4m3 by row and 128 of K, with the weights"},
    {FIELD(accumulate), OP_FLAG, 0, 1, NULL, "add to c in place"},
    {FIELD(activation), OP_CHOICE, 0, 1, activations, "of interleaved gate and up"},
    {FIELD(limit), OP_LIMIT, 0, 0, NULL, "of gate and up; 0: none"},
    {FIELD(alpha), OP_NUMBER, 0, 0, NULL, "of the gate's sigmoid"},
    {FIELD(beta), OP_NUMBER, 0, 0, NULL, "added to up"},
    {FIELD(granularity), OP_INTEGER, 1, INT32_MAX, NULL, "runs of gate and up in B's columns"},
    {FIELD(profile), OP_CHOICE, 0, 3, nvfp4_profile_words, "of a quantised output"},
    {FIELD(a_swizzled), OP_FLAG, 0, 1, a_layouts, "layout of A's scales; swizzled with pad_row_offsets"},
    {FIELD(output), OP_CHOICE, 0, 4, outputs, "dtype of C, or its codes; input: A's"},
    {FIELD(prepack), OP_FLAG, 0, 1, NULL, "repack B first: the same bits"},
};
static const int8_t like[] = {G(a), G(a_codes), OP_NONE};
static const char *const operations[] = {"nvfp4_gemm", "nvfp4_gemm_backward"};
static const char symbols[] = "T K N E N|N/2 E+1 bytes K/2|N N|K/2 C/2 C/16";
static const char *const leads[] = {"T K/16|bytes...", "|E|T...", "E K/16 N|E N K/16|E bytes...",
                                    "|E|E 2...",       "|E...",   NULL};
static const op_rename renames[] = {{"a_swizzled", "a-scales", NULL}, {NULL, NULL, NULL}};
static const op_entry ops[] = {
    {.name = "nvfp4-gemm",
     .help = "each expert's rows times its NVFP4 weights; with d_out also the gradient of A",
     .forward = GEMM,
     .backward = GEMM_BACKWARD,
     .renames = renames},
};

#define PARAMS(call) ((quern_nvfp4_gemm_params *)op_params(call))

static quern_status check_params(op_call *call)
{
    const quern_nvfp4_gemm_params *p = op_params(call);
    const bool swiglu = p->activation == QUERN_NVFP4_ACTIVATION_SWIGLU;
    if (p->accumulate && swiglu)
        return error_argument("accumulate is true with an activation: one or the other is accepted");
    return swiglu ? op_check_granularity(p->granularity) : QUERN_OK;
}

/* A view [E, K/2, N] whose pairs of K are contiguous is [E, N, K/2] in memory; the shape of A's global says
 * what shares it. */
static void adapt(op_call *call, const quern_tensor **given)
{
    gemm_call *c = (gemm_call *)call;
    const quern_tensor *offsets = given[G(offsets)],
                       *a = given[G(a)] != NULL ? given[G(a)] : given[G(a_codes)];
    const nvfp4_kinds kinds = {true, offsets != NULL && offsets->ndim == 1 ? offsets->shape[0] : -1,
                               a != NULL && a->ndim == 2 ? a : NULL, 1};
    c->params.a_global_per = nvfp4_global_kind(given[G(a_global)], c->params.a_global_per, &kinds);
    c->k_major = c->params.b_codes == QUERN_NVFP4_CODES_K_MAJOR;
    if (c->k_major || !nvfp4_is_k_major(given[G(b_codes)], &c->transposed)) return;
    c->k_major = true;
    given[G(b_codes)] = &c->transposed;
}

static bool is_coded(const op_call *call)
{
    return call->given[G(c)] == NULL &&
           (call->given[G(c_codes)] != NULL || PARAMS(call)->output == QUERN_NVFP4_OUTPUT_NVFP4);
}

static void roles(op_call *call)
{
    const quern_nvfp4_gemm_params *p = op_params(call);
    const quern_tensor *const *t = call->given;
    const bool backward = call->operation == GEMM_BACKWARD, floats = t[G(a)] != NULL,
               codes = t[G(a_codes)] != NULL, repacked = t[G(b_repacked)] != NULL, coded = is_coded(call),
               activated = p->activation != QUERN_NVFP4_ACTIVATION_NONE;
    const char *with_c = " with c: an output in floats, or c_codes, is accepted";
    uint8_t *r = call->role;
    r[G(a)] = codes ? OP_OPTIONAL : OP_NEEDED;
    op_reason(call, G(a), ", and so is a_codes: one of them is needed");
    op_allow(call, G(a_codes), !floats, OP_OPTIONAL, " with a: exactly one of them is accepted");
    op_allow(call, G(a_scales), codes, OP_NEEDED, " without a_codes: both or neither are accepted");
    op_allow(call, G(pad_row_offsets), codes, p->a_swizzled ? OP_NEEDED : OP_OPTIONAL,
             " without a_scales: both or neither are accepted");
    r[G(a_global)] = r[G(b_global)] = r[G(bias)] = OP_OPTIONAL;
    op_allow_all(call, G(b_codes), G(b_scales), !repacked, OP_NEEDED,
                 " with b_repacked: one or the other is accepted");
    if (!repacked) op_reason(call, G(b_codes), ", and so is b_repacked: exactly one of them is accepted");
    r[G(b_repacked)] = OP_OPTIONAL;
    r[G(offsets)] = OP_NEEDED;
    r[G(c)] = backward ? OP_UNUSED : coded ? OP_OPTIONAL_RESULT : OP_RESULT;
    op_allow_all(call, G(c_codes), G(c_scales), backward || coded, backward ? OP_UNUSED : OP_RESULT, with_c);
    op_allow(call, G(c_global), backward || coded, backward ? OP_UNUSED : OP_NEEDED, with_c);
    op_allow(call, G(c_old), backward || !(coded || p->accumulate || activated),
             backward ? OP_UNUSED : OP_OPTIONAL,
             coded           ? " with a quantised output: one or the other is accepted"
             : p->accumulate ? " with accumulate: one or the other is accepted"
                             : " with an activation: one or the other is accepted");
    r[G(d_c)] = backward ? OP_NEEDED : OP_UNUSED;
    r[G(d_a)] = backward ? OP_RESULT : OP_UNUSED;
    if (coded) r[G(c)] = OP_UNUSED;
}

/* T, K and E from A and the offsets. */
static quern_status derive_rows(op_call *call)
{
    const quern_tensor *const *t = call->given;
    const int32_t a = t[G(a)] != NULL ? G(a) : G(a_codes);
    int64_t *s = call->symbol;
    const int64_t columns = t[a]->shape[1], values = a == G(a) ? 1 : 2; /* of an element */
    s[GS_E] = t[G(offsets)]->shape[0];
    s[GS_E1] = s[GS_E] + 1;
    if (columns > INT32_MAX / values || values * columns % QUERN_NVFP4_BLOCK != 0 || s[GS_T] > INT32_MAX)
        return error_argument(
            "%s is [%lld, %lld]: below 2^31 rows, and K a multiple of 16 below 2^31, are accepted",
            tensors[a].field, (long long)s[GS_T], (long long)columns);
    s[GS_K] = values * columns;
    if (PARAMS(call)->a8 != QUERN_NVFP4_A8_NONE && t[G(a)] == NULL)
        return error_argument("a8 is %s with a_codes: a, activations in floats, is accepted",
                              a8_words[PARAMS(call)->a8]);
    return QUERN_OK;
}

/* N from B's codes or the parameter. */
static quern_status derive_columns(op_call *call)
{
    const gemm_call *c = (const gemm_call *)call;
    const quern_tensor *b = call->given[G(b_codes)];
    int64_t *s = call->symbol;
    s[GS_N] = c->params.n;
    if (call->given[G(b_repacked)] != NULL) {
        if (s[GS_N] > 0) return QUERN_OK;
        return error_argument("n is 0 with b_repacked: the columns of B are accepted");
    }
    const int64_t n = b->shape[c->k_major ? 1 : 2], k = 2 * b->shape[c->k_major ? 2 : 1];
    if (k % QUERN_NVFP4_BLOCK != 0 || k > INT32_MAX || n > INT32_MAX)
        return error_argument(
            "b_codes hold K = 2 x %lld, N = %lld: K a multiple of 16, both below 2^31, is accepted",
            (long long)k / 2, (long long)n);
    if (k != s[GS_K])
        return error_argument("%s has K = %lld: b_codes' %lld is accepted",
                              tensors[call->given[G(a)] != NULL ? G(a) : G(a_codes)].field,
                              (long long)s[GS_K], (long long)k);
    if (s[GS_N] != 0 && s[GS_N] != n)
        return error_argument("n is %lld: b_codes' %lld columns, or 0, is accepted", (long long)s[GS_N],
                              (long long)n);
    if (b->shape[0] != s[GS_E])
        return error_argument("offsets.shape[0] is %lld: b_codes' %lld experts are accepted",
                              (long long)s[GS_E], (long long)b->shape[0]);
    s[GS_N] = n;
    return QUERN_OK;
}

static void set_lead(op_call *call, int32_t lead, int32_t count, int64_t x, int64_t y, int64_t z)
{
    call->lead[lead - OP_LEAD] = (op_extents){.count = count, .extent = {x, y, z}};
}

/* Sets the shapes whose number of dimensions depends on the call. */
static void derive_leads(op_call *call)
{
    const quern_nvfp4_gemm_params *p = op_params(call);
    const quern_tensor *const *t = call->given;
    const int64_t *s = call->symbol, shared[] = {0, s[GS_E], s[GS_T]}, blocks = s[GS_K] / QUERN_NVFP4_BLOCK;
    const quern_tensor *g = t[G(b_global)];
    const int32_t parts = g == NULL || g->ndim < 0 || op_is_one(g) ? 0 : g->ndim < 2 ? g->ndim : 2;
    if (t[G(pad_row_offsets)] != NULL)
        set_lead(call, GL_A_SCALES, 1,
                 t[G(a_scales)] != NULL && t[G(a_scales)]->ndim == 1 ? t[G(a_scales)]->shape[0] : 0, 0, 0);
    else set_lead(call, GL_A_SCALES, 2, s[GS_T], blocks, 0);
    set_lead(call, GL_A_GLOBAL, p->a_global_per != QUERN_NVFP4_GLOBAL_TENSOR, shared[p->a_global_per], 0, 0);
    call->lead[GL_B_SCALES - OP_LEAD] = nvfp4_scales_extents(p->b_scales, s[GS_E], blocks, s[GS_N]);
    set_lead(call, GL_B_GLOBAL, parts, s[GS_E], 2, 0);
    set_lead(call, GL_C_GLOBAL, t[G(c_global)] != NULL && !op_is_one(t[G(c_global)]), s[GS_E], 0, 0);
}

static quern_status derive_outputs(op_call *call)
{
    static const quern_dtype dtypes[] = {QUERN_F32, QUERN_F32, QUERN_BF16, QUERN_F16, QUERN_U8};
    const quern_nvfp4_gemm_params *p = op_params(call);
    const quern_tensor *const *t = call->given, *g = t[G(b_global)], *c = t[G(c)];
    int64_t *s = call->symbol;
    const bool swiglu = p->activation == QUERN_NVFP4_ACTIVATION_SWIGLU;
    if ((swiglu || (g != NULL && g->ndim == 2)) && s[GS_N] % (2 * p->granularity) != 0)
        return error_argument("N is %lld: gate and up in runs of %lld, a multiple of %lld, is accepted",
                              (long long)s[GS_N], (long long)p->granularity, 2 * (long long)p->granularity);
    if (is_coded(call) && p->accumulate)
        return error_argument("accumulate is true without c: an output in floats is accepted");
    for (int i = 0; i < 2; i++, c = t[G(c_old)])
        if (c != NULL && c->dtype == QUERN_U8)
            return error_argument("%s: dtype u8: f32, f16 and bf16 are accepted", i == 0 ? "c" : "c_old");
    if (op_uses(call, G(c_old)) && t[G(c)] != NULL && t[G(c)]->dtype != t[G(c_old)]->dtype)
        return error_argument("c_old: dtype %s: c's %s is accepted", quern_dtype_name(t[G(c_old)]->dtype),
                              quern_dtype_name(t[G(c)]->dtype));
    s[GS_OUT] = swiglu ? s[GS_N] / 2 : s[GS_N];
    s[GS_CODE_BLOCKS] = s[GS_OUT] / QUERN_NVFP4_BLOCK + (s[GS_OUT] % QUERN_NVFP4_BLOCK != 0);
    s[GS_CODE_COLUMNS] = s[GS_CODE_BLOCKS] * QUERN_NVFP4_BLOCK / 2;
    call->stored = dtypes[p->output];
    if (t[G(c_old)] != NULL) call->stored = t[G(c_old)]->dtype;
    else if (p->output == QUERN_NVFP4_OUTPUT_INPUT && t[G(a)] != NULL) call->stored = t[G(a)]->dtype;
    if (op_uses(call, G(c_old)) && t[G(c)] == NULL && p->output != QUERN_NVFP4_OUTPUT_INPUT &&
        call->stored != dtypes[p->output])
        return error_argument("c_old: dtype %s: output's %s is accepted", quern_dtype_name(call->stored),
                              quern_dtype_name(dtypes[p->output]));
    return QUERN_OK;
}

/* Whether sizes fit 64 bits: of rows of A and of the product in f32, and of B, repacked or not. (Rows and
 * experts may share their memory.) */
static quern_status check_sizes(const op_call *call)
{
    const int64_t *s = call->symbol, most = (int64_t)1 << 56, widest = s[GS_K] > s[GS_N] ? s[GS_K] : s[GS_N],
                  bytes = s[GS_BYTES] > 0 ? s[GS_BYTES] : s[GS_K] / QUERN_NVFP4_BLOCK * 9 * s[GS_N];
    if (widest > 0 && s[GS_T] > most / widest)
        return error_argument(
            "T is %lld, K %lld and N %lld: up to 2^56 numbers are accepted, above it sizes overflow",
            (long long)s[GS_T], (long long)s[GS_K], (long long)s[GS_N]);
    if (bytes == 0 || s[GS_E] <= most / bytes) return QUERN_OK;
    return error_argument(
        "E is %lld, K %lld and N %lld: up to 2^56 bytes of weights are accepted, above it sizes overflow",
        (long long)s[GS_E], (long long)s[GS_K], (long long)s[GS_N]);
}

static quern_status derive(op_call *call)
{
    const gemm_call *c = (const gemm_call *)call;
    int64_t *s = call->symbol;
    quern_status status = derive_rows(call);
    if (status == QUERN_OK)
        status = nvfp4_check_kind(call->given[G(a_global)], c->params.a_global_per, "a_global");
    if (status == QUERN_OK) status = derive_columns(call);
    if (status == QUERN_OK && (op_uses(call, G(b_repacked)) || c->params.prepack))
        status = op_repacked_bytes(call, s[GS_N], s[GS_K], &s[GS_BYTES]);
    if (status == QUERN_OK) status = check_sizes(call);
    if (status == QUERN_OK) status = derive_outputs(call);
    if (status != QUERN_OK) return status;
    s[GS_CODES_0] = c->k_major ? s[GS_N] : s[GS_K] / 2;
    s[GS_CODES_1] = c->k_major ? s[GS_K] / 2 : s[GS_N];
    derive_leads(call);
    return QUERN_OK;
}

const op_family nvfp4_gemm_family = {
    OP_TABLES(operations, params, symbols, ops),
    OP_ROWS(tensors, quern_nvfp4_gemm_tensors, QUERN_NVFP4_GEMM_TENSORS_INIT),
    OP_OWN_CALL(gemm_call, QUERN_NVFP4_GEMM_PARAMS_INIT),
    .first = QUERN_OP_NVFP4_GEMM,
    .leads = leads,
    .like = like,
    .check_params = check_params,
    .adapt = adapt,
    .roles = roles,
    .derive = derive,
    .build = nvfp4_gemm_build,
};
