/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* one_stage.h - the CUDA backend as tests of single stages call it, without the core. */
#ifndef QUERN_TESTS_GPU_ONE_STAGE_H
#define QUERN_TESTS_GPU_ONE_STAGE_H

#include "backend.h"
#include "cmocka_c11.h"
#include "core/error.h"
#include "runtime/cuda_plugin.h"

#include <cuda_runtime_api.h>

#define CHECK(call)                                                                                          \
    do {                                                                                                     \
        const cudaError_t code_ = (call);                                                                    \
        if (code_ != cudaSuccess) fail_msg("%s: %s", #call, cudaGetErrorString(code_));                      \
    } while (0)

quern_cuda_plugin_entry quern_cuda_backend;
static const quern_backend *cuda;
static stage_exec exec_here = {.device = QUERN_CUDA};

static int open_backend(void **state)
{
    (void)state;
    const quern_cuda_plugin *plugin = quern_cuda_backend(error_set);
    if (plugin->check_device(0) != QUERN_OK || plugin->properties(0, &exec_here) != QUERN_OK) return 1;
    cuda = plugin->backend;
    return 0;
}

#endif
