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
#include <quern/ledger.h>

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
    int64_t window;      /* raw keys of a query, its own among them; 0: 128 */
    int64_t top_k;       /* CSA: entries chosen, 1 to 2048; 0: 512 */
    float eps;           /* of every norm; 0: 1e-6 */
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

/* On a GPU x has 16 bits, and core is not given. The workspace holds the projections of all tokens; long
 * sequences go through quern_dsv4_layer_decode() in chunks, on the CPU. */
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

/* ---- a step of many sequences ---- */

/*
 * What a layer keeps of its sequences between steps stands in tensors of the caller:
 *
 *   raw      the last raw rows of a sequence, a ring that is one page
 *   entries  in pages, and in CSA the indexer's keys, in pages of the same numbers
 *   states   the compressors', in slots (quern_dsv4_append_step())
 *
 * A ledger (ledger.h) that keeps the books of such layers has these pools, and states but in window layers.
 */
enum { QUERN_DSV4_RAW = 0, QUERN_DSV4_ENTRIES = 1 };

typedef struct quern_dsv4_layer_step_params {
    size_t size;
    quern_dsv4_layer_kind kind; /* these four as in the layer's params */
    int64_t window;
    int64_t top_k;
    float eps;
    quern_dsv4_format format;     /* of raw rows and entries: rows, or row584 (D 512, R 64) */
    quern_dsv4_format key_format; /* CSA, of the indexer's keys: rows, fp8 (either scale) or fp4 */
    uint8_t reserved[4];          /* 0; later fields stand here */
} quern_dsv4_layer_step_params;
#define QUERN_DSV4_LAYER_STEP_PARAMS_INIT QUERN_SIZED(quern_dsv4_layer_step_params)

/*
 * The weights are those of quern_dsv4_layer_tensors; results are [T, ..] in place of [B, T, ..], q [H, T,
 * D]. slots ... copies are a step's (ledger.h). All shapes are upper bounds: T may be more than the step's
 * tokens, n is at most floor(T / r) + B; rows of results behind the step's tokens and entries are 0. Entries
 * and keys that become whole come sequence after sequence, the first n of them.
 *
 *               rows                   bytes
 *   raw         [pages, R, D]          u8 [pages, R, 584]: a row's scales stand behind its data
 *   entries     [pages, page, D]       u8 [pages, page * 584]: the data of all slots, then the scales of all
 *   keys        [pages, page, C_I]     u8 [pages, page * bytes of a row]: likewise
 *
 * Rows are f32, f16 or bf16, whatever x has; raw and entries alike. Row p of a sequence stands in slot p % R
 * of its page. With m the rows that the states' rings hold (0 in window layers), R >= window - 1 + m, or a
 * sequence has up to R tokens. Entry s and its key stand in slot s % page of page entries_table[b, s / page].
 */
typedef struct quern_dsv4_layer_step_tensors {
    size_t size;
    const quern_tensor *x; /* act [T, Dm] */
    const quern_tensor *cos_sin;
    const quern_tensor *sinks;
    const quern_tensor *q_a, *q_a_norm, *q_b;
    const quern_tensor *kv, *kv_norm;
    const quern_tensor *o_a, *o_b;
    const quern_tensor *compressor_bias;
    const quern_tensor *compressor_kv, *compressor_gate;
    const quern_tensor *compressor_norm;
    const quern_tensor *indexer_bias;
    const quern_tensor *indexer_kv, *indexer_gate;
    const quern_tensor *indexer_norm;
    const quern_tensor *indexer_q_b, *indexer_heads;
    const quern_tensor *out; /* act [T, Dm]; written */
    /* Written, each may be NULL. kv_rows, compressed and idx_k are the rows before they are stored. */
    const quern_tensor *q_residual, *q, *kv_rows;
    const quern_tensor *compressed, *idx_k; /* [n, D], [n, C_I] */
    const quern_tensor *idx_q;
    /* f32 [T, E], with room for E entries a sequence; columns past those of its sequence stay. */
    const quern_tensor *idx_score;
    const quern_tensor *idx_topk;
    const quern_tensor *core, *core_irope, *o_a_out;
    const quern_tensor *compressor_fp8, *compressor_fp8_scales;
    const quern_tensor *compressor_codes, *compressor_scales, *compressor_global;
    const quern_tensor *indexer_fp8, *indexer_fp8_scales;
    const quern_tensor *indexer_codes, *indexer_scales, *indexer_global;
    const quern_tensor *slots, *positions, *cu;          /* i32 [B], [B], [B+1] */
    const quern_tensor *raw, *raw_table;                 /* updated; i32 [B, 1] */
    const quern_tensor *entries, *entries_table;         /* updated; i32 [B, columns]; CSA and HCA */
    const quern_tensor *keys;                            /* updated; CSA */
    const quern_tensor *states, *merged;                 /* as in quern_dsv4_append_tensors; CSA and HCA */
    const quern_tensor *indexer_states, *indexer_merged; /* the same of the indexer; CSA */
    const quern_tensor *copies;                          /* i32 [C, 3]; may be NULL */
    const quern_tensor *fault; /* i32 [slots]: faults of data, a word a sequence; updated; may be NULL */
} quern_dsv4_layer_step_tensors;
#define QUERN_DSV4_LAYER_STEP_TENSORS_INIT QUERN_SIZED(quern_dsv4_layer_step_tensors)

/*
 * The layer's outputs of a step's tokens, whose rows, entries, keys and states it takes in. However a
 * sequence is cut into steps, states, keys, entries and choices have the same bits, and outputs are equal
 * within rounding. Where rows are stored in x's dtype, the bits are those of quern_dsv4_layer() at the same
 * CPU level. Rows are made in f32 and rounded once, to what is stored, which is what queries read. A step of
 * up to R - window + 1 tokens a sequence, and with states of up to m, may run twice.
 *
 * Refused as in dsv4.h, and: offsets that fall or go past T; a slot outside the states, or of two sequences
 * that both have tokens; a position that is negative, that cos_sin, the table or idx_score has no room for,
 * or that is not within merged ... merged + m; a page that is none of the pool's; with a format of bytes a
 * NaN or Inf in a new row. All but copied pages, rows from a sequence's position on, and results is then as
 * it was.
 *
 * With fault these are no errors, but for the offsets: the sequence concerned takes the bit (QUERN_STATUS_..
 * of cuda.h) at its slot, its states and raw rows stay, its rows of the results are 0, here and in later
 * steps, until it begins at position 0 or its word is cleared. The other sequences' bits do not change. The
 * status word gets every bit. T is then at most the positions that there is room for. A GPU refuses steps
 * until a test has run them on one; there faults are bits in any case, x has 16 bits, core is not given, and
 * where heads have 512 channels the core sums a step in another order than whole sequences. The workspace
 * depends on shapes alone.
 */
QUERN_API quern_status quern_dsv4_layer_step_workspace(quern_context *ctx,
                                                       const quern_dsv4_layer_step_params *params,
                                                       const quern_dsv4_layer_step_tensors *tensors,
                                                       size_t *bytes);
QUERN_API quern_status quern_dsv4_layer_step(quern_context *ctx, const quern_exec *exec,
                                             const quern_dsv4_layer_step_params *params,
                                             const quern_dsv4_layer_step_tensors *tensors, void *workspace,
                                             size_t workspace_bytes);

/* A sequence as bytes: of so many tokens. */
typedef struct quern_dsv4_layer_pack_params {
    size_t size;
    int64_t tokens;
    int64_t ratio;                        /* r; 0: 4 with keys, else 128 */
    quern_dsv4_format format, key_format; /* as in the step's params */
} quern_dsv4_layer_pack_params;
#define QUERN_DSV4_LAYER_PACK_PARAMS_INIT QUERN_SIZED(quern_dsv4_layer_pack_params)

/* Shapes as in quern_dsv4_layer_step_tensors. NULL means absent. Packed are raw rows, the last that the ring
 * has room for, entries, keys, row after row, data before scales; then, of a sequence that has tokens, states
 * and merged, of the compressor and of the indexer. */
typedef struct quern_dsv4_layer_pack_tensors {
    size_t size;
    const quern_tensor *raw, *raw_table;         /* i32 [1] */
    const quern_tensor *entries, *entries_table; /* i32 [columns] */
    const quern_tensor *keys;
    const quern_tensor *states, *merged;
    const quern_tensor *indexer_states, *indexer_merged;
    const quern_tensor *slot;   /* i32 [1]: that of the states */
    const quern_tensor *packed; /* u8 [bytes] */
} quern_dsv4_layer_pack_tensors;
#define QUERN_DSV4_LAYER_PACK_TENSORS_INIT QUERN_SIZED(quern_dsv4_layer_pack_tensors)

/* Copies a sequence out of its pages and slot, and back. Neither needs a workspace. */
QUERN_API quern_status quern_dsv4_layer_pack_workspace(quern_context *ctx,
                                                       const quern_dsv4_layer_pack_params *params,
                                                       const quern_dsv4_layer_pack_tensors *tensors,
                                                       size_t *bytes);
QUERN_API quern_status quern_dsv4_layer_pack(quern_context *ctx, const quern_exec *exec,
                                             const quern_dsv4_layer_pack_params *params,
                                             const quern_dsv4_layer_pack_tensors *tensors, void *workspace,
                                             size_t workspace_bytes);
QUERN_API quern_status quern_dsv4_layer_unpack_workspace(quern_context *ctx,
                                                         const quern_dsv4_layer_pack_params *params,
                                                         const quern_dsv4_layer_pack_tensors *tensors,
                                                         size_t *bytes);
QUERN_API quern_status quern_dsv4_layer_unpack(quern_context *ctx, const quern_exec *exec,
                                               const quern_dsv4_layer_pack_params *params,
                                               const quern_dsv4_layer_pack_tensors *tensors, void *workspace,
                                               size_t workspace_bytes);

/* ---- a cache of one layer on the CPU ---- */

/*
 * A ledger and a layer's tensors in memory of the caller: the books are in `memory`, the rest is in `rows`.
 * Neither may move. One call at a time may use a cache. On an error it is as it was.
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
    int64_t page;                 /* CSA and HCA: slots of a page, up to 65536; 0: 64 */
    int64_t pages;                /* of entries, 1 ... 2^31 - 1; 0: as many as all sequences can need */
} quern_dsv4_layer_cache_params;
#define QUERN_DSV4_LAYER_CACHE_PARAMS_INIT QUERN_SIZED(quern_dsv4_layer_cache_params)

/* The ledger that such a cache has, and that other layers of the kind can share. */
QUERN_API quern_status quern_dsv4_layer_ledger_params(const quern_dsv4_layer_cache_params *params,
                                                      quern_ledger_params *ledger);
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
/* Empties a sequence; its pages are free. */
QUERN_API quern_status quern_dsv4_layer_cache_reset(quern_dsv4_layer_cache *cache, int64_t sequence);
/* Pages of entries: how many a sequence needs for `tokens` tokens, and how many no sequence holds. Either may
 * be NULL. */
QUERN_API quern_status quern_dsv4_layer_cache_pages(const quern_dsv4_layer_cache *cache, int64_t tokens,
                                                    int64_t *needed, int64_t *free);
/* Gives sequence `to`, whatever it held, the tokens of `from`. They share pages until one of them is written:
 * neither sequence sees what happens to the other. */
QUERN_API quern_status quern_dsv4_layer_cache_fork(quern_dsv4_layer_cache *cache, int64_t from, int64_t to);

/* Writes a sequence into `to`. *bytes is the room that `to` has, and becomes the length written; too little
 * room is QUERN_ERR_WORKSPACE, and both stay as they were. With `to` NULL only sets *bytes, whatever it was.
 * In two calls:
 *
 *     size_t bytes;
 *     quern_dsv4_layer_cache_save(ctx, cache, sequence, NULL, &bytes);
 *     void *to = malloc(bytes);
 *     quern_dsv4_layer_cache_save(ctx, cache, sequence, to, &bytes);
 *
 * The bytes have the machine's byte order and hold a version and a checksum. */
QUERN_API quern_status quern_dsv4_layer_cache_save(quern_context *ctx, const quern_dsv4_layer_cache *cache,
                                                   int64_t sequence, void *to, size_t *bytes);
/* Gives a sequence, whatever it held, the saved tokens. Refused (QUERN_ERR_FORMAT) are bytes that are damaged
 * or cut off, of a cache of other parameters (sequences, capacity, page and pages may differ), or with more
 * tokens than the capacity; QUERN_ERR_INVALID_ARGUMENT: too few pages are free. */
QUERN_API quern_status quern_dsv4_layer_cache_restore(quern_context *ctx, quern_dsv4_layer_cache *cache,
                                                      int64_t sequence, const void *from, size_t from_bytes);

/*
 * A step of counts[b] >= 0 new tokens of each of `batch` sequences, which stand in x [T, Dm] one sequence
 * after the other, and of quern_dsv4_layer_step()'s results, which have its shapes. Refused as there, and:
 * an id outside the cache or twice in a call; more tokens than the capacity; too few free pages; a cache of
 * another kind, window or dims. The workspace depends on the cache's parameters, B and the tensors' shapes.
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
