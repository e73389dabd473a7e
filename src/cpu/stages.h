/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* stages.h - the CPU's stage functions, for the table in backend.c. */
#ifndef QUERN_CPU_STAGES_H
#define QUERN_CPU_STAGES_H

#include "backend.h"

/* The name of tile kernels: <operation>_<dtype of their products or rows>_<level>. */
void cpu_name_kernels(char text[STAGE_NAME_BYTES], const char *operation, bool bf16, quern_cpu_level level);

void cpu_attend_kernel(const stage_exec *exec, const attend_args *args, char text[STAGE_NAME_BYTES]);
size_t cpu_attend_forward_workspace(const stage_exec *exec, const attend_args *args);
quern_status cpu_attend_forward(const stage_exec *exec, const attend_args *args, void *workspace);
size_t cpu_attend_backward_workspace(const stage_exec *exec, const attend_args *args);
quern_status cpu_attend_backward(const stage_exec *exec, const attend_args *args, void *workspace);

quern_status cpu_rowdot(const stage_exec *exec, const rowdot_args *args, void *workspace);
void cpu_rowdot_kernel(const stage_exec *exec, const rowdot_args *args, char text[STAGE_NAME_BYTES]);

void cpu_compress_kernel(const stage_exec *exec, const compress_args *args, char text[STAGE_NAME_BYTES]);
size_t cpu_compress_workspace(const stage_exec *exec, const compress_args *args);
quern_status cpu_compress(const stage_exec *exec, const compress_args *args, void *workspace);
size_t cpu_compress_backward_workspace(const stage_exec *exec, const compress_args *args);
quern_status cpu_compress_backward(const stage_exec *exec, const compress_args *args, void *workspace);
void cpu_compress_backward_kernel(const stage_exec *exec, const compress_args *args,
                                  char text[STAGE_NAME_BYTES]);

void cpu_block_index_kernel(const stage_exec *exec, const block_index_args *args,
                            char text[STAGE_NAME_BYTES]);
size_t cpu_block_index_workspace(const stage_exec *exec, const block_index_args *args);
quern_status cpu_block_index(const stage_exec *exec, const block_index_args *args, void *workspace);

void cpu_index_loss_kernel(const stage_exec *exec, const index_loss_args *args, char text[STAGE_NAME_BYTES]);
size_t cpu_index_loss_workspace(const stage_exec *exec, const index_loss_args *args);
quern_status cpu_index_loss(const stage_exec *exec, const index_loss_args *args, void *workspace);

void cpu_select_kernel(const stage_exec *exec, const select_args *args, char text[STAGE_NAME_BYTES]);
size_t cpu_select_workspace(const stage_exec *exec, const select_args *args);
quern_status cpu_select(const stage_exec *exec, const select_args *args, void *workspace);

void cpu_attend_gate_kernel(const stage_exec *exec, const attend_gate_args *args,
                            char text[STAGE_NAME_BYTES]);
size_t cpu_attend_gate_workspace(const stage_exec *exec, const attend_gate_args *args);
quern_status cpu_attend_gate(const stage_exec *exec, const attend_gate_args *args, void *workspace);

void cpu_gate_kernel(const stage_exec *exec, const gate_args *args, char text[STAGE_NAME_BYTES]);
quern_status cpu_gate_forward(const stage_exec *exec, const gate_args *args, void *workspace);
size_t cpu_gate_backward_workspace(const stage_exec *exec, const gate_args *args);
quern_status cpu_gate_backward(const stage_exec *exec, const gate_args *args, void *workspace);

quern_status cpu_convert(const stage_exec *exec, const convert_args *args, void *workspace);
void cpu_convert_kernel(const stage_exec *exec, const convert_args *args, char text[STAGE_NAME_BYTES]);

quern_status cpu_list_convert(const stage_exec *exec, const list_convert_args *args, void *workspace);
void cpu_list_convert_kernel(const stage_exec *exec, const list_convert_args *args,
                             char text[STAGE_NAME_BYTES]);

quern_status cpu_validate_lists(const stage_exec *exec, const validate_lists_args *args, void *workspace);

size_t cpu_gemm_workspace(const stage_exec *exec, const gemm_args *args);
quern_status cpu_gemm(const stage_exec *exec, const gemm_args *args, void *workspace);
/* The same for products with one b, which differ in a, c and their rows: the workspace, that of the most
 * rows, keeps b's panels from the call that sets *packed on. */
void cpu_gemm_repeated(const stage_exec *exec, const gemm_args *args, void *workspace, bool *packed);

size_t cpu_pool_workspace(const stage_exec *exec, const pool_args *args);
void cpu_pool_kernel(const stage_exec *exec, const pool_args *args, char text[STAGE_NAME_BYTES]);
quern_status cpu_pool(const stage_exec *exec, const pool_args *args, void *workspace);
size_t cpu_pool_backward_workspace(const stage_exec *exec, const pool_args *args);
quern_status cpu_pool_backward(const stage_exec *exec, const pool_args *args, void *workspace);

size_t cpu_pool_append_workspace(const stage_exec *exec, const pool_append_args *args);
quern_status cpu_pool_append(const stage_exec *exec, const pool_append_args *args, void *workspace);

size_t cpu_norm_rope_workspace(const stage_exec *exec, const norm_rope_args *args);
quern_status cpu_norm_rope(const stage_exec *exec, const norm_rope_args *args, void *workspace);
quern_status cpu_norm_rope_backward(const stage_exec *exec, const norm_rope_args *args, void *workspace);

size_t cpu_indexer_workspace(const stage_exec *exec, const indexer_args *args);
quern_status cpu_indexer(const stage_exec *exec, const indexer_args *args, void *workspace);
void cpu_indexer_kernel(const stage_exec *exec, const indexer_args *args, char text[STAGE_NAME_BYTES]);

void cpu_indexer_loss_kernel(const stage_exec *exec, const indexer_loss_args *args,
                             char text[STAGE_NAME_BYTES]);
size_t cpu_indexer_loss_workspace(const stage_exec *exec, const indexer_loss_args *args);
quern_status cpu_indexer_loss(const stage_exec *exec, const indexer_loss_args *args, void *workspace);

quern_status cpu_copy_rows(const stage_exec *exec, const copy_rows_args *args, void *workspace);
quern_status cpu_cache_copy(const stage_exec *exec, const cache_copy_args *args, void *workspace);
size_t cpu_cache_compress_workspace(const stage_exec *exec, const cache_compress_args *args);
quern_status cpu_cache_compress(const stage_exec *exec, const cache_compress_args *args, void *workspace);
quern_status cpu_copy_pages(const stage_exec *exec, const copy_pages_args *args, void *workspace);
quern_status cpu_pack_rows(const stage_exec *exec, const pack_rows_args *args, void *workspace);
quern_status cpu_step_tokens(const stage_exec *exec, const step_tokens_args *args, void *workspace);
quern_status cpu_step_places(const stage_exec *exec, const step_places_args *args, void *workspace);
quern_status cpu_step_check(const stage_exec *exec, const step_check_args *args, void *workspace);
quern_status cpu_clear_rows(const stage_exec *exec, const clear_rows_args *args, void *workspace);
size_t cpu_decode_workspace(const stage_exec *exec, const decode_args *args);
quern_status cpu_decode(const stage_exec *exec, const decode_args *args, void *workspace);
size_t cpu_nsa_decode_workspace(const stage_exec *exec, const nsa_decode_args *args);
quern_status cpu_nsa_decode(const stage_exec *exec, const nsa_decode_args *args, void *workspace);
size_t cpu_index_decode_workspace(const stage_exec *exec, const index_decode_args *args);
quern_status cpu_index_decode(const stage_exec *exec, const index_decode_args *args, void *workspace);

bool cpu_attend_mqa_supports(const stage_exec *exec, const attend_mqa_args *args, char why[STAGE_WHY_BYTES]);
void cpu_attend_mqa_kernel(const stage_exec *exec, const attend_mqa_args *args, char text[STAGE_NAME_BYTES]);
size_t cpu_attend_mqa_workspace(const stage_exec *exec, const attend_mqa_args *args);
quern_status cpu_attend_mqa(const stage_exec *exec, const attend_mqa_args *args, void *workspace);
size_t cpu_attend_mqa_backward_workspace(const stage_exec *exec, const attend_mqa_args *args);
quern_status cpu_attend_mqa_backward(const stage_exec *exec, const attend_mqa_args *args, void *workspace);

size_t cpu_store_rows_workspace(const stage_exec *exec, const store_rows_args *args);
quern_status cpu_store_rows(const stage_exec *exec, const store_rows_args *args, void *workspace);

#endif
