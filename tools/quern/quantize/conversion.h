/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* conversion.h - one run of `quern quantize`: what was asked for, and the model as far as it is known. */
#ifndef QUERN_QUANTIZE_CONVERSION_H
#define QUERN_QUANTIZE_CONVERSION_H

#include "quantize/modules.h"

#include "options.h"

#include <jansson.h>
#include <quern/nvfp4.h>

typedef enum target_format {
    FORMAT_NONE, /* none is named */
    FORMAT_MODELOPT,
    FORMAT_COMPRESSED_TENSORS,
    FORMAT_GGUF,
    FORMAT_BF16 /* --dequantize */
} target_format;

typedef struct quantize_options {
    const char *source, *target;
    int format; /* target_format */
    int scales; /* quern_nvfp4_scales */
    option_list include, exclude;
    const char *input_scales, *name_map, *gguf_base, *json, *svg;
    bool dequantize, include_mtp, dry_run;
    int64_t threads;
} quantize_options;

typedef struct conversion {
    const quantize_options *options;
    target_format format;
    model_files *model;
    json_t *config;         /* config.json; NULL: there is none */
    const char *model_type; /* "" without */
    bool v4;                /* DeepSeek-V4's layout */
    bool gpt_oss;           /* stacks of experts are as that model's */
    module_list list;
    quern_context *ctx; /* of one thread: each of the converter's calls it for itself */
    int threads;
    uint64_t inputs; /* a hash of options and inputs, of shard_hash_inputs */
} conversion;

/* Reads config.json where there is one. Returns an exit code. */
int config_open(conversion *c);
/* Refuses what config.json says of the model where the tensors say otherwise. Returns an exit code. */
int config_check(const conversion *c);
/* Decides which stored weights change, and makes their modules and groups. Returns an exit code. */
int choose_modules(conversion *c);
/* Sets the modules' input_scale from --input-scales. Returns an exit code. */
int read_input_scales(conversion *c);

static inline quern_nvfp4_profile conversion_profile(const conversion *c)
{
    return c->format == FORMAT_COMPRESSED_TENSORS ? QUERN_NVFP4_PROFILE_COMPRESSED_TENSORS
                                                  : QUERN_NVFP4_PROFILE_MODELOPT;
}

#endif
