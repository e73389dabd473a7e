/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* filling.h - a layer's experts, routed or shared, on their way into the caller's memory. */
#ifndef QUERN_CHECKPOINT_FILLING_H
#define QUERN_CHECKPOINT_FILLING_H

#include "checkpoint/experts.h"

#include "core/parallel.h"

#include <quern/checkpoint.h>

enum { RUN = 8 /* of gate's and up's columns */, TILE = 64 };

/* Where everything stands in the caller's memory. NULL: it is not there. */
typedef struct places {
    uint8_t *up_codes, *up_scales, *down_codes, *down_scales;
    uint8_t *up_repacked, *down_repacked;
    float *up_global, *down_global, *up_input, *down_input;
    uint8_t *up, *down;           /* values, where they are no view of the file */
    uint8_t *up_bias, *down_bias; /* in the file's dtype */
    quern_dtype up_bias_dtype, down_bias_dtype;
    uint8_t *row_codes, *row_scales;     /* scratch: rows of one expert */
    uint8_t *apart_codes, *apart_scales; /* GGUF's MXFP4, taken apart */
    void *workspace;
    size_t workspace_bytes;
} places;

typedef struct filling {
    quern_context *ctx;
    stage_exec exec;
    layer_experts layer;
    places at;
    bool repacked;
    int64_t up_bytes, down_bytes; /* of a repacked matrix */
    bool up_in_file, down_in_file;
    int64_t rounded;
} filling;

typedef struct fillings {
    filling routed, shared; /* shared.layer.experts is 0 where there is none to fill */
} fillings;

/* Columns of gate and up together. */
static inline int64_t up_columns(const filling *f)
{
    return 2 * f->layer.intermediate;
}

/* Where row r of a part stands among the rows of one expert: gate's and up's alternate by runs. */
static inline int64_t row_place(int part, int64_t r)
{
    if (part == PART_DOWN) return r;
    return r / RUN * 2 * RUN + r % RUN + (part == PART_UP ? RUN : 0);
}

/* One expert's codes, scales and globals to their places. */
quern_status fill_codes(filling *f, int64_t expert);
/* The largest workspace of the calls that fill_codes makes. */
quern_status codes_workspace(const filling *f, size_t *bytes);

#endif
