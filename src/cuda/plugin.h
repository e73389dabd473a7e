/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* plugin.h - what libquern_cuda hands to libquern. The number in the symbol's name changes with the stage
 * table, so that libraries of different builds refuse each other. */
#ifndef QUERN_CUDA_PLUGIN_H
#define QUERN_CUDA_PLUGIN_H

#include "backend.h"

#define QUERN_CUDA_PLUGIN_SYMBOL "quern_cuda_plugin_1"

typedef enum quern_cuda_memory_call {
    QUERN_CUDA_ALLOCATE,
    QUERN_CUDA_FREE,
    QUERN_CUDA_UPLOAD,
    QUERN_CUDA_DOWNLOAD,
    QUERN_CUDA_SYNCHRONIZE
} quern_cuda_memory_call;

typedef struct quern_cuda_plugin {
    size_t size, backend_size;
    const quern_backend *backend;
    quern_status (*check_device)(int32_t device);
    quern_status (*check_pointer)(const void *p, int32_t device, const char *name);
    /* Device memory for the command and the tests, which link no CUDA. *p is the destination. */
    quern_status (*memory)(quern_cuda_memory_call call, void **p, const void *src, size_t bytes, void *stream);
} quern_cuda_plugin;

typedef const quern_cuda_plugin *quern_cuda_plugin_entry(quern_status (*set)(quern_status, const char *, ...));

#endif
