/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "ops.h"

#include <string.h>

static const char *const compress_choices[] = {"mean", "linear", "given", NULL};
static const char *const scope_choices[] = {"group", "head", NULL};
static const char *const metric_choices[] = {"softmax", "mean_logit", NULL};
static const char *const visibility_choices[] = {"complete", "started", NULL};

#define AT(member) offsetof(any_params, member)
static const option_row attention_params[] = {
    {"causal", OPTION_BOOL, AT(attention.causal), NULL, "a query sees keys up to its own position"},
    {"window", OPTION_INT, AT(attention.window), NULL, "keys seen, self included; 0: all"},
    {"scale", OPTION_FLOAT, AT(attention.scale), NULL, "of the scores; 0: 1/sqrt(D)"},
    {"query-offset", OPTION_INT, AT(attention.query_offset), NULL, "position of query 0; -1: Nkv - Nq"},
};
static const option_row nsa_params[] = {
    {"block-size", OPTION_INT, AT(nsa.block_size), NULL, "l, compression block length"},
    {"stride", OPTION_INT, AT(nsa.stride), NULL, "d, its stride; divides l; 0: l"},
    {"select-block", OPTION_INT, AT(nsa.select_block), NULL, "l', selection block length; a multiple of d; 0: l"},
    {"num-selected", OPTION_INT, AT(nsa.num_selected), NULL, "k, selected blocks per tile, forced ones included"},
    {"tile", OPTION_INT, AT(nsa.tile), NULL, "Tq, consecutive queries that share a selection, 1 to 256"},
    {"window", OPTION_INT, AT(nsa.window), NULL, "W, window length in keys, self included"},
    {"compress", OPTION_CHOICE, AT(nsa.compress), compress_choices, "how blocks are compressed; given: K_cmp, V_cmp are inputs"},
    {"scope", OPTION_CHOICE, AT(nsa.scope), scope_choices, "heads that share a selection: all of a key/value head, or none"},
    {"metric", OPTION_CHOICE, AT(nsa.metric), metric_choices, "score of a block; mean_logit needs l = d = l'"},
    {"compressed-visibility", OPTION_CHOICE, AT(nsa.compressed_visibility), visibility_choices,
     "an entry is seen once its whole block has passed, or has begun"},
    {"forced-first", OPTION_INT, AT(nsa.forced_first), NULL, "first blocks, always selected"},
    {"forced-local", OPTION_INT, AT(nsa.forced_local), NULL, "newest blocks, always selected; those of the tile count as one; causal only"},
    {"max-compressed-groups", OPTION_INT, AT(nsa.max_compressed_groups), NULL, "c, groups of 128 entries attended; 0: all; needs mean_logit"},
    {"causal", OPTION_BOOL, AT(nsa.causal), NULL, "a query sees nothing after its own position"},
    {"scale", OPTION_FLOAT, AT(nsa.scale), NULL, "of the scores; 0: 1/sqrt(D)"},
    {"branches", OPTION_BRANCHES, AT(nsa.branches), NULL, "branches that are computed"},
};
static const option_row list_rows[] = {
    {"from", OPTION_INT, AT(list.from), NULL, "block length of the list"},
    {"to", OPTION_INT, AT(list.to), NULL, "block length wanted; one divides the other"},
    {"n", OPTION_INT, AT(list.n), NULL, "tokens of the sequence"},
};
#undef AT

#define AT(member) offsetof(quern_attention_tensors, member)
static const slot attention_slots[] = {
    {"Q", AT(q), SLOT_ACT, "B Nq H D", "Tq H D"},
    {"K", AT(k), SLOT_ACT, "B Nkv Hkv D", "Tkv Hkv D"},
    {"V", AT(v), SLOT_ACT, "B Nkv Hkv Dv", "Tkv Hkv Dv"},
    {"cu_seqlens_q", AT(cu_seqlens_q), SLOT_I32, "B+1", NULL},
    {"cu_seqlens_kv", AT(cu_seqlens_kv), SLOT_I32, "B+1", NULL},
    {"O", AT(o), SLOT_ACT, "B Nq H Dv", "Tq H Dv"},
    {"lse", AT(lse), SLOT_F32, "B H Nq", "H Tq"},
    {"dO", AT(d_o), SLOT_ACT, "=O", NULL},
    {"dQ", AT(d_q), SLOT_ACT, "=Q", NULL},
    {"dK", AT(d_k), SLOT_ACT, "=K", NULL},
    {"dV", AT(d_v), SLOT_ACT, "=V", NULL},
};
#undef AT
#define AT(member) offsetof(quern_nsa_tensors, member)
static const slot nsa_slots[] = {
    {"Q", AT(q), SLOT_ACT, "B N H D", "T H D"},
    {"K", AT(k), SLOT_ACT, "B N Hkv D", "T Hkv D"},
    {"V", AT(v), SLOT_ACT, "B N Hkv Dv", "T Hkv Dv"},
    {"K_slc", AT(k_slc), SLOT_ACT, "B N Hkv D", "T Hkv D"},
    {"V_slc", AT(v_slc), SLOT_ACT, "B N Hkv Dv", "T Hkv Dv"},
    {"K_win", AT(k_win), SLOT_ACT, "B N Hkv D", "T Hkv D"},
    {"V_win", AT(v_win), SLOT_ACT, "B N Hkv Dv", "T Hkv Dv"},
    {"K_cmp", AT(k_cmp), SLOT_ACT, "B Nc Hkv D", "Tc Hkv D"},
    {"V_cmp", AT(v_cmp), SLOT_ACT, "B Nc Hkv Dv", "Tc Hkv Dv"},
    {"cu_seqlens", AT(cu_seqlens), SLOT_I32, "B+1", NULL},
    {"cu_seqlens_cmp", AT(cu_seqlens_cmp), SLOT_I32, "B+1", NULL},
    {"W_k", AT(w_k), SLOT_WEIGHT, "Hkv D D | Hkv l*D D", NULL},
    {"W_v", AT(w_v), SLOT_WEIGHT, "Hkv Dv Dv | Hkv l*Dv Dv", NULL},
    {"pe_k", AT(pe_k), SLOT_WEIGHT, "Hkv l D", NULL},
    {"pe_v", AT(pe_v), SLOT_WEIGHT, "Hkv l Dv", NULL},
    {"gate", AT(w_gate), SLOT_WEIGHT, "H 3 D", NULL},
    {"gates", AT(gates), SLOT_F32, "B N H 3", "T H 3"},
    {"block_idx", AT(block_idx), SLOT_I32, "B Hs tiles k", "Hs rows k"},
    {"block_count", AT(block_count), SLOT_I32, "B Hs tiles", "Hs rows"},
    {"group_idx", AT(group_idx), SLOT_I32, "B Hs tiles c", "Hs rows c"},
    {"O", AT(o), SLOT_ACT, "B N H Dv", "T H Dv"},
    {"O_cmp", AT(o_cmp), SLOT_ACT, "B N H Dv", "T H Dv"},
    {"O_slc", AT(o_slc), SLOT_ACT, "B N H Dv", "T H Dv"},
    {"O_win", AT(o_win), SLOT_ACT, "B N H Dv", "T H Dv"},
    {"lse_cmp", AT(lse_cmp), SLOT_F32, "B H N", "H T"},
    {"lse_slc", AT(lse_slc), SLOT_F32, "B H N", "H T"},
    {"lse_win", AT(lse_win), SLOT_F32, "B H N", "H T"},
    {"dO", AT(d_o), SLOT_ACT, "=O", NULL},
    {"dO_cmp", AT(d_o_cmp), SLOT_ACT, "=O_cmp", NULL},
    {"dO_slc", AT(d_o_slc), SLOT_ACT, "=O_slc", NULL},
    {"dO_win", AT(d_o_win), SLOT_ACT, "=O_win", NULL},
    {"dQ", AT(d_q), SLOT_ACT, "=Q", NULL},
    {"dK", AT(d_k), SLOT_ACT, "=K", NULL},
    {"dV", AT(d_v), SLOT_ACT, "=V", NULL},
    {"dK_slc", AT(d_k_slc), SLOT_ACT, "=K_slc", NULL},
    {"dV_slc", AT(d_v_slc), SLOT_ACT, "=V_slc", NULL},
    {"dK_win", AT(d_k_win), SLOT_ACT, "=K_win", NULL},
    {"dV_win", AT(d_v_win), SLOT_ACT, "=V_win", NULL},
    {"dK_cmp", AT(d_k_cmp), SLOT_ACT, "=K_cmp", NULL},
    {"dV_cmp", AT(d_v_cmp), SLOT_ACT, "=V_cmp", NULL},
    {"dW_k", AT(d_w_k), SLOT_F32, "=W_k", NULL},
    {"dW_v", AT(d_w_v), SLOT_F32, "=W_v", NULL},
    {"dpe_k", AT(d_pe_k), SLOT_F32, "=pe_k", NULL},
    {"dpe_v", AT(d_pe_v), SLOT_F32, "=pe_v", NULL},
    {"dgate", AT(d_w_gate), SLOT_F32, "=gate", NULL},
    {"dgates", AT(d_gates), SLOT_F32, "=gates", NULL},
};
#undef AT
static const slot list_slots[] = {
    {"block_idx", offsetof(quern_nsa_list_tensors, in), SLOT_I32, "... k", NULL},
    {"converted_idx", offsetof(quern_nsa_list_tensors, out), SLOT_I32, "... k_out", NULL},
    {"converted_count", offsetof(quern_nsa_list_tensors, count), SLOT_I32, "...", NULL},
};

#define COUNT(array) (sizeof(array) / sizeof *(array))
const family family_attention = {"attention", attention_slots, COUNT(attention_slots), attention_params,
                                 COUNT(attention_params), "cu_seqlens_q"};
const family family_nsa = {"nsa", nsa_slots, COUNT(nsa_slots), nsa_params, COUNT(nsa_params), "cu_seqlens"};
const family family_list = {"list", list_slots, COUNT(list_slots), list_rows, COUNT(list_rows), ""};

const operation operations[] = {
    {.name = "attention",
     .help = "dense attention; with dO also its backward",
     .family = &family_attention,
     .needs = "Q K V",
     .takes = "cu_seqlens_q cu_seqlens_kv",
     .gives = "O lse",
     .trigger = "dO",
     .gradients = "dQ dK dV",
     .forward = {.attention_size = quern_attention_forward_workspace, .attention = quern_attention_forward},
     .backward = {.attention_size = quern_attention_backward_workspace, .attention = quern_attention_backward}},
    {.name = "nsa",
     .help = "native sparse attention, the whole; with dO also its backward. gate: gates by weights; gates: "
             "handed in; neither: 1/3 each. block_idx, group_idx: handed-in lists",
     .family = &family_nsa,
     .needs = "Q K V",
     .takes = "K_slc V_slc K_win V_win K_cmp V_cmp W_k W_v pe_k pe_v gate gates block_idx group_idx cu_seqlens",
     .gives = "O gates block_idx block_count group_idx K_cmp V_cmp cu_seqlens_cmp lse_cmp lse_slc lse_win O_cmp "
              "O_slc O_win",
     .trigger = "dO",
     .gradients = "dQ dK dV dK_slc dV_slc dK_win dV_win dK_cmp dV_cmp dW_k dW_v dpe_k dpe_v dgate dgates",
     .forward = {.nsa_size = quern_nsa_forward_workspace, .nsa = quern_nsa_forward},
     .backward = {.nsa_size = quern_nsa_backward_workspace, .nsa = quern_nsa_backward}},
    {.name = "nsa-compress",
     .help = "compress keys and values; with dK_cmp and dV_cmp also the backward",
     .family = &family_nsa,
     .needs = "K V",
     .takes = "W_k W_v pe_k pe_v cu_seqlens",
     .gives = "K_cmp V_cmp cu_seqlens_cmp",
     .trigger = "dK_cmp dV_cmp",
     .gradients = "dK dV dW_k dW_v dpe_k dpe_v",
     .forward = {.nsa_size = quern_nsa_compress_workspace, .nsa = quern_nsa_compress},
     .backward = {.nsa_size = quern_nsa_compress_backward_workspace, .nsa = quern_nsa_compress_backward}},
    {.name = "nsa-select",
     .help = "choose the blocks of every tile",
     .family = &family_nsa,
     .needs = "Q K_cmp",
     .takes = "lse_cmp cu_seqlens cu_seqlens_cmp",
     .gives = "block_idx block_count group_idx",
     .trigger = "",
     .gradients = "",
     .forward = {.nsa_size = quern_nsa_select_workspace, .nsa = quern_nsa_select}},
    {.name = "nsa-attend",
     .help = "attend over the branches asked for; with dO_cmp, dO_slc, dO_win also the backward",
     .family = &family_nsa,
     .needs = "Q",
     .takes = "K V K_slc V_slc K_win V_win K_cmp V_cmp block_idx group_idx cu_seqlens cu_seqlens_cmp",
     .gives = "O_cmp O_slc O_win lse_cmp lse_slc lse_win",
     .trigger = "dO_cmp dO_slc dO_win",
     .gradients = "dQ dK dV dK_slc dV_slc dK_win dV_win dK_cmp dV_cmp",
     .forward = {.nsa_size = quern_nsa_attend_workspace, .nsa = quern_nsa_attend},
     .backward = {.nsa_size = quern_nsa_attend_backward_workspace, .nsa = quern_nsa_attend_backward}},
    {.name = "nsa-gates",
     .help = "compute the gates",
     .family = &family_nsa,
     .needs = "Q gate",
     .takes = "cu_seqlens",
     .gives = "gates",
     .trigger = "",
     .gradients = "",
     .forward = {.nsa_size = quern_nsa_gates_workspace, .nsa = quern_nsa_gates}},
    {.name = "nsa-combine",
     .help = "combine the branches by gates handed in, or 1/3 each",
     .family = &family_nsa,
     .needs = "",
     .takes = "O_cmp O_slc O_win gates cu_seqlens",
     .gives = "O",
     .trigger = "",
     .gradients = "",
     .forward = {.nsa_size = quern_nsa_combine_workspace, .nsa = quern_nsa_combine}},
    {.name = "nsa-gate",
     .help = "compute the gates and combine in one pass; with dO also the backward (dQ is the gate's share)",
     .family = &family_nsa,
     .needs = "",
     .takes = "Q gate gates O_cmp O_slc O_win cu_seqlens",
     .gives = "gates O",
     .trigger = "dO",
     .gradients = "dO_cmp dO_slc dO_win dQ dgate dgates",
     .forward = {.nsa_size = quern_nsa_gate_workspace, .nsa = quern_nsa_gate},
     .backward = {.nsa_size = quern_nsa_gate_backward_workspace, .nsa = quern_nsa_gate_backward}},
    {.name = "nsa-list-convert",
     .help = "convert a list of blocks to another block length",
     .family = &family_list,
     .needs = "block_idx",
     .takes = "",
     .gives = "converted_idx converted_count",
     .trigger = "",
     .gradients = "",
     .forward = {.list_size = quern_nsa_list_convert_workspace, .list = quern_nsa_list_convert}},
};
const size_t operation_count = COUNT(operations);

const operation *operation_named(const char *name)
{
    for (size_t i = 0; i < operation_count; i++)
        if (strcmp(operations[i].name, name) == 0) return &operations[i];
    return NULL;
}

const slot *slot_named(const family *f, const char *name, size_t length)
{
    for (size_t i = 0; i < f->slot_count; i++)
        if (strlen(f->slots[i].name) == length && memcmp(f->slots[i].name, name, length) == 0) return &f->slots[i];
    return NULL;
}

bool list_has(const char *list, const char *name)
{
    const size_t length = strlen(name);
    for (const char *at = list; (at = strstr(at, name)) != NULL; at += length)
        if ((at == list || at[-1] == ' ') && (at[length] == '\0' || at[length] == ' ')) return true;
    return false;
}

bool list_each(const family *f, const char *list, bool (*visit)(void *arg, const slot *s), void *arg)
{
    for (const char *at = list; *at != '\0';) {
        const size_t length = strcspn(at, " ");
        if (!visit(arg, slot_named(f, at, length))) return false;
        at += length;
        at += strspn(at, " ");
    }
    return true;
}

const quern_tensor *slot_get(const any_tensors *tensors, const slot *s)
{
    return *(const quern_tensor *const *)((const char *)tensors + s->offset);
}

void slot_set(any_tensors *tensors, const slot *s, const quern_tensor *t)
{
    *(const quern_tensor **)((char *)tensors + s->offset) = t;
}

any_params params_init(const family *f)
{
    if (f == &family_attention) return (any_params){.attention = QUERN_ATTENTION_PARAMS_INIT};
    if (f == &family_nsa) return (any_params){.nsa = QUERN_NSA_PARAMS_INIT};
    return (any_params){.list = QUERN_NSA_LIST_PARAMS_INIT};
}

any_tensors tensors_init(const family *f)
{
    any_tensors t;
    memset(&t, 0, sizeof t);
    if (f == &family_attention) t.attention.size = sizeof t.attention;
    if (f == &family_nsa) t.nsa.size = sizeof t.nsa;
    if (f == &family_list) t.list.size = sizeof t.list;
    return t;
}

quern_status pass_size(const pass *p, quern_context *ctx, const any_params *params, const any_tensors *tensors,
                       size_t *bytes)
{
    if (p->attention_size != NULL) return p->attention_size(ctx, &params->attention, &tensors->attention, bytes);
    if (p->nsa_size != NULL) return p->nsa_size(ctx, &params->nsa, &tensors->nsa, bytes);
    return p->list_size(ctx, &params->list, &tensors->list, bytes);
}

quern_status pass_run(const pass *p, quern_context *ctx, const any_params *params, const any_tensors *tensors,
                      void *workspace, size_t bytes)
{
    if (p->attention != NULL) return p->attention(ctx, NULL, &params->attention, &tensors->attention, workspace, bytes);
    if (p->nsa != NULL) return p->nsa(ctx, NULL, &params->nsa, &tensors->nsa, workspace, bytes);
    return p->list(ctx, NULL, &params->list, &tensors->list, workspace, bytes);
}

bool pass_exists(const pass *p)
{
    return p->attention != NULL || p->nsa != NULL || p->list != NULL;
}
