/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* stages.cuh - the stage functions that backend.cu puts into the table, and what stages share. */
#ifndef QUERN_CUDA_STAGES_CUH
#define QUERN_CUDA_STAGES_CUH

#include "common/launch.cuh"

bool attend_forward_supports(const stage_exec *exec, const attend_args *args, char why[STAGE_WHY_BYTES]);
bool attend_backward_supports(const stage_exec *exec, const attend_args *args, char why[STAGE_WHY_BYTES]);
size_t attend_forward_bytes(const stage_exec *exec, const attend_args *args);
size_t attend_backward_bytes(const stage_exec *exec, const attend_args *args);
quern_status attend_forward_run(const stage_exec *exec, const attend_args *args, void *workspace);
quern_status attend_backward_run(const stage_exec *exec, const attend_args *args, void *workspace);
quern_status attend_forward_half(const attend_args *args, const launcher &to);
quern_status attend_forward_f32(const attend_args *args, const launcher &to);
quern_status attend_backward_f32(const stage_exec *exec, const attend_args *args, void *workspace, const launcher &to);

bool compress_supports(const stage_exec *exec, const compress_args *args, char why[STAGE_WHY_BYTES]);
size_t compress_forward_bytes(const stage_exec *exec, const compress_args *args);
size_t compress_backward_bytes(const stage_exec *exec, const compress_args *args);
quern_status compress_forward_run(const stage_exec *exec, const compress_args *args, void *workspace);
quern_status compress_backward_run(const stage_exec *exec, const compress_args *args, void *workspace);

bool select_supports(const stage_exec *exec, const select_args *args, char why[STAGE_WHY_BYTES]);
size_t select_bytes(const stage_exec *exec, const select_args *args);
quern_status select_run(const stage_exec *exec, const select_args *args, void *workspace);

bool gate_supports(const stage_exec *exec, const gate_args *args, char why[STAGE_WHY_BYTES]);
size_t gate_forward_bytes(const stage_exec *exec, const gate_args *args);
size_t gate_backward_bytes(const stage_exec *exec, const gate_args *args);
quern_status gate_forward_run(const stage_exec *exec, const gate_args *args, void *workspace);
quern_status gate_backward_run(const stage_exec *exec, const gate_args *args, void *workspace);

bool convert_supports(const stage_exec *exec, const convert_args *args, char why[STAGE_WHY_BYTES]);
size_t convert_bytes(const stage_exec *exec, const convert_args *args);
quern_status convert_run(const stage_exec *exec, const convert_args *args, void *workspace);
bool rowdot_supports(const stage_exec *exec, const rowdot_args *args, char why[STAGE_WHY_BYTES]);
size_t rowdot_bytes(const stage_exec *exec, const rowdot_args *args);
quern_status rowdot_run(const stage_exec *exec, const rowdot_args *args, void *workspace);
bool list_convert_supports(const stage_exec *exec, const list_convert_args *args, char why[STAGE_WHY_BYTES]);
size_t list_convert_bytes(const stage_exec *exec, const list_convert_args *args);
quern_status list_convert_run(const stage_exec *exec, const list_convert_args *args, void *workspace);
bool validate_lists_supports(const stage_exec *exec, const validate_lists_args *args, char why[STAGE_WHY_BYTES]);
size_t validate_lists_bytes(const stage_exec *exec, const validate_lists_args *args);
quern_status validate_lists_run(const stage_exec *exec, const validate_lists_args *args, void *workspace);

#endif
