/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* faults_case.h - calls on device memory with a status word, for tests of faults in their data. */
#ifndef QUERN_GPU_FAULTS_CASE_H
#define QUERN_GPU_FAULTS_CASE_H

#include <quern/cuda.h>

#define OK(call)                                                                                             \
    do {                                                                                                     \
        if ((call) != QUERN_OK) fail_msg("%s: %s", #call, quern_last_error(NULL));                           \
    } while (0)

extern quern_context *ctx;

/* Makes the context and the status word: a group's setup. */
int start(void **unused);
/* A tensor in device memory with the bytes at `from`. */
quern_tensor on_device(const void *from, quern_dtype dtype, int32_t ndim, const int64_t *shape);
void to_host(void *to, const quern_tensor *t, size_t bytes);
void *workspace_of(size_t bytes);
/* The status since the last call of this. */
int32_t faults(void);
quern_exec with_status(void);

#endif
