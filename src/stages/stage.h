/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * stage.h - what every stage shares: what executes it, the sequences of a call, and how its arguments are
 * listed.
 *
 * A stage takes one struct of arguments. Its views are normalised: activations are always 4-D [B, N, heads,
 * dim] (varlen: B = 1, N = T, with `seqs.cu_*` set), statistics 3-D [B, H, N], index lists 4-D [B, Hs, rows,
 * k] (varlen: B = 1). A view with ndim == 0 is absent.
 *
 * Lists of fields. Beside each struct NAME_args stand two macros. NAME_TENSORS(IN, OUT, GRAD) applies one of
 * its three to each view among the fields: IN is read; OUT is written by forward stages and read by backward
 * ones, or may be written; GRAD is written by backward stages. NAME_VALUES(F) applies F to each other field.
 * By these lists pointers are relocated, carried to a GPU by the tests and hashed into the build id, and it
 * follows from them which stages may run beside each other. A test checks that they cover the struct.
 */
#ifndef QUERN_STAGES_STAGE_H
#define QUERN_STAGES_STAGE_H

#include <quern/cuda.h>

#include "stages/mask.h"

/* A fault that a stage of the CPU found in the data of its inputs. */
typedef struct stage_fault {
    int32_t kind;               /* QUERN_STATUS_*; 0: none */
    const quern_tensor *tensor; /* of the stage's arguments. A result: what was to be stored in it */
    int64_t index;              /* flat, among the tensor's elements */
    int64_t least, most;        /* accepted there, of integers and bytes */
    int64_t multiple;           /* of which multiples alone are accepted; 0: any number */
} stage_fault;

/*
 * What executes a stage: a thread team (CPU) or a stream (CUDA); and where it reports faults of data. Entries
 * of lists that are out of range are skipped, their bit is or-ed into `status`. Any other fault: a stage of
 * the CPU fails with stage_report() before it writes anything, and its caller makes the sentence; a stage of
 * a GPU or-s the fault's bit into `status`, where there is one, and gives the result that cuda.h says.
 */
typedef struct stage_exec {
    quern_device device;
    int32_t device_id;
    int32_t threads;                  /* CPU: size of the team */
    quern_parallel_for *parallel_for; /* CPU: the caller's executor; NULL: OpenMP */
    void *parallel_for_arg;
    int32_t forks; /* CPU: parallel_forks() when the context was made */
    quern_cpu_level cpu_level;
    bool prefetch_l2;        /* CPU: cpu_prefetches_into_l2() when the context was made */
    void *stream;            /* CUDA: cudaStream_t */
    struct gemm_cache *gemm; /* CPU: the context's oneDNN primitives; NULL: oneDNN is not used */
    int32_t compute;         /* CUDA: the device's compute capability, 90 for 9.0 */
    int32_t multiprocessors; /* CUDA */
    size_t shared_bytes;     /* CUDA: shared memory that a block may take */
    /* CUDA: where a stage has kernels of this name, only these are chosen; NULL: no such wish */
    const char *variant;
    int32_t *status;    /* the caller's status word, in the device's memory; NULL: not wanted */
    stage_fault *fault; /* CPU: takes the fault with which a stage fails; NULL: nobody asks */
} stage_exec;
#define STAGE_EXEC_VALUES(F)                                                                                 \
    F(device)                                                                                                \
    F(device_id)                                                                                             \
    F(threads)                                                                                               \
    F(parallel_for)                                                                                          \
    F(parallel_for_arg)                                                                                      \
    F(forks)                                                                                                 \
    F(cpu_level)                                                                                             \
    F(prefetch_l2)                                                                                           \
    F(stream) F(gemm) F(compute) F(multiprocessors) F(shared_bytes) F(variant) F(status) F(fault)

/* Reports a fault of a stage on the CPU; returns what the stage then returns. */
static inline quern_status stage_report(const stage_exec *exec, stage_fault fault)
{
    if (exec->fault != NULL) *exec->fault = fault;
    return QUERN_ERR_INVALID_ARGUMENT;
}

enum { STAGE_WHY_BYTES = 200 };

enum { STAGE_NAME_BYTES = 64 };

/* The functions of a stage whose arguments are NAME_args. No `supports`: the stage takes every case; no
 * `workspace`: it needs none. `kernel` writes the name of the kernels that `run` would choose, for
 * quern_plan_describe(); it reads no more than `supports` does. NULL: no plan has this stage. */
#define STAGE_DECLARE(name)                                                                                  \
    typedef struct name##_stage {                                                                            \
        bool (*supports)(const stage_exec *exec, const name##_args *args, char why[STAGE_WHY_BYTES]);        \
        size_t (*workspace)(const stage_exec *exec, const name##_args *args);                                \
        quern_status (*run)(const stage_exec *exec, const name##_args *args, void *workspace);               \
        void (*kernel)(const stage_exec *exec, const name##_args *args, char text[STAGE_NAME_BYTES]);        \
    } name##_stage
#define STAGE_TAKES(stage, exec, args, why) ((stage).supports == NULL || (stage).supports(exec, args, why))
#define STAGE_WORKSPACE(stage, exec, args)                                                                   \
    ((stage).workspace != NULL ? (stage).workspace(exec, args) : (size_t)0)

/* The sequences of a call. Fixed length: cu_q is absent and there are `batch` sequences of n_q, n_kv tokens.
 * Varlen: int32 [batch + 1] in the device's memory; n_q, n_kv are then the total rows T. cu_kv absent: as
 * cu_q. */
typedef struct stage_seqs {
    int64_t batch, n_q, n_kv;
    quern_tensor cu_q, cu_kv;
} stage_seqs;
#define STAGE_SEQS_TENSORS(F) F(seqs.cu_q) F(seqs.cu_kv)
#define STAGE_SEQS_VALUES(F) F(seqs.batch) F(seqs.n_q) F(seqs.n_kv)

/* Lists of blocks or groups: one for all query heads of a key/value head, or one per query head. */
typedef enum list_scope { LIST_BY_GROUP = 0, LIST_BY_HEAD = 1 } list_scope;

enum { STAGE_GROUP_ENTRIES = 128 }; /* compressed entries of a group */

#endif
