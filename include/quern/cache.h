/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * cache.h - keys and values that are kept to decode from: dense attention and native sparse attention (nsa.h)
 * of the newest tokens of a batch of sequences of any lengths.
 *
 * Rows stand in pools of pages. A page holds 64 rows of every key/value head: keys [64, D], then values
 * [64, Dv], in the dtype of the activations; head after head. For sparse attention compressed entries stand
 * in a pool of their own. Each is computed once, when the last token of its block arrives. All raw rows are
 * kept, because any block may be selected. The window branch's own keys and values, where it has them, stand
 * in a ring of pages. Keys of the block indexer (quern_nsa_index()), where it chooses, stand in a pool whose
 * pages are numbered as those of tokens.
 *
 * The operations of a step (.._step) are functions of tensors: rows, pools, and the i32 tensors of a ledger's
 * step (ledger.h) or of an engine with books of its own. They run on the device of their tensors. On a GPU
 * they set the bits BAD_OFFSETS, BAD_POSITION and BAD_PAGE of the status word (cuda.h): rows of a sequence
 * whose position is wrong are not written, and its queries see nothing (o 0, lse -inf, lists -1). A
 * quern_cache keeps all of this for one layer on the CPU: its calls begin a step, run its operations and
 * commit it.
 *
 * Symbols: S sequences of the cache, B of a call, T tokens of a call (those of the call's first sequence,
 * then of the second, ...), H, Hkv, D, Dv, l, d, W, k, Hs, D_I as in nsa.h; Hi: 1 where the indexer's heads
 * share a key, else Hs.
 *
 * One call at a time may use a cache. On an error the cache and the outputs are as they were.
 */
#ifndef QUERN_CACHE_H
#define QUERN_CACHE_H

#include <quern/attention.h>
#include <quern/ledger.h>
#include <quern/nsa.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { QUERN_CACHE_PAGE = 64, QUERN_CACHE_ROLLBACK_MOST = QUERN_LEDGER_ROLLBACK_MOST };

/* ---- operations of a step ---- */

/* The pools of a ledger that books rows of this kind, in its order. */
enum { QUERN_CACHE_TOKENS = 0, QUERN_CACHE_ENTRIES = 1, QUERN_CACHE_WIN = 2 };

/* The compression of an append. */
typedef struct quern_cache_step_params {
    size_t size;
    int64_t block_size;               /* l; 0: no entries, and the rest is ignored */
    int64_t stride;                   /* d, a divisor of l; 0: l */
    quern_nsa_compress_kind compress; /* mean or linear */
    uint8_t reserved[4];              /* 0; later fields stand here */
} quern_cache_step_params;
#define QUERN_CACHE_STEP_PARAMS_INIT QUERN_SIZED(quern_cache_step_params)

/*
 * The tensors of an append; rows and pools in one dtype, weights in that or f32. NULL means absent. Those of
 * the step are i32; quern_step names them. A table has 64 tokens (entries) a column. The tokens' table serves
 * `slc` and `index`, too.
 */
typedef struct quern_cache_tensors {
    size_t size;
    const quern_tensor *k, *v;         /* [T, Hkv, D], [T, Hkv, Dv] */
    const quern_tensor *k_slc, *v_slc; /* with slc */
    const quern_tensor *k_win, *v_win; /* with win */
    const quern_tensor *w_k, *w_v;     /* as in quern_nsa_tensors: of the compression */
    const quern_tensor *pe_k, *pe_v;
    const quern_tensor *slots, *positions, *cu;  /* [B], [B], [B+1] */
    const quern_tensor *tokens, *tokens_table;   /* [pages, Hkv, 64 (D + Dv)], [B, columns]; updated */
    const quern_tensor *slc;                     /* as tokens: the selected branch's own pair; updated */
    const quern_tensor *entries, *entries_table; /* with block_size; updated */
    const quern_tensor *win, *win_table;         /* the window's own pair; its columns are a ring; updated */
    const quern_tensor *copies;                  /* [C, 3]: pages that are copied first; may be NULL */
    const quern_tensor *k_index;                 /* [T, Hi, D_I], with index */
    const quern_tensor *index;                   /* [pages, Hi, 64 D_I]: the block indexer's keys; updated */
} quern_cache_tensors;
#define QUERN_CACHE_TENSORS_INIT QUERN_SIZED(quern_cache_tensors)

/*
 * Writes the step's tokens behind those that the sequences have, and computes the entries whose blocks become
 * whole. Their bits are those of quern_nsa_compress() at the same CPU level. The workspace depends on shapes
 * alone.
 *
 * Refused, with QUERN_ERR_INVALID_ARGUMENT unless said: a NULL that is needed; a size other than quern.h
 * says; a tensor's ndim, extent, dtype, strides or memory; more tokens than columns; a page that is needed
 * and none of the pool's; offsets that fall; a workspace that is too small (QUERN_ERR_WORKSPACE) or NULL.
 */
QUERN_API quern_status quern_cache_append_step_workspace(quern_context *ctx,
                                                         const quern_cache_step_params *params,
                                                         const quern_cache_tensors *tensors, size_t *bytes);
QUERN_API quern_status quern_cache_append_step(quern_context *ctx, const quern_exec *exec,
                                               const quern_cache_step_params *params,
                                               const quern_cache_tensors *tensors, void *workspace,
                                               size_t workspace_bytes);

/* The tensors of a decoding call; act is the dtype of all. NULL means absent. */
typedef struct quern_decode_tensors {
    size_t size;
    const quern_tensor *q;      /* act [T, H, D] */
    const quern_tensor *o;      /* act [T, H, Dv]; written */
    const quern_tensor *lse;    /* dense: f32 [H, T]; written; may be NULL */
    const quern_tensor *w_gate; /* act or f32 [H, 3, D]: sparse, gate WEIGHTS */
    const quern_tensor
        *gates; /* f32 [T, H, 3]: sparse; read where the gate is GIVEN, else written; may then be NULL */
    const quern_tensor *block_idx;   /* i32 [Hs, T, k]: sparse; written; may be NULL */
    const quern_tensor *block_count; /* i32 [Hs, T]: sparse; written; may be NULL */
    const quern_tensor *sink;        /* dense: f32 [H], as in attention.h; may be NULL */
    /* Those of the step, as in quern_cache_tensors, with the step's rows in them. */
    const quern_tensor *slots, *positions, *cu;
    const quern_tensor *tokens, *tokens_table;
    const quern_tensor *slc;                     /* sparse; NULL: the tokens are the selected branch's */
    const quern_tensor *entries, *entries_table; /* sparse */
    const quern_tensor *win, *win_table;         /* sparse; NULL: the tokens are the window's */
    /* sparse, selection INDEXED: act [T, Hs, D_I], and the pool of quern_cache_tensors */
    const quern_tensor *q_index, *index;
} quern_decode_tensors;
#define QUERN_DECODE_TENSORS_INIT QUERN_SIZED(quern_decode_tensors)

/*
 * Attention of the step's tokens. Row t is the row that a call over the whole sequence gives, within
 * rounding. Neither the number of threads nor the batch nor the tables' columns change a bit. Refusals as for
 * the append; and
 *   dense    params.causal false; a query_offset other than -1
 *   sparse   causal false, tile other than 1, compressed_visibility other than complete,
 *            max_compressed_groups > 0, compress GIVEN, a given selection, a window that is larger than the
 *            ring; what nsa.h refuses
 * The chosen blocks are those that quern_nsa_forward() chooses at the same CPU level; on a GPU either of two
 * whose scores are equal within the rounding of f32. A query and key/value head read at most Nc + k l' + W
 * rows (scope head: Nc + g k l' + W). With selection INDEXED, which a GPU refuses, a query reads the
 * sequence's index keys once, and no entries unless the compressed branch is on. The workspace depends on
 * shapes alone.
 */
QUERN_API quern_status quern_attention_decode_step_workspace(quern_context *ctx,
                                                             const quern_attention_params *params,
                                                             const quern_decode_tensors *tensors,
                                                             size_t *bytes);
QUERN_API quern_status quern_attention_decode_step(quern_context *ctx, const quern_exec *exec,
                                                   const quern_attention_params *params,
                                                   const quern_decode_tensors *tensors, void *workspace,
                                                   size_t workspace_bytes);
QUERN_API quern_status quern_nsa_decode_step_workspace(quern_context *ctx, const quern_nsa_params *params,
                                                       const quern_decode_tensors *tensors, size_t *bytes);
QUERN_API quern_status quern_nsa_decode_step(quern_context *ctx, const quern_exec *exec,
                                             const quern_nsa_params *params,
                                             const quern_decode_tensors *tensors, void *workspace,
                                             size_t workspace_bytes);

/* A sequence as bytes: which tokens. */
typedef struct quern_cache_pack_params {
    size_t size;
    int64_t tokens;             /* of the sequence */
    int64_t dim;                /* D; 0: half of D + Dv */
    int64_t block_size, stride; /* as in quern_cache_step_params */
} quern_cache_pack_params;
#define QUERN_CACHE_PACK_PARAMS_INIT QUERN_SIZED(quern_cache_pack_params)

/* NULL means absent. */
typedef struct quern_cache_pack_tensors {
    size_t size;
    const quern_tensor *tokens, *tokens_table; /* as above; one row of a table, i32 [columns] */
    const quern_tensor *slc;
    const quern_tensor *entries, *entries_table;
    const quern_tensor *win, *win_table;
    const quern_tensor *packed; /* u8 [bytes]: tokens, slc, entries, win, index; of each, row after row, the
                                 * keys and values of every head; of a ring the last rows that it has room
                                 * for */
    const quern_tensor *index;
} quern_cache_pack_tensors;
#define QUERN_CACHE_PACK_TENSORS_INIT QUERN_SIZED(quern_cache_pack_tensors)

/* Copies a sequence out of its pages and back. Neither needs a workspace. */
QUERN_API quern_status quern_cache_pack_workspace(quern_context *ctx, const quern_cache_pack_params *params,
                                                  const quern_cache_pack_tensors *tensors, size_t *bytes);
QUERN_API quern_status quern_cache_pack(quern_context *ctx, const quern_exec *exec,
                                        const quern_cache_pack_params *params,
                                        const quern_cache_pack_tensors *tensors, void *workspace,
                                        size_t workspace_bytes);
QUERN_API quern_status quern_cache_unpack_workspace(quern_context *ctx, const quern_cache_pack_params *params,
                                                    const quern_cache_pack_tensors *tensors, size_t *bytes);
QUERN_API quern_status quern_cache_unpack(quern_context *ctx, const quern_exec *exec,
                                          const quern_cache_pack_params *params,
                                          const quern_cache_pack_tensors *tensors, void *workspace,
                                          size_t workspace_bytes);

/* ---- a cache of one layer on the CPU ---- */

typedef struct quern_cache_params {
    size_t size;
    quern_dtype dtype;  /* of the rows: f32, f16, bf16 */
    int64_t sequences;  /* S, 1 ... 2^31 - 1 */
    int64_t kv_heads;   /* >= 1 */
    int64_t dim, dim_v; /* multiples of 8 up to 512 */
    int64_t capacity;   /* the most tokens of a sequence, 1 ... 2^31 - 1 */
    int64_t page;       /* 0: there are pages for all sequences; 64: */
    int64_t pages;      /* so many of 64 tokens, 1 ... 2^31 - 1, and of their entries */
    /* Sparse attention. With block_size 0 there are no entries; without index_heads the cache is then dense,
     * and the rest is ignored. */
    int64_t block_size;               /* l */
    int64_t stride;                   /* d, a divisor of l; 0: l */
    quern_nsa_compress_kind compress; /* mean or linear */
    bool separate_slc, separate_win;  /* the branch has its own keys and values */
    int64_t window;                   /* W, with separate_win */
    int64_t step; /* with separate_win: most tokens of a sequence in a call, 1 ... 2^31 - 1. The ring holds
                   * W + 8 + step */
    /* The block indexer's keys; with index_heads 0 there are none. Preset msa needs no block_size. */
    int64_t index_heads; /* Hi */
    int64_t index_dim;   /* D_I, a multiple of 8 up to 512 */
} quern_cache_params;
#define QUERN_CACHE_PARAMS_INIT QUERN_SIZED(quern_cache_params)

/* The cache's books are in `memory`, its pools are in `rows`. */
typedef struct quern_cache quern_cache;

/* The ledger that such a cache has: its pools are QUERN_CACHE_TOKENS and the like. */
QUERN_API quern_status quern_cache_ledger_params(const quern_cache_params *params,
                                                 quern_ledger_params *ledger);
/* Bytes of the two. */
QUERN_API quern_status quern_cache_size(const quern_cache_params *params, size_t *memory_bytes,
                                        size_t *rows_bytes);
/* Makes a cache of empty sequences. Neither memory needs an alignment beyond that of a row's element, and
 * neither may move while the cache is used. The rows need not be cleared. */
QUERN_API quern_status quern_cache_create(const quern_cache_params *params, void *memory, size_t memory_bytes,
                                          void *rows, size_t rows_bytes, quern_cache **cache);

/* Tokens of a sequence, and its compressed entries. Either may be NULL. */
QUERN_API quern_status quern_cache_length(const quern_cache *cache, int64_t sequence, int64_t *tokens,
                                          int64_t *entries);
/* Bytes of the rows that the sequences hold: tokens, separate pairs, entries, index keys; with page 64 of all
 * their pages. What forks share counts for each. */
QUERN_API quern_status quern_cache_held(const quern_cache *cache, int64_t *bytes);
/* Takes back the last n tokens of a sequence: 0 ... 8, and at most those it has. With separate_win n is
 * also limited by the room in the ring (8 after the most tokens that the sequence ever had). Entries that
 * end in these tokens are dropped, and computed again when their blocks are whole again. */
QUERN_API quern_status quern_cache_rollback(quern_cache *cache, int64_t sequence, int64_t n);
/* Empties a sequence; its pages are free. */
QUERN_API quern_status quern_cache_reset(quern_cache *cache, int64_t sequence);
/* Gives sequence `to`, whatever it held, the tokens of `from`. They share pages until one of them is written:
 * neither sequence sees what happens to the other. */
QUERN_API quern_status quern_cache_fork(quern_cache *cache, int64_t from, int64_t to);
/* Writes a sequence into `to`. *bytes is the room that `to` has, and becomes the length written; too little
 * room is QUERN_ERR_WORKSPACE, and both stay as they were. With `to` NULL only sets *bytes, whatever it was.
 * In two calls:
 *
 *     size_t bytes;
 *     quern_cache_save(ctx, cache, sequence, NULL, &bytes);
 *     void *to = malloc(bytes);
 *     quern_cache_save(ctx, cache, sequence, to, &bytes);
 *
 * The bytes have the machine's byte order and hold a version and a checksum. */
QUERN_API quern_status quern_cache_save(quern_context *ctx, const quern_cache *cache, int64_t sequence,
                                        void *to, size_t *bytes);
/* Gives a sequence, whatever it held, the saved tokens. Refused (QUERN_ERR_FORMAT) are bytes that are damaged
 * or cut off, of a cache of other parameters (sequences, capacity, page and pages may differ), or with more
 * tokens than the capacity; QUERN_ERR_INVALID_ARGUMENT: too few pages are free. */
QUERN_API quern_status quern_cache_restore(quern_context *ctx, quern_cache *cache, int64_t sequence,
                                           const void *from, size_t from_bytes);

/* Which sequences a call is about; host memory. */
typedef struct quern_cache_batch {
    size_t size;
    int64_t batch;            /* B >= 0 */
    const int32_t *sequences; /* [B], each at most once; -1: none */
    const int64_t
        *counts; /* [B] tokens: to append, or the newest ones, which are the queries. >= 0, 2^31 - 1 in all */
} quern_cache_batch;
#define QUERN_CACHE_BATCH_INIT QUERN_SIZED(quern_cache_batch)

/*
 * The operations above, for sequences of a cache, which fills in the tensors of the step: an append of
 * counts[b] tokens to each, and attention of the newest counts[b] tokens, which the cache has already.
 * Refused as above, and: a batch that quern_ledger_begin() refuses; parameters of sparse attention other than
 * the cache's. The workspaces depend on the cache's capacity, B and the tensors' shapes.
 */
QUERN_API quern_status quern_cache_append_workspace(quern_context *ctx, const quern_cache *cache,
                                                    const quern_cache_batch *batch,
                                                    const quern_cache_tensors *tensors, size_t *bytes);
QUERN_API quern_status quern_cache_append(quern_context *ctx, const quern_exec *exec, quern_cache *cache,
                                          const quern_cache_batch *batch, const quern_cache_tensors *tensors,
                                          void *workspace, size_t workspace_bytes);
QUERN_API quern_status quern_attention_decode_workspace(quern_context *ctx,
                                                        const quern_attention_params *params,
                                                        const quern_cache *cache,
                                                        const quern_cache_batch *batch,
                                                        const quern_decode_tensors *tensors, size_t *bytes);
QUERN_API quern_status quern_attention_decode(quern_context *ctx, const quern_exec *exec,
                                              const quern_attention_params *params, const quern_cache *cache,
                                              const quern_cache_batch *batch,
                                              const quern_decode_tensors *tensors, void *workspace,
                                              size_t workspace_bytes);
QUERN_API quern_status quern_nsa_decode_workspace(quern_context *ctx, const quern_nsa_params *params,
                                                  const quern_cache *cache, const quern_cache_batch *batch,
                                                  const quern_decode_tensors *tensors, size_t *bytes);
QUERN_API quern_status quern_nsa_decode(quern_context *ctx, const quern_exec *exec,
                                        const quern_nsa_params *params, const quern_cache *cache,
                                        const quern_cache_batch *batch, const quern_decode_tensors *tensors,
                                        void *workspace, size_t workspace_bytes);

#ifdef __cplusplus
}
#endif
#endif
