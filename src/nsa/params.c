/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* params.c - the parameters of NSA: what is legal, defaults, presets. */
#include "core/error.h"
#include "core/op.h"
#include "nsa/call.h"

#include <string.h>

static int64_t gcd(int64_t a, int64_t b)
{
    while (b != 0) {
        const int64_t r = a % b;
        a = b;
        b = r;
    }
    return a;
}

static quern_status check_selection(const quern_nsa_params *p)
{
    int64_t forced = p->forced_first;
    if (p->causal && p->forced_local > 0)
        forced += p->forced_local +
                  (p->select_block - gcd(p->tile, p->select_block) + p->tile - 1) / p->select_block;
    if (p->num_selected < forced)
        return error_argument("num_selected is %lld: at least the %lld forced blocks (first %lld, local "
                              "%lld, tile %lld) are accepted",
                              (long long)p->num_selected, (long long)forced, (long long)p->forced_first,
                              (long long)p->forced_local, (long long)p->tile);
    return QUERN_OK;
}

static quern_status check_metric(const quern_nsa_params *p)
{
    if (p->metric == QUERN_NSA_METRIC_MEAN_LOGIT &&
        (p->stride != p->block_size || p->select_block != p->block_size))
        return error_argument("metric mean-logit with block_size %lld, stride %lld, select_block %lld: three "
                              "equal ones are accepted",
                              (long long)p->block_size, (long long)p->stride, (long long)p->select_block);
    return QUERN_OK;
}

static quern_status check_groups(const quern_nsa_params *p)
{
    if (p->max_compressed_groups == 0) {
        if (p->groups == QUERN_NSA_LIST_GIVEN)
            return error_argument(
                "groups is given with max_compressed_groups 0: 1 or more is accepted with it");
        return QUERN_OK;
    }
    if (p->metric != QUERN_NSA_METRIC_MEAN_LOGIT)
        return error_argument(
            "max_compressed_groups is %lld with metric softmax: mean-logit is accepted with it",
            (long long)p->max_compressed_groups);
    const int64_t least = p->causal ? 1 + (p->tile - 1 + STAGE_GROUP_ENTRIES * p->stride - 1) /
                                              (STAGE_GROUP_ENTRIES * p->stride)
                                    : 1;
    return error_in_range("max_compressed_groups", p->max_compressed_groups, least, INT32_MAX);
}

/* The block indexer, and the selected branch alone without a gate. */
static quern_status check_indexed(const quern_nsa_params *p, bool forward)
{
    static const char *const gates[] = {"none", "weights", "given"};
    if (forward && p->selection == QUERN_NSA_LIST_INDEXED && (p->tile != 1 || !p->causal))
        return error_argument(
            "selection is indexed with tile %lld, causal %s: tile 1, causal true is accepted",
            (long long)p->tile, p->causal ? "true" : "false");
    if (!p->ungated) return QUERN_OK;
    if (p->branches != QUERN_NSA_BRANCH_SLC || p->gate != QUERN_NSA_GATE_NONE)
        return error_argument(
            "ungated with branches %u, gate %s: branches slc (%d) alone, gate none is accepted", p->branches,
            gates[p->gate], QUERN_NSA_BRANCH_SLC);
    if (p->selection == QUERN_NSA_LIST_COMPUTED)
        return error_argument("ungated with selection computed: q_index and k_index (indexed), or block_idx "
                              "(given) is accepted");
    return QUERN_OK;
}

/* Whether the operation has no part that reads entries' lengths. */
static bool reads_no_entries(const quern_nsa_params *p, int32_t op)
{
    if (op == NSA_ATTEND || op == NSA_ATTEND_BACKWARD) return (p->branches & QUERN_NSA_BRANCH_CMP) == 0;
    return (op == NSA_FORWARD || op == NSA_BACKWARD) && !nsa_has_entries(p);
}

quern_status nsa_check_params(op_call *call)
{
    quern_nsa_params *p = &((nsa_call *)call)->params;
    const int32_t op = call->operation;
    const bool whole = op == NSA_FORWARD || op == NSA_BACKWARD;
    quern_status status = whole ? check_indexed(p, op == NSA_FORWARD) : QUERN_OK;
    if (status != QUERN_OK) return status;
    if (p->select_block == 0) p->select_block = p->block_size;
    if ((status = error_in_range("select_block", p->select_block, 1, INT32_MAX)) != QUERN_OK) return status;
    if (reads_no_entries(p, op)) p->block_size = p->stride = p->select_block;
    if (p->stride == 0) p->stride = p->block_size;
    if (p->stride < 1 || p->stride > p->block_size)
        return error_in_range("stride", p->stride, 1, p->block_size);
    if (p->block_size % p->stride != 0)
        return error_argument("stride is %lld: a divisor of block_size %lld is accepted",
                              (long long)p->stride, (long long)p->block_size);
    if (p->select_block % p->stride != 0)
        return error_argument("select_block is %lld: a multiple of stride %lld is accepted",
                              (long long)p->select_block, (long long)p->stride);
    const bool selects = op == NSA_SELECT || (op == NSA_FORWARD && nsa_scores_entries(p)),
               indexes = op == NSA_FORWARD && (p->branches & QUERN_NSA_BRANCH_SLC) &&
                         p->selection == QUERN_NSA_LIST_INDEXED;
    const bool chooses_groups = op == NSA_FORWARD && (p->branches & QUERN_NSA_BRANCH_CMP) &&
                                p->max_compressed_groups > 0 && p->groups == QUERN_NSA_LIST_COMPUTED;
    const bool compress_alone = op == NSA_COMPRESS || op == NSA_COMPRESS_BACKWARD;
    const bool groups = op == NSA_FORWARD || op == NSA_BACKWARD || op == NSA_SELECT || op == NSA_ATTEND ||
                        op == NSA_ATTEND_BACKWARD;
    if (compress_alone && p->compress == QUERN_NSA_COMPRESS_GIVEN)
        return error_argument("compress is given: mean or linear is accepted to compress alone");
    status = op == NSA_BACKWARD || op == NSA_ATTEND_BACKWARD ? op_check_backward_scale(p->scale) : QUERN_OK;
    if (status == QUERN_OK && (selects || indexes)) status = check_selection(p);
    if (status == QUERN_OK && (selects || chooses_groups)) status = check_metric(p);
    if (status == QUERN_OK && groups) status = check_groups(p);
    return status;
}

static void set_tile256(quern_nsa_params *p)
{
    p->tile = 256;
    p->scope = QUERN_NSA_SCOPE_HEAD;
    p->metric = QUERN_NSA_METRIC_MEAN_LOGIT;
    p->forced_first = 0;
    p->forced_local = 0;
    p->compressed_visibility = QUERN_NSA_VISIBLE_STARTED;
    p->stride = 0;
    p->select_block = 0;
    p->gate = QUERN_NSA_GATE_WEIGHTS;
}

static void set_msa(quern_nsa_params *p)
{
    p->select_block = 128;
    p->num_selected = 16;
    p->tile = 1;
    p->scope = QUERN_NSA_SCOPE_GROUP;
    p->forced_first = 0;
    p->forced_local = 1;
    p->branches = QUERN_NSA_BRANCH_SLC;
    p->gate = QUERN_NSA_GATE_NONE;
    p->ungated = true;
}

quern_status quern_nsa_params_preset(quern_nsa_params *params, const char *name)
{
    quern_nsa_params p = QUERN_NSA_PARAMS_INIT;
    const quern_status status = op_struct(&p, params, "params", "QUERN_NSA_PARAMS_INIT");
    if (status != QUERN_OK) return status;
    if (name != NULL && strcmp(name, "tile256") == 0) {
        set_tile256(&p);
    } else if (name != NULL && strcmp(name, "msa") == 0) {
        set_msa(&p);
    } else {
        return error_argument("preset '%s': tile256, msa are accepted",
                              TEXT_NAME(name != NULL ? name : "NULL"));
    }
    op_struct_give(params, &p);
    return QUERN_OK;
}
