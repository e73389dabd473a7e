/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* layer.h - what a layer keeps of its forward pass, and its two halves. */
#ifndef LM_LAYER_H
#define LM_LAYER_H

#include "lm.h"

#include <quern/cache.h>
#include <quern/dsv4.h>

/* attend.c: attention of a layer, by its kind. Arrays that the kind has no use for are NULL. */
typedef struct lm_attention {
    float *q_raw, *k_raw, *inv_q, *inv_k; /* before norm and rope, and 1 / rms */
    /* [context][heads][dim] ...; window, csa, hca: k is value too, and lse[1] is of csa's window alone */
    float *q, *k, *v, *o, *lse[3];
    float *o_b[3], *gates;          /* nsa */
    float *k_cmp, *v_cmp, *d_k_cmp; /* compressed keys and values; csa and hca: both in one */
    int32_t *chosen, *count;        /* nsa: blocks; csa: entries, and how many */
    float *index_q, *index_k;       /* csa: the indexer's queries and keys */
    float *d_index_k, *d_index_w;   /* and what its loss says of keys, [context][heads] weights */
} lm_attention;
/* The gradients of a backward pass; d_h is added to. */
typedef struct lm_gradients {
    const float *d_o;
    float *d_q, *d_k, *d_v, *d_h;
} lm_gradients;
bool attention_allocate(const lm_config *config, lm_kind kind, lm_attention *a);
void attention_free(lm_attention *a);
/* q, k, v and what else the layer's kind needs from its normed input h1 -> o. With g: d_o -> the others, and
 * the gradients of the kind's own weights. */
bool attend_run(lm_model *model, int32_t layer, int32_t n, const lm_gradients *g);

/* project.c: h1 of n tokens from `position` on -> q, k, v, index_q; and d_q, d_k, d_v -> d_h. */
void project_forward(lm_model *model, int32_t layer, int64_t position, int32_t n);
bool project_backward(lm_model *model, int32_t layer, int32_t n, const lm_gradients *g);

/* The kinds: attend_dense.c, attend_nsa.c, attend_v4.c. As attend_run(). */
bool dense_run(lm_model *model, int32_t layer, int32_t n, const lm_gradients *g);
bool nsa_run(lm_model *model, int32_t layer, int32_t n, const lm_gradients *g);
bool v4_run(lm_model *model, int32_t layer, int32_t n, const lm_gradients *g);
quern_attention_params dense_params(void);
quern_nsa_params nsa_params(const lm_config *config);
quern_dsv4_compress_params v4_compress_params(const lm_config *config, lm_kind kind);
/* The rows of a call of the indexer and the attention core of DeepSeek-V4. */
typedef struct v4_rows {
    int64_t n, position;   /* queries, the place of the first */
    int64_t held, entries; /* keys, the last of which is the last query's; compressed entries */
    const float *q, *kv, *kv_cmp, *index_q, *index_k;
    int32_t *chosen, *count;
    float *o, *lse, *lse_win; /* lse, lse_win: NULL in decoding */
} v4_rows;
bool v4_index(lm_model *model, int32_t layer, const v4_rows *rows);
bool v4_core(lm_model *model, int32_t layer, const v4_rows *rows, const lm_gradients *g);
/* With unit-RMS queries and keys a score of dense attention or nsa is at most dim * SCALE. */
#define SCALE 0.25f

/*
 * A layer's cache for decoding, by its kind: cache_rows.c (dense, nsa), cache_v4.c (window, csa, hca).
 */
struct lm_cache {
    lm_kind kind;
    int64_t position;  /* tokens so far */
    int32_t *chosen;   /* of the last call's queries: nsa [kv_heads][n][selected], csa [n][index_top] */
    quern_cache *rows; /* dense, nsa */
    void *
        memory[2]; /* of the rows' bookkeeping and of the rows; the states of the compressor, the indexer's */
    int32_t merged[2]; /* rows in the states' sums */
    int64_t used;      /* bytes of the keys in the window, of the entries and of the states */
    float *kv;         /* the last tokens' keys, [room][dim] */
    int64_t held, room;
    float *kv_cmp, *index_k; /* [entries][dim] */
    int32_t *count;
};
/* An empty cache for at most `capacity` tokens, `step` in a call. */
bool cache_open(lm_model *model, int32_t layer, int64_t capacity, int64_t step, lm_cache *cache);
void cache_close(lm_cache *cache);
/* Rows first ... first + n - 1 of what the layer's attention takes follow the tokens in the cache
 * -> o [n][width] */
bool cache_extend(lm_model *model, int32_t layer, lm_cache *cache, int64_t first, int64_t n, float *o);
/* Bytes of the keys, values, entries and states that it holds. */
int64_t cache_bytes(const lm_cache *cache);

/* The kinds' parts of these. */
bool rows_open(lm_model *model, int32_t layer, int64_t capacity, int64_t step, lm_cache *cache);
bool rows_extend(lm_model *model, int32_t layer, lm_cache *cache, int64_t first, int64_t n, float *o);
int64_t rows_bytes(const lm_cache *cache);
bool v4_open(lm_model *model, int32_t layer, int64_t capacity, int64_t step, lm_cache *cache);
bool v4_extend(lm_model *model, int32_t layer, lm_cache *cache, int64_t first, int64_t n, float *o);
int64_t v4_bytes(const lm_cache *cache);

/* mlp.c: rows of one network or of many, [rows][inner]. */
typedef struct lm_rows {
    float *gate, *up, *divisor, *act; /* divisor: 1 + e^-gate */
} lm_rows;

typedef struct lm_mlp {
    lm_rows shared; /* of every byte */
    /* A mixture: the bytes' slots in the order of their experts. */
    lm_rows routed;             /* [context top][inner] */
    float *in, *out;            /* [context top][width] */
    int32_t *experts, *order;   /* [context][top]; the slot of each row */
    int32_t *offsets;           /* [experts]: where each expert's rows end */
    float *weights, *d_weights; /* [context][top] */
} lm_mlp;
bool mlp_allocate(const lm_config *config, lm_mlp *mlp);
void mlp_free(lm_mlp *mlp);
/* x += mlp(h) */
bool mlp_forward(lm_model *model, int32_t layer, const float *h, float *x, int32_t n);
/* d_x of mlp's result -> d_h, and the gradients of its weights. */
bool mlp_backward(lm_model *model, int32_t layer, const float *h, const float *d_x, float *d_h, int32_t n);

struct lm_layer {
    float *x, *mid;     /* input of the attention half and of the MLP half */
    float *h1, *h2;     /* their norms */
    float *inv1, *inv2; /* 1 / rms */
    lm_attention attention;
    lm_mlp mlp;
};

#endif
