/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* bench_decode.h - decoding from caches, measured. */
#ifndef QUERN_TOOLS_BENCH_DECODE_H
#define QUERN_TOOLS_BENCH_DECODE_H

/* `quern bench` nsa-decode, attention-decode. */
int bench_decode(int argc, char **argv, const char *subject);

#endif
