/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* decode.c - the model token by token, or chunk by chunk, from its layers' caches. */
#include "decode.h"

bool decoder_open(lm_decoder *d, lm_model *m, int64_t capacity)
{
    bool ok = true;
    *d = (lm_decoder){.model = m, .capacity = capacity};
    for (int32_t l = 0; ok && l < m->config.layers; l++)
        ok = cache_open(m, l, capacity, m->config.context, &d->cache[l]);
    return ok;
}

void decoder_close(lm_decoder *d)
{
    for (int32_t l = 0; d->model != NULL && l < d->model->config.layers; l++) cache_close(&d->cache[l]);
    *d = (lm_decoder){0};
}

bool decoder_extend(lm_decoder *d, const uint8_t *text, int64_t n)
{
    lm_model *m = d->model;
    while (n > 0) {
        const int32_t chunk = n < m->config.context ? (int32_t)n : m->config.context;
        if (!model_forward(m, text, d->position, chunk, d->cache)) return false;
        d->position += chunk;
        n -= chunk;
    }
    return true;
}

int64_t decoder_bytes(const lm_decoder *d)
{
    int64_t bytes = 0;
    for (int32_t l = 0; l < d->model->config.layers; l++) bytes += cache_bytes(&d->cache[l]);
    return bytes;
}
