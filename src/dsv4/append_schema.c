/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* append_schema.c - an append's tensors, what the main compressor's say of its extents, and projections. */
#include "core/error.h"
#include "core/view.h"
#include "dsv4/call.h"

const op_tensor dsv4_append_rows[] = {
    {"proj", "proj", OP_ACTIVATION, OP_NONE, {DS_T, DS_COLUMNS}, {0}},
    {"x", "X", OP_ACTIVATION, OP_NONE, {DS_T, DS_IN}, {0}},
    {"w", "W", OP_WEIGHT, OP_NONE, {DS_IN, DS_COLUMNS}, {0}},
    {"b_a", "B_a", OP_WEIGHT, OP_NONE, {DS_R, DS_C}, {0}},
    {"b_b", "B_b", OP_WEIGHT, OP_NONE, {DS_R, DS_C}, {0}},
    {"norm_weight", "norm_weight", OP_WEIGHT, OP_NONE, {DS_C}, {0}},
    {"cos_sin", "cos_sin", OP_WEIGHT, OP_NONE, {DS_P, DS_ROPE}, {0}},
    {"out", "out", OP_STORED, OP_NONE, {OP_LEAD, DS_ROW}, {0}},
    {"pooled", "pooled", OP_F32, OP_NONE, {DS_N, DS_C}, {0}},
    DSV4_WEIGHT_TENSORS("w", "W_", DS_IN, DS_COLUMNS){"slots", "slots", OP_I32, OP_NONE, {DS_B}, {0}},
    {"positions", "positions", OP_I32, OP_NONE, {DS_B}, {0}},
    {"cu", "cu", OP_I32, OP_NONE, {DS_B1}, {0}},
    {"states", "states", OP_F32, OP_NONE, {DS_SLOTS, DS_FLOATS}, {0}},
    {"merged", "merged", OP_I32, OP_NONE, {DS_SLOTS}, {0}},
    {"copies", "copies", OP_I32, OP_NONE, {DS_COPIES, DS_COPY}, {0}},
    {"fault", "fault", OP_I32, OP_NONE, {DS_SLOTS}, {0}},
    {"index_proj", "index_proj", OP_ACTIVATION, OP_NONE, {DS_T, DS_ICOLUMNS}, {0}},
    {"index_w", "index_W", OP_WEIGHT, OP_NONE, {DS_IN, DS_ICOLUMNS}, {0}},
    {"index_b_a", "index_B_a", OP_WEIGHT, OP_NONE, {DS_R, DS_CI}, {0}},
    {"index_b_b", "index_B_b", OP_WEIGHT, OP_NONE, {DS_R, DS_CI}, {0}},
    {"index_norm_weight", "index_norm_weight", OP_WEIGHT, OP_NONE, {DS_CI}, {0}},
    {"index_out", "index_out", OP_STORED_2, OP_NONE, {OP_LEAD + 1, DS_IROW}, {0}},
    {"index_pooled", "index_pooled", OP_F32, OP_NONE, {DS_N, DS_CI}, {0}},
    DSV4_WEIGHT_TENSORS("index_w", "index_W_", DS_IN, DS_ICOLUMNS){
        "index_states", "index_states", OP_F32, OP_NONE, {DS_SLOTS, DS_IFLOATS}, {0}},
    {"index_merged", "index_merged", OP_I32, OP_NONE, {DS_SLOTS}, {0}},
    {"table", "table", OP_I32, OP_NONE, {DS_B, DS_TABLE}, {0}},
    {"index_table", "index_table", OP_I32, OP_NONE, {DS_B, DS_ITABLE}, {0}},
};
const dsv4_weight_row dsv4_append_weights[2] = {{{DP(w), OP_NONE}, DP(w_fp8)},
                                                {{DP(index_w), OP_NONE}, DP(index_w_fp8)}};

quern_status dsv4_append_derive(op_call *call, const quern_dsv4_compress_params *p, int64_t width)
{
    int64_t *s = call->symbol;
    quern_status status;
    s[DS_IN] = call->like.shape[1];
    s[DS_R] = p->ratio;
    s[DS_C] = width;
    s[DS_COLUMNS] = pool_row_columns(p->kind == QUERN_DSV4_CSA, width);
    s[DS_ROW] = dsv4_row_elements(p->format, width);
    call->stored = p->format == QUERN_DSV4_ROWS ? call->like.dtype : QUERN_U8;
    if ((status = dsv4_check_width(p, width, s[DS_ROPE])) != QUERN_OK ||
        (status = dsv4_weight_check(call, &dsv4_append_weights[0], s[DS_IN])) != QUERN_OK)
        return status;
    return op_uses(call, DP(out)) ? dsv4_check_stored(call, DP(out), p->format) : QUERN_OK;
}

static quern_tensor view(const op_build *b, int32_t tensor)
{
    return op_view(b->call, tensor, false);
}

quern_tensor dsv4_append_projection(op_build *b, bool index, dsv4_weight_given *given)
{
    const quern_tensor x = view(b, DP(x));
    if (x.ndim == 0) return view(b, index ? DP(index_proj) : DP(proj)); /* *given stays absent */
    *given = dsv4_weight_views(b->call, &dsv4_append_weights[index]);
    const dsv4_weight weight = dsv4_weight_add(b, &x, given, false);
    if (weight.proj.ndim > 0) return weight.proj;
    const quern_tensor proj =
        op_matrix(b, QUERN_F32, x.shape[0], b->call->symbol[index ? DS_ICOLUMNS : DS_COLUMNS]);
    *OP_ADD(b, gemm) = (gemm_args){.a = x, .b = weight.w, .c = proj};
    return proj;
}
