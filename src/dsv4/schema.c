/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* schema.c - the compressors' tensors and parameters, the extents that follow from them, and the host's
 * checks of starts, counts and positions. */
#include "core/error.h"
#include "core/view.h"
#include "dsv4/call.h"

static const op_tensor tensors[] = {
    {"proj", "proj", OP_ACTIVATION, OP_NONE, {OP_LEAD, DS_T, DS_COLUMNS}, {DS_T, DS_COLUMNS}},
    {"x", "X", OP_ACTIVATION, OP_NONE, {OP_LEAD, DS_T, DS_IN}, {DS_T, DS_IN}},
    {"w", "W", OP_WEIGHT, OP_NONE, {DS_IN, DS_COLUMNS}, {0}},
    {"b_a", "B_a", OP_WEIGHT, OP_NONE, {DS_R, DS_C}, {0}},
    {"b_b", "B_b", OP_WEIGHT, OP_NONE, {DS_R, DS_C}, {0}},
    {"prev_b", "prev_b", OP_WEIGHT, OP_NONE, {OP_LEAD, DS_R, DS_2C}, {DS_B, DS_R, DS_2C}},
    {"norm_weight", "norm_weight", OP_WEIGHT, OP_NONE, {DS_C}, {0}},
    {"cos_sin", "cos_sin", OP_WEIGHT, OP_NONE, {DS_P, DS_ROPE}, {0}},
    {"cu_seqlens", "cu_seqlens", OP_I32, OP_NONE, {DS_B1}, {0}},
    {"start_tokens", "start_tokens", OP_I32, OP_NONE, {DS_B}, {0}},
    {"start_positions", "start_positions", OP_I32, OP_NONE, {DS_B}, {0}},
    {"block_counts", "block_counts", OP_I32, OP_NONE, {DS_B}, {0}},
    {"has_prev", "has_prev", OP_I32, OP_NONE, {DS_B}, {0}},
    {"cu_seqlens_cmp", "cu_seqlens_cmp", OP_I32, OP_NONE, {DS_B1}, {0}},
    {"pooled", "pooled", OP_F32, OP_NONE, {OP_LEAD, DS_N, DS_C}, {DS_N, DS_C}},
    {"out", "out", OP_STORED, OP_NONE, {OP_LEAD, DS_N, DS_ROW}, {DS_N, DS_ROW}},
    {"d_out", "d_out", OP_STORED, DC(out), {OP_LEAD, DS_N, DS_C}, {DS_N, DS_C}},
    {"d_proj", "d_proj", OP_ACTIVATION, DC(proj), {OP_LEAD, DS_T, DS_COLUMNS}, {DS_T, DS_COLUMNS}},
    {"d_x", "dX", OP_ACTIVATION, DC(x), {OP_LEAD, DS_T, DS_IN}, {DS_T, DS_IN}},
    {"d_prev_b", "dprev_b", OP_SOURCE, DC(prev_b), {OP_LEAD, DS_R, DS_2C}, {DS_B, DS_R, DS_2C}},
    {"d_w", "dW", OP_F32, DC(w), {DS_IN, DS_COLUMNS}, {0}},
    {"d_b_a", "dB_a", OP_F32, DC(b_a), {DS_R, DS_C}, {0}},
    {"d_b_b", "dB_b", OP_F32, DC(b_b), {DS_R, DS_C}, {0}},
    {"d_norm_weight", "dnorm_weight", OP_F32, DC(norm_weight), {DS_C}, {0}},
    {"index_proj", "index_proj", OP_ACTIVATION, OP_NONE, {OP_LEAD, DS_T, DS_ICOLUMNS}, {DS_T, DS_ICOLUMNS}},
    {"index_w", "index_W", OP_WEIGHT, OP_NONE, {DS_IN, DS_ICOLUMNS}, {0}},
    {"index_b_a", "index_B_a", OP_WEIGHT, OP_NONE, {DS_R, DS_CI}, {0}},
    {"index_b_b", "index_B_b", OP_WEIGHT, OP_NONE, {DS_R, DS_CI}, {0}},
    {"index_prev_b", "index_prev_b", OP_WEIGHT, OP_NONE, {OP_LEAD, DS_R, DS_2CI}, {DS_B, DS_R, DS_2CI}},
    {"index_norm_weight", "index_norm_weight", OP_WEIGHT, OP_NONE, {DS_CI}, {0}},
    {"index_pooled", "index_pooled", OP_F32, OP_NONE, {OP_LEAD, DS_N, DS_CI}, {DS_N, DS_CI}},
    {"index_out", "index_out", OP_STORED_2, OP_NONE, {OP_LEAD, DS_N, DS_IROW}, {DS_N, DS_IROW}},
    {"index_d_out", "index_d_out", OP_STORED_2, DC(index_out), {OP_LEAD, DS_N, DS_CI}, {DS_N, DS_CI}},
    {"index_d_proj",
     "dindex_proj",
     OP_ACTIVATION,
     DC(index_proj),
     {OP_LEAD, DS_T, DS_ICOLUMNS},
     {DS_T, DS_ICOLUMNS}},
    {"index_d_prev_b",
     "dindex_prev_b",
     OP_SOURCE,
     DC(index_prev_b),
     {OP_LEAD, DS_R, DS_2CI},
     {DS_B, DS_R, DS_2CI}},
    {"index_d_w", "dindex_W", OP_F32, DC(index_w), {DS_IN, DS_ICOLUMNS}, {0}},
    {"index_d_b_a", "dindex_B_a", OP_F32, DC(index_b_a), {DS_R, DS_CI}, {0}},
    {"index_d_b_b", "dindex_B_b", OP_F32, DC(index_b_b), {DS_R, DS_CI}, {0}},
    {"index_d_norm_weight", "dindex_norm_weight", OP_F32, DC(index_norm_weight), {DS_CI}, {0}},
    DSV4_WEIGHT_TENSORS("w", "W_", DS_IN, DS_COLUMNS)
        DSV4_WEIGHT_TENSORS("index_w", "index_W_", DS_IN, DS_ICOLUMNS)};

const dsv4_weight_row dsv4_compress_weights[2] = {{{DC(w), OP_NONE}, DC(w_fp8)},
                                                  {{DC(index_w), OP_NONE}, DC(index_w_fp8)}};
static const dsv4_weight_row *const main_weight = &dsv4_compress_weights[0], *const index_weight =
                                                                                 &dsv4_compress_weights[1];

static const char *const kinds[] = {"csa", "hca", NULL}, *const ends[] = {"first", "last", NULL};
#define FIELD(member) OP_FIELD(quern_dsv4_compress_params, member)
/* Those that an append has, too, come first. */
const op_param dsv4_compress_param_rows[DSV4_COMPRESS_PARAMS] = {
    {FIELD(kind), OP_CHOICE, 0, 1, kinds, "overlapping blocks with two series, or one series"},
    {FIELD(ratio), OP_INTEGER, 0, DSV4_RATIO_MOST, NULL, "r, tokens of a block; 0: 4 (csa), 128 (hca)"},
    {FIELD(rope_last), OP_FLAG, 0, 1, ends, "the token of a block whose position rotates its entry"},
    {FIELD(round_bf16), OP_FLAG, 0, 1, NULL, "round pooled rows before the norm"},
    {FIELD(hadamard), OP_FLAG, 0, 1, NULL, "Walsh-Hadamard transform of the entries"},
    {FIELD(eps), OP_POSITIVE, 0, 0, NULL, "of the norm; 0: 1e-6"},
    {FIELD(format), OP_CHOICE, 0, QUERN_DSV4_ROW584, dsv4_formats, "of out"},
    {FIELD(index_format), OP_CHOICE, 0, QUERN_DSV4_FP4, dsv4_key_formats, "of index_out"},
    {FIELD(index_hadamard), OP_FLAG, 0, 1, NULL, "transform of the indexer's entries"},
    {FIELD(start_token), OP_INTEGER, 0, INT32_MAX, NULL, "row where the first block starts"},
    {FIELD(start_abs_pos), OP_INTEGER, 0, INT32_MAX, NULL, "its position; a multiple of r unless rope_last"},
    {FIELD(n_blocks), OP_INTEGER, 0, INT32_MAX, NULL, "entries of a sequence; 0: all whole blocks"},
};
static const int8_t like[] = {DC(x), DC(proj), OP_NONE};
static const char *const operations[] = {"dsv4_compress", "dsv4_compress_backward"};

const char dsv4_compress_symbols[] = "B B+1 T 4C|2C Dm r C 2C P R n C|bytes 4C_I C_I 2C_I C_I|bytes slots "
                                     "floats copies 3 index_floats columns index_columns";
static const op_rename csa_renames[] = {{"rope_last", "rope-at", NULL}, {NULL, NULL, NULL}};
static const op_rename hca_renames[] = {
    {"rope_last", "rope-at", NULL}, {"b_a", "B", NULL}, {"d_b_a", "dB", NULL}, {NULL, NULL, NULL}};
#define COMPRESS_HELP                                                                                        \
    "DeepSeek-V4's compressor, one shot or in pieces; with d_out also its backward. X and proj may have a "  \
    "leading batch extent; "                                                                                 \
    "with cu_seqlens n is floor(T / r)"
static const op_entry ops[] = {
    {.name = "csa-compress",
     .help = COMPRESS_HELP,
     .forward = DSV4_COMPRESS,
     .backward = DSV4_COMPRESS_BACKWARD,
     .renames = csa_renames,
     .fixed = "kind",
     .fixed_to = QUERN_DSV4_CSA},
    {.name = "hca-compress",
     .help = COMPRESS_HELP,
     .forward = DSV4_COMPRESS,
     .backward = DSV4_COMPRESS_BACKWARD,
     .renames = hca_renames,
     .fixed = "kind",
     .fixed_to = QUERN_DSV4_HCA},
};

#define PARAMS(call) ((quern_dsv4_compress_params *)op_params(call))

static quern_status check_params(op_call *call)
{
    return dsv4_resolve(&((dsv4_compress_call *)call)->params);
}

/* The indexer's compressor, which is there with index_b_a. */
static void index_roles(op_call *call, bool csa, bool backward)
{
    const quern_tensor *const *t = call->given;
    const bool both = csa && t[DC(index_b_a)] != NULL;
    uint8_t *r = call->role;
    for (int i = DC(index_proj); i <= DC(index_d_out); i++) r[i] = OP_REFUSED;
    dsv4_weight_roles(call, index_weight, both && t[DC(x)] != NULL);
    if (csa) r[DC(index_b_a)] = OP_OPTIONAL;
    if (!both) return;
    r[DC(index_proj)] = t[DC(x)] != NULL ? OP_REFUSED : OP_NEEDED;
    r[DC(index_b_b)] = OP_NEEDED;
    r[DC(index_prev_b)] = t[DC(prev_b)] != NULL ? OP_NEEDED : OP_REFUSED;
    r[DC(index_norm_weight)] = OP_OPTIONAL;
    r[DC(index_pooled)] = backward ? OP_UNUSED : OP_OPTIONAL_RESULT;
    r[DC(index_out)] = backward ? OP_UNUSED : OP_RESULT;
    r[DC(index_d_out)] = backward ? OP_NEEDED : OP_UNUSED;
}

static void roles(op_call *call)
{
    const bool csa = PARAMS(call)->kind == QUERN_DSV4_CSA,
               backward = call->operation == DSV4_COMPRESS_BACKWARD;
    const quern_tensor *const *t = call->given;
    uint8_t *r = call->role;
    r[DC(proj)] = t[DC(x)] != NULL ? OP_REFUSED : OP_NEEDED;
    if (t[DC(x)] == NULL) op_reason(call, DC(proj), ": proj, or x and w, are needed");
    r[DC(x)] = OP_OPTIONAL;
    r[DC(b_a)] = OP_NEEDED;
    r[DC(b_b)] = csa ? OP_NEEDED : OP_REFUSED;
    r[DC(prev_b)] = csa ? OP_OPTIONAL : OP_REFUSED;
    r[DC(norm_weight)] = r[DC(cos_sin)] = r[DC(cu_seqlens)] = OP_OPTIONAL;
    r[DC(start_tokens)] = r[DC(start_positions)] = r[DC(block_counts)] =
        call->varlen ? OP_OPTIONAL : OP_REFUSED;
    r[DC(has_prev)] = call->varlen && t[DC(prev_b)] != NULL ? OP_OPTIONAL : OP_REFUSED;
    r[DC(cu_seqlens_cmp)] = backward ? OP_UNUSED : call->varlen ? OP_OPTIONAL_RESULT : OP_REFUSED;
    r[DC(pooled)] = backward ? OP_UNUSED : OP_OPTIONAL_RESULT;
    r[DC(out)] = backward ? OP_UNUSED : OP_RESULT;
    r[DC(d_out)] = backward ? OP_NEEDED : OP_UNUSED;
    dsv4_weight_roles(call, main_weight, t[DC(x)] != NULL);
    index_roles(call, csa, backward);
    for (int i = DC(d_proj); i <= DC(index_d_norm_weight); i++)
        if (i <= DC(d_norm_weight) || i >= DC(index_d_proj))
            r[i] = !backward                                         ? OP_UNUSED
                   : t[tensors[i].gradient_of] == NULL               ? OP_SOURCE_MISSING
                   : !csa && r[tensors[i].gradient_of] == OP_REFUSED ? OP_REFUSED
                                                                     : OP_OPTIONAL_RESULT;
}

static const char *refuse(const op_call *call, int32_t tensor, char text[OP_REASON])
{
    const bool packed = dsv4_weight_has(main_weight, tensor) || dsv4_weight_has(index_weight, tensor),
               weight = packed || tensor == DC(w) || tensor == DC(index_w);
    const bool index = tensor >= DC(index_proj) && !dsv4_weight_has(main_weight, tensor);
    if (tensor == DC(proj)) return ": proj alone, or x and w are accepted";
    if (tensor == DC(b_b) || tensor == DC(prev_b)) return ": HCA has no series b";
    if (tensor == DC(has_prev)) return ": it stands beside prev_b and cu_seqlens";
    if (tensor == DC(cu_seqlens_cmp)) return ": it stands beside cu_seqlens";
    if (index && PARAMS(call)->kind != QUERN_DSV4_CSA) return ": HCA has no indexer";
    if (index && call->given[DC(index_b_a)] == NULL) return ": it stands beside index_b_a";
    if (weight && call->given[DC(x)] == NULL) return ": it stands beside x";
    if (weight) return dsv4_weight_refuse(call, index ? index_weight : main_weight, tensor, text);
    if (tensor == DC(index_proj)) return ": it stands beside proj";
    if (tensor == DC(index_prev_b)) return ": it stands beside prev_b";
    return ": it stands beside cu_seqlens; a parameter holds for all sequences";
}

/* Sets the number of entries. Checks that start_token and n_blocks are within the tokens of every sequence of
 * fixed length. */
static quern_status derive_entries(op_call *call)
{
    const quern_dsv4_compress_params *p = op_params(call);
    const int64_t tokens = call->symbol[DS_T], whole = (tokens - p->start_token) / p->ratio;
    call->symbol[DS_N] = call->varlen ? tokens / p->ratio : p->n_blocks > 0 ? p->n_blocks : whole;
    if (!call->varlen && p->start_token > tokens)
        return error_argument("start_token is %lld: 0 to the %lld tokens of a sequence are accepted",
                              (long long)p->start_token, (long long)tokens);
    if (call->varlen && p->n_blocks > 0)
        return error_argument("n_blocks is %lld with cu_seqlens: 0, or block_counts, is accepted",
                              (long long)p->n_blocks);
    if (!call->varlen && p->n_blocks > whole)
        return error_argument(
            "n_blocks is %lld: 0 (all) to the %lld whole blocks after start_token are accepted",
            (long long)p->n_blocks, (long long)whole);
    return QUERN_OK;
}

/* Dtypes of a compressor's tensors that depend on more than the activations'. */
static quern_status check_dtypes(const op_call *call, quern_dsv4_format format, int out, int d_out)
{
    const quern_tensor *const *t = call->given;
    const quern_status status = op_uses(call, out) ? dsv4_check_stored(call, out, format) : QUERN_OK;
    if (status != QUERN_OK) return status;
    if (op_uses(call, d_out) && t[d_out]->dtype == QUERN_U8)
        return error_argument("%s has dtype u8: f32, f16 or bf16 is accepted", tensors[d_out].field);
    return QUERN_OK;
}

/* The extents of the indexer's compressor; 0 where the call has none. */
static quern_status derive_index(op_call *call)
{
    const quern_dsv4_compress_params *p = op_params(call);
    const quern_dsv4_compress_params own = {.hadamard = p->index_hadamard, .format = p->index_format};
    int64_t *s = call->symbol;
    if (!op_uses(call, DC(index_b_a))) return QUERN_OK;
    s[DS_2CI] = 2 * s[DS_CI];
    s[DS_ICOLUMNS] = 4 * s[DS_CI];
    call->stored_2 = own.format == QUERN_DSV4_ROWS ? call->like.dtype : QUERN_U8;
    s[DS_IROW] = dsv4_row_elements(own.format, s[DS_CI]);
    const quern_status status = dsv4_check_width(&own, s[DS_CI], s[DS_ROPE]);
    return status == QUERN_OK ? check_dtypes(call, own.format, DC(index_out), DC(index_d_out)) : status;
}

/* Entry b of an i32 tensor, if the tensor is present. */
static int64_t value_at(const void *data, int64_t b, int64_t otherwise)
{
    return data != NULL ? ((const int32_t *)data)[b] : otherwise;
}

static quern_status check_sequence(const op_call *call, void *const *data, int64_t b)
{
    const quern_dsv4_compress_params *p = op_params(call);
    const int32_t *cu = data[DC(cu_seqlens)];
    const int64_t n = cu != NULL ? cu[b + 1] - cu[b] : call->symbol[DS_T],
                  start = value_at(data[DC(start_tokens)], b, p->start_token);
    const int64_t position = value_at(data[DC(start_positions)], b, p->start_abs_pos),
                  whole = (n - start) / p->ratio;
    const int64_t blocks = value_at(data[DC(block_counts)], b, p->n_blocks > 0 ? p->n_blocks : whole);
    const int64_t last = position + (blocks - 1) * p->ratio + (p->rope_last ? p->ratio - 1 : 0);
    if (start < 0 || start > n)
        return error_argument("sequence %lld starts at token %lld: 0 to its %lld tokens are accepted",
                              (long long)b, (long long)start, (long long)n);
    if (blocks < 0 || blocks > whole)
        return error_argument("sequence %lld has block count %lld: 0 to its %lld whole blocks are accepted",
                              (long long)b, (long long)blocks, (long long)whole);
    if (position < 0 || (!p->rope_last && position % p->ratio != 0))
        return error_argument(
            "sequence %lld starts at position %lld: %s accepted", (long long)b, (long long)position,
            position < 0 ? "0 or more is" : "multiples of ratio are, unless rope_last is set,");
    if (blocks > 0 && call->symbol[DS_ROPE] > 0 && last >= call->symbol[DS_P])
        return error_argument(
            "sequence %lld comes to an entry at position %lld: cos_sin has positions 0 to %lld", (long long)b,
            (long long)last, (long long)call->symbol[DS_P] - 1);
    return QUERN_OK;
}

static quern_status derive(op_call *call)
{
    const quern_tensor *const *t = call->given;
    const quern_dsv4_compress_params *p = op_params(call);
    const int32_t first = t[DC(x)] != NULL ? DC(x) : DC(proj);
    const quern_tensor *main = t[first];
    int64_t *s = call->symbol;
    const int32_t ndim = !call->varlen && main->ndim == 3 ? 3 : 2;
    quern_status status = op_check_ndim(call, first, ndim);
    s[DS_B] = 1;
    if (status == QUERN_OK && (call->varlen || ndim == 3))
        status = op_find_batch(call, DC(cu_seqlens), main, &s[DS_B]);
    if (status != QUERN_OK) return status;
    call->lead[0].count = ndim - 2;
    call->lead[0].extent[0] = main->shape[0];
    s[DS_B1] = s[DS_B] + 1;
    call->stored = p->format == QUERN_DSV4_ROWS ? main->dtype : QUERN_U8;
    s[DS_T] = main->shape[ndim - 2];
    s[DS_IN] = main->shape[ndim - 1];
    s[DS_R] = p->ratio;
    s[DS_2C] = 2 * s[DS_C];
    s[DS_COLUMNS] = (p->kind == QUERN_DSV4_CSA ? 4 : 2) * s[DS_C];
    s[DS_ROW] = dsv4_row_elements(p->format, s[DS_C]);
    if (s[DS_T] > INT32_MAX)
        return error_argument("%s has %lld tokens: at most %d are accepted", tensors[first].field,
                              (long long)s[DS_T], INT32_MAX);
    if ((status = dsv4_check_width(p, s[DS_C], s[DS_ROPE])) != QUERN_OK ||
        (status = derive_entries(call)) != QUERN_OK)
        return status;
    if ((status = check_dtypes(call, p->format, DC(out), DC(d_out))) != QUERN_OK ||
        (status = dsv4_weight_check(call, main_weight, s[DS_IN])) != QUERN_OK ||
        (status = dsv4_weight_check(call, index_weight, s[DS_IN])) != QUERN_OK)
        return status;
    if ((status = derive_index(call)) != QUERN_OK || call->varlen) return status;
    void *const none[OP_TENSOR_COUNT(quern_dsv4_compress_tensors)] = {NULL};
    return check_sequence(call, none, 0);
}

static quern_status check_data(const op_call *call, void *const *data)
{
    quern_status status = QUERN_OK;
    if (call->varlen)
        status =
            view_check_offsets(data[DC(cu_seqlens)], call->symbol[DS_B], "cu_seqlens", call->symbol[DS_T]);
    const int64_t sequences = call->varlen ? dsv4_compress_sequences(call) : 0;
    for (int64_t b = 0; b < sequences && status == QUERN_OK; b++) status = check_sequence(call, data, b);
    const dsv4_weight_given *weights = ((const dsv4_compress_call *)call)->weights;
    for (int i = 0; i < 2 && status == QUERN_OK; i++)
        status = dsv4_weight_check_data(call, &dsv4_compress_weights[i], &weights[i], data);
    return status;
}

const op_family dsv4_compress_family = {
    OP_TABLES(operations, dsv4_compress_param_rows, dsv4_compress_symbols, ops),
    OP_ROWS(tensors, quern_dsv4_compress_tensors, QUERN_DSV4_COMPRESS_TENSORS_INIT),
    OP_OWN_CALL(dsv4_compress_call, QUERN_DSV4_COMPRESS_PARAMS_INIT),
    .first = QUERN_OP_DSV4_COMPRESS,
    .varlen_by = DC(cu_seqlens),
    .group = "compressors",
    .like = like,
    .check_params = check_params,
    .roles = roles,
    .refuse = refuse,
    .derive = derive,
    .check_data = check_data,
    .build = dsv4_compress_build,
};
