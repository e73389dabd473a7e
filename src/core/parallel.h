/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* parallel.h - the one parallel loop of the library. */
#ifndef QUERN_CORE_PARALLEL_H
#define QUERN_CORE_PARALLEL_H

#include <stdint.h>

/* Calls body(arg, index, thread) once for each index in [0, count), thread in [0, threads). Indices are
 * handed out one by one in rising order (put the longest work first); which thread gets which is open,
 * so results must not depend on it. Serial in a child of fork. */
typedef void parallel_body(void *arg, int64_t index, int32_t thread);
void parallel_for(int32_t threads, int64_t count, parallel_body *body, void *arg);

#endif
