/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * variants.cuh - a stage on the GPU is an ordered list of variants: sets of kernels that compute it, the
 * most specialised first. The first whose `supports` agrees runs. A variant stands at the end of its
 * launch.cu; stages/<stage>.cu lists a stage's variants and fills in its row of the backend's table. An
 * instance of a kernel is a function in a file of its own, so that a part of them can be compiled.
 *
 * `supports` writes a reason where the call is of the variant's kind (dtype, device) but beyond its limits,
 * and keeps `why` as it is elsewhere: of several the last one's reason is the stage's. A stage's workspace
 * may not depend on where tensors stand in memory, while `supports` does: it is the most of all variants'.
 * `supports` NULL: the variant takes every call; `workspace` NULL: it takes no bytes.
 */
#ifndef QUERN_CUDA_VARIANTS_CUH
#define QUERN_CUDA_VARIANTS_CUH

#include "common/calls.cuh"

#include <stdio.h>
#include <string.h>

template <typename A> struct variant {
    const char *name;
    bool (*supports)(const stage_exec *exec, const A *args, char why[STAGE_WHY_BYTES]);
    size_t (*workspace)(const stage_exec *exec, const A *args);
    quern_status (*run)(const stage_exec *exec, const A *args, void *workspace);
};

/* A stage's variants, in the order in which they are asked. */
template <typename A> struct variants {
    const variant<A> *const *list;
    int count;
    template <int N> constexpr variants(const variant<A> *const (&all)[N]) : list(all), count(N) {}

    /* The variant that runs a call; NULL with the reason in `why` where there is none. exec->variant forces
     * one. */
    const variant<A> *choose(const stage_exec *exec, const A *args, char why[STAGE_WHY_BYTES]) const
    {
        bool forced = false;
        for (int i = 0; exec->variant != NULL && i < count; i++)
            forced = forced || strcmp(list[i]->name, exec->variant) == 0;
        why[0] = '\0';
        for (int i = 0; i < count; i++) {
            const variant<A> &v = *list[i];
            if (forced && strcmp(v.name, exec->variant) != 0) continue;
            if (v.supports == NULL || v.supports(exec, args, why)) return &v;
        }
        if (why[0] == '\0') snprintf(why, STAGE_WHY_BYTES, "the cuda backend has no kernel for this call");
        return NULL;
    }
    size_t workspace(const stage_exec *exec, const A *args) const
    {
        size_t most = 0;
        for (int i = 0; i < count; i++) {
            const size_t bytes = list[i]->workspace != NULL ? list[i]->workspace(exec, args) : 0;
            if (bytes > most) most = bytes;
        }
        return most;
    }
    quern_status run(const stage_exec *exec, const A *args, void *workspace) const
    {
        char why[STAGE_WHY_BYTES];
        const variant<A> *v = choose(exec, args, why);
        return v != NULL ? v->run(exec, args, workspace) : cuda_set_error()(QUERN_ERR_UNSUPPORTED, "%s", why);
    }
};

/* The stages that others call. */
extern const variants<attend_args> attend_forward_variants;
extern const variants<compress_args> compress_forward_variants;
extern const variants<select_args> select_variants;
extern const variants<gemm_args> gemm_variants;

/* The functions of a stage's row. It runs on the device of its tensors, whatever the thread's current one
 * is. */
template <typename A, const variants<A> &ALL> struct by_variants {
    static bool supports(const stage_exec *exec, const A *args, char why[STAGE_WHY_BYTES])
    {
        return ALL.choose(exec, args, why) != NULL;
    }
    static size_t workspace(const stage_exec *exec, const A *args) { return ALL.workspace(exec, args); }
    static quern_status run(const stage_exec *exec, const A *args, void *workspace)
    {
        const device_scope scope(exec->device_id);
        return scope.code != cudaSuccess ? cuda_report(scope.code, "choosing the device")
                                         : ALL.run(exec, args, workspace);
    }
    static void kernel(const stage_exec *exec, const A *args, char text[STAGE_NAME_BYTES])
    {
        char why[STAGE_WHY_BYTES];
        const variant<A> *v = ALL.choose(exec, args, why);
        snprintf(text, STAGE_NAME_BYTES, "%s", v != NULL ? v->name : "");
    }
};

template <typename A, const variants<A> &ALL, typename Stage> static void offer(Stage &row)
{
    using functions = by_variants<A, ALL>;
    row = {functions::supports, functions::workspace, functions::run, functions::kernel};
}

/* A stage's rows of the backend's table, one variable in each stages/<stage>.cu. Its constructor runs when
 * the library is loaded, and adds it to those that backend.cu calls. */
struct stage_rows {
    void (*fill)(quern_backend &backend);
    const stage_rows *next;
    explicit stage_rows(void (*fill)(quern_backend &backend));
};

#endif
