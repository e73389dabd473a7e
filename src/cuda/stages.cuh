/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* stages.cuh - the functions of the variants in variants.cu. */
#ifndef QUERN_CUDA_STAGES_CUH
#define QUERN_CUDA_STAGES_CUH

#include "variants.cuh"

/* any/: each GPU since sm_80. */
bool attend_forward_any_supports(const stage_exec *exec, const attend_args *args, char why[STAGE_WHY_BYTES]);
quern_status attend_forward_any_run(const stage_exec *exec, const attend_args *args, void *workspace);
bool attend_forward_f32_supports(const stage_exec *exec, const attend_args *args, char why[STAGE_WHY_BYTES]);
quern_status attend_forward_f32_run(const stage_exec *exec, const attend_args *args, void *workspace);
bool attend_backward_any_supports(const stage_exec *exec, const attend_args *args, char why[STAGE_WHY_BYTES]);
size_t attend_backward_any_bytes(const stage_exec *exec, const attend_args *args);
quern_status attend_backward_any_run(const stage_exec *exec, const attend_args *args, void *workspace);
bool attend_backward_f32_supports(const stage_exec *exec, const attend_args *args, char why[STAGE_WHY_BYTES]);
size_t attend_backward_f32_bytes(const stage_exec *exec, const attend_args *args);
quern_status attend_backward_f32_run(const stage_exec *exec, const attend_args *args, void *workspace);

bool compress_supports(const stage_exec *exec, const compress_args *args, char why[STAGE_WHY_BYTES]);
size_t compress_forward_bytes(const stage_exec *exec, const compress_args *args);
size_t compress_backward_bytes(const stage_exec *exec, const compress_args *args);
quern_status compress_forward_run(const stage_exec *exec, const compress_args *args, void *workspace);
quern_status compress_backward_run(const stage_exec *exec, const compress_args *args, void *workspace);
bool compress_cublaslt_supports(const stage_exec *exec, const compress_args *args, char why[STAGE_WHY_BYTES]);
size_t compress_forward_cublaslt_bytes(const stage_exec *exec, const compress_args *args);
size_t compress_backward_cublaslt_bytes(const stage_exec *exec, const compress_args *args);
quern_status compress_forward_cublaslt_run(const stage_exec *exec, const compress_args *args,
                                           void *workspace);
quern_status compress_backward_cublaslt_run(const stage_exec *exec, const compress_args *args,
                                            void *workspace);

bool select_supports(const stage_exec *exec, const select_args *args, char why[STAGE_WHY_BYTES]);
size_t select_bytes(const stage_exec *exec, const select_args *args);
quern_status select_run(const stage_exec *exec, const select_args *args, void *workspace);

bool gate_supports(const stage_exec *exec, const gate_args *args, char why[STAGE_WHY_BYTES]);
size_t gate_backward_bytes(const stage_exec *exec, const gate_args *args);
quern_status gate_forward_run(const stage_exec *exec, const gate_args *args, void *workspace);
quern_status gate_backward_run(const stage_exec *exec, const gate_args *args, void *workspace);

quern_status convert_run(const stage_exec *exec, const convert_args *args, void *workspace);
quern_status rowdot_run(const stage_exec *exec, const rowdot_args *args, void *workspace);
quern_status list_convert_run(const stage_exec *exec, const list_convert_args *args, void *workspace);
quern_status validate_lists_run(const stage_exec *exec, const validate_lists_args *args, void *workspace);

size_t attend_mqa_bytes(const stage_exec *exec, const attend_mqa_args *args);
bool attend_mqa_any_supports(const stage_exec *exec, const attend_mqa_args *args, char why[STAGE_WHY_BYTES]);
quern_status attend_mqa_any_run(const stage_exec *exec, const attend_mqa_args *args, void *workspace);
bool indexer_any_supports(const stage_exec *exec, const indexer_args *args, char why[STAGE_WHY_BYTES]);
quern_status indexer_any_run(const stage_exec *exec, const indexer_args *args, void *workspace);

/* sm90/: compute capability 9.0, where its code is compiled. By TMA and specialised warps; by any's kernels
 * with warpgroup products. */
#ifdef QUERN_SM90
bool attend_forward_sm90_supports(const stage_exec *exec, const attend_args *args, char why[STAGE_WHY_BYTES]);
size_t attend_forward_sm90_bytes(const stage_exec *exec, const attend_args *args);
quern_status attend_forward_sm90_run(const stage_exec *exec, const attend_args *args, void *workspace);
bool attend_forward_sm90_apart_supports(const stage_exec *exec, const attend_args *args,
                                        char why[STAGE_WHY_BYTES]);
size_t attend_forward_sm90_apart_bytes(const stage_exec *exec, const attend_args *args);
quern_status attend_forward_sm90_apart_run(const stage_exec *exec, const attend_args *args, void *workspace);
bool attend_forward_sm90_tokens_supports(const stage_exec *exec, const attend_args *args,
                                         char why[STAGE_WHY_BYTES]);
quern_status attend_forward_sm90_tokens_run(const stage_exec *exec, const attend_args *args, void *workspace);
bool attend_forward_wgmma_supports(const stage_exec *exec, const attend_args *args,
                                   char why[STAGE_WHY_BYTES]);
quern_status attend_forward_wgmma_run(const stage_exec *exec, const attend_args *args, void *workspace);
bool attend_backward_sm90_supports(const stage_exec *exec, const attend_args *args,
                                   char why[STAGE_WHY_BYTES]);
size_t attend_backward_sm90_bytes(const stage_exec *exec, const attend_args *args);
quern_status attend_backward_sm90_run(const stage_exec *exec, const attend_args *args, void *workspace);
bool attend_backward_sm90_lists_supports(const stage_exec *exec, const attend_args *args,
                                         char why[STAGE_WHY_BYTES]);
size_t attend_backward_sm90_lists_bytes(const stage_exec *exec, const attend_args *args);
quern_status attend_backward_sm90_lists_run(const stage_exec *exec, const attend_args *args, void *workspace);
bool attend_backward_sm90_tokens_supports(const stage_exec *exec, const attend_args *args,
                                          char why[STAGE_WHY_BYTES]);
size_t attend_backward_sm90_tokens_bytes(const stage_exec *exec, const attend_args *args);
quern_status attend_backward_sm90_tokens_run(const stage_exec *exec, const attend_args *args,
                                             void *workspace);
bool attend_backward_wgmma_supports(const stage_exec *exec, const attend_args *args,
                                    char why[STAGE_WHY_BYTES]);
quern_status attend_backward_wgmma_run(const stage_exec *exec, const attend_args *args, void *workspace);
bool attend_gate_sm90_supports(const stage_exec *exec, const attend_gate_args *args,
                               char why[STAGE_WHY_BYTES]);
size_t attend_gate_sm90_bytes(const stage_exec *exec, const attend_gate_args *args);
quern_status attend_gate_sm90_run(const stage_exec *exec, const attend_gate_args *args, void *workspace);
bool select_sm90_supports(const stage_exec *exec, const select_args *args, char why[STAGE_WHY_BYTES]);
size_t select_sm90_bytes(const stage_exec *exec, const select_args *args);
quern_status select_sm90_run(const stage_exec *exec, const select_args *args, void *workspace);
bool attend_mqa_sm90_supports(const stage_exec *exec, const attend_mqa_args *args, char why[STAGE_WHY_BYTES]);
quern_status attend_mqa_sm90_run(const stage_exec *exec, const attend_mqa_args *args, void *workspace);
bool indexer_sm90_supports(const stage_exec *exec, const indexer_args *args, char why[STAGE_WHY_BYTES]);
quern_status indexer_sm90_run(const stage_exec *exec, const indexer_args *args, void *workspace);
#endif

#endif
