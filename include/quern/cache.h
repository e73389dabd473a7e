/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * cache.h - caches of keys and values, and decoding from them: dense attention and native sparse attention
 * (nsa.h) of the newest tokens of a batch of sequences of any lengths.
 *
 * A cache holds rows for sequences 0 ... S - 1 in memory of the caller. A call appends tokens to any subset
 * of the sequences; the last tokens can be taken back. For sparse attention the cache also holds the
 * compressed entries. Each is computed once, when the last token of its block arrives. All raw rows are kept,
 * because any block may be selected. The window branch's own keys and values, where it has them, are kept in
 * a ring.
 *
 * Rows are stored in blocks of 64 tokens of one key/value head: keys [64, D], then values [64, Dv], in the
 * cache's dtype. Contiguous: the blocks of a head follow each other, head after head, sequence after
 * sequence. Paged: a page holds the blocks of all heads for 64 tokens (or 64 entries); the caller says which
 * page of the pool holds which tokens.
 *
 * Symbols: S sequences of the cache, B of a call, T tokens of a call (those of the call's first sequence,
 * then of the second, ...), H, Hkv, D, Dv, l, d, W, k, Hs as in nsa.h.
 *
 * Calls run on the CPU. One call at a time may use a cache. On an error the cache and the outputs are as they
 * were.
 */
#ifndef QUERN_CACHE_H
#define QUERN_CACHE_H

#include <quern/attention.h>
#include <quern/nsa.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { QUERN_CACHE_PAGE = 64, QUERN_CACHE_ROLLBACK_MOST = 8 };

typedef struct quern_cache_params {
    size_t size;
    quern_dtype dtype;  /* of the rows: f32, f16, bf16 */
    int64_t sequences;  /* S, 1 ... 2^31 - 1 */
    int64_t kv_heads;   /* >= 1 */
    int64_t dim, dim_v; /* multiples of 8 up to 512 */
    int64_t capacity;   /* the most tokens of a sequence, 1 ... 2^31 - 1 */
    int64_t page;       /* 0: contiguous; 64: paged */
    int64_t pages;      /* paged: pages of the pool, 1 ... 2^31 - 1 */
    /* Sparse attention; with block_size 0 the cache is dense and the rest is ignored. */
    int64_t block_size;               /* l */
    int64_t stride;                   /* d, a divisor of l; 0: l */
    quern_nsa_compress_kind compress; /* mean or linear */
    bool separate_slc, separate_win;  /* the branch has its own keys and values */
    int64_t window;                   /* W, with separate_win */
    int64_t step; /* with separate_win: most tokens of a sequence in a call, 1 ... 2^31 - 1. The ring holds
                   * W + 8 + step */
} quern_cache_params;
#define QUERN_CACHE_PARAMS_INIT QUERN_SIZED(quern_cache_params)

/* The cache's bookkeeping is in `memory`, its rows are in `rows`. */
typedef struct quern_cache quern_cache;

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
/* Bytes of the rows that the sequences hold: tokens, separate pairs, entries; paged: of all their pages. */
QUERN_API quern_status quern_cache_held(const quern_cache *cache, int64_t *bytes);
/* Takes back the last n tokens of a sequence: 0 ... 8, and at most those it has. With separate_win n is
 * also limited by the room in the ring (8 after the most tokens that the sequence ever had). Entries that
 * end in these tokens are dropped, and computed again when their blocks are whole again. */
QUERN_API quern_status quern_cache_rollback(quern_cache *cache, int64_t sequence, int64_t n);
/* Empties a sequence. Other sequences may then take its pages. */
QUERN_API quern_status quern_cache_reset(quern_cache *cache, int64_t sequence);

/*
 * Page tables: i32 [S, columns], on the host. A row lists the pages of a sequence in four runs of columns:
 * tokens, entries, the selected branch's own pair, the window's ring. Column first + i of a run is the page
 * of that run's rows 64 i ... 64 i + 63 (the ring's: modulo its pages). Only columns that the sequence's
 * tokens need are read. One sequence writes a page, in one column, as long as that column is in use and names
 * the page. Its forks may read it (quern_cache_fork()).
 */
typedef struct quern_cache_columns {
    size_t size;
    int64_t tokens, entries, slc, win; /* where each run starts */
    int64_t columns;
} quern_cache_columns;
#define QUERN_CACHE_COLUMNS_INIT QUERN_SIZED(quern_cache_columns)
QUERN_API quern_status quern_cache_columns_of(const quern_cache_params *params, quern_cache_columns *columns);
/* Pages of each run that a sequence of so many tokens needs (the fields as counts; columns: their sum). */
QUERN_API quern_status quern_cache_pages_of(const quern_cache_params *params, int64_t tokens,
                                            quern_cache_columns *pages);

/*
 * Copies of a sequence. `table` is as in quern_cache_batch; NULL for a contiguous cache. Sequence, table and
 * pages are refused as for an append. The calls run on the calling thread.
 *
 * A fork gives sequence `to`, whatever it held, the tokens of `from`. Where both rows of the table name the
 * same page, and it is full and not of the ring, they share it; all other rows are copied. Afterwards neither
 * sequence sees what happens to the other: an append that would write a shared page, after a roll-back, is
 * refused while another sequence reads it.
 */
QUERN_API quern_status quern_cache_fork(quern_cache *cache, int64_t from, int64_t to, const int32_t *table);
/* Writes a sequence into `to`. *bytes is the room that `to` has, and becomes the length written; too little
 * room is QUERN_ERR_WORKSPACE, and both stay as they were. With `to` NULL only sets *bytes, whatever it was.
 * In two calls:
 *
 *     size_t bytes;
 *     quern_cache_save(cache, sequence, table, NULL, &bytes);
 *     void *to = malloc(bytes);
 *     quern_cache_save(cache, sequence, table, to, &bytes);
 *
 * The bytes have the machine's byte order and hold a version and a checksum. */
QUERN_API quern_status quern_cache_save(const quern_cache *cache, int64_t sequence, const int32_t *table,
                                        void *to, size_t *bytes);
/* Gives a sequence, whatever it held, the saved tokens, in this cache's pages. Refused (QUERN_ERR_FORMAT) are
 * bytes that are damaged or cut off, of a cache of other parameters (sequences, capacity, page and pages may
 * differ), or with more tokens than the capacity. */
QUERN_API quern_status quern_cache_restore(quern_cache *cache, int64_t sequence, const int32_t *table,
                                           const void *from, size_t from_bytes);

/* Which sequences a call is about; host memory. */
typedef struct quern_cache_batch {
    size_t size;
    int64_t batch;            /* B >= 0 */
    const int32_t *sequences; /* [B], each at most once */
    const int64_t
        *counts; /* [B] tokens: to append, or the newest ones, which are the queries. >= 0, 2^31 - 1 in all */
    const int32_t *table; /* paged: [S, columns]; else NULL */
} quern_cache_batch;
#define QUERN_CACHE_BATCH_INIT QUERN_SIZED(quern_cache_batch)

/* The tensors of an append; rows in the cache's dtype, weights in that or f32. NULL means absent. */
typedef struct quern_cache_tensors {
    size_t size;
    const quern_tensor *k, *v;         /* [T, Hkv, D], [T, Hkv, Dv] */
    const quern_tensor *k_slc, *v_slc; /* with separate_slc */
    const quern_tensor *k_win, *v_win; /* with separate_win */
    const quern_tensor *w_k, *w_v;     /* as in quern_nsa_tensors: of the compression */
    const quern_tensor *pe_k, *pe_v;
} quern_cache_tensors;
#define QUERN_CACHE_TENSORS_INIT QUERN_SIZED(quern_cache_tensors)

/*
 * Appends counts[b] tokens to each sequence of the batch and computes the entries whose blocks become whole.
 * Their bits are those of quern_nsa_compress() at the same CPU level. The workspace depends on B and the
 * counts, not on what the sequences hold.
 *
 * Refused, with QUERN_ERR_INVALID_ARGUMENT unless said: a NULL that is needed; a size other than quern.h
 * says; ids outside 0 ... S - 1 or twice in a batch; more tokens than capacity or step; a table's page that
 * is missing, outside the pool, or written by another sequence or in another column; a tensor's ndim, extent,
 * dtype, strides or memory; another device than the CPU (QUERN_ERR_UNSUPPORTED); a workspace that is too
 * small (QUERN_ERR_WORKSPACE) or NULL.
 */
QUERN_API quern_status quern_cache_append_workspace(quern_context *ctx, const quern_cache *cache,
                                                    const quern_cache_batch *batch,
                                                    const quern_cache_tensors *tensors, size_t *bytes);
QUERN_API quern_status quern_cache_append(quern_context *ctx, const quern_exec *exec, quern_cache *cache,
                                          const quern_cache_batch *batch, const quern_cache_tensors *tensors,
                                          void *workspace, size_t workspace_bytes);

/* The tensors of a decoding call; act is the cache's dtype. NULL means absent. */
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
} quern_decode_tensors;
#define QUERN_DECODE_TENSORS_INIT QUERN_SIZED(quern_decode_tensors)

/*
 * Attention of the newest counts[b] tokens of each sequence, which are in the cache already. Row t is the row
 * that a call over the whole sequence gives, within rounding. The number of threads changes no bit. Refusals
 * as for the append; and
 *   dense    params.causal false; a query_offset other than -1
 *   sparse   causal false, tile other than 1, compressed_visibility other than complete,
 *            max_compressed_groups > 0, compress GIVEN or another than the cache's, a given selection,
 *            block_size or stride other than the cache's, a window larger than the ring's; what nsa.h refuses
 * The chosen blocks are those that quern_nsa_forward() chooses at the same CPU level. A query and key/value
 * head read at most Nc + k l' + W rows (scope head: Nc + g k l' + W). Workspaces depend on the cache's
 * capacity, B, the counts and the tensors' shapes.
 */
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
