/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * index_loss.h - the inner functions of the index_loss stage on the CPU: a chunk of one list's queries, and
 * the tokens of it that name a block against the block's keys.
 */
#ifndef QUERN_CPU_INDEX_LOSS_H
#define QUERN_CPU_INDEX_LOSS_H

#include "cpu/kernels/attend/attend.h"
#include "cpu/kernels/attend/gradients.h"
#include "cpu/kernels/attend/turns.h"
#include "cpu/kernels/nsa_kernels.h"

enum {
    LOSS_TOKENS = 96,        /* most queries of a tile */
    LOSS_TEACHER_ROWS = 192, /* rows of q, heads of queries, that are scored at once */
    LOSS_KEYS = 128,         /* most columns of a tile */
    LOSS_LD = LOSS_KEYS + 16 /* floats of a row of scores: an odd number of cache lines */
};

/* Never copied or moved: it points into itself. */
typedef struct loss_plan {
    const index_loss_args *args;
    attend_args teacher_args, student_args;
    attend_plan teacher, student; /* the lists are the teacher's */
    const nsa_kernels *kernels;
    int64_t lists, group; /* Hs, heads of a list */
    bool shared;          /* key_index */
    int64_t ld;           /* floats of a row of d_q_index or d_keys_index: an odd number of cache lines */
    int32_t key_panel;    /* columns of a panel of index_rows */
    /* Panels: of both keys, the B of the scores; of key_index the B of d_q_index, where `nonfinite` says that
     * 64 rows have 0 in place of nonfinite elements. */
    void *keys, *index_keys, *index_rows;
    uint8_t *nonfinite;
    gradient_rows d_keys;
    float gradient_scale; /* of sums over P - T */
} loss_plan;

/* Queries [token0, token0 + tokens) of a sequence under one list. */
typedef struct loss_chunk {
    attend_sequence seq;
    int32_t list;
    int64_t token0, tokens;
    attend_chunk teacher;             /* its q alone */
    uint32_t *q_index;                /* [tokens][student.key_words] */
    uint8_t *nonfinite;               /* [tokens]: q_index */
    int32_t *seen;                    /* [tokens * group]: keys before this, the same for a token's heads */
    float *max, *sum;                 /* [tokens]: of the student's scores, running */
    float *teacher_max, *teacher_sum; /* [tokens * group] */
    float *lse, *teacher_lse2;        /* as `divergence` and `add_probabilities` take them */
    double *loss, *total;             /* [tokens]: sums of T (log T - log P) and of T */
    int32_t *count;                   /* [tokens]: keys in the lists */
    float *d_q;                       /* [tokens][ld] */
    bool weighs_teacher;              /* some lse is not given, or too coarse */
} loss_chunk;

typedef struct loss_tile {
    int32_t *token; /* [LOSS_TOKENS], of the chunk */
    int32_t tokens;
    int64_t key0, key1, base; /* its keys, in a sequence; the key of column 0 */
    int32_t columns;          /* a multiple of 16 */
    bool fresh;               /* no sum was written to d_keys yet */
    /* scratch */
    void *gather_q;           /* [max(LOSS_TEACHER_ROWS, group)][teacher.key_words] */
    float *scores;            /* [max(LOSS_TEACHER_ROWS, group)][LOSS_LD] */
    uint32_t *gather_index;   /* [LOSS_TOKENS][student.key_words] */
    void *index_pairs;        /* rows of q_index as the B of d_keys_index, nonfinite elements as 0 */
    float *teacher, *student; /* [LOSS_TOKENS][LOSS_LD]: T group; scores, then P - T */
    uint16_t *g_words;        /* bf16 P - T, [LOSS_TOKENS + 1][LOSS_LD] */
    uint32_t *g_pairs;        /* the same in pairs along rows */
    float *d_q, *d_keys;      /* [LOSS_TOKENS][ld], [LOSS_LD][ld] */
    int32_t *lo, *hi;         /* [max(LOSS_TEACHER_ROWS, group, LOSS_TOKENS)]: columns that a row sees */
    float *max, *sum, *shrink;
} loss_tile;

void loss_tile_carve(const loss_plan *plan, arena *a, loss_tile *tile);
/* Adds the tile's columns to max and sum of its tokens' student scores and, where the chunk says so, of their
 * teachers'. */
void loss_tile_weigh(const loss_plan *plan, const loss_chunk *chunk, loss_tile *tile);
/* Adds them to the tokens' losses and gradients, and to the tile's d_keys. */
void loss_tile_run(const loss_plan *plan, const loss_chunk *chunk, loss_tile *tile);

#endif
