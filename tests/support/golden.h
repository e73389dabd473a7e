/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* golden.h - reads the golden vectors of tests/vectors. Every function fails the test on an error. */
#ifndef QUERN_TEST_GOLDEN_H
#define QUERN_TEST_GOLDEN_H

#include <quern/safetensors.h>

#include <stdint.h>

/* max |out - expected| / max |expected| that tests/vectors/INDEX.md allows the f32 path. */
#define GOLDEN_BOUND 2e-6

/* `directory` is QUERN_TEST_VECTORS, `name` a file without its suffix. */
quern_safetensors *golden_open(const char *directory, const char *name);
/* A tensor, possibly "prefix" + "name", as new doubles, checked to have `count` elements. */
double *golden_get(const quern_safetensors *file, const char *prefix, const char *name, int64_t count);
int32_t *golden_get_i32(const quern_safetensors *file, const char *prefix, const char *name, int64_t count);

#endif
