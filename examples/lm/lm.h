/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * lm.h - a byte-level language model that trains and serves on Quern's public API alone.
 *
 *   x = E[byte] + E2[hash of the last 2 bytes] + E3[hash of the last 3]
 *   layers times:  x += attention(norm(x) w) Wo           of the layer's kind: attend.h
 *                  x += experts(norm(x) w)                one SwiGLU network, or a mixture: mlp.c
 *   logits = (norm(x) w) Wh
 *
 * norm is RMSNorm; all arrays are f32, row-major, [tokens][columns]; a matrix W is [in][out] and y = x W.
 */
#ifndef LM_H
#define LM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <quern/quern.h>

enum { BYTES = 256, HASH_ROWS = 16384, MAX_LAYERS = 32, DIGEST_TEXT = 65 };
enum { FEW_ROWS = 4 }; /* as in decoding: done before other threads would have started */

/* config.c */
typedef enum lm_kind { KIND_DENSE, KIND_NSA, KIND_WINDOW, KIND_CSA, KIND_HCA, KINDS } lm_kind;

typedef struct lm_config {
    int32_t width, layers, heads, kv_heads, inner, context;
    int32_t attention;       /* a row of lm_attentions */
    int32_t block, selected; /* nsa: tokens of a block, blocks that a query selects */
    int32_t window;          /* tokens: nsa's window branch, window, csa and hca layers */
    int32_t index_top;       /* csa: entries of 4 tokens that a query selects */
    int32_t ratio;           /* hca: tokens of an entry */
    int32_t experts, top;    /* of a mixture, and those that a byte goes to; 0: one network */
} lm_config;
#define LM_CONFIG_DEFAULT                                                                                    \
    {                                                                                                        \
        128, 4, 4, 1, 384, 4096, 0, 32, 8, 256, 64, 128, 0, 2                                                \
    }

/* The attentions of a model: the kinds of its first layer, then of the others in turn. */
typedef struct lm_attention_row {
    const char *name;
    lm_kind first, second, third;
} lm_attention_row;
enum { ATTENTIONS = 5 };
extern const lm_attention_row lm_attentions[ATTENTIONS];

/* The integers of a configuration under their names in options and checkpoints. */
typedef struct lm_field {
    const char *name;
    size_t offset; /* in lm_config */
    int32_t least, most;
} lm_field;
enum { FIELDS = 13 };
extern const lm_field lm_fields[FIELDS];
int32_t *config_field(lm_config *config, int field);
/* Tokens of a compressed entry; 0 where the kind has none. */
int64_t config_ratio(const lm_config *config, lm_kind kind);
/* Channels of a head that RoPE rotates, its last ones. */
int64_t config_rotated(const lm_config *config);
lm_kind config_kind(const lm_config *config, int32_t layer);
/* Inner width of the network that serves every byte, and of each expert. */
int32_t config_expert_inner(const lm_config *config);
const char *config_title(const lm_config *config); /* "nsa", "nsa with experts", in static memory */
/* The row of an attention by name, -1 where there is none. */
int32_t config_attention(const char *name);
/* NULL, or what does not fit together, as a sentence in static memory. */
const char *config_fault(const lm_config *config);

/* How an array is trained. */
typedef enum lm_rule {
    RULE_ADAMW,
    RULE_MUON,   /* a hidden matrix */
    RULE_BALANCE /* a step of `rate` against the gradient's sign */
} lm_rule;

/* One array, with its gradient and optimizer state. An array that the configuration has no use for has
 * value NULL and no rows. */
typedef struct lm_param {
    char name[48];
    int64_t rows, cols;
    int64_t stack; /* matrices of rows / stack rows */
    lm_rule rule;
    float rate; /* of AdamW and BALANCE, relative to the schedule */
    float *value, *grad;
    float *first, *second; /* Muon: momentum, none. AdamW: both moments. */
} lm_param;

/* Indices into lm_model.params. */
enum { P_BYTE, P_PAIR, P_TRIPLE, P_NORM, P_HEAD, P_LAYERS };
enum {
    L_NORM1,
    L_Q,
    L_K,
    L_V,
    L_O,
    L_GATE,    /* nsa */
    L_KV_NORM, /* window, csa, hca, as the next */
    L_SINK,
    L_CMP, /* csa, hca: a compressor's matrix, biases by place in a block (of csa's two series), norm */
    L_CMP_BIAS_A,
    L_CMP_BIAS_B,
    L_CMP_NORM,
    L_INDEX_CMP, /* csa: the same of the indexer; its queries and the weights of their heads */
    L_INDEX_BIAS_A,
    L_INDEX_BIAS_B,
    L_INDEX_NORM,
    L_INDEX_Q,
    L_INDEX_HEADS,
    L_NORM2,
    L_W1, /* the network of every byte, then the experts */
    L_W3,
    L_W2,
    L_ROUTER,
    L_BALANCE, /* added to the experts' scores where the router chooses */
    L_COUNT
};

typedef struct lm_layer lm_layer; /* activations of one layer, layer.h */
typedef struct lm_served lm_served;
typedef struct lm_cache lm_cache; /* of one layer, layer.h */

typedef struct lm_model {
    lm_config config;
    int32_t param_count;
    lm_param *params;
    int64_t step;
    lm_layer *layer;
    lm_served *served; /* NULL: the experts compute with the trained weights */
    quern_context *ctx;
    float *x, *normed, *logits, *d_x, *d_normed; /* [context][...] */
    float *inverse;                              /* 1 / rms of the last norm's rows */
    float *rope;                                 /* [positions][rotated]: cosines, then sines */
    int64_t positions;
    double index_loss; /* of the last backward pass: the sum of the csa layers' indexers' losses */
    void *workspace;
    size_t workspace_bytes;
    float *scratch[4]; /* [context][inner] and more, see model_create() */
} lm_model;

/* params.c */
bool params_create(lm_model *model, uint64_t seed);
void params_free(lm_model *model);
lm_param *layer_param(const lm_model *model, int32_t layer, int which);

/* model.c */
bool model_create(lm_model *model, const lm_config *config, uint64_t seed);
void model_destroy(lm_model *model);
/* The RoPE table holds positions 0 ... positions - 1; else it prints an error and returns false. */
bool model_positions(lm_model *model, int64_t positions);
/* Mean cross-entropy in nats of predicting text[1 .. n] from text[0 .. n - 1]; n <= context. With `train`,
 * the gradients are left in params. Negative on failure. */
double model_loss(lm_model *model, const uint8_t *text, int32_t n, bool train);
/* Bytes text[position ... position + n - 1] -> the logits after each, in model->logits; n <= context. Without
 * caches position is 0; with the caches of all layers, these hold the bytes before and then these too. */
bool model_forward(lm_model *model, const uint8_t *text, int64_t position, int32_t n, lm_cache *caches);

/* call.c: what every call of Quern needs. */
quern_tensor view(const void *data, quern_dtype dtype, int32_t ndim, int64_t a, int64_t b, int64_t c,
                  int64_t d);
/* The model's workspace is at least so large; else it prints an error and returns false. */
bool reserve(lm_model *model, size_t bytes);
/* True, or false after Quern's sentence. */
bool done(quern_status status);

/* served.c: experts as a server holds them, computed by quern_moe_forward(). */
typedef enum lm_expert_weights { EXPERTS_TRAINED, EXPERTS_BF16, EXPERTS_NVFP4 } lm_expert_weights;
/* Sets model->served from the trained weights; EXPERTS_TRAINED: to NULL. */
bool served_create(lm_model *model, lm_expert_weights weights);
void served_free(lm_served *served, int32_t layers);
/* x += experts(h) */
bool served_forward(lm_model *model, int32_t layer, const float *h, float *x, int32_t n);

/* layers.c */
void norm_forward(const float *x, const float *w, float *y, float *inverse, int64_t rows, int64_t cols);
/* d_x += ...; d_w = ... (w NULL: no weight, and it cannot fail). Without memory it prints an error and
 * returns false. */
bool norm_backward(const float *x, const float *w, const float *inverse, const float *d_y, float *d_x,
                   float *d_w, int64_t rows, int64_t cols);
/* Rotates interleaved pairs of the last channels of every head; backwards with sign -1. */
void rope_apply(float *x, const float *table, int64_t tokens, int64_t heads, int64_t dim, int64_t rotated,
                float sign);
/* divisor = 1 + e^-gate, y = gate / divisor * up */
void swiglu_forward(const float *gate, const float *up, float *divisor, float *y, int64_t rows, int64_t cols);
void swiglu_backward(const float *gate, const float *up, const float *divisor, const float *d_y,
                     float *d_gate, float *d_up, int64_t n);
/* Mean loss in nats; d_logits = gradient of the mean, in place of the logits where `gradient`. */
double cross_entropy(float *logits, const uint8_t *target, int64_t rows, bool gradient);
/* Of bytes text[position ... position + n - 1], and the two before each. */
void embed_forward(const lm_param *params, const uint8_t *text, int64_t position, float *x, int64_t n,
                   int64_t width);
void embed_backward(lm_param *params, const uint8_t *text, const float *d_x, int64_t n, int64_t width);

/* gemm.c: C[m][n] = A B (+ C), A [m][k] or, transposed, [k][m]; B likewise. */
void gemm(bool a_transposed, bool b_transposed, int64_t m, int64_t n, int64_t k, const float *a,
          const float *b, float *c, bool accumulate);

/* optimizer.c */
typedef struct lm_rates {
    float muon, adam;
} lm_rates;
#define LM_RATES_DEFAULT                                                                                     \
    {                                                                                                        \
        0.02f, 0.02f                                                                                         \
    }
/* One update from the gradients; `schedule` scales both rates. Without memory it prints an error and
 * returns false: the step is then half done. */
bool optimizer_step(lm_model *model, float schedule, lm_rates rates);

/* corpus.c */
typedef struct lm_corpus {
    uint8_t *bytes;
    int64_t size, train;      /* bytes [0, train) train, the rest is held out */
    char digest[DIGEST_TEXT]; /* SHA-256 of the bytes that train */
} lm_corpus;
/* `path`: a file or folder, or NULL for the C headers of linux-libc-dev and libc6-dev. */
bool corpus_load(const char *path, lm_corpus *corpus);
void corpus_free(lm_corpus *corpus);
/* The start of training piece `i`: pieces of n bytes in an order drawn by seed. Without memory it
 * prints an error and returns a negative number. */
int64_t corpus_piece(const lm_corpus *corpus, int64_t n, uint64_t seed, int64_t i);
/* The start of held-out piece `i` of `count` spread over the held-out part; -1 past the last. */
int64_t corpus_held_out(const lm_corpus *corpus, int64_t n, int64_t i, int64_t count);

/* order2.c: interpolated order-2 byte model (Witten-Bell). */
typedef struct order2 order2;
order2 *order2_create(void);
void order2_add(order2 *model, const uint8_t *text, int64_t n);
/* Bits that text[1 .. n) takes given what precedes. */
double order2_bits(const order2 *model, const uint8_t *text, int64_t n);
void order2_free(order2 *model);

/* What a run needs besides the model to resume as if it had never stopped. */
typedef struct lm_run {
    uint64_t seed;
    int64_t steps; /* of the whole run */
    lm_rates rates;
    int64_t corpus_bytes; /* the corpus it learns from, and its digest */
    char corpus_digest[DIGEST_TEXT];
} lm_run;

/* checkpoint.c */
bool checkpoint_save(const lm_model *model, const char *path, const lm_run *run);
/* Reads configuration, weights, optimizer state and run into a fresh model. */
bool checkpoint_load(lm_model *model, const char *path, lm_run *run);

/* sample.c: a byte drawn from the likeliest whose chances sum to top_p; temperature 0: the likeliest, of
 * equals the lowest. */
int sample(const float *logits, double temperature, double top_p, uint64_t *state);

/* random.c: splitmix64, the same numbers everywhere. */
uint64_t random_next(uint64_t *state);
float random_normal(uint64_t *state);

/* The verbs; exit codes: 0 done, 2 usage, 3 failure. */
int verb_train(int argc, char **argv);
int verb_eval(int argc, char **argv);
int verb_generate(int argc, char **argv);
int verb_order2(int argc, char **argv);
int verb_speed(int argc, char **argv);
/* True if the held-out part is longer than n bytes; else it prints an error. */
bool held_out_fits(const lm_corpus *corpus, int64_t n);
/* Bits per held-out byte. On failure it prints an error and returns a negative number. */
double evaluate(lm_model *model, const lm_corpus *corpus, int64_t pieces);
double seconds(void);

/* curve.c: the losses of runs, as text and as a chart. */
typedef struct lm_curve {
    char name[64];
    double *loss; /* of each step; 0: none */
    int64_t count;
} lm_curve;
/* path NULL: none is wanted. */
bool curve_save(const char *path, const lm_curve *curve);
bool curve_load(const char *path, lm_curve *curve);
/* Draws the running means of the losses > 0 in one chart. Without gnuplot a warning: a run is worth more than
 * its picture. Where the file cannot be written it prints an error and returns false. */
bool curves_draw(const char *path, const lm_curve *curves, int count);

/* threads.c: starts the threads of all loops, fewer than OMP_NUM_THREADS where these cannot be created; a
 * context's params, with these threads. */
void threads_start(void);
quern_context_params threads_params(void);
/* So many bytes can be had now. */
bool room_for(size_t bytes);

/* output.c */
/* Prints "lm: sentence" to stderr, control characters as '?'; returns 1. */
int failure(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* Finds out before the work that a file cannot be written. path NULL: none is wanted. */
bool output_check(const char *path);
/* A result for other programs; NULL path: none is wanted. */
bool json_write(const char *path, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* The exit code, or 3 where standard output could not be written. */
int output_finish(int code);

/* signals.c: from signals_end_program on, SIGINT, SIGTERM, SIGHUP and SIGPIPE end the program at once, with
 * exit code 128 + number and no temporary file. Between the two calls they wait. A thread that starts there
 * never takes them: it would take a file away while the main thread finishes it, and that one would report an
 * error. */
void signals_hold(void);
void signals_end_program(void);

#endif
