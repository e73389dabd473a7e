/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * checkpoint.h - reads models: a safetensors file, a folder of them with an index or with one file alone,
 * or a GGUF file (versions 2 and 3).
 *
 *     quern_checkpoint *checkpoint;
 *     if (quern_checkpoint_open("model", &checkpoint) != QUERN_OK) puts(quern_last_error(NULL));
 *     for (size_t i = 0; i < quern_checkpoint_count(checkpoint); i++) ...
 *
 * Files are mapped, and views point into the mappings: read-only, until the checkpoint is closed. Opening
 * reads headers and the index alone; after that nothing is allocated. Only shards that the index names
 * are read, and the index must say exactly what they hold. Symbolic links are read through.
 *
 * A weight may stand in several tensors: codes, block scales, a global. `format` says how the tensor with the
 * codes is to be read with those beside it, which are QUERN_FORMAT_SCALES.
 */
#ifndef QUERN_CHECKPOINT_H
#define QUERN_CHECKPOINT_H

#include <quern/moe.h>

#ifdef __cplusplus
extern "C" {
#endif

/* An open checkpoint. May be read from several threads at once. */
typedef struct quern_checkpoint quern_checkpoint;

/* How a tensor's numbers are stored. X is the module's name. The values are part of the ABI. */
typedef enum quern_format {
    QUERN_FORMAT_PLAIN = 0,  /* as its dtype says */
    QUERN_FORMAT_SCALES = 1, /* belongs to another: block scales, a global, an activation's scale */
    /* NVFP4: ModelOpt's X.weight [N, K/2], X.weight_scale E4M3 [N, K/16], X.weight_scale_2 = G */
    QUERN_FORMAT_NVFP4_MODELOPT = 2,
    /* compressed-tensors' X.weight_packed, X.weight_scale, X.weight_global_scale = 1 / G */
    QUERN_FORMAT_NVFP4_COMPRESSED_TENSORS = 3,
    /* GGUF's type 40, with X.scale = G, one or one an expert */
    QUERN_FORMAT_NVFP4_GGUF = 4,
    /* MXFP4: DeepSeek-V4's X.weight [N, K/2] with X.scale E8M0 [N, K/32] */
    QUERN_FORMAT_MXFP4 = 5,
    /* gpt-oss' X_blocks [E, N, K/32, 16] with X_scales [E, N, K/32] */
    QUERN_FORMAT_MXFP4_BLOCKS = 6,
    /* GGUF's type 39 */
    QUERN_FORMAT_MXFP4_GGUF = 7,
    /* E4M3 X.weight [N, K] with X.scale, X.weight_scale_inv or X.weight_scale: one a block, a row, or one */
    QUERN_FORMAT_FP8_BLOCKS = 8,
    QUERN_FORMAT_FP8_ROWS = 9,
    QUERN_FORMAT_FP8_TENSOR = 10,
    QUERN_FORMAT_GGML = 11 /* another of ggml's block types; bytes only */
} quern_format;

/* "plain", "scales", "nvfp4 modelopt", "fp8 blocks" and so on; "?" for an unknown value. Static storage. */
QUERN_API const char *quern_format_name(quern_format format);

/* A tensor. All pointers belong to the checkpoint. */
typedef struct quern_checkpoint_tensor {
    size_t size;
    const char *name;  /* U+0000 stands as C0 80 */
    const char *dtype; /* the file's own name for it: "BF16", "F8_E4M3", "Q4_K" */
    quern_format format;
    int32_t ndim; /* any number */
    const int64_t
        *shape;       /* as the file has it; GGUF's is turned round, so that the last extent runs fastest */
    const void *data; /* in the mapping; not necessarily aligned to its element */
    size_t bytes;
    const char *shard; /* the name of its file */
} quern_checkpoint_tensor;
#define QUERN_CHECKPOINT_TENSOR_INIT QUERN_SIZED(quern_checkpoint_tensor)

/* Opens and validates all headers. QUERN_ERR_IO: a file cannot be read, or is missing. QUERN_ERR_FORMAT:
 * a file is none of these formats, or index and shards disagree; the sentence names the shard or the
 * index, and the tensor. */
QUERN_API quern_status quern_checkpoint_open(const char *path, quern_checkpoint **checkpoint);
/* Unmaps and frees; NULL is allowed. */
QUERN_API void quern_checkpoint_close(quern_checkpoint *checkpoint);

/* Number of tensors. They are in the order of their shards' names, and within one of their data. */
QUERN_API size_t quern_checkpoint_count(const quern_checkpoint *checkpoint);
/* The number of the tensor with this name, or -1. */
QUERN_API int64_t quern_checkpoint_find(const quern_checkpoint *checkpoint, const char *name);
/* Fills *tensor, every field but size. A number past the end: QUERN_ERR_INVALID_ARGUMENT. */
QUERN_API quern_status quern_checkpoint_info(const quern_checkpoint *checkpoint, size_t number,
                                             quern_checkpoint_tensor *tensor);
/* A contiguous CPU view of it, as quern_safetensors_get makes one. QUERN_ERR_UNSUPPORTED: no quern_dtype
 * has its elements (ggml's blocks, 6-bit floats), it has more than QUERN_MAX_DIMS dimensions, or its data
 * is not aligned to its element. */
QUERN_API quern_status quern_checkpoint_view(const quern_checkpoint *checkpoint, size_t number,
                                             quern_tensor *view);

/* What the file says besides: GGUF's keys, or the metadata of the first shard. The key of one (NULL past the
 * end), and its value as text, cut where the room ends; of an array its length, type and first elements.
 * Returns the text's length, at most room - 1. */
QUERN_API size_t quern_checkpoint_metadata_count(const quern_checkpoint *checkpoint);
QUERN_API const char *quern_checkpoint_metadata_key(const quern_checkpoint *checkpoint, size_t number);
QUERN_API size_t quern_checkpoint_metadata_text(const quern_checkpoint *checkpoint, size_t number, char *text,
                                                size_t room);

/*
 * The routed experts of one layer, as quern_moe_forward takes them.
 *
 * Experts in any NVFP4 or MXFP4 format become NVFP4: gate_up_codes [E, D/2, 2 I], scales and global [E,
 * 2], gate and up interleaved by 8 columns, and down; or with `repacked` gate_up_repacked and
 * down_repacked, for which quern_moe_params.intermediate is I. MXFP4 keeps its codes where its exponents
 * allow it (quern_nvfp4_from_mxfp4). Globals are G, whichever sense the file has. Experts in f32, f16 or
 * bf16 become gate_up [E, 2 I, D], in halves, and down; where they stand so in the file, the tensors are
 * views of it. FP8 becomes bf16, as `quern quantize --dequantize` has it. Biases go where they belong.
 * Beside them stand, where the layer has them in a dtype that a call takes, the router's weight and its
 * correction bias or its table of experts by token.
 *
 * The shared expert (mlp.shared_expert, shared_experts, ffn_*_shexp) goes by its own format, which need not
 * be the others': shared_gate, shared_up and shared_down, or its codes or repacked bytes, for which
 * quern_moe_params.shared_intermediate is Is. These stay NULL where it has biases, or a gate that scales its
 * output (Qwen's shared_expert_gate): the layer computes no such expert.
 *
 * hidden, logits, out and all else stay NULL, and are the caller's to set.
 */
typedef struct quern_checkpoint_moe {
    size_t size;
    quern_moe_tensors tensors;             /* what is written; they point into `views` */
    int64_t experts, hidden, intermediate; /* E, D, I */
    int64_t shared_intermediate;           /* Is; 0: no shared expert is filled */
    /* f32 [E]: the activations' globals for a4, from input_scale; NULL: the file has none. Set
     * tensors.gate_up_input_global and down_input_global to them. */
    const quern_tensor *gate_up_input_global, *down_input_global;
    int64_t rounded_blocks; /* blocks of MXFP4 whose codes were rounded again */
    quern_tensor views[24]; /* what `tensors` points to: the struct may not be moved */
} quern_checkpoint_moe;
#define QUERN_CHECKPOINT_MOE_INIT QUERN_SIZED(quern_checkpoint_moe)

/* Bytes of memory that quern_checkpoint_experts needs for a layer; part of them is scratch.
 * QUERN_ERR_UNSUPPORTED: its experts are in a format that is not listed above, or in several; or the
 * device is not the CPU, for which experts are laid out; those that are not repacked may be copied to a GPU
 * and repacked there. QUERN_ERR_FORMAT: tensors are missing or do not fit; the sentence names one.
 * QUERN_ERR_INVALID_ARGUMENT: the layer has no routed experts. */
QUERN_API quern_status quern_checkpoint_experts_bytes(quern_context *ctx, const quern_checkpoint *checkpoint,
                                                      int64_t layer, quern_device device, bool repacked,
                                                      size_t *bytes);
/* Fills `memory`, which must outlive the use of experts->tensors, as must the checkpoint. Allocates
 * nothing. On an error *experts is untouched, and memory holds nothing of use. A number that is no scale
 * of its format, or not above 0, is QUERN_ERR_FORMAT; E4M3 bytes are the product's to check. */
QUERN_API quern_status quern_checkpoint_experts(quern_context *ctx, const quern_checkpoint *checkpoint,
                                                int64_t layer, quern_device device, bool repacked,
                                                void *memory, size_t bytes, quern_checkpoint_moe *experts);
/* The same without the work: `memory` holds what quern_checkpoint_experts() wrote for the same checkpoint,
 * layer, device and `repacked`, at the same distance from a multiple of 64, by a library with the same
 * QUERN_MOE_PREPACK_VERSION: a file, say, that was kept and is mapped again. Its contents are not looked at,
 * and rounded_blocks becomes 0. */
QUERN_API quern_status quern_checkpoint_experts_filled(quern_context *ctx, const quern_checkpoint *checkpoint,
                                                       int64_t layer, quern_device device, bool repacked,
                                                       void *memory, size_t bytes,
                                                       quern_checkpoint_moe *experts);

#ifdef __cplusplus
}
#endif
#endif
