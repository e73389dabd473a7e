/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* bench_experts.h - NVFP4's operations and the mixture of experts, measured. */
#ifndef QUERN_TOOLS_BENCH_EXPERTS_H
#define QUERN_TOOLS_BENCH_EXPERTS_H

#include "bench.h"

/* What is measured. */
typedef struct experts_case {
    int64_t rows; /* of each expert in nvfp4-gemm, else of all */
    int64_t experts, width, depth;
    int dtype; /* quern_dtype of the activations; QUERN_U8: in NVFP4 */
    bool backward;
    any_params params;
} experts_case;

/* `quern bench` nvfp4-*, moe-route, moe. */
int bench_experts(int argc, char **argv, const char *subject);
/* `quern bench nvfp4-profiles`. */
int bench_profiles(int argc, char **argv, const char *subject);

/* The random weight [depth, width] that each expert has: codes and scales to be freed, or false without
 * memory. */
bool experts_weight(int64_t depth, int64_t width, uint8_t **codes, uint8_t **scales);

/* What stands beside a prepared job. NULL: nothing; `close` frees what open returns. */
typedef struct experts_beside {
    const char *name;
    void *(*open)(const experts_case *c, const job *j, quern_context *ctx);
    double (*ms)(void *arg);
    void (*close)(void *arg);
} experts_beside;
extern const experts_beside experts_onednn;   /* oneDNN's bf16 product on the same weights, dequantised */
extern const experts_beside experts_products; /* bench_moe.c: the layer's own products */

#endif
