/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* quern.c - the one file that names all families and backends. */
#include "attention/attention.h"
#include "cache/cache.h"
#include "cpu/cpu.h"
#include "dsv4/call.h"
#include "dsv4/hyper.h"
#include "dsv4/layer.h"
#include "linear/linear.h"
#include "moe/call.h"
#include "nsa/call.h"
#include "nvfp4/call.h"
#include "nvfp4/gemm.h"
#include "runtime/context.h"

/* In the order of their public numbers. */
const op_family *const quern_families[] = {
    &attention_family, /* dense attention */
    &attention_decode_family,
    &cache_append_family, /* keys and values in pages */
    &cache_pack_family,
    &nsa_family,            /* native sparse attention */
    &nsa_list_family,       /* its lists of blocks */
    &nsa_index_family,      /* its block indexer */
    &nsa_index_loss_family, /* and that indexer's loss */
    &nsa_decode_family,
    &dsv4_compress_family,  /* DeepSeek-V4: compressors */
    &dsv4_index_family,     /* indexer */
    &dsv4_attention_family, /* attention core */
    &dsv4_store_family,     /* rows of its caches */
    &dsv4_layer_family,     /* whole layer */
    &dsv4_append_step_family,
    &dsv4_layer_step_family, /* a step of the layer, and what it keeps of a sequence as bytes */
    &dsv4_layer_pack_family,
    &dsv4_hyper_family,      /* hyper-connections */
    &dsv4_index_loss_family, /* the indexer's loss */
    &nvfp4_quantize_family,
    &nvfp4_dequantize_family,
    &nvfp4_from_mxfp4_family,
    &nvfp4_fused_quantize_family,
    &nvfp4_swizzle_family,
    &nvfp4_interleave_family,
    &nvfp4_gemm_family,
    &moe_prepack_family,
    &moe_family,
    &moe_route_family,
    &linear_family, /* projections */
    &rms_norm_family,
    &rope_family,
    NULL,
};

/* That of GPUs is a library of its own, which runtime/plugin.c loads where a call asks for it. */
const quern_backend *const quern_host_backend = &quern_backend_cpu;
