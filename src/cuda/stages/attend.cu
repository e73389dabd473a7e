/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* attend.cu - attention's variants, and what a sink adds around them. */
#include "attend/sink.cuh"
#include "common/rows.cuh"
#include "variants.cuh"

extern const variant<attend_args> attend_forward_sm90, attend_forward_sm90_by_block,
    attend_forward_sm90_tokens, attend_forward_wgmma, attend_forward_any, attend_forward_f32,
    attend_backward_sm90, attend_backward_sm90_lists, attend_backward_sm90_tokens, attend_backward_wgmma,
    attend_backward_any, attend_backward_f32;

static const variant<attend_args> *const forward_list[] = {
#ifdef QUERN_SM90
    &attend_forward_sm90, &attend_forward_sm90_by_block, &attend_forward_sm90_tokens, &attend_forward_wgmma,
#endif
    &attend_forward_any,  &attend_forward_f32,
};
extern const variants<attend_args> attend_forward_variants(forward_list);
static const variant<attend_args> *const backward_list[] = {
#ifdef QUERN_SM90
    &attend_backward_sm90, &attend_backward_sm90_lists, &attend_backward_sm90_tokens, &attend_backward_wgmma,
#endif
    &attend_backward_any,  &attend_backward_f32,
};
extern const variants<attend_args> attend_backward_variants(backward_list);

/* The variants know no sink: statistics of their own, in the workspace's first bytes, are then the keys' lse
 * where a forward has none, and a backward's with the sink. */
template <const variants<attend_args> &ALL> struct with_sink {
    typedef by_variants<attend_args, ALL> plain;

    static size_t own_bytes(const attend_args *args)
    {
        const size_t bytes = room_for(sink_bytes(args)) + ARENA_ALIGN - 1;
        return present(args->sink) ? bytes / ARENA_ALIGN * ARENA_ALIGN : 0;
    }
    static size_t workspace(const stage_exec *exec, const attend_args *args)
    {
        return own_bytes(args) + plain::workspace(exec, args);
    }
    static quern_status run(const stage_exec *exec, const attend_args *args, void *workspace)
    {
        const bool backward = &ALL == &attend_backward_variants;
        if (!present(args->sink) && !present(args->kv_first) && !present(args->kv_count))
            return plain::run(exec, args, workspace);
        const device_scope scope(exec->device_id);
        if (scope.code != cudaSuccess) return cuda_report(scope.code, "choosing the device");
        const quern_tensor own = sink_statistics(args, room_at<float>(workspace));
        attend_args of_keys = *args;
        if (present(args->sink) && (backward || !present(args->lse))) of_keys.lse = own;
        quern_status status = ranges_validate(exec, args);
        if (status == QUERN_OK && backward && present(args->sink)) status = sink_join(exec, args, own);
        if (status == QUERN_OK)
            status = ALL.run(exec, &of_keys, workspace != NULL ? (char *)workspace + own_bytes(args) : NULL);
        if (status != QUERN_OK || !present(args->sink)) return status;
        return backward ? sink_gradient(exec, args, own) : sink_scale(exec, &of_keys);
    }
};

static const stage_rows rows([](quern_backend &backend) {
    typedef with_sink<attend_forward_variants> forward;
    typedef with_sink<attend_backward_variants> backward;
    offer<attend_args, attend_forward_variants>(backend.attend_forward);
    offer<attend_args, attend_backward_variants>(backend.attend_backward);
    backend.attend_forward.workspace = forward::workspace;
    backend.attend_forward.run = forward::run;
    backend.attend_backward.workspace = backward::workspace;
    backend.attend_backward.run = backward::run;
});
