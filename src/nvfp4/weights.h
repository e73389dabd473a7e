/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* weights.h - checks of experts' weights in the layouts that products take. */
#ifndef QUERN_NVFP4_WEIGHTS_H
#define QUERN_NVFP4_WEIGHTS_H

#include "core/view.h"
#include "nvfp4/call.h"

/* Experts' matrices as the stages take them. */
typedef struct nvfp4_weights {
    quern_tensor codes, scales;
    bool k_major;
    scale_order order;
    int64_t experts, n, k;
} nvfp4_weights;

enum { NVFP4_WEIGHT_RULES = 2 };

/* Reads the layouts of codes and scales into *w, and the rules for both into rules[NVFP4_WEIGHT_RULES]. The
 * rules refer to w's views; the caller checks them with those of its other tensors. */
quern_status nvfp4_weights_of(const quern_tensor *codes, const quern_tensor *scales,
                              quern_nvfp4_codes_layout codes_layout, quern_nvfp4_scales_layout scales_layout,
                              bool output, nvfp4_weights *w, view_rule rules[NVFP4_WEIGHT_RULES]);

#endif
