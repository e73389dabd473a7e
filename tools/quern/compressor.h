/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* compressor.h - DeepSeek-V4's compressors as scenarios: one shot, or token by token through a streaming state. */
#ifndef QUERN_TOOLS_COMPRESSOR_H
#define QUERN_TOOLS_COMPRESSOR_H

#include <stdbool.h>

/* Whether a word of the command line names one: csa-compress, hca-compress. */
bool compressor_asked(int argc, char **argv);
/* `quern run` of one. Returns an exit code. */
int compressor_run(int argc, char **argv);
/* Their part of `quern run --list`. */
void compressor_list(bool markdown);

/* `quern bench` csa-compress, hca-compress, csa-append. */
int bench_compressor(int argc, char **argv, const char *subject);

#endif
