/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * ffi.h - what the functions for Python share. They use TVM-FFI's C ABI alone, so that one build serves every
 * Python and every framework. A function returns 0, or -1 with an error that Python raises: the library's
 * sentence as ValueError, NotImplementedError, MemoryError or RuntimeError.
 */
#ifndef QUERN_PYTHON_FFI_H
#define QUERN_PYTHON_FFI_H

#include <quern/dsv4_layer.h>
#include <quern/op.h>

#include <tvm/ffi/c_api.h>

#include <stdalign.h>

#define EXPORT __attribute__((visibility("default")))
/* Defines the function that Python calls `name`. */
#define FUNCTION(name)                                                                                       \
    EXPORT int __tvm_ffi_##name(void *self, const TVMFFIAny *args, int32_t count, TVMFFIAny *result);        \
    EXPORT int __tvm_ffi_##name(void *self, const TVMFFIAny *args, int32_t count, TVMFFIAny *result)

int fail(const char *kind, const char *sentence);
int fail_as(quern_status status);

/* The bytes of a str or bytes argument, where it is one. */
bool text_of(const TVMFFIAny *a, TVMFFIByteArray *text);
bool is_int(const TVMFFIAny *a);
int give_nothing(TVMFFIAny *result);
int give_int(int64_t value, TVMFFIAny *result);
int give_text(const char *data, size_t size, TVMFFIAny *result);
int give_bytes(const void *data, size_t size, TVMFFIAny *result);

/* Room with the alignment of a params struct, which bytes of Python lack. */
typedef struct params_room {
    alignas(16) char bytes[QUERN_OP_PARAMS_BYTES];
} params_room;
bool read_params(const TVMFFIAny *a, params_room *params);

/* The tensors of a call, as the library's structs of tensors hold them. */
typedef struct tensor_list {
    quern_tensor storage[QUERN_OP_TENSORS_MAX];
    struct {
        size_t size;
        const quern_tensor *t[QUERN_OP_TENSORS_MAX];
    } tensors;
    const quern_tensor *first; /* the first on a GPU, else the first; NULL: there is none */
} tensor_list;

/* Takes tensors, or None where one is absent. */
int take_tensors(const TVMFFIAny *args, int32_t count, tensor_list *to);
/* Takes those `given` of an operation's `count` tensors, each at its place. */
int take_placed(const TVMFFIAny *args, const uint8_t *places, int32_t given, int32_t count, tensor_list *to);

/* What a plan fixes of a call. */
typedef struct plan_request {
    quern_context *context;
    quern_operation operation;
    const void *params;
    size_t params_bytes;
    const tensor_list *list;
    int32_t tensor_count;
    const void *stream; /* a plan's runs follow one another, those of two streams need not */
} plan_request;
/* This thread's plan of such calls; NULL: the ordinary call serves. */
const quern_plan *plan_of(const plan_request *r);

/* A number of a struct that Python names: the field's place and its bytes, 8, 4 or 1. */
typedef struct named_field {
    const char *name;
    size_t offset, bytes;
} named_field;
#define NAMED_FIELD(type, field)                                                                             \
    {                                                                                                        \
#field, offsetof(type, field), sizeof(((type *)NULL)->field)                                         \
    }
/* Sets the fields of "name=number" lines; false where a name or a number is none of these. */
bool read_fields(const TVMFFIAny *a, const named_field *fields, size_t count, void *to);

/* The fields of a cache of a layer of DeepSeek-V4. */
bool read_layer_fields(const TVMFFIAny *a, quern_dsv4_layer_cache_params *p);

/* Memory in a tensor of bytes. */
int read_memory(const TVMFFIAny *a, void **memory, size_t *bytes);

/* Which sequences of a cache a call is about: bytes of int32, and of as many int64. */
typedef struct batch_lists {
    int64_t batch;
    const int32_t *sequences;
    const int64_t *counts;
} batch_lists;
bool read_lists(const TVMFFIAny *args, batch_lists *lists);

/* The one context of the process; NULL, with an error, where it cannot be made. */
quern_context *need_context(void);

/* Calls with memory of that many bytes: of this thread, or on a GPU of the framework's allocator and on its
 * current stream. */
typedef quern_status computation(const void *what, const quern_exec *exec, void *workspace, size_t bytes);
int with_memory(const quern_tensor *first, size_t bytes, computation *compute, const void *what);

/* The framework's current stream on the tensor's GPU; NULL for tensors in the host's memory. */
void *stream_of(const quern_tensor *first);

#endif
