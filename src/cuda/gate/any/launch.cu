/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* launch.cu - the gate stages: the arguments of kernel.cuh's kernels, and the sum of the slices' dW. */
#include "gate/any/params.cuh"
#include "variants.cuh"

enum { MOST_SLICES = 264 };

/* dW = the slices' shares: 32 lanes sum interleaved slices, then the lanes in order. */
__global__ void gate_sum_dw(const float *part, int64_t slices, int64_t count, int dim, float *dw, int64_t s0,
                            int64_t s1)
{
    const int64_t i = (int64_t)blockIdx.x * 32 + threadIdx.x;
    __shared__ float sums[8][32];
    float sum = 0.0f;
    if (i < count)
        for (int64_t s = threadIdx.y; s < slices; s += 8) sum += part[s * count + i];
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y != 0 || i >= count) return;
    for (int y = 1; y < 8; y++) sum += sums[y][threadIdx.x];
    dw[i / dim / 3 * s0 + i / dim % 3 * s1 + i % dim] = sum;
}

/* Tokens of a slice: few where there are few, so that all of the GPU works; at most MOST_SLICES slices where
 * the backward writes a share of dW for each. Depends on the shape alone, as the order of that sum does. */
static int64_t tokens_of(int64_t rows, bool shares)
{
    const int64_t tokens = shares ? (rows + MOST_SLICES - 1) / MOST_SLICES : rows / 2048;
    return tokens < 2 ? 2 : shares || tokens < 32 ? tokens : 32;
}

static int64_t slices_of(const gate_args *args)
{
    const int64_t rows = args->q.shape[0] * args->q.shape[1], tokens = tokens_of(rows, true);
    return (rows + tokens - 1) / tokens;
}

static gate_kernel kernel_of(const gate_args *args, void *workspace)
{
    gate_kernel a = {};
    const bool varlen = args->seqs.cu_q.data != NULL;
    const quern_tensor &shape = present(args->q) ? args->q : present(args->o) ? args->o : args->d_o;
    a.n = shape.shape[1];
    a.rows = shape.shape[0] * a.n;
    a.heads = (int)shape.shape[2];
    a.cu = varlen ? (const int32_t *)args->seqs.cu_q.data : NULL;
    a.valid_index = args->seqs.batch;
    a.kind = args->kind;
    a.dim = present(args->q) ? (int)args->q.shape[3] : 0;
    a.q = view4_of(args->q);
    a.o = view4_of(args->o);
    a.d_o = view4_of(args->d_o);
    a.d_q = view4_of(args->d_q);
    a.gates = view4_of(args->gates);
    a.d_gates = view4_of(args->d_gates);
    a.vec = (!present(args->q) || rows_aligned16(args->q)) &&
            (!present(args->o) || rows_aligned16(args->o)) &&
            (!present(args->d_o) || rows_aligned16(args->d_o));
    for (int i = 0; i < 3; i++) {
        a.ob[i] = view4_of(args->o_b[i]);
        a.d_ob[i] = view4_of(args->d_o_b[i]);
        a.delta[i] = view3_of(args->delta[i]);
        if (present(args->o_b[i])) {
            a.dim_v = (int)args->o_b[i].shape[3];
            a.vec = a.vec && rows_aligned16(args->o_b[i]);
        }
        if (present(args->d_o_b[i])) a.vec = a.vec && rows_aligned16(args->d_o_b[i]);
    }
    if (present(args->o)) a.dim_v = (int)args->o.shape[3];
    if (present(args->d_o)) a.dim_v = (int)args->d_o.shape[3];
    a.dq_f32 = args->d_q.dtype == QUERN_F32;
    a.add_q = args->accumulate;
    if (present(args->d_q) && !a.dq_f32) a.vec = a.vec && rows_aligned16(args->d_q);
    a.w = args->w_gate.data;
    a.w_f32 = args->w_gate.dtype == QUERN_F32;
    a.w_vec = rows_aligned16(args->w_gate);
    a.ws[0] = args->w_gate.strides[0];
    a.ws[1] = args->w_gate.strides[1];
    if (present(args->d_w_gate)) a.dw_part = (float *)(((uintptr_t)workspace + 15) & ~(uintptr_t)15);
    const view4 &like = args->d_o.ndim > 0 ? a.d_o : a.ob[0];
    a.same = true;
    const view4 *const all[] = {&a.q,     &a.o,       &a.d_o,     &a.ob[0],  &a.ob[1],
                                &a.ob[2], &a.d_ob[0], &a.d_ob[1], &a.d_ob[2]};
    for (int i = 0; i < 9; i++)
        for (int j = 0; j < 3; j++) a.same = a.same && (all[i]->p == NULL || all[i]->s[j] == like.s[j]);
    a.tokens = tokens_of(a.rows, a.dw_part != NULL);
    return a;
}

/* That of the activations' dtype. */
static gate_part *part_of(const gate_args *args, gate_part *const parts[3])
{
    const quern_tensor &act = present(args->q) ? args->q : present(args->o) ? args->o : args->d_o;
    return parts[act.dtype == QUERN_F32 ? 0 : act.dtype == QUERN_BF16 ? 1 : 2];
}

static bool gate_supports(const stage_exec *, const gate_args *args, char why[STAGE_WHY_BYTES])
{
    const quern_tensor &value = present(args->o) ? args->o : args->d_o; /* gates alone have neither */
    return dims_fit(args->q.shape[3], value.shape[3], why);
}

static size_t gate_backward_bytes(const stage_exec *, const gate_args *args)
{
    if (!present(args->d_w_gate)) return 0;
    return (size_t)slices_of(args) * (size_t)(args->d_w_gate.shape[0] * 3 * args->d_w_gate.shape[2]) * 4 + 15;
}

static quern_status gate_forward_run(const stage_exec *exec, const gate_args *args, void *)
{
    static gate_part *const parts[] = {gate_forward_f32, gate_forward_bf16, gate_forward_f16};
    return part_of(args, parts)(kernel_of(args, NULL), (cudaStream_t)exec->stream);
}

static quern_status gate_backward_run(const stage_exec *exec, const gate_args *args, void *workspace)
{
    static gate_part *const parts[] = {gate_backward_f32, gate_backward_bf16, gate_backward_f16};
    cudaStream_t stream = (cudaStream_t)exec->stream;
    const gate_kernel a = kernel_of(args, workspace);
    const quern_status status = part_of(args, parts)(a, stream);
    if (status != QUERN_OK || !present(args->d_w_gate)) return status;
    const int64_t count = (int64_t)a.heads * 3 * a.dim;
    if (count == 0) return QUERN_OK;
    gate_sum_dw<<<(unsigned)((count + 31) / 32), dim3(32, 8), 0, stream>>>(
        a.dw_part, slices_of(args), count, a.dim, (float *)args->d_w_gate.data, args->d_w_gate.strides[0],
        args->d_w_gate.strides[1]);
    return LAUNCHED("gate dW");
}

extern const variant<gate_args> gate_forward_any = {"gate_forward_any", gate_supports, NULL,
                                                    gate_forward_run};
extern const variant<gate_args> gate_backward_any = {"gate_backward_any", gate_supports, gate_backward_bytes,
                                                     gate_backward_run};
