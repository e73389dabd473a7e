/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * modules.h - a model's tensors as weights: which tensors belong together, in which encoding a weight is
 * stored, and the matrices that it holds.
 *
 * A stored weight is one tensor with its scales, or a stack of all experts. It becomes one module, or, as
 * loaders want a stack, one for each expert and projection.
 */
#ifndef QUERN_QUANTIZE_MODULES_H
#define QUERN_QUANTIZE_MODULES_H

#include "quantize/matrix.h"

#include "io/checkpoint_names.h"
#include "io/model_files.h"

/* How rows of a stack's gate_up are told apart. */
typedef enum stack_split {
    SPLIT_NONE,    /* one matrix an expert */
    SPLIT_HALVES,  /* gate, then up */
    SPLIT_EVEN_ODD /* gate the even rows, up the odd: gpt-oss */
} stack_split;

typedef struct stored_weight {
    const model_tensor *tensor; /* its values or codes */
    checkpoint_name name;       /* of that tensor */
    const model_tensor *of[NAME_ROLES];
    bool stack;
    stack_split split;
    int64_t experts;                          /* 1 without a stack */
    matrix first;                             /* the whole matrix, of a stack the first expert's */
    int64_t expert_bytes, expert_scale_bytes; /* of a stack: from an expert to the next */
    /* Why it cannot be read as values, as the end of a sentence; NULL: it can. */
    const char *unreadable;
    bool chosen;
    bool as_values;                    /* chosen, to be written as bf16 */
    const char *left;                  /* why it does not become NVFP4 */
    size_t first_module, module_count; /* of chosen weights */
} stored_weight;

/* What the report says of a module. */
typedef struct module_error {
    double error, square; /* sums of squares of what is lost, and of the values */
    double worst;         /* the largest error / square of a block */
    int64_t saturated, rounded;
} module_error;

typedef struct module {
    char *name;
    checkpoint_name parsed; /* of `name` */
    size_t stored;
    matrix weight;
    size_t group;
    float input_scale; /* 0: there is none */
    /* Where its parts stand in the output file; -1: it has none. */
    int64_t codes_at, scales_at, values_at;
    module_error error;
    bool lossy; /* block scales were rescaled to a common global */
} module;

/* Modules that share a global scale. */
typedef struct module_group {
    size_t first, count; /* in module_list.members */
    bool known;
    float global; /* G, or R under compressed-tensors */
    float amax;   /* of values that are quantised: the largest magnitude */
    int largest;  /* MXFP4: the largest exponent byte of a nonzero block; -1: there is none */
    bool below;   /* MXFP4: blocks below the range of the scales are rounded */
    bool zeros;   /* MXFP4: there are blocks of zeros */
} module_group;

typedef struct module_list {
    const model_files *model;
    stored_weight *stored;
    size_t *stored_of; /* a tensor's stored weight; SIZE_MAX: none */
    module *modules;
    size_t *members; /* modules by group */
    module_group *groups;
    size_t stored_count, count, group_count;
} module_list;

/* Finds the stored weights. gpt_oss: stacks are as that model's. False without memory. */
bool modules_find(const model_files *model, bool gpt_oss, module_list *list);
/* Makes the modules of chosen weights; keep_stacks: a stack's experts stay whole. False without memory. */
bool modules_expand(module_list *list, bool keep_stacks);
/* Puts modules that loaders fuse into groups. False without memory. */
bool modules_group(module_list *list);
void modules_free(module_list *list);

#endif
