/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * variants.cuh - a stage on the GPU is an ordered list of variants: sets of kernels that compute it, the
 * most specialised first. The first whose `supports` agrees runs. variants.cu holds the lists; an instance of
 * any's or sm90's kernels is a function in a file of its own, so that a part of them can be compiled.
 *
 * `supports` writes a reason where the call is of the variant's kind (dtype, device) but beyond its limits,
 * and leaves `why` as it is elsewhere: of several the last one's reason is the stage's. A stage's workspace
 * may not depend on where tensors stand in memory, while `supports` does: it is the most of all variants'.
 * `supports` NULL: the variant takes every call; `workspace` NULL: it takes no bytes.
 */
#ifndef QUERN_CUDA_VARIANTS_CUH
#define QUERN_CUDA_VARIANTS_CUH

#include "common/device.cuh"

#include <string.h>

template <typename Args> struct variant {
    const char *name;
    bool (*supports)(const stage_exec *exec, const Args *args, char why[STAGE_WHY_BYTES]);
    size_t (*workspace)(const stage_exec *exec, const Args *args);
    quern_status (*run)(const stage_exec *exec, const Args *args, void *workspace);
};

template <typename Args> struct variants {
    const variant<Args> *list;
    int count;
};

extern const variants<attend_args> attend_forward_variants, attend_backward_variants;
extern const variants<compress_args> compress_forward_variants, compress_backward_variants;
extern const variants<select_args> select_variants;
extern const variants<gate_args> gate_forward_variants, gate_backward_variants;
extern const variants<attend_gate_args> attend_gate_variants;
extern const variants<attend_mqa_args> attend_mqa_forward_variants;
extern const variants<indexer_args> indexer_variants;
extern const variants<convert_args> convert_variants;
extern const variants<rowdot_args> rowdot_variants;
extern const variants<list_convert_args> list_convert_variants;
extern const variants<validate_lists_args> validate_lists_variants;

/* The variant that runs a call; NULL with the reason in `why` where there is none. exec->variant forces one.
 */
template <typename Args>
static const variant<Args> *choose(const variants<Args> &all, const stage_exec *exec, const Args *args,
                                   char why[STAGE_WHY_BYTES])
{
    bool forced = false;
    for (int i = 0; exec->variant != NULL && i < all.count; i++)
        forced = forced || strcmp(all.list[i].name, exec->variant) == 0;
    why[0] = '\0';
    for (int i = 0; i < all.count; i++) {
        const variant<Args> &v = all.list[i];
        if (forced && strcmp(v.name, exec->variant) != 0) continue;
        if (v.supports == NULL || v.supports(exec, args, why)) return &v;
    }
    if (why[0] == '\0') snprintf(why, STAGE_WHY_BYTES, "the cuda backend has no kernel for this call");
    return NULL;
}

template <typename Args>
static size_t workspace_of(const variants<Args> &all, const stage_exec *exec, const Args *args)
{
    size_t most = 0;
    for (int i = 0; i < all.count; i++) {
        const size_t bytes = all.list[i].workspace != NULL ? all.list[i].workspace(exec, args) : 0;
        if (bytes > most) most = bytes;
    }
    return most;
}

template <typename Args>
static quern_status run_chosen(const variants<Args> &all, const stage_exec *exec, const Args *args,
                               void *workspace)
{
    char why[STAGE_WHY_BYTES];
    const variant<Args> *v = choose(all, exec, args, why);
    return v != NULL ? v->run(exec, args, workspace) : cuda_set_error()(QUERN_ERR_UNSUPPORTED, "%s", why);
}

#endif
