/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * backend.h - the stage table: everything that a backend (CPU, CUDA) offers to the family drivers, in one
 * place.
 *
 * A driver validates, carves workspace and calls stages. It does no arithmetic on tensors and never assumes
 * that the host can read tensor data. Beside a stage's `run` are `supports` (false with a reason in `why`
 * where this backend lacks the case; NULL: it takes all) and `workspace` (the bytes that `run` needs; NULL:
 * none). These two read shapes and alignments only: `data` is no address there, but has the alignment of the
 * address to come (of an element at least; `workspace` does not depend on it). Optional stages may be NULL:
 * the driver then composes them from others.
 */
#ifndef QUERN_BACKEND_H
#define QUERN_BACKEND_H

#include "stages/attend.h"
#include "stages/attend_gate.h"
#include "stages/attend_mqa.h"
#include "stages/block_index.h"
#include "stages/validate_lists.h"
#include "stages/cache.h"
#include "stages/combine.h"
#include "stages/compress.h"
#include "stages/convert.h"
#include "stages/copy_rows.h"
#include "stages/dequantise.h"
#include "stages/e4m3.h"
#include "stages/expert_sums.h"
#include "stages/from_mxfp4.h"
#include "stages/fused_quantise.h"
#include "stages/gate.h"
#include "stages/gemm.h"
#include "stages/grouped_dense.h"
#include "stages/grouped_gemm.h"
#include "stages/grouped_outer.h"
#include "stages/hyper.h"
#include "stages/index_loss.h"
#include "stages/indexer.h"
#include "stages/indexer_loss.h"
#include "stages/interleave.h"
#include "stages/list_convert.h"
#include "stages/norm_rope.h"
#include "stages/permute.h"
#include "stages/pool.h"
#include "stages/prepack.h"
#include "stages/quantise.h"
#include "stages/route.h"
#include "stages/rowdot.h"
#include "stages/select.h"
#include "stages/store_rows.h"
#include "stages/swiglu.h"
#include "stages/swizzle.h"
#include "stages/widen_blocks.h"

/* FORWARD(stage, NAME) or BACKWARD(stage, NAME): a row of the table, whose arguments are NAME_args. A
 * backward stage writes their gradients and reads their results. */
#define BACKEND_STAGES(FORWARD, BACKWARD)                                                                    \
    FORWARD(attend_forward, attend)                                                                          \
    BACKWARD(attend_backward, attend)                                                                        \
    FORWARD(compress_forward, compress)                                                                      \
    BACKWARD(compress_backward, compress)                                                                    \
    FORWARD(select, select)                                                                                  \
    FORWARD(gate_forward, gate)                                                                              \
    BACKWARD(gate_backward, gate)                                                                            \
    FORWARD(convert, convert)                                                                                \
    FORWARD(rowdot, rowdot)                                                                                  \
    FORWARD(list_convert, list_convert)                                                                      \
    FORWARD(validate_lists, validate_lists)                                                                  \
    FORWARD(attend_gate_forward, attend_gate) /* optional */                                                 \
    FORWARD(quantise, quantise)                                                                              \
    FORWARD(dequantise, dequantise)                                                                          \
    FORWARD(fused_quantise, fused_quantise)                                                                  \
    FORWARD(from_mxfp4, from_mxfp4)                                                                          \
    FORWARD(swizzle, swizzle)                                                                                \
    FORWARD(interleave, interleave)                                                                          \
    FORWARD(prepack, prepack)                                                                                \
    FORWARD(grouped_gemm, grouped_gemm)                                                                      \
    BACKWARD(grouped_gemm_backward, grouped_gemm)                                                            \
    FORWARD(grouped_dense, grouped_dense)                                                                    \
    FORWARD(grouped_outer, grouped_outer)                                                                    \
    FORWARD(permute, permute)                                                                                \
    FORWARD(combine, combine)                                                                                \
    FORWARD(swiglu_forward, swiglu)                                                                          \
    BACKWARD(swiglu_backward, swiglu)                                                                        \
    FORWARD(expert_sums, expert_sums)                                                                        \
    FORWARD(route_forward, route)                                                                            \
    BACKWARD(route_backward, route)                                                                          \
    FORWARD(gemm, gemm)                                                                                      \
    FORWARD(pool_forward, pool)                                                                              \
    BACKWARD(pool_backward, pool)                                                                            \
    FORWARD(pool_append, pool_append)                                                                        \
    FORWARD(indexer, indexer)                                                                                \
    FORWARD(attend_mqa_forward, attend_mqa)                                                                  \
    BACKWARD(attend_mqa_backward, attend_mqa)                                                                \
    FORWARD(store_rows, store_rows)                                                                          \
    FORWARD(widen_blocks, widen_blocks)                                                                      \
    FORWARD(norm_rope_forward, norm_rope)                                                                    \
    BACKWARD(norm_rope_backward, norm_rope)                                                                  \
    FORWARD(copy_rows, copy_rows)                                                                            \
    FORWARD(cache_copy, cache_copy)                                                                          \
    FORWARD(cache_compress, cache_compress)                                                                  \
    FORWARD(copy_pages, copy_pages)                                                                          \
    FORWARD(pack_rows, pack_rows)                                                                            \
    FORWARD(step_tokens, step_tokens)                                                                        \
    FORWARD(step_places, step_places)                                                                        \
    FORWARD(step_check, step_check)                                                                          \
    FORWARD(clear_rows, clear_rows)                                                                          \
    FORWARD(decode, decode)                                                                                  \
    FORWARD(nsa_decode, nsa_decode)                                                                          \
    FORWARD(index_decode, index_decode)                                                                      \
    FORWARD(block_index, block_index)                                                                        \
    FORWARD(index_loss, index_loss)                                                                          \
    FORWARD(e4m3_gemm, e4m3_gemm)                                                                            \
    FORWARD(e4m3_round, e4m3_round)                                                                          \
    FORWARD(e4m3_weights, e4m3_weights)                                                                      \
    FORWARD(hyper_forward, hyper)                                                                            \
    BACKWARD(hyper_backward, hyper)                                                                          \
    FORWARD(indexer_loss, indexer_loss)

/* F(NAME, UPPER): the structs NAME_args, whose views are UPPER_TENSORS and whose other fields
 * UPPER_VALUES. The members of attend_gate_args are such structs themselves. */
#define BACKEND_ARGS(F)                                                                                      \
    F(attend, ATTEND)                                                                                        \
    F(compress, COMPRESS)                                                                                    \
    F(select, SELECT)                                                                                        \
    F(gate, GATE)                                                                                            \
    F(convert, CONVERT)                                                                                      \
    F(rowdot, ROWDOT)                                                                                        \
    F(list_convert, LIST_CONVERT)                                                                            \
    F(validate_lists, VALIDATE_LISTS)                                                                        \
    F(quantise, QUANTISE)                                                                                    \
    F(dequantise, DEQUANTISE)                                                                                \
    F(fused_quantise, FUSED_QUANTISE)                                                                        \
    F(from_mxfp4, FROM_MXFP4)                                                                                \
    F(swizzle, SWIZZLE)                                                                                      \
    F(interleave, INTERLEAVE)                                                                                \
    F(prepack, PREPACK)                                                                                      \
    F(grouped_gemm, GROUPED_GEMM)                                                                            \
    F(grouped_dense, GROUPED_DENSE)                                                                          \
    F(grouped_outer, GROUPED_OUTER)                                                                          \
    F(permute, PERMUTE)                                                                                      \
    F(combine, COMBINE)                                                                                      \
    F(swiglu, SWIGLU)                                                                                        \
    F(expert_sums, EXPERT_SUMS)                                                                              \
    F(route, ROUTE)                                                                                          \
    F(gemm, GEMM)                                                                                            \
    F(pool, POOL)                                                                                            \
    F(pool_append, POOL_APPEND)                                                                              \
    F(indexer, INDEXER)                                                                                      \
    F(attend_mqa, ATTEND_MQA)                                                                                \
    F(store_rows, STORE_ROWS)                                                                                \
    F(widen_blocks, WIDEN_BLOCKS)                                                                            \
    F(norm_rope, NORM_ROPE)                                                                                  \
    F(copy_rows, COPY_ROWS)                                                                                  \
    F(cache_copy, CACHE_COPY)                                                                                \
    F(cache_compress, CACHE_COMPRESS)                                                                        \
    F(copy_pages, COPY_PAGES)                                                                                \
    F(pack_rows, PACK_ROWS)                                                                                  \
    F(step_tokens, STEP_TOKENS)                                                                              \
    F(step_places, STEP_PLACES)                                                                              \
    F(step_check, STEP_CHECK)                                                                                \
    F(clear_rows, CLEAR_ROWS)                                                                                \
    F(decode, DECODE)                                                                                        \
    F(nsa_decode, NSA_DECODE)                                                                                \
    F(index_decode, INDEX_DECODE)                                                                            \
    F(block_index, BLOCK_INDEX)                                                                              \
    F(index_loss, INDEX_LOSS)                                                                                \
    F(e4m3_gemm, E4M3_GEMM)                                                                                  \
    F(e4m3_round, E4M3_ROUND)                                                                                \
    F(e4m3_weights, E4M3_WEIGHTS)                                                                            \
    F(hyper, HYPER)                                                                                          \
    F(indexer_loss, INDEXER_LOSS)

#define BACKEND_ROW(stage, name) name##_stage stage;

/* Runs the stages of a call on `exec`. */
typedef quern_status backend_run(const void *arg, const stage_exec *exec);

/* What launches to come would wait for, in a stream that is recorded. */
enum { BACKEND_POINT_MOST = 16 };
typedef struct backend_point {
    int32_t count;
    uint64_t recording; /* no two have one number */
    void *after[BACKEND_POINT_MOST];
} backend_point;

typedef struct quern_backend {
    const char *name;
    /* What a context keeps for the backend. Created with the context (NULL where memory is short),
     * destroyed with it. */
    void *(*open)(void);
    void (*close)(void *kept);
    /* The host's alone: the level of a context that asks for `asked`. */
    quern_status (*choose_level)(quern_cpu_level asked, quern_cpu_level *level);
    /* Optional, all three or none: what a call that is made again keeps, so that its stages start as one.
     * `run` and `arg` say the same stages at each call, but for addresses: the `bytes` at `addresses`, as
     * many each time, hold all of these. Threads may share a replay. Open returns NULL where memory is
     * short. */
    void *(*replay_open)(const stage_exec *exec, size_t bytes);
    void (*replay_close)(void *replay);
    quern_status (*replay)(void *replay, const stage_exec *exec, const void *addresses, backend_run *run,
                           const void *arg);
    /* Optional, both or neither: stages beside each other in a stream that is recorded. point() fills in
     * what the next stage would wait for; false where the stream is not recorded, or that is too much.
     * resume(): the next stage waits for what these points say and for nothing else. */
    bool (*point)(const stage_exec *exec, backend_point *point);
    quern_status (*resume)(const stage_exec *exec, const backend_point *const *points, int32_t count);
    /* With the prepack stage: bytes of a matrix [K, N] in its layout. */
    int64_t (*repacked_bytes)(int64_t n, int64_t k);
    BACKEND_STAGES(BACKEND_ROW, BACKEND_ROW)
    /* Optional: products of which none needs another's result, in one launch. False where it does not take
     * them so: nothing has been launched then. */
    bool (*gemm_together)(const stage_exec *exec, const gemm_args *const *list, int32_t count,
                          quern_status *status);
} quern_backend;

#endif
