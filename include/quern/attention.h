/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * attention.h - dense attention, forward and backward.
 *
 *   s[t,j] = scale * q[t] . k[j]      over the keys j that query t sees
 *   lse[t] = ln sum_j exp(s[t,j])     o[t] = sum_j exp(s[t,j] - lse[t]) v[j]
 *
 * Symbols: B batch, N tokens of a sequence, T tokens of a varlen batch, H query heads, Hkv key/value
 * heads, g = H / Hkv (any integer >= 1), D query/key head dim, Dv value head dim; D and Dv are multiples
 * of 8 up to 512, on a GPU up to 256 (others: QUERN_ERR_UNSUPPORTED). Query head h reads key/value head h / g
 * (integer division).
 *
 * Which keys a query sees. The queries are the last Nq of Nkv positions: query i stands at position
 * p = Nkv - Nq + i, unless params.query_offset >= 0 gives the position of query 0 (chunked prefill).
 * Key j stands at position j.
 *   causal:      j <= p, and with window W > 0 also j > p - W (W keys, self included)
 *   not causal:  every key, and with window W > 0 those with |p - j| <= W / 2 (integer division)
 * A query before position 0 (Nq > Nkv) sees no key, causal or not. A query that sees no key has o = 0,
 * lse = -inf and takes no part in any gradient.
 *
 * A sink is a logit of a head that joins the denominator alone: o[t] is multiplied by 1 / (1 + e^(sink -
 * lse[t])), and lse stays that of the keys. A sink of -inf is none, one of inf leaves nothing to the keys: o
 * and all gradients are 0. With delta[t] = d_o[t] . o[t], d_sink = -sum_t delta[t] / (1 + e^(lse[t] - sink)).
 *
 * kv_first and kv_count say which keys of a sequence exist: those at kv_first ... kv_count - 1, so kv_count
 * is an end. Batches padded on the left and caches with room are attended without a copy. Positions, and
 * query_offset, then count from kv_first, and Nkv above is kv_count - kv_first. What other rows of k and v
 * hold never matters; their gradients are 0.
 *
 * Source of the maths: Vaswani et al. 2017 (arXiv 1706.03762) eq. 1; the blockwise softmax and its
 * backward are those of FlashAttention-2 (arXiv 2307.08691).
 */
#ifndef QUERN_ATTENTION_H
#define QUERN_ATTENTION_H

#include <quern/quern.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct quern_attention_params {
    size_t size;
    bool causal;
    int64_t window;       /* >= 0 keys; 0: none */
    float scale;          /* 0: 1 / sqrt(D); otherwise finite and > 0; backward: at most 65536 (lse is f32) */
    int64_t query_offset; /* -1: Nkv - Nq; otherwise 0 ... 2^31 - 1 */
} quern_attention_params;
#define QUERN_ATTENTION_PARAMS_INIT                                                                          \
    {                                                                                                        \
        sizeof(quern_attention_params), true, 0, 0.0f, -1                                                    \
    }

/*
 * The tensors of a call; NULL means absent. "act" is one of f32, f16, bf16, the same for all.
 * Fixed length: q [B,Nq,H,D]  k [B,Nkv,Hkv,D]  v [B,Nkv,Hkv,Dv]  o [B,Nq,H,Dv]  lse [B,H,Nq]
 * Varlen:       q [Tq,H,D]    k [Tkv,Hkv,D]    v [Tkv,Hkv,Dv]    o [Tq,H,Dv]    lse [H,Tq]
 *               with cu_seqlens_q and cu_seqlens_kv: int32 [B+1], starting at 0, not decreasing, the last at
 *               most Tq, Tkv. cu_seqlens_kv may be NULL: the same as cu_seqlens_q. Output rows past the last
 *               offset are written as 0 (lse: -inf). On CUDA only kernels read the offsets. They do not
 *               refuse bad ones: they clamp them into the tensors and set QUERN_STATUS_BAD_OFFSETS.
 * sink, kv_first and kv_count may be there or not, each for itself; kv_first and kv_count need fixed lengths.
 * A GPU holds kv_first and kv_count within the keys, sets QUERN_STATUS_BAD_POSITION where they are no range,
 * and has no backward with them (QUERN_ERR_UNSUPPORTED).
 *
 * Refused, with QUERN_ERR_INVALID_ARGUMENT unless said, before an output or the workspace is written: a NULL
 * that is needed; a size other than quern.h says; a parameter, ndim, extent, dtype or head dim other than
 * stated here; H no multiple of Hkv; more than 2^31 - 1 tokens; a last dimension with gaps; data NULL or not
 * aligned to its element; an output that shares memory with itself or another tensor; offsets other than
 * stated; a sequence for which 0 <= kv_first <= kv_count <= Nkv does not hold; tensors on two devices (a
 * device without a backend: QUERN_ERR_DEVICE); a workspace that is too small (QUERN_ERR_WORKSPACE) or NULL.
 */
typedef struct quern_attention_tensors {
    size_t size;
    const quern_tensor *q, *k, *v; /* act */
    const quern_tensor *cu_seqlens_q, *cu_seqlens_kv;
    const quern_tensor *o;               /* act; written by forward, read by backward */
    const quern_tensor *lse;             /* f32; written by forward (optional there), read by backward */
    const quern_tensor *d_o;             /* act, like o: gradient of the loss by o; read by backward */
    const quern_tensor *d_q, *d_k, *d_v; /* act, like q, k, v; overwritten by backward */
    const quern_tensor *sink;            /* f32 [H]; NULL: none */
    const quern_tensor *kv_first, *kv_count; /* int32 [B]; NULL: 0; Nkv */
    const quern_tensor *d_sink;              /* f32 [H]; overwritten by backward; may be NULL; needs sink */
} quern_attention_tensors;
#define QUERN_ATTENTION_TENSORS_INIT QUERN_SIZED(quern_attention_tensors)

/* Bytes of workspace that the forward or backward call with the same arguments needs. Reads only shapes,
 * dtypes and devices of the tensors, never their data. */
QUERN_API quern_status quern_attention_forward_workspace(quern_context *ctx,
                                                         const quern_attention_params *params,
                                                         const quern_attention_tensors *tensors,
                                                         size_t *bytes);
QUERN_API quern_status quern_attention_backward_workspace(quern_context *ctx,
                                                          const quern_attention_params *params,
                                                          const quern_attention_tensors *tensors,
                                                          size_t *bytes);

/* Reads q, k, v and what says which keys exist; writes o and, if given, lse. */
QUERN_API quern_status quern_attention_forward(quern_context *ctx, const quern_exec *exec,
                                               const quern_attention_params *params,
                                               const quern_attention_tensors *tensors, void *workspace,
                                               size_t workspace_bytes);
/* Reads what forward reads, o, lse and d_o; writes d_q, d_k, d_v (all three) and, if given, d_sink. lse is
 * that of the call's own keys: where it is large (f32: beyond 20), it is taken from the scores again, which
 * an lse in f32 no longer tells. Scores of f32 may have any size; how far their own rounding goes is in
 * docs/numerics.md. */
QUERN_API quern_status quern_attention_backward(quern_context *ctx, const quern_exec *exec,
                                                const quern_attention_params *params,
                                                const quern_attention_tensors *tensors, void *workspace,
                                                size_t workspace_bytes);

#ifdef __cplusplus
}
#endif
#endif
