/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* context.h - what a context holds. */
#ifndef QUERN_RUNTIME_CONTEXT_H
#define QUERN_RUNTIME_CONTEXT_H

#include "backend.h"
#include "core/op_recorded.h"
#include "runtime/kept_calls.h"
#include "runtime/replays.h"

/* The backend of the host's memory: quern.c. */
extern const quern_backend *const quern_host_backend;

struct quern_context {
    int32_t threads;
    quern_parallel_for *parallel_for; /* the caller's executor, or NULL */
    void *parallel_for_arg;
    int32_t forks; /* parallel_forks() when the context was made */
    quern_cpu_level cpu_level;
    bool prefetch_l2; /* cpu_prefetches_into_l2() */
    void *kept;       /* the CPU backend's */
    replays replays;
    op_recorded recorded;
    kept_calls calls;
};

/* The backend for `device`; sets the error, with its status, and returns NULL where there is none. */
const quern_backend *context_backend_of(quern_device device, int32_t device_id);
/* The backend for `device`, and an exec for it in *exec. Sets the error, with its status, and returns
 * NULL where there is none. */
const quern_backend *context_backend(quern_context *ctx, quern_device device, int32_t device_id, void *stream,
                                     stage_exec *exec);

#endif
