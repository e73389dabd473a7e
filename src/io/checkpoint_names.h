/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * checkpoint_names.h - what the name of a checkpoint's tensor says: the module that it belongs to, which of
 * the module's tensors it is, and where in the model the module stands.
 *
 * A name is read as MODULE SUFFIX: "model.layers.3.mlp.experts.7.up_proj" ".weight_scale". Nothing here
 * looks at dtypes or shapes: an I8 ".weight" with a ".scale" is MXFP4, an F8_E4M3 one FP8, which the caller
 * decides.
 */
#ifndef QUERN_IO_CHECKPOINT_NAMES_H
#define QUERN_IO_CHECKPOINT_NAMES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Which tensor of its module. */
typedef enum name_role {
    NAME_OTHER,               /* the module is the whole name */
    NAME_WEIGHT,              /* .weight */
    NAME_BIAS,                /* .bias, and _bias of a stack of experts */
    NAME_WEIGHT_PACKED,       /* .weight_packed: NVFP4 codes of compressed-tensors */
    NAME_WEIGHT_SCALE,        /* .weight_scale: of NVFP4 blocks, or of FP8 */
    NAME_WEIGHT_SCALE_2,      /* .weight_scale_2: G, ModelOpt */
    NAME_WEIGHT_GLOBAL_SCALE, /* .weight_global_scale: R = 1 / G, compressed-tensors */
    NAME_WEIGHT_SCALE_INV,    /* .weight_scale_inv: FP8, the number that a weight is multiplied with */
    NAME_SCALE,               /* .scale: FP8 and MXFP4 of DeepSeek-V4, G in GGUF */
    NAME_INPUT_SCALE,         /* .input_scale: of activations */
    NAME_INPUT_GLOBAL_SCALE,  /* .input_global_scale: its reciprocal, compressed-tensors */
    NAME_BLOCKS,              /* _blocks: MXFP4 codes of gpt-oss */
    NAME_SCALES,              /* _scales: their exponents */
    NAME_ROLES
} name_role;

/* Which projection the module is, where that matters: loaders fuse Q, K and V, and GATE and UP. */
typedef enum name_part {
    NAME_NO_PART,
    NAME_Q,
    NAME_K,
    NAME_V,
    NAME_GATE,
    NAME_UP,
    NAME_DOWN,
    NAME_GATE_UP /* both in one tensor, of a stack of experts */
} name_part;

typedef struct checkpoint_name {
    name_role role;
    name_part part;
    size_t module;   /* characters of the name that are the module's */
    size_t parent;   /* characters up to and with the last '.' of the module; 0: there is none */
    int64_t layer;   /* the number after "layers", "blk", "h", "layer" or "mtp"; -1: none */
    int64_t expert;  /* the number that follows "experts"; -1: none */
    bool in_experts; /* a module of the routed experts: of one, or a stack of all */
    bool shared;     /* a module of the shared expert */
    bool stacked;    /* of all experts: gate_up_proj and down_proj right under "experts", and *_exps */
    bool mtp;        /* under "mtp." */
} checkpoint_name;

checkpoint_name checkpoint_name_read(const char *name);
/* ".weight" and the others; "" for NAME_OTHER. Of NAME_BIAS the usual one. */
const char *checkpoint_name_suffix(name_role role);
/* Whether loaders fuse both modules, so that they need one global scale: q, k and v, or gate and up, under
 * one parent. */
bool checkpoint_names_fused(const char *a, const checkpoint_name *of_a, const char *b,
                            const checkpoint_name *of_b);

/* Modules that stay as they are unless asked for otherwise: embeddings, norms, routers, the output head.
 * Each takes the tensor's whole name. */
bool checkpoint_name_is_embedding(const char *name);
bool checkpoint_name_is_norm(const char *name);
bool checkpoint_name_is_router(const char *name);
bool checkpoint_name_is_head(const char *name);

#endif
