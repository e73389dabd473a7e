/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * plan.h - an operation prepared once and run many times.
 *
 * A plan never asks more of an address than malloc() gives: a multiple of 16 bytes, and that only where the
 * view had one when the plan was made. What is faster at a multiple of 64 is decided at each run.
 *
 * A plan fixes the operation, its parameters, which tensors are there, their shapes, strides, dtypes and
 * device, and that alignment. All checks of these are made when the plan is made; a run takes only pointers.
 * An ordinary call is the same code: it makes a plan on the stack and runs it.
 *
 * A plan never changes: several threads may run it at once, each with its own workspace and outputs. It
 * belongs to the context that it was made with; destroy it before the context.
 *
 * On a GPU a plan starts its kernels as one CUDA graph, which costs the host as much as one launch. Its first
 * run makes the graph, and with it CUDA allocates: warm a plan up by a run. Runs with the addresses of the
 * run before are the fastest. Runs of one plan follow one another on the GPU, on whatever streams they are; a
 * plan for each stream lets them overlap. In a caller's capture the kernels are recorded one by one.
 */
#ifndef QUERN_PLAN_H
#define QUERN_PLAN_H

#include <quern/quern.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The operations: each is the function of its name, with that function's params and tensors. The values
 * are part of the ABI. */
typedef enum quern_operation {
    QUERN_OP_ATTENTION_FORWARD = 1,
    QUERN_OP_ATTENTION_BACKWARD = 2,
    QUERN_OP_ATTENTION_DECODE_STEP = 3,
    QUERN_OP_CACHE_APPEND_STEP = 8,
    QUERN_OP_CACHE_PACK = 9,
    QUERN_OP_CACHE_UNPACK = 10,
    QUERN_OP_NSA_FORWARD = 16,
    QUERN_OP_NSA_BACKWARD = 17,
    QUERN_OP_NSA_COMPRESS = 18,
    QUERN_OP_NSA_COMPRESS_BACKWARD = 19,
    QUERN_OP_NSA_SELECT = 20,
    QUERN_OP_NSA_ATTEND = 21,
    QUERN_OP_NSA_ATTEND_BACKWARD = 22,
    QUERN_OP_NSA_GATES = 23,
    QUERN_OP_NSA_COMBINE = 24,
    QUERN_OP_NSA_GATE = 25,
    QUERN_OP_NSA_GATE_BACKWARD = 26,
    QUERN_OP_NSA_LIST_CONVERT = 32,
    QUERN_OP_NSA_INDEX = 33,
    QUERN_OP_NSA_INDEX_LOSS = 34,
    QUERN_OP_NSA_DECODE_STEP = 35,
    QUERN_OP_DSV4_COMPRESS = 48,
    QUERN_OP_DSV4_COMPRESS_BACKWARD = 49,
    QUERN_OP_DSV4_INDEX = 50,
    QUERN_OP_DSV4_ATTENTION = 51,
    QUERN_OP_DSV4_ATTENTION_BACKWARD = 52,
    QUERN_OP_DSV4_STORE = 53,
    QUERN_OP_DSV4_LAYER = 54,
    QUERN_OP_DSV4_LAYER_BACKWARD = 55,
    QUERN_OP_DSV4_APPEND_STEP = 56,
    QUERN_OP_DSV4_LAYER_STEP = 57,
    QUERN_OP_DSV4_LAYER_PACK = 58,
    QUERN_OP_DSV4_LAYER_UNPACK = 59,
    QUERN_OP_DSV4_HYPER = 60,
    QUERN_OP_DSV4_HYPER_BACKWARD = 61,
    QUERN_OP_DSV4_INDEX_LOSS = 62,
    QUERN_OP_NVFP4_QUANTIZE = 64,
    QUERN_OP_NVFP4_DEQUANTIZE = 65,
    QUERN_OP_NVFP4_FROM_MXFP4 = 66,
    QUERN_OP_NVFP4_FUSED_QUANTIZE = 67,
    QUERN_OP_NVFP4_SWIZZLE = 68,
    QUERN_OP_NVFP4_INTERLEAVE = 69,
    QUERN_OP_NVFP4_GEMM = 72,
    QUERN_OP_NVFP4_GEMM_BACKWARD = 73,
    QUERN_OP_MOE_FORWARD = 96,
    QUERN_OP_MOE_BACKWARD = 97,
    QUERN_OP_MOE_ROUTE = 98,
    QUERN_OP_MOE_ROUTE_BACKWARD = 99,
    QUERN_OP_MOE_PREPACK = 100,
    QUERN_OP_LINEAR_FORWARD = 112,
    QUERN_OP_LINEAR_BACKWARD = 113,
    QUERN_OP_RMS_NORM_FORWARD = 114,
    QUERN_OP_RMS_NORM_BACKWARD = 115,
    QUERN_OP_ROPE_FORWARD = 116,
    QUERN_OP_ROPE_BACKWARD = 117
} quern_operation;

typedef struct quern_plan quern_plan;

/*
 * Makes a plan in *plan. `params` and `tensors` are the operation's own structs, as its function takes them;
 * the plan keeps neither them nor the views that they point to. A view's `data` says only how its address
 * will be aligned: the greatest power of two, at most 16, that divides it. NULL promises no more than its
 * element's size. May allocate. Errors are those of the ordinary call; QUERN_ERR_OUT_OF_MEMORY;
 * QUERN_ERR_INVALID_ARGUMENT for an operation that does not exist.
 */
QUERN_API quern_status quern_plan_create(quern_context *ctx, quern_operation operation, const void *params,
                                         const void *tensors, quern_plan **plan);
/* Frees the plan; NULL is allowed. No thread of the host may be running it. */
QUERN_API void quern_plan_destroy(quern_plan *plan);

/* Bytes of workspace that a run needs. */
QUERN_API quern_status quern_plan_workspace(const quern_plan *plan, size_t *bytes);

/*
 * Runs the plan on other pointers: data[i] is the address of the tensor that is the i-th pointer of the
 * operation's tensors struct, counted from 0 after `size`; as many entries as the tensors struct given to
 * quern_plan_create() has. Where that struct had NULL, data[i] is NULL; where the operation does not use the
 * tensor, data[i] is ignored.
 *
 * Checked: that every tensor with elements has an address, with the alignment that the plan was made with;
 * the bytes of workspace; exec; on the CPU, cu_seqlens and the like. Not checked again: that outputs share no
 * memory with other tensors, and (CUDA) that an address is memory of the plan's device.
 */
QUERN_API quern_status quern_plan_run(const quern_plan *plan, const quern_exec *exec, void *const *data,
                                      void *workspace, size_t bytes);

/* Writes one line about the plan, ended with '\0' and cut to `bytes`: the operation; the backend; the
 * stages in the order in which they first run, each with its kernels and how often it runs; the workspace.
 * Names of stages and kernels are for people: they change without notice. */
QUERN_API quern_status quern_plan_describe(const quern_plan *plan, char *text, size_t bytes);

#ifdef __cplusplus
}
#endif
#endif
