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
    TILE_TOKENS = 24, /* that read fn once */
    TILE_GROUP = 4,   /* of them are widened at once, at most: what L1 holds */
    CHUNK = 1024,     /* channels of a chunk of fn */
    CHUNK_LD = CHUNK + 16,
    PART = 256,         /* channels that the backward writes at once */
    PART_LD = PART + 16 /* rows a multiple of 4 KB apart would share their places in the caches */
};

typedef struct hyper_job {
    const hyper_args *args;
    const cpu_kernels *kernels;
    int64_t tokens, copies, width, weights; /* T, n, C, J */
    int64_t ld;                             /* floats of a token's sums */
    int64_t chunks;                         /* of a copy */
    bool mixes, takes_f;                    /* fn is there; f is */
    f32_rows norm;                          /* the norm's weight */
    quern_tensor beside;                    /* as x, which is read after the sums of a tile; or absent */
    float *packed;                          /* [n chunks][J][CHUNK_LD], or NULL: fn is read in place */
    float *parts; /* [n chunks][T][ld], a chunk's sums, or NULL: a tile makes them */
} hyper_job;

/* A tile's tokens, and what a thread keeps of them. */
typedef struct hyper_tile {
    int64_t token0, tokens;
    float *sums, *weights; /* [TILE_TOKENS][ld] */
    float *rows;           /* [HYPER_COPIES][CHUNK_LD]: widened */
    float *collapsed;      /* [width] */
} hyper_tile;

static inline const void *token_row(const quern_tensor *t, int64_t token, int64_t copy, int64_t channel)
{
    const int64_t at = token * t->strides[0] + (t->ndim > 2 ? copy * t->strides[1] : 0) + channel;
    return (const char *)t->data + at * (int64_t)quern_dtype_size(t->dtype);
}

static inline float *float_row(const quern_tensor *t, int64_t token)
{
    return (float *)t->data + token * t->strides[0];
}

static inline int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

hyper_job hyper_plan(const stage_exec *exec, const hyper_args *args);
/* Room for fn in chunks, which hyper_pack() fills. */
void hyper_carve_packed(hyper_job *job, arena *a);
void hyper_pack(const stage_exec *exec, hyper_job *job);
void hyper_carve_tile(const hyper_job *job, arena *a, hyper_tile *tile);
/* Room for the sums of few tokens by chunks, so that all threads read fn, and these sums. */
void hyper_carve_parts(hyper_job *job, arena *a);
void hyper_add_parts(const stage_exec *exec, const hyper_job *job, const hyper_tile *tiles);
hyper_weights hyper_weights_of(const hyper_job *job, const hyper_tile *tile);
/* The tile's sums, and weights where the call mixes. */
void hyper_weigh(const hyper_job *job, const hyper_tile *tile);
/* The factors of the copies on the way in. */
const float *hyper_pre(const hyper_job *job, const hyper_tile *tile, int64_t token);
/* n channels of a tensor's rows at a token, in f32: in place, or in `to` [rows][CHUNK_LD]; *ld: from one row
 * to the next. */
const float *hyper_widen(const hyper_job *job, const quern_tensor *t, int64_t token, int64_t channel,
                         int64_t n, float *to, int64_t *ld);
/* out[0, n) = sum of pre[i] x_i of a token. */
void hyper_collapse(const hyper_job *job, int64_t token, const float *pre, int64_t channel, int64_t n,
                    float *out);

#endif
