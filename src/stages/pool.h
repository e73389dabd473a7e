/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * pool.h - the arguments of the stages that pool tokens into entries: softmax over the tokens of a block,
 * channel by channel, then norm, rotation and format of the pooled row.
 *
 * A token's projection is [value, logit] (one series) or [value a, logit a, value b, logit b], each `width`
 * columns. Series a counts in the token's own block, series b (`overlap`) in the next block. Views of
 * varlen batches are [1, T, ..]; an absent view has ndim 0.
 */
#ifndef QUERN_STAGES_POOL_H
#define QUERN_STAGES_POOL_H

#include "stages/step.h"

/* How an entry is stored; all but ROWS are bytes. */
typedef enum entry_format {
    ENTRY_ROWS,      /* in the output's dtype */
    ENTRY_FP8,       /* e4m3 and an f32 scale */
    ENTRY_FP8_POWER, /* the same, the scale a power of two */
    ENTRY_FP4,       /* e2m1, then a power of two for every 32 */
    ENTRY_ROW584     /* 448 e4m3, 64 bf16, a power of two for every 64 of the e4m3, a zero */
} entry_format;

/* The steps after pooling, in this order; each is optional. */
typedef struct entry_args {
    bool round_bf16;
    float eps;
    quern_tensor norm_weight; /* [width] */
    quern_tensor cos_sin;     /* [positions, dim]: rotates the last `dim` channels */
    bool rope_last;           /* at the position of the block's last token, else of its first */
    bool hadamard;
    entry_format format;
} entry_args;
#define ENTRY_TENSORS(F) F(entry.norm_weight) F(entry.cos_sin)
#define ENTRY_VALUES(F) F(entry.round_bf16) F(entry.eps) F(entry.rope_last) F(entry.hadamard) F(entry.format)

typedef struct pool_args {
    int64_t ratio, width;
    bool overlap;
    /* Sequences: fixed length, or varlen by cu_seqlens. The i32 [batch] tensors, where present, replace
     * the numbers. */
    int64_t batch;
    quern_tensor cu_seqlens;
    int64_t start_token, start_position, blocks; /* 0 blocks: all that are whole */
    /* has_prev absent: where prev_b is present */
    quern_tensor start_tokens, start_positions, block_counts, has_prev;
    /* The call is a part of a longer sequence (fixed length only). Rows before start_token hold the block
     * before. Backward: a block after `blocks` follows, in proj and d_out, which gives series b of the
     * last one its gradient. */
    bool continued, followed;
    quern_tensor proj;           /* [B, T, columns]; or absent, and proj = x w in f32: */
    quern_tensor x, w;           /* [B, T, in], [in, columns] */
    quern_tensor bias_a, bias_b; /* [ratio, width] */
    quern_tensor prev_b;         /* [B, ratio, 2 width]: values and logits of series b of the block before */
    entry_args entry;
    quern_tensor cu_entries; /* i32 [batch + 1], or absent: where the sequences' entries start in out */
    /* [B, n, width] f32 or absent; [B, n, width] or bytes of the format, or absent */
    quern_tensor pooled, out;
    /* Backward: gradients of `out` before its format. All outputs are optional; d_proj is written in the
     * blocks' rows and, unless continued or followed, as 0 elsewhere. */
    quern_tensor d_out;
    quern_tensor d_proj, d_prev_b;                  /* proj's dtype or f32 */
    quern_tensor d_x, d_w;                          /* x's dtype; f32 */
    quern_tensor d_bias_a, d_bias_b, d_norm_weight; /* f32 */
    bool accumulate;                                /* these three are added to */
    bool accumulate_x;                              /* d_x, f32, is added to */
} pool_args;
STAGE_DECLARE(pool);
#define POOL_TENSORS(IN, OUT, GRAD)                                                                          \
    IN(cu_seqlens)                                                                                           \
    IN(start_tokens)                                                                                         \
    IN(start_positions)                                                                                      \
    IN(block_counts)                                                                                         \
    IN(has_prev)                                                                                             \
    IN(proj)                                                                                                 \
    IN(x)                                                                                                    \
    IN(w)                                                                                                    \
    IN(bias_a) IN(bias_b) IN(prev_b) ENTRY_TENSORS(IN) IN(cu_entries) OUT(pooled) OUT(out) IN(d_out)         \
        GRAD(d_proj) GRAD(d_x) GRAD(d_w) GRAD(d_prev_b) GRAD(d_bias_a) GRAD(d_bias_b) GRAD(d_norm_weight)
#define POOL_VALUES(F)                                                                                       \
    F(ratio)                                                                                                 \
    F(width)                                                                                                 \
    F(overlap)                                                                                               \
    F(batch)                                                                                                 \
    F(start_token)                                                                                           \
    F(start_position) F(blocks) F(continued) F(followed) ENTRY_VALUES(F) F(accumulate) F(accumulate_x)

/*
 * A compressor whose sequences are pooled token by token. Row slots[b] of `state` is sequence b's: the sums
 * of the open block (begun with series b of the block before), with overlap the sums of series b of the open
 * block, and a ring of projected rows that can still be taken back, row q of the sequence in slot q mod
 * ring. A sum is [3, width]: maximum, sum of weights, weighted sum. The sums hold the rows before
 * merged[slots[b]], the ring those from there on. A sequence at position 0 starts anew, whatever its slot
 * holds.
 */
typedef struct pool_append_part {
    int64_t width;       /* 0: the call has no such compressor */
    quern_tensor merged; /* i32 [slots], updated */
    quern_tensor state;  /* f32 [slots, pool_state_floats()], updated */
    quern_tensor proj, bias_a, bias_b;
    entry_args entry;
    /* Without a table: rows of the entries that become whole, sequence after sequence, and rows behind
     * these, which become 0. With one, i32 [B, columns]: pages, as store_rows has them, and entry e of the
     * sequence stands in slot e % page of page table[b, e / page]. pooled: rows, or absent. */
    quern_tensor out, pooled, table;
    int64_t page; /* slots of a page of out */
} pool_append_part;

/* Appends a step's tokens to both compressors, or to the first alone. A fault of one concerns both. */
enum { POOL_PARTS = 2 };
typedef struct pool_append_args {
    int64_t ratio, ring;
    bool overlap;
    stage_step step; /* rows of proj */
    /* i32 [slots], updated; or absent. A sequence of a step whose position or page is wrong, or that
     * would have an entry that its format refuses, takes the bit at its slot, keeps its states and has
     * entries of 0, as many as its positions say; the others go on. So it stays until it begins at
     * position 0. */
    quern_tensor fault;
    pool_append_part part[POOL_PARTS];
} pool_append_args;
STAGE_DECLARE(pool_append);
#define POOL_APPEND_TENSORS(IN, OUT, GRAD)                                                                   \
    STAGE_STEP_TENSORS(IN)                                                                                   \
    OUT(fault)                                                                                               \
    OUT(part[0].merged)                                                                                      \
    OUT(part[0].state) IN(part[0].proj) IN(part[0].bias_a) IN(part[0].bias_b) IN(part[0].entry.norm_weight)  \
        IN(part[0].entry.cos_sin) OUT(part[0].out) OUT(part[0].pooled) IN(part[0].table) OUT(part[1].merged) \
            OUT(part[1].state) IN(part[1].proj) IN(part[1].bias_a) IN(part[1].bias_b)                        \
                IN(part[1].entry.norm_weight) IN(part[1].entry.cos_sin) OUT(part[1].out) OUT(part[1].pooled) \
                    IN(part[1].table)
#define POOL_APPEND_VALUES(F)                                                                                \
    F(ratio)                                                                                                 \
    F(ring)                                                                                                  \
    F(overlap)                                                                                               \
    F(part[0].width) F(part[0].entry.round_bf16) F(part[0].entry.eps) F(part[0].entry.rope_last)             \
        F(part[0].entry.hadamard) F(part[0].entry.format) F(part[0].page) F(part[1].width)                   \
            F(part[1].entry.round_bf16) F(part[1].entry.eps) F(part[1].entry.rope_last)                      \
                F(part[1].entry.hadamard) F(part[1].entry.format) F(part[1].page)

/* Columns of a projected row, floats of the sums, and floats of both with the ring. */
static inline int64_t pool_row_columns(bool overlap, int64_t width)
{
    return (overlap ? 4 : 2) * width;
}

static inline int64_t pool_sums_floats(bool overlap, int64_t width)
{
    return (overlap ? 6 : 3) * width;
}

static inline int64_t pool_state_floats(bool overlap, int64_t width, int64_t ring)
{
    return pool_sums_floats(overlap, width) + ring * pool_row_columns(overlap, width);
}

#endif
