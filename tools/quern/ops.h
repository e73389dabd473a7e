/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * ops.h - the operations of `quern run` as tables: which tensors each reads and writes, under which names
 * and shapes, with which parameters, by which calls.
 *
 * A shape is a list of symbols: "B N Hkv D". Reading a tensor binds its symbols; an output's shape is then
 * known. "=K" means the shape of tensor K. Shapes with other signs (|, *) are for the reader only.
 */
#ifndef QUERN_TOOLS_OPS_H
#define QUERN_TOOLS_OPS_H

#include "options.h"

#include <quern/attention.h>
#include <quern/nsa.h>

typedef union any_params {
    quern_attention_params attention;
    quern_nsa_params nsa;
    quern_nsa_list_params list;
} any_params;

typedef union any_tensors {
    quern_attention_tensors attention;
    quern_nsa_tensors nsa;
    quern_nsa_list_tensors list;
} any_tensors;

typedef enum slot_dtype { SLOT_ACT, SLOT_WEIGHT, SLOT_F32, SLOT_I32 } slot_dtype;

/* A named tensor of a family. */
typedef struct slot {
    const char *name;
    size_t offset; /* of its pointer in the family's tensors struct */
    slot_dtype dtype;
    const char *fixed, *packed; /* shape; packed NULL: as fixed */
} slot;

typedef struct family {
    const char *name;
    const slot *slots;
    size_t slot_count;
    const option_row *params; /* offsets in any_params */
    size_t param_count;
    const char *packed_by; /* the tensor whose presence means a packed batch */
} family;

/* One direction of an operation. The family says which members are set. */
typedef struct pass {
    quern_status (*attention_size)(quern_context *, const quern_attention_params *,
                                   const quern_attention_tensors *, size_t *);
    quern_status (*attention)(quern_context *, const quern_exec *, const quern_attention_params *,
                              const quern_attention_tensors *, void *, size_t);
    quern_status (*nsa_size)(quern_context *, const quern_nsa_params *, const quern_nsa_tensors *, size_t *);
    quern_status (*nsa)(quern_context *, const quern_exec *, const quern_nsa_params *, const quern_nsa_tensors *,
                        void *, size_t);
    quern_status (*list_size)(quern_context *, const quern_nsa_list_params *, const quern_nsa_list_tensors *, size_t *);
    quern_status (*list)(quern_context *, const quern_exec *, const quern_nsa_list_params *,
                         const quern_nsa_list_tensors *, void *, size_t);
} pass;

/* Tensor names are space-separated lists. */
typedef struct operation {
    const char *name, *help;
    const family *family;
    const char *needs, *takes; /* inputs: required, optional */
    const char *gives;         /* outputs */
    const char *trigger;       /* inputs that ask for the backward pass; "" where there is none */
    const char *gradients;     /* its outputs */
    pass forward, backward;
} operation;

extern const family family_attention, family_nsa, family_list;
extern const operation operations[];
extern const size_t operation_count;

enum { SLOTS_MAX = 64 };

/* NULL where there is none of the name. */
const operation *operation_named(const char *name);
const slot *slot_named(const family *f, const char *name, size_t length);
/* True if `name` is a word of `list`. */
bool list_has(const char *list, const char *name);
/* Calls visit(arg, slot) for each word of the list, until one returns false. */
bool list_each(const family *f, const char *list, bool (*visit)(void *arg, const slot *s), void *arg);

/* The pointer member of a slot. */
const quern_tensor *slot_get(const any_tensors *tensors, const slot *s);
void slot_set(any_tensors *tensors, const slot *s, const quern_tensor *t);

/* Default parameters of a family, and no tensors. */
any_params params_init(const family *f);
any_tensors tensors_init(const family *f);

/* Bytes of workspace of a pass, and the pass itself. */
quern_status pass_size(const pass *p, quern_context *ctx, const any_params *params, const any_tensors *tensors,
                       size_t *bytes);
quern_status pass_run(const pass *p, quern_context *ctx, const any_params *params, const any_tensors *tensors,
                      void *workspace, size_t bytes);
bool pass_exists(const pass *p);

#endif
