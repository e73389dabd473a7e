/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * dsv4_layer.h - a whole attention layer of DeepSeek-V4 (CSA, HCA or the window alone), from hidden states to
 * its output: forward, backward, and token by token from a cache.
 *
 * Symbols: B sequences of T tokens, Dm width of hidden states, H heads of D channels in G groups, Hi heads of
 * C_I channels of the indexer, r tokens of an entry, S entries, k chosen, P positions and R rotated channels
 * of a RoPE table.
 *
 * Source of the maths: the DeepSeek-V4 report (arXiv 2606.19348) and its public inference code.
 */
#ifndef QUERN_DSV4_LAYER_H
#define QUERN_DSV4_LAYER_H

#include <quern/dsv4.h>

#ifdef __cplusplus
extern "C" {
#endif

/*
 * A whole attention layer, from hidden states to its output.
 *
 *   qr  = norm(x q_a^T)                          q_lora channels
 *   q   = rotate(norm(qr q_b^T))                 H heads of D, each divided by its root of mean square
 *   kv  = rotate(norm(x kv^T))                   the raw rows
 *   entries: the compressor of x [kv_proj | gate_proj], with norm and rotation by a block's first token
 *   CSA chooses by the indexer: its keys are a second compressor's entries, its queries rotate(qr
 *   indexer_q_b^T), the weights of its heads x indexer_heads^T
 *   o   = the attention core over the window and the entries, rotated back
 *   out = [o_1 o_a_1^T | ... | o_G o_a_G^T] o_b^T, o_j the heads of group j
 *
 * Projection weights are [out, in], as a checkpoint has them. CSA's compressors have two series: rows (and
 * columns of the bias) of series b, then of series a.
 */
typedef enum quern_dsv4_layer_kind {
    QUERN_DSV4_LAYER_CSA = 0,
    QUERN_DSV4_LAYER_HCA = 1,
    QUERN_DSV4_LAYER_SWA = 2 /* the window alone */
} quern_dsv4_layer_kind;

typedef struct quern_dsv4_layer_params {
    size_t size;
    quern_dsv4_layer_kind kind;
    int64_t window; /* raw keys of a query, its own among them; 0: 128 */
    int64_t top_k;  /* CSA: entries chosen, 1 to 2048; 0: 512 */
    float eps;      /* of every norm; 0: 1e-6 */
    uint8_t reserved[4]; /* 0; later fields stand here */
} quern_dsv4_layer_params;
#define QUERN_DSV4_LAYER_PARAMS_INIT QUERN_SIZED(quern_dsv4_layer_params)

/*
 * NULL means absent. act is one of f32, f16, bf16; weights are any of these. All sequences start at position
 * 0. H, G and Hi follow from the weights: D and C_I are the extents of kv_norm and indexer_norm, r that of
 * compressor_bias. S = floor(T / r) entries; m series: 2 in CSA, 1 in HCA. Refused as in dsv4.h, and: a
 * weight that the kind has no use for; heads or groups that do not divide; positions beyond cos_sin; a
 * compressor's weight in two formats.
 *
 * quern_dsv4_layer_decode() takes x [T, Dm] and the shapes in brackets, where n counts the entries that the
 * call completes, and no gradients.
 */
typedef struct quern_dsv4_layer_tensors {
    size_t size;
    const quern_tensor *x;                               /* act [B, T, Dm] */
    const quern_tensor *cos_sin;                         /* [P, R], see quern_dsv4_rope_table() */
    const quern_tensor *sinks;                           /* [H]; NULL: none */
    const quern_tensor *q_a, *q_a_norm, *q_b;            /* [q_lora, Dm] [q_lora] [H D, q_lora] */
    const quern_tensor *kv, *kv_norm;                    /* [D, Dm] [D] */
    const quern_tensor *o_a, *o_b;                       /* [G o_lora, H / G D] [Dm, G o_lora] */
    const quern_tensor *compressor_bias;                 /* [r, mD]; CSA and HCA */
    const quern_tensor *compressor_kv, *compressor_gate; /* [mD, Dm] */
    const quern_tensor *compressor_norm;                 /* [D] */
    const quern_tensor *indexer_bias;                    /* [r, 2 C_I]; CSA */
    const quern_tensor *indexer_kv, *indexer_gate;       /* [2 C_I, Dm] */
    const quern_tensor *indexer_norm;                    /* [C_I] */
    const quern_tensor *indexer_q_b, *indexer_heads;     /* [Hi C_I, q_lora] [Hi, Dm] */
    const quern_tensor *out;                             /* act [B, T, Dm] ([T, Dm]); written */
    /* What the layer goes through. Written, each may be NULL: */
    const quern_tensor *q_residual; /* qr: act [B, T, q_lora] ([T, q_lora]) */
    const quern_tensor *q;          /* act [B, H, T, D] ([H, T, D]) */
    const quern_tensor *kv_rows;    /* act [B, T, D] ([T, D]) */
    const quern_tensor *compressed; /* act [B, S, D] ([n, D]) */
    const quern_tensor *idx_k;      /* act [B, S, C_I] ([n, C_I]) */
    const quern_tensor *idx_q;      /* act [B, T, Hi, C_I] ([T, Hi, C_I]) */
    const quern_tensor *idx_score;  /* f32 [B, T, S], -inf where an entry is not seen ([T, most entries of a
                                      sequence, or more]: columns past a sequence's entries stay as
                                      they are) */
    const quern_tensor *idx_topk;   /* i32 [B, T, k] ([T, k]), ascending, then -1 */
    const quern_tensor *core, *core_irope; /* act [B, T, H, D] ([T, H, D]): o before and after
                                                                it is rotated back */
    const quern_tensor *o_a_out;           /* act [B, T, G, o_lora] ([T, G, o_lora]) */
    const quern_tensor *d_out;             /* act: gradient of the loss by out */
    /* Written by backward, each may be NULL: d_x act, the others f32. The indexer gets no gradient. */
    const quern_tensor *d_x, *d_sinks, *d_q_a, *d_q_a_norm, *d_q_b, *d_kv, *d_kv_norm, *d_o_a, *d_o_b;
    const quern_tensor *d_compressor_bias, *d_compressor_kv, *d_compressor_gate, *d_compressor_norm;
    /* Instead of compressor_kv and compressor_gate, both in one, as quern_dsv4_compress() takes it: columns
     * C_a Z_a C_b Z_b, 4D (HCA: C Z, 2D). In FP8 e4m3 or u8 [columns, Dm] with scales in f32, or in e8m0 or
     * u8 [ceil(columns / 128), ceil(Dm / 128)]; in NVFP4, Dm a multiple of 16, u8 [Dm / 2, columns], e4m3 or
     * u8 [Dm / 16, columns] and f32 []. It gets no gradient, and every call widens FP8. */
    const quern_tensor *compressor_fp8, *compressor_fp8_scales;
    const quern_tensor *compressor_codes, *compressor_scales, *compressor_global;
    /* The same instead of indexer_kv and indexer_gate, columns 4C_I. */
    const quern_tensor *indexer_fp8, *indexer_fp8_scales;
    const quern_tensor *indexer_codes, *indexer_scales, *indexer_global;
} quern_dsv4_layer_tensors;
#define QUERN_DSV4_LAYER_TENSORS_INIT QUERN_SIZED(quern_dsv4_layer_tensors)

/* CPU alone. The workspace holds the projections of all tokens; long sequences go through
 * quern_dsv4_layer_decode() in chunks. */
QUERN_API quern_status quern_dsv4_layer_workspace(quern_context *ctx, const quern_dsv4_layer_params *params,
                                                  const quern_dsv4_layer_tensors *tensors, size_t *bytes);
QUERN_API quern_status quern_dsv4_layer(quern_context *ctx, const quern_exec *exec,
                                        const quern_dsv4_layer_params *params,
                                        const quern_dsv4_layer_tensors *tensors, void *workspace,
                                        size_t workspace_bytes);
/* Computes the layer again from x and the weights, and writes every d_ that is given. The choice of entries
 * carries no gradient. */
QUERN_API quern_status quern_dsv4_layer_backward_workspace(quern_context *ctx,
                                                           const quern_dsv4_layer_params *params,
                                                           const quern_dsv4_layer_tensors *tensors,
                                                           size_t *bytes);
QUERN_API quern_status quern_dsv4_layer_backward(quern_context *ctx, const quern_exec *exec,
                                                 const quern_dsv4_layer_params *params,
                                                 const quern_dsv4_layer_tensors *tensors, void *workspace,
                                                 size_t workspace_bytes);

/*
 * What a layer keeps of its sequences between calls: the last raw rows, all entries, the indexer's keys and
 * the compressors' states. Bookkeeping and states are in `memory`, rows in `rows`; both are the caller's and
 * may not move. One call at a time may use a cache. On an error it is as it was.
 *
 * With pages, entry s of a sequence and its key stand in slot s % page of the sequence's page number s /
 * page, in one pool of entries and one of keys. The caller gives pages to a sequence before tokens need them
 * (quern_dsv4_layer_cache_add_pages()). Raw rows are as many as the window and have no pages.
 */
typedef struct quern_dsv4_layer_cache quern_dsv4_layer_cache;

typedef struct quern_dsv4_layer_cache_params {
    size_t size;
    quern_dsv4_layer_kind kind;
    quern_dtype dtype;            /* of rows: f32, f16, bf16; x may have another */
    int64_t sequences;            /* 1 ... 2^31 - 1 */
    int64_t capacity;             /* most tokens of a sequence, 1 ... 2^31 - 1 */
    int64_t dim;                  /* D */
    int64_t window;               /* as in the layer's params */
    int64_t ratio;                /* r, CSA and HCA; 0: 4, 128 */
    int64_t index_dim;            /* C_I, CSA */
    int64_t ring;                 /* tokens of a sequence that can be taken back, 0 to 8 */
    quern_dsv4_format format;     /* of raw rows and entries: rows in dtype, or row584 (D 512, R 64) */
    quern_dsv4_format key_format; /* CSA, of the indexer's keys: rows in dtype, fp8 (either scale) or fp4 */
    int64_t page;                 /* 0: contiguous; CSA and HCA: slots of a page, up to 65536 */
    int64_t pages;                /* with page: of the pool, 1 ... 2^31 - 1 */
} quern_dsv4_layer_cache_params;
#define QUERN_DSV4_LAYER_CACHE_PARAMS_INIT QUERN_SIZED(quern_dsv4_layer_cache_params)

/* Bytes of the two. */
QUERN_API quern_status quern_dsv4_layer_cache_size(const quern_dsv4_layer_cache_params *params,
                                                   size_t *memory_bytes, size_t *rows_bytes);
/* Makes a cache of empty sequences, in memory of any alignment. The rows need not be cleared. */
QUERN_API quern_status quern_dsv4_layer_cache_create(const quern_dsv4_layer_cache_params *params,
                                                     void *memory, size_t memory_bytes, void *rows,
                                                     size_t rows_bytes, quern_dsv4_layer_cache **cache);
/* Tokens of a sequence, and how many of the last ones can be taken back. Either may be NULL. */
QUERN_API quern_status quern_dsv4_layer_cache_length(const quern_dsv4_layer_cache *cache, int64_t sequence,
                                                     int64_t *tokens, int64_t *held);
/* Takes back the last n tokens of a sequence; more than can be is an error. */
QUERN_API quern_status quern_dsv4_layer_cache_rollback(quern_dsv4_layer_cache *cache, int64_t sequence,
                                                       int64_t n);
/* Empties a sequence. Other sequences may then take its pages. */
QUERN_API quern_status quern_dsv4_layer_cache_reset(quern_dsv4_layer_cache *cache, int64_t sequence);
/* Gives a sequence more pages, numbers of the pool: the first holds its first entries. Refused are pages that
 * are outside the pool, that a sequence has, or that stand twice; more than its capacity needs. */
QUERN_API quern_status quern_dsv4_layer_cache_add_pages(quern_dsv4_layer_cache *cache, int64_t sequence,
                                                        const int32_t *pages, int64_t count);
/* How many pages a sequence has, and how many it needs for `tokens` tokens. Either may be NULL. */
QUERN_API quern_status quern_dsv4_layer_cache_pages(const quern_dsv4_layer_cache *cache, int64_t sequence,
                                                    int64_t tokens, int64_t *held, int64_t *needed);
/* Makes sequence `to` an independent copy of sequence `from`, in pages that `to` has. */
QUERN_API quern_status quern_dsv4_layer_cache_fork(quern_dsv4_layer_cache *cache, int64_t from, int64_t to);

/* Writes a sequence into `to`. *bytes is the room that `to` has, and becomes the length written; too little
 * room is QUERN_ERR_WORKSPACE, and both stay as they were. With `to` NULL only sets *bytes, whatever it was.
 * In two calls:
 *
 *     size_t bytes;
 *     quern_dsv4_layer_cache_save(cache, sequence, NULL, &bytes);
 *     void *to = malloc(bytes);
 *     quern_dsv4_layer_cache_save(cache, sequence, to, &bytes);
 *
 * The bytes have the machine's byte order and hold a version and a checksum. */
QUERN_API quern_status quern_dsv4_layer_cache_save(const quern_dsv4_layer_cache *cache, int64_t sequence,
                                                   void *to, size_t *bytes);
/* Gives a sequence, whatever it held, the saved tokens. Refused (QUERN_ERR_FORMAT) are bytes that are damaged
 * or cut off, of a cache of other parameters (sequences, capacity, page and pages may differ), or with more
 * tokens than the capacity. */
QUERN_API quern_status quern_dsv4_layer_cache_restore(quern_dsv4_layer_cache *cache, int64_t sequence,
                                                      const void *from, size_t from_bytes);

/* What a cache holds of a sequence, to move it to another cache: rows as the cache stores them, contiguous or
 * not, and states. */
typedef struct quern_dsv4_layer_rows {
    size_t size;
    int64_t tokens;
    quern_tensor raw;           /* [n, D], or u8 [n, 584]: the rows of the last n tokens */
    quern_tensor entries, keys; /* [floor(tokens / r), D or 584], [floor(tokens / r), C_I or bytes] */
    const quern_dsv4_state *main, *index; /* at position `tokens`; NULL where the kind has none */
} quern_dsv4_layer_rows;
#define QUERN_DSV4_LAYER_ROWS_INIT QUERN_SIZED(quern_dsv4_layer_rows)

/* Sets *rows to views of the memory of a cache without pages, which hold until the sequence changes. */
QUERN_API quern_status quern_dsv4_layer_cache_get(const quern_dsv4_layer_cache *cache, int64_t sequence,
                                                  quern_dsv4_layer_rows *rows);
/* Makes a sequence of rows and states that are copied. Refused are states of other dims, at another position
 * or that did not begin at 0, and fewer raw rows than window - 1, or all tokens; the sequence is then as it
 * was. */
QUERN_API quern_status quern_dsv4_layer_cache_set(quern_dsv4_layer_cache *cache, int64_t sequence,
                                                  const quern_dsv4_layer_rows *rows);

/*
 * The layer's outputs of counts[b] >= 0 new tokens of each of `batch` sequences, which stand in x one
 * sequence after the other; the cache takes them in. However a sequence is cut into calls, states, keys,
 * entries and choices have the same bits, and outputs are equal within rounding. Where the cache has rows in
 * x's dtype, the bits are those of quern_dsv4_layer() at the same CPU level. Rows are made in f32 and rounded
 * once, to what the cache stores, which is what queries read; kv_rows, compressed and idx_k are the rows
 * before that. Refused as in dsv4.h, and: an id outside the cache or twice in a call; more tokens than the
 * capacity, or more entries than the pages hold; a cache of another kind, window or dims; with a format of
 * bytes, a NaN or Inf in a new row. CPU alone. The workspace depends on the cache's parameters, B and the
 * tensors' shapes, not on what sequences hold.
 */
QUERN_API quern_status quern_dsv4_layer_decode_workspace(
    quern_context *ctx, const quern_dsv4_layer_params *params, const quern_dsv4_layer_cache *cache,
    const int32_t *sequences, const int64_t *counts, int64_t batch, const quern_dsv4_layer_tensors *tensors,
    size_t *bytes);
QUERN_API quern_status quern_dsv4_layer_decode(quern_context *ctx, const quern_exec *exec,
                                               const quern_dsv4_layer_params *params,
                                               quern_dsv4_layer_cache *cache, const int32_t *sequences,
                                               const int64_t *counts, int64_t batch,
                                               const quern_dsv4_layer_tensors *tensors, void *workspace,
                                               size_t workspace_bytes);

#ifdef __cplusplus
}
#endif
#endif
