/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * bench.h - `quern bench`: a table of subjects (bench_subjects.c) and what runs them. A subject says which
 * options it takes, how its inputs are made, what a pass must do at least, which ceiling that is measured
 * against, and what stands beside it.
 */
#ifndef QUERN_TOOLS_BENCH_H
#define QUERN_TOOLS_BENCH_H

#include "ceilings.h"
#include "formula.h"
#include "job.h"
#include "row_cache.h"

#include <jansson.h>

typedef enum bench_data { DATA_NORMAL, DATA_SMOOTH } bench_data;
typedef enum bench_gate { GATE_WEIGHTS, GATE_NONE, GATE_GIVEN } bench_gate;
typedef enum bench_project { PROJECT_K = 1, PROJECT_V = 2 } bench_project;         /* a set */
typedef enum bench_separate { SEPARATE_SLC = 1, SEPARATE_WIN = 2 } bench_separate; /* a set */
typedef enum bench_weights { WEIGHTS_F32, WEIGHTS_INPUT } bench_weights;
typedef enum bench_selection { SELECTION_COMPUTED, SELECTION_GIVEN, SELECTION_INDEXED } bench_selection;

typedef struct bench_subject bench_subject;
enum { EXTENTS_MAX = 16, CHOICES_MAX = 3, WORDS_MAX = 5 };

/* What is measured. */
typedef struct bench_case {
    const bench_subject *subject; /* NULL: of `quern probe` */
    const operation *op;          /* NULL: the subject has none */
    int64_t n;
    int dtype, device; /* quern_dtype: f32, f16, bf16, and U8 where activations are NVFP4; quern_device */
    bool backward;
    int64_t extent[EXTENTS_MAX]; /* as the subject's rows name them */
    int choice[CHOICES_MAX];
    any_params params;
    const char *heads_text, *dim_text; /* H/Hkv, D/Dv */
    int64_t heads, kv_heads, dim, dim_v;
    /* Of attention and NSA: */
    int64_t batch, documents; /* documents 0: sequences of fixed length; else a varlen batch of n tokens */
    int data, gate, project, separate, weights, selection; /* the enums above */
    bool encodings;
    int64_t seed;
} bench_case;

/* Options whose base is a bench_case: dtype, backward, heads, dim, then those of attention and NSA, of which
 * `quern probe` takes the first. */
extern const option_row bench_case_rows[];
enum { CASE_DTYPE, CASE_BACKWARD, CASE_HEADS, CASE_DIM, CASE_OTHERS, CASE_ROWS_PROBE = 11, CASE_ROWS = 14 };
/* Their defaults; op NULL: none. */
bench_case bench_case_init(const operation *op);
/* Reads heads and dim and checks the options above. An exit code. */
int bench_case_check(bench_case *c);

/* ---- a measurement ---- */

enum { BENCH_REPS_MAX = 101 };
typedef struct timing {
    int reps;
    double median, p10, p90; /* milliseconds */
} timing;
timing timing_of(double *ms, int count);

/* The least work of a pass: the denominator. With flops and bytes, the bytes are read beside them, and the
 * slower of the two is the limit. */
typedef struct work {
    double flops, bytes;
    ceiling limit; /* of the flops, of the bytes where there are none; CEILINGS if none fits the CPU level */
    const char *formula, *bytes_formula; /* the second with flops alone; "": none */
} work;

/* What a subject is compared with, in turns with it. */
typedef struct bench_peer {
    const char *name;
    void *(*open)(const bench_case *c, const job *j, quern_context *ctx); /* NULL: there is none here */
    bool (*run)(void *arg, quern_context *ctx, double ms[2]);             /* by pass; 0: not this one */
    void (*close)(void *arg);
} bench_peer;

/* A prepared subject. */
typedef struct bench_run {
    const bench_case *what;
    job job;            /* of a subject that is an operation; else zeros */
    row_cache cache[2]; /* rows that the job reads */
    void *data;         /* of a subject with an `open` of its own */
    int passes;
    formula_symbols symbols;
    /* Runs all passes once; sets their milliseconds. An exit code. */
    int (*once)(struct bench_run *r, quern_context *ctx, double ms[2]);
    void (*close)(struct bench_run *r);
    const bench_peer *peer; /* NULL: none */
    void *peer_data;
} bench_run;

/* A pass, and its limits on as many threads. */
typedef struct measurement {
    timing time;
    ceiling limit;      /* the one that binds in most rounds; CEILINGS: none */
    double ceiling;     /* median over rounds; 0: none */
    double fraction;    /* of the ceiling, median over rounds; 0: none */
    double of_read;     /* with flops and bytes: of the time that reading takes, median over rounds; else 0 */
    double moved;       /* the mover's time over the pass's, median over rounds; 0: none */
    double beside_ms;   /* median over rounds; 0: there is nothing beside */
    double over_beside; /* its time over the pass's, median over rounds */
} measurement;

/* Measures the passes in turns with their limits and the peer. rounds > 0: so many rounds of a moment each;
 * else `reps` runs, or with reps 0 at least 3 and a second, one where a run takes more than 8 seconds. A
 * first run warms up; it counts only if it took more than 8 seconds. Returns an exit code. */
int bench_measure(bench_run *r, const work w[2], quern_context *ctx, int rounds, int reps, const char *label,
                  measurement out[2]);
/* The arithmetic peak that a level has for a dtype. */
ceiling bench_compute_limit(int dtype, quern_cpu_level level);

/* The first GPU's GB/s of a copy or a fill of 2 GiB, the best of five: a read is bounded by the copy. 0 for
 * arithmetic. */
double bench_ceiling_cuda(ceiling limit);

/* ---- results ---- */

/* One line of results. */
typedef struct bench_result {
    const bench_subject *subject;
    char op[48];
    bench_case what;
    int pass, threads; /* pass 1: backward */
    measurement measured;
    work work;
    const char *peer; /* NULL: none */
    size_t workspace_bytes;
    json_t *extra;  /* further fields of the JSON, NULL: none */
    char label[64]; /* in a chart of bars */
    double value;   /* there */
} bench_result;

enum { BENCH_THREADS_MAX = 4 };
typedef struct bench_results {
    bench_result *rows;
    size_t count;
    int64_t threads[BENCH_THREADS_MAX];
    int thread_counts;
    bool page; /* of several subjects: charts are bars of the fractions */
    double ceilings[CEILINGS][BENCH_THREADS_MAX];
} bench_results;

/* Adds a result of the case, measured on ctx, and returns it; its memory moves with the next. */
bench_result *bench_add(bench_results *r, const bench_case *c, const quern_context *ctx, const char *op);
void bench_free(bench_results *r);
/* Prints a result; before the first of its kind the table's head. */
void report_row(const bench_results *r, const bench_result *row);
/* Prints what the results share: sizes, and the formulas of each operation. */
void report_formulas(const bench_results *r);
/* Writes the schema's document. An exit code. */
int report_json(const char *path, const bench_results *r, const bench_case *c, const quern_context *ctx);
/* Draws time, and speed-up over the peer, against length; without lengths bars. Needs gnuplot. An exit
 * code. */
int report_svg(const char *path, const bench_results *r);

/* A progress line that the next one overwrites, on a terminal only. */
void progress(const char *format, ...) __attribute__((format(printf, 1, 2)));
void progress_clear(void);

/* ---- subjects ---- */

/* An integer option, which shapes and formulas name by its symbol. */
typedef struct bench_extent {
    const char *option, *symbol; /* NULL past the last */
    int64_t least, most;
    const char *help;
} bench_extent;

typedef struct bench_choice {
    const char *option;
    const char *const *words;
    const char *help;
} bench_choice;

typedef enum input_kind {
    NORMAL,     /* N(0, 1) in the activations' dtype */
    NORMAL_F32, /* N(0, 1) in f32 */
    CODES,      /* random bytes */
    CODES_FP8,  /* random bytes of E4M3, no NaN */
    SCALES,     /* random bytes of E4M3 from 2^-6 to 2^-4 */
    POWERS,     /* random bytes of E8M0 over 14 binades */
    REPACKED,   /* weights whose last extent K:N stands for the bytes of one [K, N], repacked */
    ENDS,       /* as many rows for each expert */
    CHOSEN,     /* entries spread at random over all that a query sees */
    SMALL,      /* 0.01 in f32 */
    PREPARED    /* i32 that `prepare` fills */
} input_kind;

typedef struct input_row {
    const char *tensor, *shape; /* NULL past the last; a tensor that the operation lacks is left out */
    input_kind kind;
    const char *when; /* made where this formula is above 0; NULL: always; "needed": by its role */
} input_row;

typedef enum limit_kind {
    LIMIT_PRODUCTS, /* of the activations' dtype */
    LIMIT_F32,      /* of f32 */
    LIMIT_READ,
    LIMIT_COPY,
    LIMIT_WRITE
} limit_kind;

/* The least work of a pass, as formulas; NULL: none. */
typedef struct work_row {
    limit_kind limit;
    const char *flops, *bytes;
} work_row;

struct bench_subject {
    const char *name, *help;
    const char *op; /* its parameters are options; NULL: none */
    /* Options and their defaults. */
    const char *n;             /* lengths; NULL: there are none */
    const char *heads, *dim;   /* NULL: none */
    bool attention;            /* takes the options of attention and NSA */
    const char *const *dtypes; /* NULL: f32, f16, bf16 */
    int dtype;
    bool by_reps; /* not by rounds of a moment each, unless the command line says so */
    bool mean;    /* a round counts as the mean of its runs, not their median */
    const bench_extent *extents;
    int64_t extent[EXTENTS_MAX]; /* their defaults */
    bench_choice choices[CHOICES_MAX];
    const char *set[WORDS_MAX][2];     /* parameters before the command line */
    const char *follow[WORDS_MAX][2];  /* parameters that are no options but follow: by formulas; "": else */
    int (*check)(const bench_case *c); /* beyond ranges; NULL: nothing. An exit code after a message */
    /* Inputs, and symbols of their shapes; before them stand n, the extents' symbols, those of heads and dim,
     * b (bytes of an activation), backward, and codes or values: which the activations are. */
    const char *symbols[WORDS_MAX][2];
    void (*count)(const bench_case *c, const job *ran, formula_symbols *to); /* more; NULL: none */
    const char *without; /* results that are not written; NULL: none */
    bool count_again;    /* after a first run, which has written what is written on request */
    const input_row *inputs;
    int (*prepare)(bench_run *r, quern_context *ctx); /* changes inputs; NULL: nothing */
    int (*open)(bench_run *r, quern_context *ctx);    /* instead of inputs; NULL: by inputs */
    /* Least work, by pass; a variant of it where `variant` says so. */
    work_row work[2];
    const work_row *(*variant)(const bench_case *c, int pass);
    const bench_peer *peer;                                                        /* NULL: none */
    json_t *(*extra)(const bench_run *r, const bench_case *c, quern_context *ctx); /* of the forward pass */
    double (*mover_ms)(const job *j, bool backward, int threads); /* NULL: the subject has no mover */
    /* Instead of all from `inputs` on: measures by itself and adds results. An exit code. */
    int (*measure)(const bench_case *c, quern_context *ctx, bench_results *to);
    const char *json, *svg; /* files of the results and the chart by default; NULL: none */
    const char *unit;       /* with `measure` and without lengths: of the chart's values */
    bool cpu;               /* --device cuda is refused */
    const char *example;    /* options of a good example; NULL: none */
    const char *all[2];     /* options in `quern bench all` on the CPU and on a GPU; NULL: it is not there */
};

extern const bench_subject bench_subjects[]; /* ends with a name of NULL */
int64_t bench_extent_of(const bench_case *c, const char *option);
int bench_choice_of(const bench_case *c, const char *option);
/* The value that `base` holds for an option: a number, a boolean or a word. */
json_t *bench_option_json(const option_row *row, const void *base);

/* bench_inputs.c, bench_rows.c: allocate and fill the inputs of a job that is begun. An exit code. */
int bench_inputs(job *j, const bench_case *c);
int bench_row_inputs(job *j, const bench_case *c, const formula_symbols *symbols, quern_context *ctx);
/* Starts a job, allocates and fills inputs of attention or NSA, prepares it; with `plan` only sizes it. */
int bench_open(job *j, const bench_case *c, quern_context *ctx, bool plan);
/* The random weight [depth, width] that each expert has: codes and scales to be freed, or false without
 * memory. */
bool bench_expert_weight(int64_t depth, int64_t width, uint8_t **codes, uint8_t **scales);

/* Members of the table. */
typedef void bench_count(const bench_case *c, const job *ran, formula_symbols *to);
typedef const work_row *bench_variant(const bench_case *c, int pass);
typedef int bench_own(const bench_case *c, quern_context *ctx, bench_results *to);
bench_count bench_count_attention, bench_count_index, bench_count_experts, bench_count_v4,
    bench_count_compressor, bench_count_index_loss, bench_count_linear;
bench_variant bench_variant_nsa, bench_variant_index, bench_variant_compressor, bench_variant_layer;
bench_own bench_all, bench_append, bench_ceilings, bench_ledger, bench_overhead, bench_profiles;
int bench_check_compressor(const bench_case *c);
int bench_check_caches(const bench_case *c);
int bench_check_products(const bench_case *c);
int bench_check_layer(const bench_case *c);
int bench_prepare_caches(bench_run *r, quern_context *ctx);
int bench_prepare_lists(bench_run *r, quern_context *ctx);
int bench_open_decode(bench_run *r, quern_context *ctx);
int bench_open_layer(bench_run *r, quern_context *ctx);
json_t *bench_workspace(const bench_run *r, const bench_case *c, quern_context *ctx);
double bench_mover_ms(const job *j, bool backward, int threads);
double bench_quantise_mover_ms(const job *j, bool backward, int threads);
double bench_fused_mover_ms(const job *j, bool backward, int threads);
double bench_weights_mover_ms(const job *j, bool backward, int threads);
extern const bench_peer peer_dense, peer_attention, peer_experts, peer_projection, peer_products;

#endif
