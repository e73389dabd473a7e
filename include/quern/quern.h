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
 *  - Structs that callers fill start with `size_t size`; their `_INIT` macro sets it. A smaller struct is
 *    that of a caller compiled against an older header: the fields it lacks take their defaults. A larger
 *    one is that of a newer caller: it is accepted where every byte past this library's struct is zero.
 *  - Every operation is `(ctx, exec, params, tensors, workspace, bytes)` and has its `*_workspace(ctx,
 *    params, tensors, &bytes)`. exec NULL means the CPU, or the default stream of the tensors' device, and
 *    no status word.
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
/* One number that rises with every release: 0.1.0 is 100. */
#define QUERN_VERSION (QUERN_VERSION_MAJOR * 10000 + QUERN_VERSION_MINOR * 100 + QUERN_VERSION_PATCH)

#if defined(QUERN_STATIC)
#define QUERN_API
#else
#define QUERN_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C++" {
/* A struct whose fields are all zero but for `size`. */
template <typename T> constexpr T quern_sized()
{
    T t = T();
    t.size = sizeof(T);
    return t;
}
}
#define QUERN_SIZED(type) quern_sized<type>()
extern "C" {
#else
#define QUERN_SIZED(type)                                                                                    \
    {                                                                                                        \
        .size = sizeof(type)                                                                                 \
    }
#endif

/* The result of a call. The values are part of the ABI. */
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

/* Element types. Each operation says which of them it takes. The values are part of the ABI. */
typedef enum quern_dtype {
    QUERN_F32 = 0,
    QUERN_F16 = 1,
    QUERN_BF16 = 2,
    QUERN_I32 = 3,
    QUERN_U8 = 4,
    QUERN_I64 = 5,
    QUERN_F64 = 6,
    QUERN_E4M3 = 7, /* 8-bit float without infinities, bias 7 (OCP OFP8; "e4m3fn" elsewhere) */
    QUERN_E5M2 = 8, /* 8-bit float, bias 15 (OCP OFP8) */
    QUERN_E8M0 = 9, /* a power of two: 2^(byte - 127), 255 is NaN (OCP MX) */
    QUERN_E2M1X2 =
        10, /* two 4-bit floats a byte, the first in the low bits; shapes and strides count bytes */
    QUERN_I8 = 11,
    QUERN_I16 = 12,
    QUERN_U16 = 13,
    QUERN_U32 = 14,
    QUERN_U64 = 15,
    QUERN_BOOL = 16, /* a byte, 0 or 1 */
    QUERN_C64 = 17,  /* two f32: real, imaginary */
    /* AMD's 8-bit floats, in files only: biases 8 and 16, no infinities, no -0, whose byte is NaN */
    QUERN_E4M3FNUZ = 18,
    QUERN_E5M2FNUZ = 19
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

/* A contiguous (row-major) CPU view of `data`. ndim in 0 ... QUERN_MAX_DIMS; extents >= 0. (Calls refuse
 * extents whose product, and with it a stride here, exceeds 64 bits.) */
static inline quern_tensor quern_tensor_contiguous(void *data, quern_dtype dtype, int32_t ndim,
                                                   const int64_t *shape)
{
    quern_tensor t = {data, dtype, QUERN_CPU, 0, ndim, {0}, {0}};
    int64_t stride = 1;
    for (int32_t i = ndim - 1; i >= 0; i--) {
        t.shape[i] = shape[i];
        t.strides[i] = stride;
        stride = (int64_t)((uint64_t)stride * (uint64_t)(shape[i] > 0 ? shape[i] : 1));
    }
    return t;
}

/* Bytes of one element, 0 for an unknown dtype. */
QUERN_API size_t quern_dtype_size(quern_dtype dtype);
/* "f32", "e4m3", "e2m1x2" and so on: the enum's name in lower case; "?" for an unknown dtype. Static storage.
 */
QUERN_API const char *quern_dtype_name(quern_dtype dtype);
/* A short English name of a status. Static storage. */
QUERN_API const char *quern_status_name(quern_status status);
/* "0.1.0" and the like. Static storage. */
QUERN_API const char *quern_version(void);

/*
 * A context holds what does not change between calls: the number of threads, the CPU level, the loaded GPU
 * backend. Several threads may use it at once if each call has its own workspace. After a fork the child
 * computes on one thread, whoever used OpenMP before, except in contexts with an executor that the child
 * makes itself. Where OpenMP's threads cannot be created (address space, a limit of the system), there are
 * fewer. Kernels run under the default floating-point state (round to nearest even, subnormals kept, no
 * traps), on every thread; the caller's state is restored afterwards, sticky flags included.
 */
typedef struct quern_context quern_context;

/* Levels are a set: their numbers are no order. A level without a constant here is found by its name. */
typedef enum quern_cpu_level {
    QUERN_CPU_LEVEL_AUTO = 0, /* what QUERN_CPU names, else what quern_cpu_level_detect() finds */
    QUERN_CPU_LEVEL_PORTABLE = 1,
    QUERN_CPU_LEVEL_AVX2 = 2,       /* AVX2, FMA, F16C */
    QUERN_CPU_LEVEL_AVX512 = 3,     /* AVX-512 F, BW, DQ, VL */
    QUERN_CPU_LEVEL_AVX512BF16 = 4, /* the same with AVX512_BF16, AVX512_VNNI and AVX512_VBMI */
    QUERN_CPU_LEVEL_AMX = 5         /* the same with AMX_TILE and AMX_BF16 */
} quern_cpu_level;

/*
 * Runs body(body_arg, index, thread) once for each index in 0 ... count - 1 and returns when all are done.
 * `thread` is in 0 ... threads - 1; no two calls that run at the same time share a thread number. Results do
 * not depend on which thread gets which index, nor on their order; a serial loop is enough. At each call of
 * body the library starts the lowest index that is left, and at the end it runs what is left over itself. A
 * call may wait for an index that another thread has begun, so an executor may not suspend a thread that has
 * begun one. `arg` is quern_context_params.parallel_for_arg.
 */
typedef void quern_parallel_for(void *arg, int32_t threads, int64_t count,
                                void (*body)(void *body_arg, int64_t index, int32_t thread), void *body_arg);

typedef struct quern_context_params {
    size_t size;
    int32_t threads; /* 0: OMP_NUM_THREADS, else the CPUs this process may run on. At most 1024. */
    quern_cpu_level cpu_level;
    quern_parallel_for *parallel_for; /* the caller's executor; NULL: OpenMP */
    void *parallel_for_arg;
} quern_context_params;
#define QUERN_CONTEXT_PARAMS_INIT QUERN_SIZED(quern_context_params)

/* Creates a context in *ctx; params NULL means the defaults. The environment variable QUERN_CPU names the
 * level where params says AUTO; a level that the machine lacks is QUERN_ERR_UNSUPPORTED. */
QUERN_API quern_status quern_context_create(const quern_context_params *params, quern_context **ctx);
/* Frees the context; NULL is allowed. */
QUERN_API void quern_context_destroy(quern_context *ctx);
/* What the context computes with: both resolved, never 0 or AUTO. (Of NULL: 0, AUTO.) */
QUERN_API int32_t quern_context_threads(const quern_context *ctx);
QUERN_API quern_cpu_level quern_context_cpu_level(const quern_context *ctx);
/* "auto", "portable", "avx2", "avx512", "avx512bf16", "amx"; "?" for an unknown level. Static storage. */
QUERN_API const char *quern_cpu_level_name(quern_cpu_level level);
/* The level that is the default: of those that this machine, its operating system and this build have, the
 * last that the library lists. Linux lets a process use AMX once it asks, which a context of that level or of
 * AUTO does: signal frames are 8 KiB longer from then on, and a process with a signal stack too small for
 * them lacks the level. */
QUERN_API quern_cpu_level quern_cpu_level_detect(void);

/*
 * How a call runs. NULL in its place means every field at its default. `stream` belongs to the device of the
 * call's tensors. `status` is on that device and shares no memory with another tensor of the call; the bits
 * QUERN_STATUS_* of cuda.h are or-ed into it and it is never cleared.
 */
typedef struct quern_exec {
    size_t size;
    void *stream;               /* CUDA: a cudaStream_t; NULL: the default stream. Ignored on the CPU. */
    const quern_tensor *status; /* i32 [1]; NULL: not wanted */
} quern_exec;
#define QUERN_EXEC_INIT QUERN_SIZED(quern_exec)

/*
 * The sentence for the calling thread's most recent failed call ("" if none failed yet). It stays valid
 * until the same thread's next failing call. ctx may be NULL.
 */
QUERN_API const char *quern_last_error(const quern_context *ctx);

#ifdef __cplusplus
}
#endif
#endif
