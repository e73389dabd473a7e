/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* hyper.h - what the forward and the backward of hyper-connections share on the CPU: the job, a tile of
 * tokens, their sums over the copies' channels. */
#ifndef QUERN_CPU_HYPER_H
#define QUERN_CPU_HYPER_H

#include "core/arena.h"
#include "cpu/hyper/hyper_kernels.h"
#include "cpu/kernels/rows/f32_rows.h"
#include "cpu/levels.h"
#include "cpu/rows_at.h"

enum {
    TILE_TOKENS = 48, /* that read fn once */
    PIECE = 1024,
    PIECE_IN_PLACE = 1024
};

typedef struct hyper_job {
    const hyper_args *args;
    const cpu_kernels *kernels;
    int64_t tokens, copies, width, weights; /* T, n, C, J */
    int64_t ld;                             /* floats of a token's sums */
    int64_t tiles;
    int64_t piece, pieces; /* channels of a piece of fn; pieces of a copy */
    int64_t piece_floats;  /* of a packed piece */
    bool mixes, takes_f;   /* fn is there; f is */
    f32_rows norm;         /* the norm's weight */
    quern_tensor beside;   /* as x or as f, which is read after the sums of a tile; or absent */
    float *packed;         /* [n pieces][piece_floats], or NULL: fn is read in place */
    float *parts;          /* [n pieces][T][J + 1][lanes]: a piece's sums, or NULL: a tile makes them */
} hyper_job;

/* A tile's tokens, and what a thread keeps of them. */
typedef struct hyper_tile {
    int64_t token0, tokens;
    float *lanes;          /* [TILE_TOKENS][J + 1][lanes] */
    float *sums, *weights; /* [TILE_TOKENS][ld] */
    float *collapsed;      /* [width] */
} hyper_tile;

static inline char *token_row(const quern_tensor *t, int64_t token, int64_t copy, int64_t channel)
{
    const int64_t at = token * t->strides[0] + (t->ndim > 2 ? copy * t->strides[1] : 0) + channel;
    return (char *)t->data + at * (int64_t)quern_dtype_size(t->dtype);
}

static inline float *float_row(const quern_tensor *t, int64_t token)
{
    return (float *)t->data + token * t->strides[0];
}

static inline int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* `packs`: fn becomes packed, in room that is carved. */
hyper_job hyper_plan(const stage_exec *exec, const hyper_args *args, bool packs, arena *a);
void hyper_pack(const stage_exec *exec, hyper_job *job);
/* Room for the sums of few tokens by pieces, so that all threads read fn, and these sums. */
void hyper_carve_parts(hyper_job *job, arena *a);
void hyper_add_parts(const stage_exec *exec, hyper_job *job);
void hyper_carve_tile(const hyper_job *job, arena *a, hyper_tile *tile);
/* The tile's tokens: as many as its neighbours, up to a block of products. */
void hyper_take_tile(const hyper_job *job, int64_t index, hyper_tile *tile);
hyper_weights hyper_weights_of(const hyper_job *job, const hyper_tile *tile);
/* The tile's sums, and weights where the call mixes. */
void hyper_weigh(const hyper_job *job, const hyper_tile *tile);
/* The factors of the copies on the way in. */
const float *hyper_pre(const hyper_job *job, const hyper_tile *tile, int64_t token);

#endif
