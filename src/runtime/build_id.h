/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * build_id.h - a number that tells whether two builds agree on the fields of all stages' arguments: a hash of
 * the name, offset and size of every field that the stage headers list. libquern and libquern_cuda each
 * compute it from their own headers.
 */
#ifndef QUERN_RUNTIME_BUILD_ID_H
#define QUERN_RUNTIME_BUILD_ID_H

#include "runtime/cuda_plugin.h"

#include <stddef.h>

/* FNV-1a over a text and two numbers. Not inlined: the compiler would work out each of hundreds of calls. */
__attribute__((noinline)) static uint64_t build_id_add(uint64_t hash, const char *text, size_t offset,
                                                       size_t size)
{
    const uint64_t prime = 0x100000001b3u;
    for (; *text != '\0'; text++) hash = (hash ^ (unsigned char)*text) * prime;
    for (int i = 0; i < 8; i++) hash = (hash ^ (offset >> 8 * i & 255)) * prime;
    for (int i = 0; i < 8; i++) hash = (hash ^ (size >> 8 * i & 255)) * prime;
    return hash;
}

#define BUILD_ID_FIELD(field)                                                                                \
    h = build_id_add(h, #field, offsetof(fields_of, field), sizeof(__typeof__(((fields_of *)0)->field)));
#define BUILD_ID_ROW(stage, name)                                                                            \
    h = build_id_add(h, #stage, offsetof(quern_backend, stage), sizeof(name##_args));
#define BUILD_ID_ARGS(name, NAME)                                                                            \
    {                                                                                                        \
        typedef name##_args fields_of;                                                                       \
        NAME##_TENSORS(BUILD_ID_FIELD, BUILD_ID_FIELD, BUILD_ID_FIELD) NAME##_VALUES(BUILD_ID_FIELD)         \
    }

static inline uint64_t build_id(void)
{
    uint64_t h = 0xcbf29ce484222325u;
    BACKEND_STAGES(BUILD_ID_ROW, BUILD_ID_ROW)
    h = build_id_add(h, "backend", 0, sizeof(quern_backend));
    BACKEND_ARGS(BUILD_ID_ARGS)
    {
        typedef attend_gate_args fields_of;
        ATTEND_GATE_MEMBERS(BUILD_ID_FIELD)
        ATTEND_GATE_VALUES(BUILD_ID_FIELD)
    }
    {
        typedef quern_tensor fields_of;
        BUILD_ID_FIELD(data)
        BUILD_ID_FIELD(dtype)
        BUILD_ID_FIELD(device)
        BUILD_ID_FIELD(device_id) BUILD_ID_FIELD(ndim) BUILD_ID_FIELD(shape) BUILD_ID_FIELD(strides)
    }
    {
        typedef quern_cuda_plugin fields_of;
        PLUGIN_VALUES(BUILD_ID_FIELD)
    }
    {
        typedef stage_exec fields_of;
        STAGE_EXEC_VALUES(BUILD_ID_FIELD)
    }
    return h;
}

#endif
