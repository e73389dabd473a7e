/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * quern.h - status codes, tensor views, the context. Every other header includes this one.
 *
 * Conventions of the whole API
 *  - Every function returns a quern_status. On anything but QUERN_OK the outputs are exactly as they
 *    were before the call, and quern_last_error() says in one sentence which argument was wrong, what
 *    was given and what is accepted.
 *  - The library never aborts, exits, prints, or allocates during a computation: `*_workspace()` says
 *    how many bytes a call needs, the caller hands them over and may reuse them as soon as the call
 *    (on CUDA: the stream's work) is done. Workspace needs no particular alignment.
 *  - Structs that callers fill start with `size_t size`; initialise them with their `_INIT` macro, so
 *    that fields can be added without breaking callers compiled against an older header.
 *  - Outputs may not overlap inputs or each other unless a function says so.
 */
#ifndef QUERN_QUERN_H
#define QUERN_QUERN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define QUERN_VERSION_MAJOR 0
#define QUERN_VERSION_MINOR 1
#define QUERN_VERSION_PATCH 0

#if defined(QUERN_STATIC)
#define QUERN_API
#else
#define QUERN_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* What a call came to. The values are part of the ABI. */
typedef enum quern_status {
    QUERN_OK = 0,
    QUERN_ERR_INVALID_ARGUMENT = 1, /* a shape, dtype, stride, pointer or parameter is not accepted */
    QUERN_ERR_UNSUPPORTED = 2,      /* legal, but this backend does not take it */
    QUERN_ERR_WORKSPACE = 3,        /* the workspace is smaller than *_workspace() said */
    QUERN_ERR_OUT_OF_MEMORY = 4,    /* context or file layer only */
    QUERN_ERR_IO = 5,               /* a file could not be read or written */
    QUERN_ERR_FORMAT = 6,           /* a file's contents are malformed */
    QUERN_ERR_DEVICE = 7,           /* a device is missing, or a device call failed */
    QUERN_ERR_INTERNAL = 8          /* a defect of the library */
} quern_status;

/* Element types. The values are part of the ABI. */
typedef enum quern_dtype {
    QUERN_F32 = 0,
    QUERN_F16 = 1,
    QUERN_BF16 = 2,
    QUERN_I32 = 3,
    QUERN_U8 = 4,
    QUERN_I64 = 5
} quern_dtype;

typedef enum quern_device { QUERN_CPU = 0, QUERN_CUDA = 1 } quern_device;

enum { QUERN_MAX_DIMS = 6 };

/*
 * A view of memory that the caller owns: the fields of a DLPack tensor. `strides` are in elements and
 * may be anything for which no two elements of an output share memory, but the last dimension must be
 * contiguous (stride 1, or extent <= 1). `data` needs the alignment of its element type only; it may be
 * NULL when the tensor has no elements.
 */
typedef struct quern_tensor {
    void *data;
    quern_dtype dtype;
    quern_device device;
    int32_t device_id; /* CUDA ordinal; 0 on the CPU */
    int32_t ndim;
    int64_t shape[QUERN_MAX_DIMS];
    int64_t strides[QUERN_MAX_DIMS];
} quern_tensor;

/* A contiguous (row-major) CPU view of `data`. ndim in 0 ... QUERN_MAX_DIMS; extents >= 0. */
static inline quern_tensor quern_tensor_contiguous(void *data, quern_dtype dtype, int32_t ndim,
                                                   const int64_t *shape)
{
    quern_tensor t = {data, dtype, QUERN_CPU, 0, ndim, {0}, {0}};
    int64_t stride = 1;
    for (int32_t i = ndim - 1; i >= 0; i--) {
        t.shape[i] = shape[i];
        t.strides[i] = stride;
        stride *= shape[i] > 0 ? shape[i] : 1;
    }
    return t;
}

/* Bytes of one element, 0 for an unknown dtype. */
QUERN_API size_t quern_dtype_size(quern_dtype dtype);
/* "f32", "f16", "bf16", "i32", "u8", "i64"; "?" for an unknown dtype. Static storage. */
QUERN_API const char *quern_dtype_name(quern_dtype dtype);
/* A short English name of a status. Static storage. */
QUERN_API const char *quern_status_name(quern_status status);
/* "0.1.0" and the like. Static storage. */
QUERN_API const char *quern_version(void);

/*
 * A context holds what does not change between calls: the number of threads, the CPU level, the loaded
 * GPU backend. It may be used from several threads at once if each call has its own workspace. After a
 * fork the child computes on one thread.
 */
typedef struct quern_context quern_context;

typedef enum quern_cpu_level {
    QUERN_CPU_LEVEL_AUTO = 0, /* the best this machine has, or what QUERN_CPU names */
    QUERN_CPU_LEVEL_PORTABLE = 1,
    QUERN_CPU_LEVEL_AVX2 = 2,       /* AVX2, FMA, F16C */
    QUERN_CPU_LEVEL_AVX512 = 3,     /* AVX-512 F, BW, DQ, VL */
    QUERN_CPU_LEVEL_AVX512BF16 = 4  /* the same with AVX512_BF16 */
} quern_cpu_level;

typedef struct quern_context_params {
    size_t size;
    int32_t threads; /* 0: OMP_NUM_THREADS, else the CPUs this process may run on. At most 1024. */
    quern_cpu_level cpu_level;
} quern_context_params;
#define QUERN_CONTEXT_PARAMS_INIT {sizeof(quern_context_params), 0, QUERN_CPU_LEVEL_AUTO}

/* Creates a context in *ctx; params NULL means the defaults. The environment variable
 * QUERN_CPU=portable|avx2|avx512|avx512bf16 is the level where params says AUTO; a level that the
 * machine lacks is QUERN_ERR_UNSUPPORTED. */
QUERN_API quern_status quern_context_create(const quern_context_params *params, quern_context **ctx);
/* Frees the context; NULL is allowed. */
QUERN_API void quern_context_destroy(quern_context *ctx);
/* What the context computes with: both resolved, never 0 or AUTO. ctx is not NULL. */
QUERN_API int32_t quern_context_threads(const quern_context *ctx);
QUERN_API quern_cpu_level quern_context_cpu_level(const quern_context *ctx);
/* "auto", "portable", "avx2", "avx512", "avx512bf16"; "?" for an unknown level. Static storage. */
QUERN_API const char *quern_cpu_level_name(quern_cpu_level level);
/* The best level that this machine, its operating system and this build offer. */
QUERN_API quern_cpu_level quern_cpu_level_detect(void);

/*
 * The sentence for the calling thread's most recent failed call ("" if none failed yet). It stays valid
 * until the same thread's next failing call. ctx may be NULL.
 */
QUERN_API const char *quern_last_error(const quern_context *ctx);

#ifdef __cplusplus
}
#endif
#endif
