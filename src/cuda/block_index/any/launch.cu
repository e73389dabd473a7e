/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* launch.cu - which calls the kernel of any GPU takes. */
#include "block_index/any/kernel.cuh"
#include "variants.cuh"

static quern_status launch_any(const launcher &to, const block_index_args *args)
{
    const block_index_kernel a = block_index_kernel_of(args);
    return args->q.dtype == QUERN_F32   ? any_block_index::block_index_f32(to, args, a)
           : args->q.dtype == QUERN_F16 ? any_block_index::block_index_f16(to, args, a)
                                        : any_block_index::block_index_bf16(to, args, a);
}

static bool block_index_any_supports(const stage_exec *exec, const block_index_args *args,
                                     char why[STAGE_WHY_BYTES])
{
    size_t bytes = 0;
    if (!block_index_takes(args, why) || launch_any({NULL, &bytes}, args) != QUERN_OK) return false;
    return shared_fits(exec, bytes, "block_index", why);
}

static quern_status block_index_any_run(const stage_exec *exec, const block_index_args *args, void *)
{
    const quern_status status = launch_any({(cudaStream_t)exec->stream, NULL}, args);
    return status == QUERN_OK ? block_index_pad(exec, block_index_kernel_of(args)) : status;
}

extern const variant<block_index_args> block_index_any = {"block_index_any", block_index_any_supports, NULL,
                                                          block_index_any_run};
