/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* bench_layer.h - a whole attention layer of DeepSeek-V4, measured. */
#ifndef QUERN_TOOLS_BENCH_LAYER_H
#define QUERN_TOOLS_BENCH_LAYER_H

/* `quern bench v4-layer`. */
int bench_layer(int argc, char **argv, const char *subject);

#endif
