/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* call.c - what every call of Quern needs: views, a workspace, the sentence of an error. */
#include "lm.h"

#include <stdlib.h>

quern_tensor view(const void *data, quern_dtype dtype, int32_t ndim, int64_t a, int64_t b, int64_t c,
                  int64_t d)
{
    return quern_tensor_contiguous((void *)data, dtype, ndim, (const int64_t[]){a, b, c, d});
}

bool reserve(lm_model *m, size_t bytes)
{
    if (bytes <= m->workspace_bytes) return true;
    free(m->workspace);
    m->workspace = malloc(bytes);
    m->workspace_bytes = m->workspace != NULL ? bytes : 0;
    return m->workspace != NULL || failure("no memory for a workspace of %zu bytes", bytes) == 0;
}

bool done(quern_status status)
{
    return status == QUERN_OK || failure("%s", quern_last_error(NULL)) == 0;
}
