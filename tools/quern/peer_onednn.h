/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * peer_onednn.h - what a program on a good GEMM library reaches: causal attention composed of oneDNN's
 * primitives, for oneDNN has none, and bf16 products with experts' weights.
 */
#ifndef QUERN_TOOLS_PEER_ONEDNN_H
#define QUERN_TOOLS_PEER_ONEDNN_H

#include "bench.h"

/* Times the dense causal forward pass of a case on `threads` threads. False without such a peer: a build
 * without oneDNN 2, another mask, f16, or a failed call of oneDNN. */
bool peer_onednn(const bench_case *c, int threads, int reps, timing *time);

/* Products of each expert's `rows` rows of a, bf16 [experts rows, k], with a copy of `weight`, bf16 [k, n],
 * in the weight format that is fastest here. NULL without oneDNN 2 or memory. */
void *peer_gemm_open(int64_t experts, int64_t rows, int64_t n, int64_t k, const void *weight, void *a,
                     int threads);
/* Milliseconds of all products; below 0: a call failed. */
double peer_gemm_ms(void *peer);
void peer_gemm_close(void *peer);

#endif
