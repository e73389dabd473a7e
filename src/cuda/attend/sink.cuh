/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* sink.cuh - what a sink, a head's logit without a key, changes around any of attention's kernels. */
#ifndef QUERN_CUDA_ATTEND_SINK_CUH
#define QUERN_CUDA_ATTEND_SINK_CUH

#include "common/device.cuh"

/* f32 [B, H, N] of a call's rows, at `data`, and its bytes. */
quern_tensor sink_statistics(const attend_args *args, void *data);
size_t sink_bytes(const attend_args *args);

/* After a forward without the sink: o times what the sink leaves to the keys; lse is the keys' own. */
quern_status sink_scale(const stage_exec *exec, const attend_args *args);
/* Before a backward: lse with the sink's share goes to `to`. */
quern_status sink_join(const stage_exec *exec, const attend_args *args, const quern_tensor &to);
/* After it: d_sink, from the lse that sink_join() has made, and delta. */
quern_status sink_gradient(const stage_exec *exec, const attend_args *args, const quern_tensor &joint);

/* Sets a bit of the status word where kv_first and kv_count are no ranges of keys. */
quern_status ranges_validate(const stage_exec *exec, const attend_args *args);

#endif
