/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* route.h - what the router's files share. */
#ifndef QUERN_CPU_ROUTE_ROUTE_H
#define QUERN_CPU_ROUTE_ROUTE_H

#include "backend.h"
#include "core/arena.h"
#include "cpu/kernels/attention_kernels.h"

enum {
    ROUTE_ROWS = 64,   /* tokens of a task */
    ROUTE_DEPTH = 128, /* terms that are summed from zero and then added */
    ROUTE_PANEL = 64   /* no level's panel is wider */
};

/* A thread's own memory. */
typedef struct route_scratch {
    float a[ROUTE_ROWS * ROUTE_DEPTH], b[ROUTE_DEPTH * ROUTE_PANEL], c[ROUTE_ROWS * ROUTE_PANEL];
} route_scratch;

typedef struct route_job {
    const route_args *args;
    const attention_kernels *dense;
    int64_t tokens, experts, dim;
    quern_tensor logits;    /* the caller's, or own */
    float *own;             /* [T, E] */
    float *d_own;           /* [T, E], for calls without d_logits in f32 */
    float *scores;          /* [threads][3 E]: scores, keys, logits in f32 */
    route_scratch *scratch; /* [threads] */
} route_job;

/* own = hidden weight^T. */
void route_products(const stage_exec *exec, route_job *job);
/* d_hidden = d weight and d_weight = d^T hidden, d [T, E] rows of `stride`. */
void route_gradients(const stage_exec *exec, route_job *job, const float *d, int64_t stride);

float route_sigmoid(float x);
/* The scores of a token's logits. */
void route_scores(route_score score, const float *logits, int64_t experts, float *out);

size_t cpu_route_workspace(const stage_exec *exec, const route_args *args);
quern_status cpu_route(const stage_exec *exec, const route_args *args, void *workspace);
size_t cpu_route_backward_workspace(const stage_exec *exec, const route_args *args);
quern_status cpu_route_backward(const stage_exec *exec, const route_args *args, void *workspace);

#endif
