/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* replay.cuh - the rows of the stage table that start a call's launches as one graph, and beside each other
 * in it. */
#ifndef QUERN_CUDA_REPLAY_CUH
#define QUERN_CUDA_REPLAY_CUH

#include "common/device.cuh"

extern "C" {
#include "backend.h"
}

void *replay_open(const stage_exec *exec, size_t bytes);
void replay_close(void *kept);
quern_status replay_run(void *kept, const stage_exec *exec, const void *addresses, backend_run *run,
                        const void *arg);
bool capture_point(const stage_exec *exec, backend_point *point);
quern_status capture_resume(const stage_exec *exec, const backend_point *const *points, int32_t count);

#endif
