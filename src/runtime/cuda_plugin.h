/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* cuda_plugin.h - what libquern_cuda hands to libquern. The build id and the version are compared, so that
 * libraries of different builds refuse each other. */
#ifndef QUERN_RUNTIME_CUDA_PLUGIN_H
#define QUERN_RUNTIME_CUDA_PLUGIN_H

#include "backend.h"

#include <quern/cuda.h>

#define QUERN_CUDA_PLUGIN_SYMBOL "quern_cuda_backend"

typedef struct quern_cuda_plugin {
    uint64_t build_id;   /* build_id.h; first, whatever else changes */
    const char *version; /* of quern.h */
    const quern_backend *backend;
    quern_status (*check_device)(int32_t device);
    /* Fills in the fields of an exec that describe the device. */
    quern_status (*properties)(int32_t device, stage_exec *exec);
    /* Whether the first byte of `name` stands in memory of the device that its tensor names. */
    quern_status (*check_pointer)(const void *p, quern_device device, int32_t device_id, const char *name);
    /* As in cuda.h; the arguments are checked already. */
    quern_status (*count)(int32_t *count);
    quern_status (*device)(int32_t device, quern_cuda_device *info);
    quern_status (*allocate)(int32_t device, size_t bytes, void **p);
    quern_status (*release)(int32_t device, void *p);
    quern_status (*copy)(int32_t device, void *to, const void *from, size_t bytes, void *stream);
    quern_status (*fill)(int32_t device, void *to, uint8_t value, size_t bytes, void *stream);
    quern_status (*stream_create)(int32_t device, void **stream);
    quern_status (*stream_destroy)(int32_t device, void *stream);
    quern_status (*synchronize)(int32_t device, void *stream);
    quern_status (*query)(int32_t device, void *stream, bool *done);
    quern_status (*event_create)(int32_t device, void **event);
    quern_status (*event_destroy)(int32_t device, void *event);
    quern_status (*event_record)(int32_t device, void *event, void *stream);
    quern_status (*event_elapsed)(int32_t device, void *from, void *to, double *ms);
} quern_cuda_plugin;
#define PLUGIN_VALUES(F)                                                                                     \
    F(build_id)                                                                                              \
    F(version)                                                                                               \
    F(backend) F(check_device) F(properties) F(check_pointer) F(count) F(device) F(allocate) F(release)      \
        F(copy) F(fill) F(stream_create) F(stream_destroy) F(synchronize) F(query) F(event_create)           \
            F(event_destroy) F(event_record) F(event_elapsed)

typedef const quern_cuda_plugin *quern_cuda_plugin_entry(quern_status (*set)(quern_status, const char *,
                                                                             ...));

#endif
