/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * peer_onednn.h - causal attention composed of oneDNN's primitives, to compare with: oneDNN has no attention,
 * so this shows the speed of a program on a good GEMM library.
 */
#ifndef QUERN_TOOLS_PEER_ONEDNN_H
#define QUERN_TOOLS_PEER_ONEDNN_H

#include "bench.h"

/* Times the dense causal forward pass of a case on `threads` threads. False without such a peer: a build
 * without oneDNN 2, another mask, f16, or a failed call of oneDNN. */
bool peer_onednn(const bench_case *c, int threads, int reps, timing *time);

#endif
