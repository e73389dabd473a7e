/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* variants.cu - for each stage its variants, in the order in which they are asked. A kernel is added by a
 * row. */
#include "stages.cuh"

#define LIST(rows)                                                                                           \
    {                                                                                                        \
        rows, sizeof rows / sizeof *rows                                                                     \
    }

static const variant<attend_args> attend_forward_rows[] = {
#ifdef QUERN_SM90
    {"attend_forward_sm90", attend_forward_sm90_supports, attend_forward_sm90_bytes, attend_forward_sm90_run},
    {"attend_forward_sm90_apart", attend_forward_sm90_apart_supports, attend_forward_sm90_apart_bytes,
     attend_forward_sm90_apart_run},
    {"attend_forward_sm90_tokens", attend_forward_sm90_tokens_supports, attend_forward_sm90_bytes,
     attend_forward_sm90_tokens_run},
    {"attend_forward_wgmma", attend_forward_wgmma_supports, NULL, attend_forward_wgmma_run},
#endif
    {"attend_forward_any", attend_forward_any_supports, NULL, attend_forward_any_run},
    {"attend_forward_f32", attend_forward_f32_supports, NULL, attend_forward_f32_run},
};
const variants<attend_args> attend_forward_variants = LIST(attend_forward_rows);

static const variant<attend_args> attend_backward_rows[] = {
#ifdef QUERN_SM90
    {"attend_backward_sm90", attend_backward_sm90_supports, attend_backward_sm90_bytes,
     attend_backward_sm90_run},
    {"attend_backward_sm90_lists", attend_backward_sm90_lists_supports, attend_backward_sm90_lists_bytes,
     attend_backward_sm90_lists_run},
    {"attend_backward_sm90_tokens", attend_backward_sm90_tokens_supports, attend_backward_sm90_tokens_bytes,
     attend_backward_sm90_tokens_run},
    {"attend_backward_wgmma", attend_backward_wgmma_supports, attend_backward_any_bytes,
     attend_backward_wgmma_run},
#endif
    {"attend_backward_any", attend_backward_any_supports, attend_backward_any_bytes, attend_backward_any_run},
    {"attend_backward_f32", attend_backward_f32_supports, attend_backward_f32_bytes, attend_backward_f32_run},
};
const variants<attend_args> attend_backward_variants = LIST(attend_backward_rows);

static const variant<compress_args> compress_forward_rows[] = {
    {"compress_forward_cublaslt", compress_cublaslt_supports, compress_forward_cublaslt_bytes,
     compress_forward_cublaslt_run},
    {"compress_forward_any", compress_supports, compress_forward_bytes, compress_forward_run},
};
const variants<compress_args> compress_forward_variants = LIST(compress_forward_rows);

static const variant<compress_args> compress_backward_rows[] = {
    {"compress_backward_cublaslt", compress_cublaslt_supports, compress_backward_cublaslt_bytes,
     compress_backward_cublaslt_run},
    {"compress_backward_any", compress_supports, compress_backward_bytes, compress_backward_run},
};
const variants<compress_args> compress_backward_variants = LIST(compress_backward_rows);

static const variant<select_args> select_rows[] = {
#ifdef QUERN_SM90
    {"select_sm90", select_sm90_supports, select_sm90_bytes, select_sm90_run},
#endif
    {"select_any", select_supports, select_bytes, select_run},
};
const variants<select_args> select_variants = LIST(select_rows);

static const variant<gate_args> gate_forward_rows[] = {
    {"gate_forward_any", gate_supports, NULL, gate_forward_run}};
const variants<gate_args> gate_forward_variants = LIST(gate_forward_rows);

static const variant<gate_args> gate_backward_rows[] = {
    {"gate_backward_any", gate_supports, gate_backward_bytes, gate_backward_run}};
const variants<gate_args> gate_backward_variants = LIST(gate_backward_rows);

#ifdef QUERN_SM90
static const variant<attend_gate_args> attend_gate_rows[] = {
    {"attend_gate_sm90", attend_gate_sm90_supports, attend_gate_sm90_bytes, attend_gate_sm90_run}};
const variants<attend_gate_args> attend_gate_variants = LIST(attend_gate_rows);
#endif

static const variant<attend_mqa_args> attend_mqa_forward_rows[] = {
#ifdef QUERN_SM90
    {"attend_mqa_sm90", attend_mqa_sm90_supports, attend_mqa_bytes, attend_mqa_sm90_run},
#endif
    {"attend_mqa_any", attend_mqa_any_supports, attend_mqa_bytes, attend_mqa_any_run},
};
const variants<attend_mqa_args> attend_mqa_forward_variants = LIST(attend_mqa_forward_rows);

static const variant<indexer_args> indexer_rows[] = {
#ifdef QUERN_SM90
    {"indexer_sm90", indexer_sm90_supports, NULL, indexer_sm90_run},
#endif
    {"indexer_any", indexer_any_supports, NULL, indexer_any_run},
};
const variants<indexer_args> indexer_variants = LIST(indexer_rows);

static const variant<convert_args> convert_rows[] = {{"convert_any", NULL, NULL, convert_run}};
const variants<convert_args> convert_variants = LIST(convert_rows);

static const variant<rowdot_args> rowdot_rows[] = {{"rowdot_any", NULL, NULL, rowdot_run}};
const variants<rowdot_args> rowdot_variants = LIST(rowdot_rows);

static const variant<list_convert_args> list_convert_rows[] = {
    {"list_convert_any", NULL, NULL, list_convert_run}};
const variants<list_convert_args> list_convert_variants = LIST(list_convert_rows);

static const variant<validate_lists_args> validate_lists_rows[] = {
    {"validate_lists_any", NULL, NULL, validate_lists_run},
};
const variants<validate_lists_args> validate_lists_variants = LIST(validate_lists_rows);
