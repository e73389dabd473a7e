/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* golden.c - reads golden vectors. */
#include "golden.h"

#include "cmocka_c11.h"
#include "tensor.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

quern_safetensors *golden_open(const char *directory, const char *name)
{
    char path[4096];
    quern_safetensors *file = NULL;
    snprintf(path, sizeof path, "%s/%s.safetensors", directory, name);
    if (quern_safetensors_open(path, &file) != QUERN_OK) fail_msg("%s: %s", path, quern_last_error(NULL));
    return file;
}

static quern_tensor view_of(const quern_safetensors *file, const char *prefix, const char *name,
                            quern_dtype dtype, int64_t count)
{
    char full[256];
    quern_tensor view;
    int64_t have = 1;
    snprintf(full, sizeof full, "%s%s", prefix, name);
    if (quern_safetensors_get(file, full, &view) != QUERN_OK)
        fail_msg("%s: %s", full, quern_last_error(NULL));
    for (int32_t i = 0; i < view.ndim; i++) have *= view.shape[i];
    if (view.dtype != dtype || have != count)
        fail_msg("%s has dtype %s and %" PRId64 " elements, expected %" PRId64, full,
                 quern_dtype_name(view.dtype), have, count);
    return view;
}

double *golden_get(const quern_safetensors *file, const char *prefix, const char *name, int64_t count)
{
    const quern_tensor view = view_of(file, prefix, name, QUERN_F32, count);
    const float *data = view.data;
    double *values = test_doubles(count);
    for (int64_t i = 0; i < count; i++) values[i] = data[i];
    return values;
}

int32_t *golden_get_i32(const quern_safetensors *file, const char *prefix, const char *name, int64_t count)
{
    const quern_tensor view = view_of(file, prefix, name, QUERN_I32, count);
    int32_t *values = malloc(sizeof *values * (size_t)(count + 1));
    if (values == NULL) fail_msg("the test is out of memory");
    memcpy(values, view.data, sizeof *values * (size_t)count);
    return values;
}
