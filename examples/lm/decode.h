/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* decode.h - a sequence that grows: the caches of all layers. */
#ifndef LM_DECODE_H
#define LM_DECODE_H

#include "layer.h"

typedef struct lm_decoder {
    lm_model *model;
    int64_t position, capacity; /* tokens so far, and at most */
    lm_cache cache[MAX_LAYERS];
} lm_decoder;
/* A decoder without tokens. It computes in the model's memory: nothing else may between its calls rely on
 * the activations there. */
bool decoder_open(lm_decoder *decoder, lm_model *model, int64_t capacity);
void decoder_close(lm_decoder *decoder);
/* Appends text[position ... position + n - 1], in chunks of the model's context. The logits of the last
 * chunk's bytes are then in model->logits; where n is at most the context, those of all n. */
bool decoder_extend(lm_decoder *decoder, const uint8_t *text, int64_t n);
/* Bytes that the caches hold. */
int64_t decoder_bytes(const lm_decoder *decoder);
/* The logits after the last byte. */
static inline const float *decoder_logits(const lm_decoder *d, int64_t n)
{
    const int64_t context = d->model->config.context, rows = n % context != 0 ? n % context : context;
    return d->model->logits + (rows - 1) * BYTES;
}

#endif
