/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* checkpoint_names_test.c - what the names of real checkpoints' tensors say. */
#include "io/checkpoint_names.h"

#include "cmocka_c11.h"

#include <string.h>

static const struct row {
    const char *name, *module;
    name_role role;
    name_part part;
    int64_t layer, expert;
    bool in_experts, stacked;
} rows[] = {
    {"model.layers.3.self_attn.q_proj.weight", "model.layers.3.self_attn.q_proj", NAME_WEIGHT, NAME_Q, 3, -1,
     0, 0},
    {"model.layers.3.self_attn.q_proj.bias", "model.layers.3.self_attn.q_proj", NAME_BIAS, NAME_Q, 3, -1, 0,
     0},
    {"model.layers.10.mlp.experts.7.up_proj.weight_scale_2", "model.layers.10.mlp.experts.7.up_proj",
     NAME_WEIGHT_SCALE_2, NAME_UP, 10, 7, 1, 0},
    {"model.layers.0.mlp.experts.gate_up_proj_blocks", "model.layers.0.mlp.experts.gate_up_proj", NAME_BLOCKS,
     NAME_GATE_UP, 0, -1, 1, 1},
    {"model.layers.0.mlp.experts.down_proj_scales", "model.layers.0.mlp.experts.down_proj", NAME_SCALES,
     NAME_DOWN, 0, -1, 1, 1},
    {"model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.gate_up_proj", NAME_OTHER,
     NAME_GATE_UP, 0, -1, 1, 1},
    {"model.layers.0.mlp.experts.down_proj_bias", "model.layers.0.mlp.experts.down_proj", NAME_BIAS,
     NAME_DOWN, 0, -1, 1, 1},
    {"model.layers.0.mlp.down_proj.weight", "model.layers.0.mlp.down_proj", NAME_WEIGHT, NAME_DOWN, 0, -1, 0,
     0},
    {"model.layers.0.mlp.shared_experts.gate_proj.weight", "model.layers.0.mlp.shared_experts.gate_proj",
     NAME_WEIGHT, NAME_GATE, 0, -1, 0, 0},
    {"layers.2.ffn.experts.255.w1.scale", "layers.2.ffn.experts.255.w1", NAME_SCALE, NAME_GATE, 2, 255, 1, 0},
    {"layers.2.ffn.shared_experts.w3.weight", "layers.2.ffn.shared_experts.w3", NAME_WEIGHT, NAME_UP, 2, -1,
     0, 0},
    {"mtp.0.ffn.experts.1.w2.weight", "mtp.0.ffn.experts.1.w2", NAME_WEIGHT, NAME_DOWN, 0, 1, 1, 0},
    {"encoder.layer.5.attention.self.query.weight", "encoder.layer.5.attention.self.query", NAME_WEIGHT,
     NAME_Q, 5, -1, 0, 0},
    {"blk.4.ffn_gate_exps.weight", "blk.4.ffn_gate_exps", NAME_WEIGHT, NAME_GATE, 4, -1, 1, 1},
    {"x.weight_packed", "x", NAME_WEIGHT_PACKED, NAME_NO_PART, -1, -1, 0, 0},
    {"x.weight_global_scale", "x", NAME_WEIGHT_GLOBAL_SCALE, NAME_NO_PART, -1, -1, 0, 0},
    {"x.weight_scale", "x", NAME_WEIGHT_SCALE, NAME_NO_PART, -1, -1, 0, 0},
    {"x.weight_scale_inv", "x", NAME_WEIGHT_SCALE_INV, NAME_NO_PART, -1, -1, 0, 0},
    {"x.input_global_scale", "x", NAME_INPUT_GLOBAL_SCALE, NAME_NO_PART, -1, -1, 0, 0},
    {"norm.weight", "norm", NAME_WEIGHT, NAME_NO_PART, -1, -1, 0, 0},
    {"layers.1.ffn.gate.tid2eid", "layers.1.ffn.gate.tid2eid", NAME_OTHER, NAME_NO_PART, 1, -1, 0, 0},
    {".weight", ".weight", NAME_OTHER, NAME_NO_PART, -1, -1, 0, 0},
    {"", "", NAME_OTHER, NAME_NO_PART, -1, -1, 0, 0},
};

static void names_are_read(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const struct row *r = &rows[i];
        const checkpoint_name n = checkpoint_name_read(r->name);
        if (n.role != r->role || n.part != r->part || n.layer != r->layer || n.expert != r->expert ||
            n.in_experts != r->in_experts || n.stacked != r->stacked || n.module != strlen(r->module) ||
            strncmp(r->name, r->module, n.module) != 0 || n.mtp != (r->name[0] == 'm' && r->name[1] == 't'))
            fail_msg("'%s': role %d, part %d, layer %d, expert %d, in experts %d, stacked %d, module of %zu",
                     r->name, n.role, n.part, (int)n.layer, (int)n.expert, n.in_experts, n.stacked, n.module);
    }
}

static void shared_experts_are_known(void **state)
{
    static const char *const shared[] = {"model.layers.0.mlp.shared_expert.up_proj.weight",
                                         "model.layers.0.mlp.shared_experts.up_proj.weight_scale",
                                         "layers.0.ffn.shared_experts.w3.scale", "blk.0.ffn_up_shexp.weight"};
    (void)state;
    for (size_t i = 0; i < sizeof shared / sizeof *shared; i++) {
        const checkpoint_name n = checkpoint_name_read(shared[i]);
        assert_true(n.shared && !n.in_experts && n.part == NAME_UP && n.layer == 0);
    }
    assert_int_equal(checkpoint_name_read("blk.0.ffn_down_shexp.weight").part, NAME_DOWN);
    assert_false(checkpoint_name_read("model.layers.0.mlp.shared_expert_gate.weight").shared);
    assert_false(checkpoint_name_read("model.layers.0.mlp.experts.0.up_proj.weight").shared);
}

static bool fused(const char *a, const char *b)
{
    const checkpoint_name of_a = checkpoint_name_read(a), of_b = checkpoint_name_read(b);
    return checkpoint_names_fused(a, &of_a, b, &of_b);
}

static void fused_modules_are_known(void **state)
{
    (void)state;
    assert_true(fused("l.0.a.q_proj.weight", "l.0.a.v_proj.weight"));
    assert_true(fused("l.0.m.experts.3.gate_proj.weight", "l.0.m.experts.3.up_proj.weight"));
    assert_true(fused("layers.0.ffn.experts.3.w1.weight", "layers.0.ffn.experts.3.w3.weight"));
    assert_false(fused("layers.0.ffn.experts.3.w1.weight", "layers.0.ffn.experts.3.w2.weight"));
    assert_false(fused("layers.0.ffn.experts.3.w1.weight", "layers.0.ffn.experts.4.w3.weight"));
    assert_false(fused("l.0.a.q_proj.weight", "l.1.a.k_proj.weight"));
    assert_false(fused("l.0.a.q_proj.weight", "l.0.a.o_proj.weight"));
    assert_false(fused("l.0.a.q_proj.weight", "l.0.a.up_proj.weight"));
}

static void kinds_of_modules_are_known(void **state)
{
    (void)state;
    assert_true(checkpoint_name_is_router("model.layers.0.mlp.gate.weight"));
    assert_false(checkpoint_name_is_router("model.layers.0.mlp.gate_proj.weight"));
    assert_true(checkpoint_name_is_embedding("model.embed_tokens.weight"));
    assert_true(checkpoint_name_is_embedding("embeddings.word_embeddings.weight"));
    assert_true(checkpoint_name_is_embedding("shared.weight"));
    assert_false(checkpoint_name_is_embedding("model.layers.0.mlp.shared_experts.up_proj.weight"));
    assert_true(checkpoint_name_is_norm("encoder.layer.0.output.LayerNorm.weight"));
    assert_true(checkpoint_name_is_head("lm_head.weight"));
    assert_true(checkpoint_name_is_head("head.weight"));
    assert_false(checkpoint_name_is_head("layers.0.attn.wo_a.weight"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names_are_read),
        cmocka_unit_test(shared_experts_are_known),
        cmocka_unit_test(fused_modules_are_known),
        cmocka_unit_test(kinds_of_modules_are_known),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
