/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * v4.h - DeepSeek-V4 on Quern's public API. A step of R tokens, n copies of the residual stream:
 *
 *   x = n copies of the tokens' embeddings                                         [R, n, Dm]      model.c
 *   in each layer, with f = attention, then with f = experts:
 *       x = comb x + post f(norm(pre x))       hyper-connections around the sub-layer              model.c
 *   logits = head(norm(pre x))
 *
 * Attention leaves rows that later tokens read; cache.c says where they stand. Projections are computed from
 * the checkpoint's own bytes (weights.c), experts from repacked ones (experts.c). Failures end the process.
 */
#ifndef V4_H
#define V4_H

#include <quern/checkpoint.h>
#include <quern/cuda.h>
#include <quern/dsv4.h>
#include <quern/dsv4_hyper.h>
#include <quern/ledger.h>
#include <quern/linear.h>

#include <stdio.h>
#include <string.h>

enum { CSA = 4 /* tokens of an entry */, PAGE = 64, RATIOS = 3, LAYERS_MOST = 1024, NAME = 160, LANES = 8 };

/* Memory of intermediate results, made larger where it has to be, as is the operations' workspace. Two that
 * follow one another (Q, Q_NEXT) take turns. Up to EMBEDDED as the activations, then i32, LOGITS f32. */
enum { X, X_NEXT, X_MIDDLE, H, F };
enum { QR_RAW = F + 1, QR, Q, Q_NEXT, KV, KV_NEXT, GROUPS, PROJ, INDEX_PROJ, IQ, IQ_NEXT, IW };
enum { EMBEDDED = IW + 1, IDS, IDX, COUNT, LOGITS, WORKSPACE, ROOMS = WORKSPACE + LANES };

/* The extents of a tensor. */
#define SHAPE(...) ((const int64_t[]){__VA_ARGS__, 0})

/* config.json */
typedef struct v4_config {
    int64_t width, layers, vocab, heads, dim, rope_dim, q_lora, groups, o_lora, window;
    int64_t index_heads, index_dim, index_top, experts, top, inner, shared, hash_layers, copies, iters;
    double hc_eps, rms_eps, limit, route_scale;
    double base[2], factor, length, beta_fast, beta_slow; /* of RoPE; base: of layers without, with entries */
    bool renormalize;
    quern_moe_score score;
    int64_t ratio[LAYERS_MOST]; /* tokens of an entry; 0: a window layer */
    int64_t ratios[RATIOS];     /* those that there are, then 0 */
    int pool[LAYERS_MOST];      /* 1 + the ratio's number among them: the ledger's pool of entries */
} v4_config;

/* A projection [N, K] as the file has it: floats, or FP8 with scales (else data NULL) of blocks. */
typedef struct v4_matrix {
    quern_tensor w, scale;
    int64_t block;
} v4_matrix;

typedef struct v4_compressor {
    v4_matrix w;                 /* columns C_a Z_a C_b Z_b, in HCA C Z */
    quern_tensor b_a, b_b, norm; /* f32 [r, C], [C] */
} v4_compressor;

typedef struct v4_hyper {
    quern_tensor fn, base, scale, norm; /* f32; norm: the sub-layer's */
} v4_hyper;

typedef struct v4_layer {
    int64_t ratio;         /* as in the config, as is the pool */
    int pool, compressors; /* CSA has two, the second of which is the indexer's; HCA one */
    v4_hyper hyper[2];     /* around attention, around the experts */
    v4_matrix q_a, q_b, kv, o_a, o_b, index_q_b, index_heads;
    v4_compressor compressor[2];
    quern_tensor q_norm, kv_norm, sink, repacked[2]; /* repacked: on a GPU, experts' */
    quern_checkpoint_moe experts;
    /* What later tokens read. [pages, PAGE, channels]: raw rows, entries, the indexer's keys; and by slot the
     * compressors' sums, and how many rows those contain. */
    quern_tensor rows[3], sums[2], merged[2];
} v4_layer;

/* What the operations of a step read, on the device: B sequences, R tokens, as many of each. */
typedef struct v4_step {
    int64_t batch;
    quern_step books;
    quern_tensor position, raw_table, raw_slot; /* i32 [R], [B, columns], [R] */
} v4_step;

typedef struct v4_cache {
    quern_ledger_params params;
    quern_ledger *ledger;
    int64_t *counts;       /* tokens of each sequence in a step */
    int32_t *ids;          /* 0, 1, ... */
    int32_t *host, *block; /* a step's numbers, and the device's copy of them */
    size_t books_bytes, host_bytes;
} v4_cache;

typedef struct v4_model {
    v4_config config;
    quern_context *ctx;
    quern_exec exec;               /* a GPU's stream */
    void *graph;                   /* of a step of one token of each of `recorded` sequences */
    int64_t recorded, lane, lanes; /* calls of a step take workspaces in turn, so that they may run at once */
    void *room[ROOMS];
    size_t room_bytes[ROOMS];
    quern_checkpoint *checkpoint;
    quern_dtype act; /* of activations and rows */
    v4_layer *layer;
    quern_tensor embed, cos_sin[2]; /* embed: on the host */
    v4_matrix head;
    v4_hyper head_hyper;
    v4_cache cache;
    void *mapped; /* repacked experts, or their file */
    bool cuda, quiet;
} v4_model;

typedef struct v4_options {
    const char *folder, *tokens, *batch, *out, *session, *cache; /* the command line's */
    int64_t chunk, max_new, threads;
    bool cuda, bf16, json, quiet, greedy;
} v4_options;

/* output.c */
extern int exit_code; /* of fail(): 2 while the command line is read, 3 from then on */
_Noreturn void fail(const char *format, ...) __attribute__((format(printf, 1, 2))); /* prints the sentence */
void check(quern_status status); /* fails with Quern's sentence */
/* Progress, which the next line replaces, where stderr is a terminal; or a line that stays. */
void note(const v4_model *m, bool passing, const char *format, ...) __attribute__((format(printf, 3, 4)));
uint64_t checksum(uint64_t start, const void *bytes, size_t size);

/* device.c. Memory of the host, which is cleared, and of the device. */
void *host_take(size_t bytes);
void *device_take(const v4_model *m, size_t bytes);
void device_copy(const v4_model *m, void *to, const void *from, size_t bytes); /* from and to either side */
void device_read(const v4_model *m, void *to, const void *from, size_t bytes); /* to the host: waits */
void *device_room(v4_model *m, int i, size_t bytes);
quern_tensor view(const v4_model *m, const void *data, quern_dtype dtype, const int64_t *shape);
quern_tensor make(const v4_model *m, quern_dtype dtype, const int64_t *shape);
quern_tensor room(v4_model *m, int i, const int64_t *shape);
size_t tensor_bytes(const quern_tensor *t);
static inline float number(const void *data, quern_dtype dtype, int64_t i) /* of f32 or bf16, as widen()'s */
{
    const uint32_t bits =
        dtype == QUERN_F32 ? ((const uint32_t *)data)[i] : (uint32_t)((const uint16_t *)data)[i] << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
void widen(const v4_model *m, const quern_tensor *from, const quern_tensor *to);
enum graph_call { BEGIN, END, LAUNCH }; /* of a CUDA graph, with the launches between BEGIN and END */
bool graph(v4_model *m, enum graph_call call);

void weights_open(v4_model *m, const char *folder);
quern_tensor place(const v4_model *m, quern_tensor from); /* a copy on the device */
void experts_open(v4_model *m, const char *cache); /* cache: their file, or NULL */

/* cache.c */
void cache_open(v4_model *m, int64_t sequences, int64_t capacity, int64_t chunk);
/* A step of `tokens` tokens of each of the sequences first ... first + batch - 1. */
void cache_begin(v4_model *m, int64_t first, int64_t batch, int64_t tokens, v4_step *step);

/* Sequence 0 in a file, and its last logits. Loading returns how many of `tokens` it has; 0: no file. */
void session_save(v4_model *m, const char *path, const int32_t *tokens, int64_t count, const float *logits);
int64_t session_load(v4_model *m, const char *path, const int32_t *tokens, int64_t most, float *logits);

/* model.c */
void model_open(v4_model *m, const v4_options *o, int64_t sequences, int64_t capacity);
/* tokens [batch, count], one of which is 1, of the sequences from `first` on; logits of the last n rows. */
void model_step(v4_model *m, int64_t first, int64_t batch, const int32_t *tokens, int64_t count, int64_t n,
                float *logits);
void op_prepack(v4_model *m, const quern_tensor *codes, const quern_tensor *scales, const quern_tensor *to);

#endif
