/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * backend.h - the stage table: everything that a backend (CPU, CUDA) offers to the family drivers, in
 * one place.
 *
 * A driver validates, carves workspace and calls stages; it does no arithmetic on tensors and never
 * assumes that tensor data can be read by the host. A stage takes one args struct. Beside `run` stand
 * `supports` (false with a reason in `why` where this backend lacks the case) and `workspace` (the bytes
 * `run` needs; looks at shapes only). Optional fused stages may be NULL: the driver then composes.
 *
 * Views in stage args are normalised: activations are always 4-D [B, N, heads, dim] (packed batches:
 * B = 1, N = T, with `seqs.cu_*` set), statistics 3-D [B, H, N], index lists 4-D [B, Hs, rows, k] (packed:
 * B = 1). A view with data == NULL and ndim == 0 is absent.
 */
#ifndef QUERN_BACKEND_H
#define QUERN_BACKEND_H

#include <quern/nsa.h>
#include <quern/quern.h>

/* What executes a stage: a thread team (CPU) or a stream (CUDA). */
typedef struct stage_exec {
    quern_device device;
    int32_t device_id;
    int32_t threads;         /* CPU: size of the team */
    quern_cpu_level cpu_level;
    void *stream;            /* CUDA: cudaStream_t */
    struct gemm_cache *gemm; /* CPU: the context's oneDNN primitives; NULL: no use of oneDNN */
    size_t shared_bytes;     /* CUDA: shared memory that a kernel may take; 0: what the device offers */
} stage_exec;

enum { STAGE_WHY_BYTES = 200 };

/* Sequence borders. Fixed length: cu_q.data == NULL and `batch` sequences of n_q, n_kv tokens. Packed:
 * int32 [batch + 1] device arrays; n_q, n_kv are then the total rows T. */
typedef struct stage_seqs {
    int64_t batch, n_q, n_kv;
    quern_tensor cu_q, cu_kv;
} stage_seqs;

enum { STAGE_GROUP_ENTRIES = 128 }; /* compressed entries of a group */

/* Which keys a query sees. Positions are per sequence. */
typedef enum attend_mask {
    ATTEND_RANGE,      /* tokens: causal or not, optional window, query_offset */
    ATTEND_COMPRESSED, /* entries: stride, block_size, visibility; optional group list */
    ATTEND_BLOCKS      /* tokens of listed blocks */
} attend_mask;

typedef struct attend_args {
    attend_mask mask;
    stage_seqs seqs;
    bool causal;
    float scale;
    int64_t window;       /* RANGE; 0: none */
    int64_t query_offset; /* RANGE; -1: n_kv - n_q. The other masks: queries stand at 0 ... n_q - 1 */
    int64_t block_size, stride; /* COMPRESSED: l, d. BLOCKS: block_size is l' */
    quern_nsa_visibility visibility; /* COMPRESSED */
    int64_t tile;           /* queries that share a list (COMPRESSED with groups, BLOCKS) */
    quern_nsa_scope scope;  /* of the list */
    quern_tensor list;      /* i32 [B,Hs,rows,k]; BLOCKS: blocks. COMPRESSED: groups, or absent */
    quern_tensor q, k, v, o, lse; /* COMPRESSED: k, v are k_cmp, v_cmp; packed ones use seqs.cu_kv */
    /* Backward only. Given: q, k, v, lse, d_o, delta. The gradient that reaches this branch is
     * row_scale * d_o, row by row (row_scale absent: 1), and delta = row_scale * rowsum(d_o * o).
     * d_q, d_k, d_v are f32 or the activations' dtype; with accumulate_* they are f32 and added to. */
    quern_tensor d_o, row_scale, delta; /* row_scale, delta: f32 [B,H,N], any strides */
    quern_tensor d_q, d_k, d_v;
    bool accumulate_q, accumulate_k, accumulate_v;
} attend_args;

typedef struct compress_args {
    stage_seqs seqs; /* cu_q: tokens; cu_kv: compressed rows (an output where packed) */
    quern_nsa_compress_kind kind;
    int64_t block_size, stride;
    quern_tensor k, v, w_k, w_v, pe_k, pe_v;
    quern_tensor k_cmp, v_cmp;
    /* Backward: d_k_cmp, d_v_cmp (act or f32) in; d_k, d_v (accumulate: f32, added to), weights out. */
    quern_tensor d_k_cmp, d_v_cmp, d_k, d_v, d_w_k, d_w_v, d_pe_k, d_pe_v;
    bool accumulate;
} compress_args;

typedef struct select_args {
    stage_seqs seqs; /* cu_q: tokens; cu_kv: compressed rows */
    quern_nsa_params params; /* stride, select_block and scale resolved */
    quern_tensor q, k_cmp;
    quern_tensor lse_cmp; /* softmax metric: of the compressed branch, or absent */
    quern_tensor block_idx, block_count, group_idx; /* group_idx with c > 0 */
    bool groups_given;
} select_args;

typedef struct gate_args {
    stage_seqs seqs;
    quern_nsa_gate_kind kind;
    quern_tensor q, w_gate, gates; /* gates: written unless kind is GIVEN; may be absent */
    quern_tensor o_b[3];           /* cmp, slc, win; absent: 0 */
    quern_tensor o;                /* absent: gates only. May be the memory of one o_b */
    /* Backward. delta[b] = gate * rowsum(d_o * o_b), f32 [B,H,N], and d_o_b = gate * d_o are optional; d_q f32 (added
     * to where accumulate) or act; d_w_gate or d_gates by kind. */
    quern_tensor d_o, d_o_b[3], delta[3], d_q, d_w_gate, d_gates;
    bool accumulate;
} gate_args;

/* out = in, converted; rows past the last sequence border (packed) are written as 0. */
typedef struct convert_args {
    stage_seqs seqs;
    quern_tensor in, out;
} convert_args;

/* out = rowsum(a * b), f32 [B,H,N]: delta of a backward whose gradient comes through no gate. */
typedef struct rowdot_args {
    stage_seqs seqs;
    quern_tensor a, b, out;
} rowdot_args;

typedef struct list_convert_args {
    quern_tensor in, out, count; /* 2-D views [lists, k]; count [lists] or absent */
    int64_t from, to, n;
} list_convert_args;

/* Reports on what only the device can read: lists that were handed in, and the borders of `seqs`. */
typedef struct check_args {
    stage_seqs seqs;             /* cu_q: tokens; cu_kv: compressed rows where they are an input; n_kv: their bound */
    quern_tensor blocks, groups; /* i32 [B,Hs,rows,k], or absent */
    int64_t tile, select_block, block_size, stride;
    quern_tensor status; /* i32 [1]; QUERN_STATUS_* are or-ed in */
} check_args;

/* The forward of NSA's three branches with the gate, in one pass per tile, without o_b in memory. */
typedef struct attend_gate_args {
    attend_args branch[3]; /* cmp, slc, win; mask fields set, o absent unless wanted */
    uint32_t branches;
    bool separate[3];      /* the branch reads keys and values of its own */
    select_args select;    /* computed inside where select.block_idx was not handed in */
    bool select_given;
    gate_args gate;
} attend_gate_args;

#define STAGE(args_type)                                                                               \
    struct {                                                                                           \
        bool (*supports)(const stage_exec *exec, const args_type *args, char why[STAGE_WHY_BYTES]);    \
        size_t (*workspace)(const stage_exec *exec, const args_type *args);                            \
        quern_status (*run)(const stage_exec *exec, const args_type *args, void *workspace);           \
    }

typedef struct quern_backend {
    const char *name;
    STAGE(attend_args) attend_forward, attend_backward;
    STAGE(compress_args) compress_forward, compress_backward;
    STAGE(select_args) select;
    STAGE(gate_args) gate_forward, gate_backward;
    STAGE(convert_args) convert;
    STAGE(rowdot_args) rowdot;
    STAGE(list_convert_args) list_convert;
    STAGE(check_args) check;
    STAGE(attend_gate_args) attend_gate_forward; /* optional */
} quern_backend;

extern const quern_backend quern_backend_cpu;

#endif
