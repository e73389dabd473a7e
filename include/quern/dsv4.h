/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * dsv4.h - the compressed attention of DeepSeek-V4 (CSA, HCA): compressors and their streaming states, the
 * indexer that selects entries, and the attention core over raw rows and entries.
 *
 * A compressor turns every r tokens of a sequence into one entry of C channels. A token's projection holds
 * values C_a and logits Z_a and, for CSA, a second series C_b, Z_b that the *next* block reads. With biases
 * by the place in the block,
 *
 *   entry[i,c] = sum of softmax(logits)[j] * value[j,c] over, for CSA, series b of block i - 1, then series a
 *                of block i; for HCA over series a of block i
 *
 * channel by channel, in f32. A logit of -inf weighs nothing; where all are -inf, the entry is 0. Block 0
 * without a block before it uses its own r tokens alone. Then follow, each where asked for: rounding to bf16,
 * RMS norm, rotation of the last channels, Walsh-Hadamard transform, a cache's row format.
 *
 * Symbols: B sequences, T tokens (of a sequence, or of a varlen batch), r ratio, C width, n entries of a
 * call, R rotated channels, P positions of a RoPE table, Dm width of hidden states; columns = 4C (CSA:
 * C_a Z_a C_b Z_b) or 2C (HCA: C Z).
 *
 * Source of the maths: the DeepSeek-V4 report (arXiv 2606.19348) and its public inference code. YaRN:
 * arXiv 2309.00071.
 */
#ifndef QUERN_DSV4_H
#define QUERN_DSV4_H

#include <quern/quern.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum quern_dsv4_kind {
    QUERN_DSV4_CSA = 0, /* overlapping blocks: the released models' r is 4 */
    QUERN_DSV4_HCA = 1  /* r 128 */
} quern_dsv4_kind;

/* How an entry is stored. Rows of bytes hold finite values alone: a NaN or Inf is an error. */
typedef enum quern_dsv4_format {
    QUERN_DSV4_ROWS = 0,      /* in the dtype of `out` */
    QUERN_DSV4_FP8 = 1,       /* C e4m3 bytes, then an f32 scale, little-endian: max(amax, 1e-4) / 448 */
    QUERN_DSV4_FP8_POWER = 2, /* the same with the next power of two as scale */
    QUERN_DSV4_FP4 =
        3, /* C / 2 bytes of e2m1 (the first in the low bits), then C / 32 E8M0 scales; C a multiple of 32 */
    QUERN_DSV4_ROW584 =
        4 /* C 512: 448 e4m3, the last 64 channels in bf16, 7 E8M0 scales of 64 each, a zero */
} quern_dsv4_format;

typedef struct quern_dsv4_compress_params {
    size_t size;
    quern_dsv4_kind kind;
    int64_t ratio;         /* r; 0: 4 (CSA), 128 (HCA) */
    int64_t start_token;   /* row of a sequence where its first block starts; those before are not read */
    int64_t start_abs_pos; /* its position; a multiple of r unless rope_last */
    int64_t n_blocks;      /* entries of a sequence, at most its whole blocks; 0: all */
    bool rope_last;        /* rotate by the position of a block's last token, else of its first */
    bool round_bf16;       /* before the norm */
    bool hadamard;         /* C is a power of two */
    float eps;             /* of the norm; 0: 1e-6 */
    quern_dsv4_format format;
    /* Of the indexer's entries, in a call that makes both: */
    quern_dsv4_format index_format;
    bool index_hadamard; /* C_I is a power of two */
    uint8_t reserved[7]; /* 0; later fields stand here */
} quern_dsv4_compress_params;
#define QUERN_DSV4_COMPRESS_PARAMS_INIT QUERN_SIZED(quern_dsv4_compress_params)

/*
 * The tensors of a call; NULL means absent. act is one of f32, f16, bf16, the same for all; weights (w,
 * biases, prev_b, norm_weight, cos_sin) are act or f32.
 *
 *                      one sequence     B of T tokens       varlen, with cu_seqlens
 *   proj               [T, columns]     [B, T, columns]     [T, columns]
 *   x                  [T, Dm]          [B, T, Dm]          [T, Dm]
 *   prev_b             [r, 2C]          [B, r, 2C]          [B, r, 2C]
 *   out, pooled, d_out [n, C]           [B, n, C]           [floor(T / r), C]
 *
 * n is params.n_blocks, or floor((T - start_token) / r). Varlen: sequence b's entries follow those of the
 * sequences before it, floor(N_b / r) rows each. Rows without an entry are written as 0; those of d_out are
 * not read.
 *
 * Refused, with QUERN_ERR_INVALID_ARGUMENT unless said, before an output or the workspace is written: a NULL
 * that is needed; a tensor that these parameters have no use for; a size other than quern.h says; a
 * parameter, ndim, extent or dtype other than stated here; a last dimension with gaps; data NULL or not
 * aligned to its element; an output that shares memory with itself or another tensor; starts, counts and
 * positions outside a sequence or the table; tensors on two devices (a device without these operations:
 * QUERN_ERR_UNSUPPORTED); a workspace that is too small (QUERN_ERR_WORKSPACE) or NULL. With a format: an
 * entry with a NaN or Inf, before an output is written.
 *
 * On a GPU entries have up to 1024 channels. There faults of data set their bits of the status word: a
 * sequence whose start, count or position is wrong has no entries (QUERN_STATUS_BAD_POSITION), and an entry
 * whose position the table lacks is 0; offsets are held within T (QUERN_STATUS_BAD_OFFSETS); infinite values
 * and NaN count as 0 where they are quantised (QUERN_STATUS_NOT_FINITE), so does a weight's scale byte of NaN
 * (QUERN_STATUS_BAD_SCALE).
 */
typedef struct quern_dsv4_compress_tensors {
    size_t size;
    const quern_tensor *proj;      /* act; or x and w: proj = x w, summed in f32 and not rounded */
    const quern_tensor *x, *w;     /* act, and [Dm, columns] */
    const quern_tensor *b_a, *b_b; /* [r, C]: biases of the logits; b_b for CSA */
    const quern_tensor
        *prev_b; /* CSA: values and logits (without bias) of series b of the block before block 0, or NULL */
    const quern_tensor *norm_weight; /* [C]; NULL: no norm */
    const quern_tensor *cos_sin;     /* [P, R], see quern_dsv4_rope_table(); NULL: no rotation */
    const quern_tensor *cu_seqlens;  /* i32 [B+1], starting at 0, not falling, the last at most T */
    const quern_tensor *start_tokens, *start_positions,
        *block_counts;            /* varlen: i32 [B], in place of the params. block_counts: 0 is none */
    const quern_tensor *has_prev; /* varlen: i32 [B], 0 where a sequence has no block before it; NULL: all
                                     have, where prev_b is given */
    const quern_tensor
        *cu_seqlens_cmp; /* varlen: i32 [B+1], written: where the sequences' entries start; may be NULL */
    const quern_tensor *pooled; /* f32, before anything else; may be NULL; written */
    const quern_tensor *out; /* f32, f16 or bf16; with a format u8, rows of its bytes instead of C; written */
    const quern_tensor
        *d_out; /* act or f32: gradient of the loss by out, as if it had no format; read by backward */
    /* Written by backward, each may be NULL. In the dtype of what they are the gradient of: */
    const quern_tensor *d_proj, *d_x, *d_prev_b;
    const quern_tensor *d_w, *d_b_a, *d_b_b, *d_norm_weight; /* f32 */
    /* CSA: the indexer's compressor in the same call, of width C_I, with index_b_a. Each as its namesake
     * above, with C_I for C; index_proj stands beside proj, index_w beside w, index_prev_b beside prev_b.
     * Both compressors share x, the table and where sequences and blocks start. d_x is the sum of both. */
    const quern_tensor *index_proj, *index_w, *index_b_a, *index_b_b, *index_prev_b, *index_norm_weight;
    const quern_tensor *index_pooled, *index_out, *index_d_out;
    const quern_tensor *index_d_proj, *index_d_prev_b;
    const quern_tensor *index_d_w, *index_d_b_a, *index_d_b_b, *index_d_norm_weight;
    /* Instead of w, beside x: in FP8 e4m3 or u8 [columns, Dm] and, for every 128 x 128 of it, a scale in f32,
     * or as a power of two in e8m0 or u8 [ceil(columns / 128), ceil(Dm / 128)]; in NVFP4 (nvfp4.h), Dm a
     * multiple of 16, u8 [Dm / 2, columns], e4m3 or u8 [Dm / 16, columns] and f32 []. Such a weight gets no
     * gradient. Scale bytes of NaN, 0xFF and from 0x7F on, are refused. */
    const quern_tensor *w_fp8, *w_fp8_scales, *w_codes, *w_scales, *w_global;
    const quern_tensor *index_w_fp8, *index_w_fp8_scales, *index_w_codes, *index_w_scales, *index_w_global;
} quern_dsv4_compress_tensors;
#define QUERN_DSV4_COMPRESS_TENSORS_INIT QUERN_SIZED(quern_dsv4_compress_tensors)

/* Bytes of workspace that the call with the same arguments needs; reads shapes alone. With x the workspace
 * holds the projections of some 1536 tokens, in the backward pass their gradients too, and a copy of w in
 * panels; with w in FP8 (in the backward pass NVFP4), a copy of it in floats; in the forward pass with NVFP4
 * the projections of all tokens; in the backward pass of both compressors, where x is not f32, also the
 * gradient of x in f32. On a GPU it holds the projections of all tokens, in the backward pass their gradients
 * too. */
QUERN_API quern_status quern_dsv4_compress_workspace(quern_context *ctx,
                                                     const quern_dsv4_compress_params *params,
                                                     const quern_dsv4_compress_tensors *tensors,
                                                     size_t *bytes);
/* Writes out, and pooled and cu_seqlens_cmp where they are given. */
QUERN_API quern_status quern_dsv4_compress(quern_context *ctx, const quern_exec *exec,
                                           const quern_dsv4_compress_params *params,
                                           const quern_dsv4_compress_tensors *tensors, void *workspace,
                                           size_t workspace_bytes);
/* Writes every d_ that is given, from the inputs and d_out. Gradients pass through roundings and formats
 * as if these were not there. */
QUERN_API quern_status quern_dsv4_compress_backward_workspace(quern_context *ctx,
                                                              const quern_dsv4_compress_params *params,
                                                              const quern_dsv4_compress_tensors *tensors,
                                                              size_t *bytes);
QUERN_API quern_status quern_dsv4_compress_backward(quern_context *ctx, const quern_exec *exec,
                                                    const quern_dsv4_compress_params *params,
                                                    const quern_dsv4_compress_tensors *tensors,
                                                    void *workspace, size_t workspace_bytes);

/*
 * Streams. A state is what a sequence's compressor keeps between calls: softmax sums (HCA 3 C floats, CSA
 * 6 C) and a ring of the last m projected rows (m * columns floats), 0 to 8, which can be taken back. States
 * stand in the slots of a tensor. However a sequence is cut into appends, the entries are the same to the
 * bit: those of quern_dsv4_compress() on the same projections and CPU level.
 *
 * The tensors of an append; NULL means absent. act: f32, f16 or bf16.
 */
typedef struct quern_dsv4_append_tensors {
    size_t size;
    const quern_tensor
        *proj; /* act [T, columns]: the tokens of the first sequence, then of the second, ... */
    const quern_tensor *x, *w;       /* instead of proj: act [T, Dm], and [Dm, columns] f32 or as x */
    const quern_tensor *b_a, *b_b;   /* [r, C]; b_b for CSA. These and the next two: f32, or proj's dtype */
    const quern_tensor *norm_weight; /* [C]; NULL: no norm */
    const quern_tensor *cos_sin;     /* [P, R], see quern_dsv4_rope_table(); NULL: no rotation */
    const quern_tensor *out;         /* f32, f16 or bf16 [n, C], or with a format u8 [n, bytes of a row] */
    const quern_tensor *pooled;      /* f32 [n, C], before anything else; may be NULL */
    /* Instead of w, beside x: as in quern_dsv4_compress_tensors. FP8 is widened by every call. */
    const quern_tensor *w_fp8, *w_fp8_scales, *w_codes, *w_scales, *w_global;
    /* A step's (ledger.h) slots, positions, offsets and copies; the states: */
    const quern_tensor *slots, *positions, *cu; /* i32 [B], [B], [B+1] */
    const quern_tensor *states; /* f32 [slots, (6 + 4m) C], HCA [slots, (3 + 2m) C]; updated */
    const quern_tensor *merged; /* i32 [slots]: how many rows a state's sums contain; updated */
    const quern_tensor *copies; /* i32 [C, 3]: states that are copied first; may be NULL */
    const quern_tensor *fault;  /* i32 [slots]: faults of data, one word a sequence; updated; may be NULL */
    /* CSA: the indexer's compressor in the same call, of width C_I, with index_b_a. Each as its namesake
     * above, in params->index_format and with index_hadamard; the rings have as many rows. cos_sin is
     * shared. */
    const quern_tensor *index_proj, *index_w, *index_b_a, *index_b_b, *index_norm_weight;
    const quern_tensor *index_out, *index_pooled;
    const quern_tensor *index_w_fp8, *index_w_fp8_scales, *index_w_codes, *index_w_scales, *index_w_global;
    const quern_tensor *index_states, *index_merged;
    /* i32 [B, columns] or NULL. With a table out is a pool, [pages, page, C] or with a format u8 [pages,
     * page * bytes of a row], as quern_dsv4_store() has it; entry e of sequence b goes to slot e % page
     * of page table[b, e / page]. index_table: of index_out. */
    const quern_tensor *table, *index_table;
} quern_dsv4_append_tensors;
#define QUERN_DSV4_APPEND_TENSORS_INIT QUERN_SIZED(quern_dsv4_append_tensors)

/*
 * Appends a step's tokens to the states in its slots. Sequences begin at position 0, where a state starts
 * anew, whatever its slot holds; nothing needs to be cleared. out and pooled have n = floor(T / r) + B rows:
 * the entries that become whole, sequence after sequence, then rows of 0. The sums contain the rows before
 * positions + tokens - m, and no later ones, so that a step of up to m tokens may run twice, and up to m
 * tokens can be taken back: a next step then begins at an earlier position. Entries of blocks that are no
 * longer whole are computed again when the blocks are. A copy of a sequence is a copy of its row of states
 * and its element of merged; a sequence that begins at position p, a multiple of r unless rope_last, counts
 * from 0 with rows p and later of cos_sin; one that has a block before it, which only series b of is known,
 * begins with r rows of 0 in C_a and Z_a, whose entry is not used.
 *
 * params->start_token, n_blocks and start_abs_pos are ignored. Refused as above, and: offsets that fall or
 * go past T; a slot outside the states, or of two sequences that both have tokens; a position that is
 * negative, that cos_sin lacks, or that is not within merged ... merged + m; a page that a table lacks or
 * that is none of the pool's. On an error states and outputs are as they were, but for slots that are copied
 * to.
 *
 * With fault a sequence's wrong position or page, or an entry that its format refuses, is no error: the
 * sequence takes the bit (QUERN_STATUS_BAD_POSITION, .._BAD_PAGE, .._NOT_FINITE, cuda.h) at its slot, its
 * states stay and its entries are 0 (in pages they stay), here and in later steps, until it begins at
 * position 0 or its word is cleared. The other sequences' bits do not change. A slot outside the states, or
 * of an earlier sequence, has no word: the sequence is passed over. The status word gets every bit. On a GPU
 * the same holds without fault, but that later steps know nothing of it, and of offsets (.._BAD_OFFSETS).
 *
 * On a GPU entries have up to 1024 channels, and those of a stopped sequence in pages may be written.
 */
QUERN_API quern_status quern_dsv4_append_step_workspace(quern_context *ctx,
                                                        const quern_dsv4_compress_params *params,
                                                        const quern_dsv4_append_tensors *tensors,
                                                        size_t *bytes);
QUERN_API quern_status quern_dsv4_append_step(quern_context *ctx, const quern_exec *exec,
                                              const quern_dsv4_compress_params *params,
                                              const quern_dsv4_append_tensors *tensors, void *workspace,
                                              size_t workspace_bytes);

/*
 * The indexer: scores every query against the entries it sees and keeps the best k.
 *
 *   score[t,s] = Hi^-1/2 C^-1/2 sum over h of w[t,h] max(0, q[t,h] . k[s]),
 *                s < floor((start_abs_pos + t + 1) / r)
 *
 * NaN passes through the maximum and is the lowest of all scores; ties go to the lowest index. The scores of
 * a query depend on nothing but its own row and the keys, so the choice is the same however tokens are cut
 * into calls.
 */
/* How queries and keys are multiplied. FP8, beside keys of FP8 (either scale): each head of a query is
 * rounded to e4m3 as an FP8 row is, its scale goes to its weight, and codes are multiplied by codes. That
 * loses the query's bits past e4m3's three, up to 2^-4 of a channel's value; and on a Hopper GPU, which sums
 * FP8 products with some 14 bits, up to 2^-13 of the largest term of a dot product at each addition. A CPU,
 * and other GPUs, sum the same operands' products in f32. */
typedef enum quern_dsv4_index_products {
    QUERN_DSV4_INDEX_EXACT = 0,
    QUERN_DSV4_INDEX_FP8 = 1
} quern_dsv4_index_products;

typedef struct quern_dsv4_index_params {
    size_t size;
    int64_t ratio;                /* r, tokens of an entry; 0: 4 */
    int64_t top_k;                /* 1 to 2048; 0: 512 */
    int64_t start_abs_pos;        /* where query 0 stands */
    quern_dsv4_format key_format; /* of k: rows, fp8 (either scale) or fp4 */
    int64_t page;                 /* 0: k is contiguous; else it stands in pages of so many slots */
    quern_dsv4_index_products products;
    uint8_t reserved[4]; /* 0; later fields stand here */
} quern_dsv4_index_params;
#define QUERN_DSV4_INDEX_PARAMS_INIT QUERN_SIZED(quern_dsv4_index_params)

/*
 * NULL means absent. act is one of f32, f16, bf16. Hi heads, C (a multiple of 8 to 256) channels, S entries.
 *
 * With pages k is a pool [pages, page, C], or u8 [pages, page * bytes of a row]. A page of bytes holds the
 * data of every slot, then the scales of every slot. Entry s of sequence b stands in slot s % page of page
 * k_table[b, s / page], S is columns * page, and a sequence has floor((start + T) / r) entries. Only columns
 * that its queries need are read. The results are those of contiguous keys, to the bit.
 *
 * Refused as above, and: a top_k, ratio or format other than stated; a negative position; heads, queries or
 * entries beyond 2^31 - 1; a column that the table lacks, or that names no page of the pool; fp4: an entry
 * that is seen with a scale byte of 0xFF; products in FP8: a key format other than fp8, a NaN or Inf in q.
 */
typedef struct quern_dsv4_index_tensors {
    size_t size;
    const quern_tensor *q;      /* act [B, T, Hi, C], rotated (and transformed) as the keys are */
    const quern_tensor *k;      /* [B, S, C] f32, f16 or bf16; with a format u8 [B, S, bytes of a row] */
    const quern_tensor *w;      /* act or f32 [B, T, Hi]: weights of the heads, without the factor above */
    const quern_tensor *idx;    /* i32 [B, T, top_k]: entries, ascending, then -1; written */
    const quern_tensor *count;  /* i32 [B, T]: how many; written */
    const quern_tensor *scores; /* f32 [B, T, S]; -inf where an entry is not seen; may be NULL; written */
    const quern_tensor *start_positions; /* i32 [B], in place of params.start_abs_pos; may be NULL */
    const quern_tensor *k_table;         /* i32 [B, columns], with pages */
} quern_dsv4_index_tensors;
#define QUERN_DSV4_INDEX_TENSORS_INIT QUERN_SIZED(quern_dsv4_index_tensors)

/* On the CPU bf16 queries against keys in bf16 or bytes are multiplied exactly and summed in f32; all other
 * operands go through f32. A GPU takes bf16 and f16, or bf16 with keys of bytes. There faults of data set
 * their bits of the status word: a sequence that begins before 0 sees no entries (QUERN_STATUS_BAD_POSITION),
 * nor does a query see one whose page is none of the pool's (QUERN_STATUS_BAD_PAGE), and with a scale byte of
 * 0xFF a score is NaN (QUERN_STATUS_BAD_SCALE). With products in FP8 a NaN or Inf of a query counts as 0
 * (QUERN_STATUS_NOT_FINITE). */
QUERN_API quern_status quern_dsv4_index_workspace(quern_context *ctx, const quern_dsv4_index_params *params,
                                                  const quern_dsv4_index_tensors *tensors, size_t *bytes);
QUERN_API quern_status quern_dsv4_index(quern_context *ctx, const quern_exec *exec,
                                        const quern_dsv4_index_params *params,
                                        const quern_dsv4_index_tensors *tensors, void *workspace,
                                        size_t workspace_bytes);

/*
 * The loss that trains the indexer: the divergence of its scores' softmax from attention's weights over S_t,
 * the entries that query t sees, or with idx those of them that it names. Attention is taken as given:
 *
 *   a[h,s] = D^-1/2 q[t,h] . kv_cmp[s],  L_h = log(sum over S_t of e^a + e^lse_win + e^sink)
 *   T[s] = sum_h p_h[s] / max(sum over S_t of sum_h p_h, 2^-126),  p_h = e^(a - L_h)
 *   row_loss[t] = sum over S_t of T (log max(T, 1e-10) - log P)
 *   loss = lambda sum row_loss / max(1, rows),  rows: how many queries of the batch have an entry
 *
 * where P is the softmax over S_t of the indexer's scores. lse_win is of the window's keys alone, without the
 * sink (quern_dsv4_attention() returns it). A query without an entry has row_loss 0; where T's sum would be
 * below 2^-126 there is no teacher, and neither a loss nor a gradient. Entries of idx have any order and
 * count once. One call gives the loss and its gradients; each may be NULL. A GPU takes up to 128 heads of
 * either kind, C_I up to 128, and queries that fit its shared memory beside 16 entries (128 heads of 512 in
 * bf16, 64 in f32), and says so of others.
 */
typedef struct quern_dsv4_index_loss_params {
    size_t size;
    int64_t ratio;         /* tokens of an entry; 0: 4 */
    int64_t start_abs_pos; /* where query 0 stands */
    float lambda;
    uint8_t reserved[4]; /* 0; later fields stand here */
} quern_dsv4_index_loss_params;
#define QUERN_DSV4_INDEX_LOSS_PARAMS_INIT                                                                    \
    {                                                                                                        \
        sizeof(quern_dsv4_index_loss_params), 0, 0, 1.0f,                                                    \
        {                                                                                                    \
            0                                                                                                \
        }                                                                                                    \
    }

typedef struct quern_dsv4_index_loss_tensors {
    size_t size;
    const quern_tensor *q_index;   /* act [B, T, Hi, C_I]; C_I a multiple of 8 up to 256 */
    const quern_tensor *k_index;   /* act [B, S, C_I] */
    const quern_tensor *w;         /* f32 or act [B, T, Hi] */
    const quern_tensor *q;         /* act [B, T, H, D]; D a multiple of 8 up to 512 */
    const quern_tensor *kv_cmp;    /* act [B, S, D] */
    const quern_tensor *lse_win;   /* f32 [B, H, T] */
    const quern_tensor *sink;      /* f32 [H], or NULL */
    const quern_tensor *idx;       /* i32 [B, T, k], or NULL: all that is seen */
    const quern_tensor *loss;      /* f32 []; written, as all below */
    const quern_tensor *row_loss;  /* f32 [B, T], without lambda */
    const quern_tensor *d_q_index; /* act [B, T, Hi, C_I] */
    const quern_tensor *d_k_index; /* act [B, S, C_I] */
    const quern_tensor *d_w;       /* as w */
} quern_dsv4_index_loss_tensors;
#define QUERN_DSV4_INDEX_LOSS_TENSORS_INIT QUERN_SIZED(quern_dsv4_index_loss_tensors)

QUERN_API quern_status quern_dsv4_index_loss_workspace(quern_context *ctx,
                                                       const quern_dsv4_index_loss_params *params,
                                                       const quern_dsv4_index_loss_tensors *tensors,
                                                       size_t *bytes);
QUERN_API quern_status quern_dsv4_index_loss(quern_context *ctx, const quern_exec *exec,
                                             const quern_dsv4_index_loss_params *params,
                                             const quern_dsv4_index_loss_tensors *tensors, void *workspace,
                                             size_t workspace_bytes);

/*
 * The attention core of CSA, HCA and window layers. One row per key is key and value at once for all H heads.
 * With t and j positions in the sequence, query t's keys are the raw rows t - window < j <= t and, of the
 * compressed entries s < floor((t + 1) / r), all (HCA) or the chosen (CSA). One softmax covers both:
 *
 *   o[t,h] = rotate back (sum_i p_i key_i),  p_i = e^(D^-1/2 q . key_i) / (e^sink[h] + sum of the numerators)
 *
 * lse[h,t] is the logarithm of that sum without the sink. A query without keys has output 0 and lse -inf. A
 * sink of inf leaves nothing to the keys: the head's output and gradients are 0.
 */
typedef struct quern_dsv4_attention_params {
    size_t size;
    int64_t ratio;         /* r, tokens of an entry; 0: 4 with idx, else 128. Looked at with kv_cmp */
    int64_t window;        /* raw keys of a query, its own among them; 0: 128 */
    int64_t start_abs_pos; /* where query 0 stands; -1: N - T. Varlen: 0 or -1, every sequence starts at 0 */
    quern_dsv4_format
        format; /* of kv and kv_cmp: QUERN_DSV4_ROWS, or QUERN_DSV4_ROW584 (D 512). Forward alone */
    int64_t
        page; /* 0: kv and kv_cmp are contiguous; else they stand in pages of so many slots. Forward alone */
} quern_dsv4_attention_params;
#define QUERN_DSV4_ATTENTION_PARAMS_INIT                                                                     \
    {                                                                                                        \
        sizeof(quern_dsv4_attention_params), 0, 0, -1, QUERN_DSV4_ROWS, 0                                    \
    }

/*
 * NULL means absent. act is one of f32, f16, bf16, the same for all. H heads, D (a multiple of 8 to 512)
 * channels.
 *
 *              fixed lengths         varlen, with cu_seqlens
 *   q, o, d_o  [B, T, H, D]          [T, H, D]
 *   kv         [B, N, D]             [T, D]
 *   kv_cmp     [B, S, D]             [floor(T / r), D], sequence after sequence, floor(N_b / r) rows each
 *   idx        [B, T, k]             [T, k], entries counted from the sequence's first
 *   count      [B, T]                [T]
 *   lse        [B, H, T]             [H, T]
 *
 * With format row584 kv and kv_cmp are u8 [B, N, 584] and [B, S, 584]; a scale byte of 0xFF makes its tile
 * NaN. With pages they are pools [pages,
 * page, D], or u8 [pages, page * 584]; such a page holds the 576 bytes of data of every slot, then 8 bytes of
 * scales of every slot. Position p of sequence b stands in slot p % page of page kv_table[b, p / page], entry
 * s in slot s % page of page kv_cmp_table[b, s / page]. The sequence has start + T raw rows and floor((start
 * + T) / r) entries. Only columns that its queries need are read. Fixed lengths alone.
 *
 * Raw row j of N stands at position start_abs_pos + T - N + j. A list may come in any order. -1 is padding. A
 * repeated entry counts once, an entry that is not visible is not attended, and one outside [-1, S) is
 * skipped and sets QUERN_STATUS_BAD_INDEX. On a GPU a query that needs a row whose page is none of the pool's
 * sees nothing and sets QUERN_STATUS_BAD_PAGE. Varlen: rows of o past the last sequence are written as 0, of
 * lse as -inf.
 *
 * Refused as above, and: a position that is negative or that cos_sin lacks; a window below 1 or a ratio below
 * 0; pages or bytes with cu_seqlens or in the backward; a column that a table lacks, or that names no page of
 * the pool.
 */
typedef struct quern_dsv4_attention_tensors {
    size_t size;
    const quern_tensor *q, *kv; /* act, rotated; kv with a format u8, else in the forward f32, f16 or bf16 */
    const quern_tensor *kv_cmp; /* as kv; NULL: the window alone */
    const quern_tensor *idx, *count; /* i32; NULL: every visible entry; every entry of the list */
    const quern_tensor *sink;        /* f32 [H]; NULL or -inf: none */
    const quern_tensor *cos_sin; /* act or f32 [P, R], see quern_dsv4_rope_table(); NULL: no rotation of o */
    const quern_tensor *cu_seqlens; /* i32 [B+1], starting at 0, not falling, the last at most T */
    const quern_tensor *o;          /* act; written, read by backward */
    const quern_tensor *lse;        /* f32; may be NULL; written, read by backward */
    const quern_tensor *lse_win;    /* f32, as lse, of the window's keys alone; may be NULL; written */
    const quern_tensor *d_o;        /* act: gradient of the loss by o; read by backward */
    /* written by backward, each may be NULL; d_sink f32 */
    const quern_tensor *d_q, *d_kv, *d_kv_cmp, *d_sink;
    const quern_tensor
        *start_positions; /* i32 [B], in place of params.start_abs_pos; fixed lengths; may be NULL */
    const quern_tensor *kv_table, *kv_cmp_table; /* i32 [B, columns], with pages */
} quern_dsv4_attention_tensors;
#define QUERN_DSV4_ATTENTION_TENSORS_INIT QUERN_SIZED(quern_dsv4_attention_tensors)

QUERN_API quern_status quern_dsv4_attention_workspace(quern_context *ctx,
                                                      const quern_dsv4_attention_params *params,
                                                      const quern_dsv4_attention_tensors *tensors,
                                                      size_t *bytes);
QUERN_API quern_status quern_dsv4_attention(quern_context *ctx, const quern_exec *exec,
                                            const quern_dsv4_attention_params *params,
                                            const quern_dsv4_attention_tensors *tensors, void *workspace,
                                            size_t workspace_bytes);
/* Writes every d_ that is given, from the inputs, o, lse and d_o. The choice of entries carries no
 * gradient. */
QUERN_API quern_status quern_dsv4_attention_backward_workspace(quern_context *ctx,
                                                               const quern_dsv4_attention_params *params,
                                                               const quern_dsv4_attention_tensors *tensors,
                                                               size_t *bytes);
QUERN_API quern_status quern_dsv4_attention_backward(quern_context *ctx, const quern_exec *exec,
                                                     const quern_dsv4_attention_params *params,
                                                     const quern_dsv4_attention_tensors *tensors,
                                                     void *workspace, size_t workspace_bytes);

/* Writes rows into a cache that quern_dsv4_attention() or quern_dsv4_index() reads. */
typedef struct quern_dsv4_store_params {
    size_t size;
    quern_dsv4_format format;
    int64_t page; /* 0: contiguous rows; else slots of a page */
} quern_dsv4_store_params;
#define QUERN_DSV4_STORE_PARAMS_INIT QUERN_SIZED(quern_dsv4_store_params)

/*
 * Row i of x goes to slot slots[i], counted over all pages: page * slots + slot; contiguous: the number of
 * the row. A row with slot -1 is not stored. Of two rows for one slot the later stays. Refused as above, and:
 * a slot outside the cache; with a format a NaN or Inf in a row that is stored. The cache is then as it was.
 */
typedef struct quern_dsv4_store_tensors {
    size_t size;
    const quern_tensor *x;     /* act [n, D] */
    const quern_tensor *slots; /* i32 [n] */
    const quern_tensor
        *cache; /* f32, f16 or bf16 [rows, D] or [pages, page, D]; with a format u8 [rows, bytes of a row] or
                 * [pages, page * bytes of a row], the data of all slots before the scales of all. Slots that
                 * are not named are left as they are */
} quern_dsv4_store_tensors;
#define QUERN_DSV4_STORE_TENSORS_INIT QUERN_SIZED(quern_dsv4_store_tensors)

/* Of rows for one slot the last one stays. On a GPU rows have up to 1024 channels; a slot below -1 or past
 * the cache is not stored and sets QUERN_STATUS_BAD_POSITION; infinite values and NaN count as 0 in a format
 * of bytes and set QUERN_STATUS_NOT_FINITE. */
QUERN_API quern_status quern_dsv4_store_workspace(quern_context *ctx, const quern_dsv4_store_params *params,
                                                  const quern_dsv4_store_tensors *tensors, size_t *bytes);
QUERN_API quern_status quern_dsv4_store(quern_context *ctx, const quern_exec *exec,
                                        const quern_dsv4_store_params *params,
                                        const quern_dsv4_store_tensors *tensors, void *workspace,
                                        size_t workspace_bytes);

/* The parameters of a RoPE table; factor 0: plain, else YaRN. */
typedef struct quern_dsv4_rope_params {
    size_t size;
    float base;                 /* 10000 in window layers, 160000 in CSA and HCA layers */
    float factor;               /* 16 in CSA and HCA layers */
    float original_length;      /* 65536 */
    float beta_fast, beta_slow; /* 32, 1 */
    uint8_t reserved[4];        /* 0; later fields stand here */
} quern_dsv4_rope_params;
#define QUERN_DSV4_ROPE_PARAMS_INIT QUERN_SIZED(quern_dsv4_rope_params)

/* Fills table [P, R], f32, f16 or bf16 on the CPU: R / 2 cosines, then as many sines, of position * inv_m.
 * inv_m = 1 / base^(2m / R); with YaRN inv_m / factor * ramp + inv_m * (1 - ramp). Every step is rounded
 * to f32. */
QUERN_API quern_status quern_dsv4_rope_table(const quern_dsv4_rope_params *params, const quern_tensor *table);

/* Packs a compressor's weights from its parts [Dm, C]: w_a_kv, w_a_z and, for CSA, w_b_kv, w_b_z (HCA:
 * NULL) into w [Dm, columns]. f32, f16 or bf16, on the CPU; the parts share a dtype, w may have another. */
QUERN_API quern_status quern_dsv4_pack_weights(quern_dsv4_kind kind, const quern_tensor *w_a_kv,
                                               const quern_tensor *w_a_z, const quern_tensor *w_b_kv,
                                               const quern_tensor *w_b_z, const quern_tensor *w);
/* The same from a checkpoint: wkv and wgate are [S C, Dm] and ape [r, S C], S = 2 for CSA (series b first), 1
 * for HCA. Writes w [Dm, columns], b_a [r, C] and b_b [r, C] (HCA: NULL). */
QUERN_API quern_status quern_dsv4_pack_checkpoint(quern_dsv4_kind kind, const quern_tensor *wkv,
                                                  const quern_tensor *wgate, const quern_tensor *ape,
                                                  const quern_tensor *w, const quern_tensor *b_a,
                                                  const quern_tensor *b_b);

#ifdef __cplusplus
}
#endif
#endif
