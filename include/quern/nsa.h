/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * nsa.h - native sparse attention: compress, select, attend over three branches, gate; and backward.
 *
 * Source of the maths: Native Sparse Attention (arXiv 2502.11089) section 3, and the tile-shared variant used
 * for training at millions of tokens (parameter `tile`).
 *
 * Symbols: B, N, T, H, Hkv, g, D, Dv as in attention.h; l block_size, d stride, l' select_block, k
 * num_selected, Tq tile, W window, c max_compressed_groups.
 *   Nc = (N - l)/d + 1 for N >= l, else 0     compressed entries of a sequence
 *   tiles = ceil(N / Tq)                      query tiles of a sequence
 *   Hs = Hkv (scope group) or H (scope head)  selection lists per tile
 *
 * Compress.  Entry i covers tokens [i d, i d + l). mean: their mean in f32, then optionally times w_k (w_v).
 *            linear: (tokens + pe) flattened position-major times w_k (w_v). given: the caller hands in
 *            k_cmp, v_cmp.
 * Select.    Each tile selects the num_selected best of the ceil(N / l') selection blocks, forced ones
 *            included. The candidates are, causal, the blocks that begin at or before the tile's last query;
 *            else all. A block's score:
 *              softmax     p = softmax over the entries that a query sees, summed over the tile's queries
 *                          (and, scope group, the g heads):
 *                          s[J] = sum over m < l'/d, n < l/d of p[J l'/d + m - n]
 *              mean_logit  scale * (mean of the tile's queries, and of the g heads) . k_cmp[J]
 *            A candidate with no entry that the tile's last query sees scores 0 (softmax) or -inf
 *            (mean_logit). Ties go to the lower index, NaN comes last.
 *            Forced are the first forced_first blocks and, causal and with forced_local > 0, the blocks that
 *            the tile touches and the forced_local - 1 before these.
 *            Entries form groups of 128. With c > 0 the compressed branch attends c groups per tile: those of
 *            the newest entries that the tile's last and first query see (causal), then the best by the mean
 *            of mean_logit over the group's entries that the last query sees.
 *            Selection carries no gradient.
 * Attend.    cmp: query q sees entry i iff i d + l - 1 <= q (complete) or i d <= q (started).
 *            slc: tokens <= q of the chosen blocks.
 *            win: tokens q - W < j <= q.
 *            Each branch has its own softmax over what is seen, as in attention.h; query head h reads
 *            key/value head h / g.
 *            Non-causal: all entries, chosen blocks whole, |q - j| <= W / 2.
 * Gate.      o = sum_b g_b o_b, g_b = sigmoid(q . w_gate[h,b]), or given, or 1/3.
 * A query that sees no key in a branch gets o_b = 0, lse_b = -inf, and no gradient flows there.
 */
#ifndef QUERN_NSA_H
#define QUERN_NSA_H

#include <quern/quern.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum quern_nsa_compress_kind {
    QUERN_NSA_COMPRESS_MEAN = 0,
    QUERN_NSA_COMPRESS_LINEAR = 1,
    QUERN_NSA_COMPRESS_GIVEN = 2
} quern_nsa_compress_kind;

typedef enum quern_nsa_scope { QUERN_NSA_SCOPE_GROUP = 0, QUERN_NSA_SCOPE_HEAD = 1 } quern_nsa_scope;

typedef enum quern_nsa_metric {
    QUERN_NSA_METRIC_SOFTMAX = 0,
    QUERN_NSA_METRIC_MEAN_LOGIT = 1 /* needs l = d = l' */
} quern_nsa_metric;

typedef enum quern_nsa_visibility {
    QUERN_NSA_VISIBLE_COMPLETE = 0, /* a compressed entry is seen once its whole block has passed */
    QUERN_NSA_VISIBLE_STARTED = 1   /* as soon as its block has begun */
} quern_nsa_visibility;

typedef enum quern_nsa_gate_kind {
    QUERN_NSA_GATE_NONE = 0,    /* 1/3 each */
    QUERN_NSA_GATE_WEIGHTS = 1, /* sigmoid of q . w_gate */
    QUERN_NSA_GATE_GIVEN = 2    /* post-sigmoid gates handed in */
} quern_nsa_gate_kind;

/* Where a list of indices comes from. */
typedef enum quern_nsa_list {
    QUERN_NSA_LIST_COMPUTED = 0,
    QUERN_NSA_LIST_GIVEN = 1,
    QUERN_NSA_LIST_INDEXED = 2 /* selection alone: q_index and k_index choose, as in quern_nsa_index() */
} quern_nsa_list;

enum {
    QUERN_NSA_BRANCH_CMP = 1,
    QUERN_NSA_BRANCH_SLC = 2,
    QUERN_NSA_BRANCH_WIN = 4,
    QUERN_NSA_BRANCH_ALL = 7
};

/* Lengths count tokens. In brackets what QUERN_NSA_PARAMS_INIT sets. */
typedef struct quern_nsa_params {
    size_t size;
    int64_t block_size;               /* l >= 1 [64] */
    int64_t stride;                   /* d; 0: l. Divides l. [0] */
    int64_t select_block;             /* l'; 0: l. A multiple of d. [0] */
    int64_t num_selected; /* k >= 1 blocks of a tile, forced ones included: at least as many [16] */
    int64_t tile;                     /* Tq, 1 ... 256 consecutive queries that share a selection [1] */
    int64_t window;                   /* W >= 1, the query's own token included [512] */
    quern_nsa_compress_kind compress; /* [mean] */
    quern_nsa_scope scope;   /* heads that share a selection: the g of a key/value head, or none [group] */
    quern_nsa_metric metric; /* [softmax] */
    quern_nsa_visibility compressed_visibility; /* [complete] */
    int64_t forced_first;                       /* >= 0 blocks [1] */
    int64_t forced_local;                       /* >= 0 blocks; causal only [2] */
    /* c; 0: every entry is attended. Needs mean_logit; at least the groups of the newest entries that a
     * tile's first and last query see, 1 + ceil((Tq - 1) / (128 d)) (non-causal: 1). [0] */
    int64_t max_compressed_groups;
    bool causal;                                /* [true] */
    float scale;       /* 0: 1 / sqrt(D); otherwise finite and > 0; backward: at most 65536 [0] */
    uint32_t branches; /* QUERN_NSA_BRANCH_* or-ed; at least one. An absent branch has o_b = 0. [all] */
    quern_nsa_gate_kind gate; /* [none] */
    quern_nsa_list
        selection;         /* block_idx: computed, handed in, or by the indexer (causal, Tq 1) [computed] */
    quern_nsa_list groups; /* group_idx: computed, or handed in with c > 0 [computed] */
    /* o = o_slc, of the selected branch alone, without gates; selection given or by the indexer [false] */
    bool ungated;
    uint8_t reserved[7];      /* 0; later fields stand here */
} quern_nsa_params;
#define QUERN_NSA_PARAMS_INIT                                                                                \
    {                                                                                                        \
        sizeof(quern_nsa_params), 64, 0, 0, 16, 1, 512, QUERN_NSA_COMPRESS_MEAN, QUERN_NSA_SCOPE_GROUP,      \
            QUERN_NSA_METRIC_SOFTMAX, QUERN_NSA_VISIBLE_COMPLETE, 1, 2, 0, true, 0.0f, QUERN_NSA_BRANCH_ALL, \
            QUERN_NSA_GATE_NONE, QUERN_NSA_LIST_COMPUTED, QUERN_NSA_LIST_COMPUTED, false,                    \
        {                                                                                                    \
            0                                                                                                \
        }                                                                                                    \
    }

/* Sets the fields of the named preset and leaves the others. "tile256": Tq = 256, head scope, mean_logit,
 * forced 0/0, started visibility, l = d = l', gates by weights. "msa", MiniMax Sparse Attention: l' = 128,
 * k = 16, Tq = 1, group scope, forced 0/1, the selected branch alone and ungated; selection is left. Unknown:
 * QUERN_ERR_INVALID_ARGUMENT. */
QUERN_API quern_status quern_nsa_params_preset(quern_nsa_params *params, const char *name);

/*
 * The tensors of every NSA call; NULL means absent. Each function below says which it reads and writes.
 * "act": f32, f16 or bf16, one for all activations. "weight": f32 or the activations' dtype; weight gradients
 * are f32.
 * Varlen, with cu_seqlens (int32 [B+1], as in attention.h): activations are [T, ...] instead of [B, N, ...],
 * lse [H,T], index lists [Hs, T/Tq + B, k] (sequence b's tiles start at row sum_{b' < b} ceil(N_b' / Tq);
 * indices relative to the sequence; unused rows -1, count 0), and k_cmp, v_cmp [T/d, Hkv, D], with
 * cu_seqlens_cmp; rows past the last are written as 0; k_index [T,D_I] or [T,Hs,D_I].
 */
typedef struct quern_nsa_tensors {
    size_t size;
    /* activations */
    const quern_tensor *q;             /* act [B,N,H,D] */
    const quern_tensor *k, *v;         /* act [B,N,Hkv,D], [B,N,Hkv,Dv] */
    const quern_tensor *k_slc, *v_slc; /* separate pair of the selected branch; default k, v */
    const quern_tensor *k_win, *v_win; /* separate pair of the window branch; default k, v */
    const quern_tensor *k_cmp, *v_cmp; /* act [B,Nc,Hkv,D], [B,Nc,Hkv,Dv] */
    const quern_tensor *cu_seqlens, *cu_seqlens_cmp;
    /* weights */
    const quern_tensor *w_k, *w_v;   /* mean: [Hkv,D,D], [Hkv,Dv,Dv] or NULL; linear: [Hkv,l*D,D], ... */
    const quern_tensor *pe_k, *pe_v; /* linear only: [Hkv,l,D], [Hkv,l,Dv] or NULL */
    const quern_tensor *w_gate;      /* [H,3,D], branches in the order cmp, slc, win */
    const quern_tensor *gates;       /* f32 [B,N,H,3], after the sigmoid */
    /* lists */
    const quern_tensor *block_idx;   /* i32 [B,Hs,tiles,k], ascending, padded with -1 */
    const quern_tensor *block_count; /* i32 [B,Hs,tiles] */
    const quern_tensor *group_idx;   /* i32 [B,Hs,tiles,c], like block_idx */
    /* results */
    const quern_tensor *o;                           /* act [B,N,H,Dv] */
    const quern_tensor *o_cmp, *o_slc, *o_win;       /* act, like o */
    const quern_tensor *lse_cmp, *lse_slc, *lse_win; /* f32 [B,H,N], natural log */
    /* gradients; overwritten, not accumulated */
    const quern_tensor *d_o;                                                     /* act, like o; an input */
    const quern_tensor *d_o_cmp, *d_o_slc, *d_o_win;                             /* act, like o */
    const quern_tensor *d_q, *d_k, *d_v, *d_k_slc, *d_v_slc, *d_k_win, *d_v_win; /* act */
    const quern_tensor *d_k_cmp, *d_v_cmp;                                       /* act */
    const quern_tensor *d_w_k, *d_w_v, *d_pe_k, *d_pe_v, *d_w_gate; /* f32, shaped like the weight */
    const quern_tensor *d_gates;                                    /* f32 [B,N,H,3] */
    /* the block indexer's, selection INDEXED: act [B,N,Hs,D_I], and [B,N,D_I] or [B,N,Hs,D_I] */
    const quern_tensor *q_index, *k_index;
} quern_nsa_tensors;
/* Every tensor absent. */
#define QUERN_NSA_TENSORS_INIT QUERN_SIZED(quern_nsa_tensors)

/*
 * Bits of exec's status word. Each call reports on the lists and offsets that it takes as inputs. It does not
 * read rows of a list that belong to no tile.
 *   QUERN_STATUS_BAD_INDEX    block_idx: an entry other than -1 and 0 ... blocks of its sequence - 1; skipped
 *   QUERN_STATUS_BAD_GROUP    group_idx: the same, of groups of 128 compressed entries
 *   QUERN_STATUS_BAD_OFFSETS  cu_seqlens, cu_seqlens_cmp
 */

/* ---- extents; `n` tokens of a sequence, `total` of a batch ---- */

/* Nc: compressed entries of a sequence. */
static inline int64_t quern_nsa_entries(const quern_nsa_params *p, int64_t n)
{
    const int64_t stride = p->stride > 0 ? p->stride : p->block_size;
    return p->block_size > 0 && n >= p->block_size ? (n - p->block_size) / stride + 1 : 0;
}

/* Varlen: rows of k_cmp and v_cmp. */
static inline int64_t quern_nsa_entry_rows(const quern_nsa_params *p, int64_t total)
{
    const int64_t stride = p->stride > 0 ? p->stride : p->block_size;
    return stride > 0 ? total / stride : 0;
}

/* Selection blocks of a sequence: indices in block_idx are below it. */
static inline int64_t quern_nsa_blocks(const quern_nsa_params *p, int64_t n)
{
    const int64_t length = p->select_block > 0 ? p->select_block : p->block_size;
    return length > 0 ? n / length + (n % length != 0) : 0;
}

/* Groups of 128 compressed entries of a sequence: indices in group_idx are below it. */
static inline int64_t quern_nsa_groups(const quern_nsa_params *p, int64_t n)
{
    const int64_t entries = quern_nsa_entries(p, n);
    return entries / 128 + (entries % 128 != 0);
}

/* Query tiles of a sequence: rows of its index lists. */
static inline int64_t quern_nsa_tiles(const quern_nsa_params *p, int64_t n)
{
    return p->tile > 0 ? n / p->tile + (n % p->tile != 0) : 0;
}

/* Varlen: rows of the index lists of `batch` sequences. */
static inline int64_t quern_nsa_list_rows(const quern_nsa_params *p, int64_t total, int64_t batch)
{
    return p->tile > 0 ? total / p->tile + batch : 0;
}

/* Hs: index lists of a tile. */
static inline int64_t quern_nsa_list_heads(const quern_nsa_params *p, int64_t heads, int64_t kv_heads)
{
    return p->scope == QUERN_NSA_SCOPE_HEAD ? heads : kv_heads;
}

/*
 * Every check comes before the first byte of an output or of the workspace is written, and quern_last_error()
 * names the argument, what was given and what is accepted. What parameters and tensors allow together stands
 * beside them above; quern_op_roles() (op.h) says it of any set of parameters.
 *
 * Not refused: entries of a block or group list that are out of range (skipped, see exec's status word),
 * duplicates (count once), blocks of the future (masked), and a tensor that the operation has no use for
 * under these parameters, which it does not read. Tensors of a branch that params.branches leaves out are
 * such tensors, also for the gate's operations. Without the compressed branch, and with selection GIVEN or
 * INDEXED, nothing is compressed: block_size, stride, compress and metric are not read.
 */

/*
 * The whole. Forward reads q, k, v (and k_slc ... pe_v, w_gate or gates, block_idx, group_idx as params say)
 * and writes o, and whichever of these are given: k_cmp, v_cmp, cu_seqlens_cmp, gates, block_idx,
 * block_count, group_idx, o_b, lse_b. Backward needs k_cmp, v_cmp, block_idx, group_idx (c > 0), lse_b, gates
 * as forward wrote them, d_o, and o_b (recomputed where absent). It writes d_q, d_k, d_v and every other d_
 * tensor that is given and whose input these params use. It leaves what belongs to a branch that is off
 * (d_k_slc; d_w_k where the window branch is alone) as it is, like that input.
 *
 * Forward's workspace on the CPU is at most the sum of
 *   - one copy of K and V in panels, in the dtype of the products (bf16 pairs with AVX512-BF16, else f32),
 *     each sequence rounded up to 64 tokens and Dv to 16; branches with pairs of their own take turns in the
 *     same place,
 *   - k_cmp, v_cmp, block_idx, group_idx, cu_seqlens_cmp where the caller does not take them,
 *   - one lse [B,H,N],
 *   - 4 MiB per thread.
 * 16-bit weights of the linear compression are copied into panels, too, before K and V and in the same place.
 */
QUERN_API quern_status quern_nsa_forward_workspace(quern_context *ctx, const quern_nsa_params *params,
                                                   const quern_nsa_tensors *tensors, size_t *bytes);
QUERN_API quern_status quern_nsa_forward(quern_context *ctx, const quern_exec *exec,
                                         const quern_nsa_params *params, const quern_nsa_tensors *tensors,
                                         void *workspace, size_t workspace_bytes);
QUERN_API quern_status quern_nsa_backward_workspace(quern_context *ctx, const quern_nsa_params *params,
                                                    const quern_nsa_tensors *tensors, size_t *bytes);
QUERN_API quern_status quern_nsa_backward(quern_context *ctx, const quern_exec *exec,
                                          const quern_nsa_params *params, const quern_nsa_tensors *tensors,
                                          void *workspace, size_t workspace_bytes);

/* Compress alone: k, v, w_k, w_v, pe_k, pe_v -> k_cmp, v_cmp (and cu_seqlens_cmp where varlen). Backward:
 * d_k_cmp, d_v_cmp and the inputs -> d_k, d_v, d_w_k, d_w_v, d_pe_k, d_pe_v (those given). */
QUERN_API quern_status quern_nsa_compress_workspace(quern_context *ctx, const quern_nsa_params *params,
                                                    const quern_nsa_tensors *tensors, size_t *bytes);
QUERN_API quern_status quern_nsa_compress(quern_context *ctx, const quern_exec *exec,
                                          const quern_nsa_params *params, const quern_nsa_tensors *tensors,
                                          void *workspace, size_t workspace_bytes);
QUERN_API quern_status quern_nsa_compress_backward_workspace(quern_context *ctx,
                                                             const quern_nsa_params *params,
                                                             const quern_nsa_tensors *tensors, size_t *bytes);
QUERN_API quern_status quern_nsa_compress_backward(quern_context *ctx, const quern_exec *exec,
                                                   const quern_nsa_params *params,
                                                   const quern_nsa_tensors *tensors, void *workspace,
                                                   size_t workspace_bytes);

/* Select alone: q, k_cmp, optionally lse_cmp (softmax metric; computed where absent) -> block_idx,
 * block_count, group_idx (c > 0). N comes from q. Carries no gradient. */
QUERN_API quern_status quern_nsa_select_workspace(quern_context *ctx, const quern_nsa_params *params,
                                                  const quern_nsa_tensors *tensors, size_t *bytes);
QUERN_API quern_status quern_nsa_select(quern_context *ctx, const quern_exec *exec,
                                        const quern_nsa_params *params, const quern_nsa_tensors *tensors,
                                        void *workspace, size_t workspace_bytes);

/* Attend alone, the branches of params.branches: q, k_cmp, v_cmp, k, v (or the separate pairs), block_idx,
 * group_idx -> o_b, lse_b. Backward: those, d_o_b -> d_q, d_k, d_v, d_k_cmp, d_v_cmp, d_k_slc, ... */
QUERN_API quern_status quern_nsa_attend_workspace(quern_context *ctx, const quern_nsa_params *params,
                                                  const quern_nsa_tensors *tensors, size_t *bytes);
QUERN_API quern_status quern_nsa_attend(quern_context *ctx, const quern_exec *exec,
                                        const quern_nsa_params *params, const quern_nsa_tensors *tensors,
                                        void *workspace, size_t workspace_bytes);
QUERN_API quern_status quern_nsa_attend_backward_workspace(quern_context *ctx, const quern_nsa_params *params,
                                                           const quern_nsa_tensors *tensors, size_t *bytes);
QUERN_API quern_status quern_nsa_attend_backward(quern_context *ctx, const quern_exec *exec,
                                                 const quern_nsa_params *params,
                                                 const quern_nsa_tensors *tensors, void *workspace,
                                                 size_t workspace_bytes);

/* Gates alone: q, w_gate -> gates. */
QUERN_API quern_status quern_nsa_gates_workspace(quern_context *ctx, const quern_nsa_params *params,
                                                 const quern_nsa_tensors *tensors, size_t *bytes);
QUERN_API quern_status quern_nsa_gates(quern_context *ctx, const quern_exec *exec,
                                       const quern_nsa_params *params, const quern_nsa_tensors *tensors,
                                       void *workspace, size_t workspace_bytes);
/* Combine alone: o_cmp, o_slc, o_win (any of those that params.branches has), gates (NULL: 1/3 each) -> o. */
QUERN_API quern_status quern_nsa_combine_workspace(quern_context *ctx, const quern_nsa_params *params,
                                                   const quern_nsa_tensors *tensors, size_t *bytes);
QUERN_API quern_status quern_nsa_combine(quern_context *ctx, const quern_exec *exec,
                                         const quern_nsa_params *params, const quern_nsa_tensors *tensors,
                                         void *workspace, size_t workspace_bytes);
/* Both in one pass: q, w_gate (or gates in, or none), o_b -> gates (if given), o. */
QUERN_API quern_status quern_nsa_gate_workspace(quern_context *ctx, const quern_nsa_params *params,
                                                const quern_nsa_tensors *tensors, size_t *bytes);
QUERN_API quern_status quern_nsa_gate(quern_context *ctx, const quern_exec *exec,
                                      const quern_nsa_params *params, const quern_nsa_tensors *tensors,
                                      void *workspace, size_t workspace_bytes);
/* Backward of the gate: q, w_gate, gates, o_b, d_o -> d_o_b, and by mode d_q (the gate's share only) and
 * d_w_gate, or d_gates. */
QUERN_API quern_status quern_nsa_gate_backward_workspace(quern_context *ctx, const quern_nsa_params *params,
                                                         const quern_nsa_tensors *tensors, size_t *bytes);
QUERN_API quern_status quern_nsa_gate_backward(quern_context *ctx, const quern_exec *exec,
                                               const quern_nsa_params *params,
                                               const quern_nsa_tensors *tensors, void *workspace,
                                               size_t workspace_bytes);

/* ---- lists in another block length ---- */

typedef struct quern_nsa_list_params {
    size_t size;
    int64_t from, to; /* tokens of a block of `in` and of `out`: 1 ... 2^31 - 1, one divides the other */
    int64_t n;        /* tokens of the sequence, 0 ... 2^31 - 1 */
} quern_nsa_list_params;
#define QUERN_NSA_LIST_PARAMS_INIT QUERN_SIZED(quern_nsa_list_params)

/* All i32, in any strides, with the same leading dimensions. On a GPU, leading dimensions that do not
 * merge into one in all three take one launch for each index. */
typedef struct quern_nsa_list_tensors {
    size_t size;
    const quern_tensor *in;    /* [.., k_in] */
    const quern_tensor *out;   /* [.., k_out]: k_in * from / to for an expansion, k_in for a contraction */
    const quern_tensor *count; /* [..], or NULL: the entries of each list of out */
} quern_nsa_list_tensors;
#define QUERN_NSA_LIST_TENSORS_INIT QUERN_SIZED(quern_nsa_list_tensors)

/* Converts lists of blocks between block lengths: out is ascending and padded with -1. Entries of `in`
 * outside the sequence are skipped (other than -1: QUERN_STATUS_BAD_INDEX); a repeated index counts once. */
QUERN_API quern_status quern_nsa_list_convert_workspace(quern_context *ctx,
                                                        const quern_nsa_list_params *params,
                                                        const quern_nsa_list_tensors *tensors, size_t *bytes);
QUERN_API quern_status quern_nsa_list_convert(quern_context *ctx, const quern_exec *exec,
                                              const quern_nsa_list_params *params,
                                              const quern_nsa_list_tensors *tensors, void *workspace,
                                              size_t workspace_bytes);

/* ---- the block indexer (MiniMax Sparse Attention, arXiv 2606.13392) ---- */

/*
 * Chooses the blocks of the selected branch by light queries and keys of its own, in place of k_cmp. Query t
 * of a sequence stands at position p = S - N + t, or query_offset + t. The score of block J for list j is
 *   max over its tokens s <= p of q_index[t, j] . k_index[s], in f32, not scaled; NaN where one of them is.
 * Candidates are the blocks whose first token is <= p; none where p < 0. Forced, inside num_selected, are
 * blocks 0 ... forced_first - 1 and the forced_local blocks that end with that of p, as far as there are
 * such. Order and lists are those of quern_nsa_select with tile 1. It is strictly causal and carries no
 * gradient.
 */
typedef struct quern_nsa_index_params {
    size_t size;
    int64_t select_block; /* l', 1 ... 2^31 - 1 tokens [128] */
    int64_t num_selected; /* k, forced_first + forced_local ... 2^31 - 1 blocks [16] */
    int64_t forced_first; /* 0 ... 2^31 - 1 blocks [0] */
    int64_t forced_local; /* 0 ... 2^31 - 1 blocks [1] */
    int64_t query_offset; /* -1: S - N of each sequence; 0 ... 2^31 - 1 [-1] */
} quern_nsa_index_params;
#define QUERN_NSA_INDEX_PARAMS_INIT                                                                          \
    {                                                                                                        \
        sizeof(quern_nsa_index_params), 128, 16, 0, 1, -1                                                    \
    }

/* Varlen, with cu_seqlens_q (and cu_seqlens_kv, else the same): [T,Hs,D_I], [T,D_I] or [T,Hs,D_I], and lists
 * [Hs,T+B,k] whose rows past the last query are -1, count 0. D_I is a multiple of 8, 8 ... 512,
 * on a GPU up to 256. */
typedef struct quern_nsa_index_tensors {
    size_t size;
    const quern_tensor *q_index; /* act [B,N,Hs,D_I], a head a list */
    const quern_tensor *k_index; /* act [B,S,D_I], one key for all lists, or [B,S,Hs,D_I] */
    const quern_tensor *cu_seqlens_q, *cu_seqlens_kv;
    const quern_tensor *block_idx;   /* i32 [B,Hs,N,k], ascending, padded with -1 */
    const quern_tensor *block_count; /* i32 [B,Hs,N], or NULL */
    const quern_tensor *block_score; /* f32 [B,Hs,N,ceil(S/l')], -inf where a block is no candidate; or NULL.
                                        Fixed lengths only. */
} quern_nsa_index_tensors;
#define QUERN_NSA_INDEX_TENSORS_INIT QUERN_SIZED(quern_nsa_index_tensors)

QUERN_API quern_status quern_nsa_index_workspace(quern_context *ctx, const quern_nsa_index_params *params,
                                                 const quern_nsa_index_tensors *tensors, size_t *bytes);
QUERN_API quern_status quern_nsa_index(quern_context *ctx, const quern_exec *exec,
                                       const quern_nsa_index_params *params,
                                       const quern_nsa_index_tensors *tensors, void *workspace,
                                       size_t workspace_bytes);

/*
 * The indexer's loss: how far its choice is from what attention weighs, over the tokens s <= p of the blocks
 * that list j of block_idx names for query t. With h the H / Hs heads of q that list j serves (group scope),
 *   T = mean over h of softmax(scale q[t,h] . k[s,j]),   P = softmax(index_scale q_index[t,j] . k_index[s])
 *   row_loss[t,j] = sum_s T (ln max(T, 1e-10) - ln P)            0 where the list has no token
 *   loss = lambda sum row_loss / (Hs max(1, rows)),  rows: the queries with a token in some list
 * d_q_index and d_k_index are the gradients of loss; q, k and the lists are constants. Lists may be the
 * indexer's or any: entries in any order, -1 is padding, a repeated entry counts once, others out of range
 * are skipped (QUERN_STATUS_BAD_INDEX). Row losses are strictly causal.
 */
typedef struct quern_nsa_index_loss_params {
    size_t size;
    int64_t select_block; /* l', 1 ... 2^31 - 1 tokens [128] */
    int64_t query_offset; /* -1: S - N of each sequence; 0 ... 2^31 - 1 [-1] */
    float lambda;         /* finite [1] */
    float scale;          /* 0: 1 / sqrt(D); or finite and > 0 [0] */
    float index_scale;    /* 0: 1 / sqrt(D_I); or finite and > 0 [0] */
    uint8_t reserved[4];  /* 0; later fields stand here */
} quern_nsa_index_loss_params;
#define QUERN_NSA_INDEX_LOSS_PARAMS_INIT                                                                     \
    {                                                                                                        \
        sizeof(quern_nsa_index_loss_params), 128, -1, 1.0f, 0.0f, 0.0f,                                      \
        {                                                                                                    \
            0                                                                                                \
        }                                                                                                    \
    }

/* Varlen as quern_nsa_index_tensors: q [T,H,D], k [T,Hs,D], lse_slc [H,T], row_loss [Hs,T+B]. Rows past the
 * last query are 0. The results may each be NULL. */
typedef struct quern_nsa_index_loss_tensors {
    size_t size;
    const quern_tensor *q_index, *k_index; /* as quern_nsa_index_tensors */
    const quern_tensor *q;                 /* act [B,N,H,D], H a multiple of Hs */
    const quern_tensor *k;                 /* act [B,S,Hs,D] */
    const quern_tensor *block_idx;         /* i32 [B,Hs,N,k] */
    const quern_tensor *lse_slc; /* f32 [B,H,N] of attention over the same lists, or NULL: computed */
    const quern_tensor *cu_seqlens_q, *cu_seqlens_kv;
    const quern_tensor *loss;                  /* f32 [] */
    const quern_tensor *row_loss;              /* f32 [B,Hs,N] */
    const quern_tensor *d_q_index, *d_k_index; /* act, like q_index, k_index */
} quern_nsa_index_loss_tensors;
#define QUERN_NSA_INDEX_LOSS_TENSORS_INIT QUERN_SIZED(quern_nsa_index_loss_tensors)

QUERN_API quern_status quern_nsa_index_loss_workspace(quern_context *ctx,
                                                      const quern_nsa_index_loss_params *params,
                                                      const quern_nsa_index_loss_tensors *tensors,
                                                      size_t *bytes);
QUERN_API quern_status quern_nsa_index_loss(quern_context *ctx, const quern_exec *exec,
                                            const quern_nsa_index_loss_params *params,
                                            const quern_nsa_index_loss_tensors *tensors, void *workspace,
                                            size_t workspace_bytes);

#ifdef __cplusplus
}
#endif
#endif
