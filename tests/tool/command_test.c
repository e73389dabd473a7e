/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * command_test.c - the command as a script sees it: exit codes, one sentence on a mistake, outputs untouched
 * on an error, and the golden vectors through `quern run`.
 */
#include "command.h"

#include <quern/op.h>
#include <quern/safetensors.h>

/* Copies tensors of a golden file under other names: "W=gate Q=Q" becomes a file with gate and Q. */
static void copy_renamed(const char *golden, const char *pairs, const char *name)
{
    enum { MAX = 16 };
    quern_safetensors *file = NULL;
    quern_safetensors_item items[MAX];
    quern_tensor views[MAX];
    char from[MAX][32], to[MAX][32], path[512];
    size_t n = 0;
    snprintf(path, sizeof path, "%s/%s", QUERN_TEST_VECTORS, golden);
    assert_int_equal(quern_safetensors_open(path, &file), QUERN_OK);
    for (const char *at = pairs; *at != '\0' && n < MAX; n++) {
        int used = 0;
        assert_int_equal(sscanf(at, "%31[^=]=%31[^ ] %n", from[n], to[n], &used), 2);
        assert_int_equal(quern_safetensors_get(file, from[n], &views[n]), QUERN_OK);
        items[n] = (quern_safetensors_item){to[n], &views[n]};
        at += used;
    }
    assert_int_equal(quern_safetensors_save(path_of(name), items, n, NULL, 0), QUERN_OK);
    quern_safetensors_close(file);
}

static void every_verb_has_help(void **state)
{
    static const char *const verbs[] = {"info", "run", "quantize", "compare", "bench", "probe"};
    (void)state;
    expect(0, "--help", "usage: quern VERB");
    expect(0, "--version", "quern 0.");
    for (size_t i = 0; i < sizeof verbs / sizeof *verbs; i++) {
        char arguments[64];
        snprintf(arguments, sizeof arguments, "%s --help", verbs[i]);
        assert_int_equal(run(arguments), 0);
        assert_non_null(strstr(output, "usage: quern "));
        assert_non_null(strstr(output, "example"));
        assert_non_null(strstr(output, "exit codes:"));
        snprintf(arguments, sizeof arguments, "%s --no-such-option", verbs[i]);
        expect(2, arguments, "--no-such-option");
    }
}

static void every_operation_has_help_of_its_own(void **state)
{
    quern_op_info info;
    (void)state;
    for (size_t i = 0; quern_op_at(i) != NULL; i++) {
        char arguments[64], usage[96], line[80];
        quern_op_tensor tensors[QUERN_OP_TENSORS_MAX];
        assert_int_equal(quern_op_get(quern_op_at(i), &info), QUERN_OK);
        assert_int_equal(quern_op_get_tensors(quern_op_at(i), tensors), QUERN_OK);
        snprintf(arguments, sizeof arguments, "run %s --help", info.name);
        snprintf(usage, sizeof usage, "usage: quern run %s IN.safetensors OUT.safetensors", info.name);
        int32_t first = 0;
        while (!tensors[first].input) first++;
        snprintf(line, sizeof line, "\n    %s", tensors[first].name);
        expect(0, arguments, usage);
        assert_non_null(strstr(output, "\ntensors:\n    "));
        assert_non_null(strstr(output, line));
        assert_non_null(strstr(output, "\n  --threads INT"));
        assert_null(strstr(output, " \n"));
    }
    expect(0, "run nsa-decode --help", "cache_bytes");
}

static void wrong_command_lines_are_usage_errors(void **state)
{
    (void)state;
    expect(2, "frobnicate", "'frobnicate'");
    expect(2, "info extra", "'extra'");
    expect(2, "run nsa one-word", "OP IN OUT");
    expect(2, "run no-such-op a b", "'no-such-op'");
    expect(2, "run nsa a b --window", "needs a value");
    expect(2, "run nsa a b --window 3x", "--window '3x'");
    expect(2, "run nsa a b --window 99999999999999999999", "--window");
    expect(2, "run nsa a b --scope tribe", "group|head");
    expect(2, "run nsa a b --causal maybe", "true|false");
    expect(2, "run nsa a b --branches cmp,all", "--branches");
    expect(2, "run nsa a b --profile none-such", "none-such");
    expect(2, "run attention a b --profile tile256", "--profile");
    expect(2, "run attention a b --tile 64", "--tile");
    expect(2, "compare one", "A B");
    expect(2, "bench", "ceilings");
    expect(2, "bench attention --n 12,x", "--n '12,x'");
    expect(2, "bench attention --heads 3/2", "--heads '3/2'");
    expect(2, "bench attention --dim 128/", "--dim '128/'");
    expect(2, "bench attention --threads 1,-2", "--threads");
    expect(2, "probe nsa --memory lots", "--memory 'lots'");
    expect(2, "probe", "attention and nsa");
    expect(2, "info --threads 5000", "1024");
}

static void a_missing_device_or_level_is_reported(void **state)
{
    (void)state;
    expect(4, "info --device cuda", "cuda");
    expect(4, "run attention $VECTORS/nsa_small.safetensors $DIR/no.safetensors --device cuda", "cuda");
    assert_int_equal(run_with("QUERN_CPU=z80", "info"), 3);
    assert_non_null(strstr(output, "z80"));
}

static void info_says_what_this_is(void **state)
{
    (void)state;
    expect(0, "info", "level");
    assert_int_equal(run("info --json --threads 1"), 0);
    assert_non_null(strstr(output, "\"device\": \"cpu\""));
    assert_non_null(strstr(output, "\"threads\": 1"));
    assert_non_null(strstr(output, "\"isa\":"));
}

static void bad_files_leave_the_output_alone(void **state)
{
    static const char old[] = "the old contents";
    (void)state;
    write_text("old.safetensors", old, sizeof old);
    write_text("empty", "", 0);
    write_text("hostile", "\xff\xff\xff\xff\xff\xff\xff\x7f{}", 10);
    expect(3, "run attention $DIR/none $DIR/old.safetensors", "none");
    expect(3, "run attention $DIR/empty $DIR/old.safetensors", "0 bytes");
    expect(3, "run attention $DIR/hostile $DIR/old.safetensors", "header length");
    expect(3, "run attention /bin/sh $DIR/old.safetensors", "/bin/sh: it is no safetensors file");
    expect(3, "run attention $DIR $DIR/old.safetensors", "regular file");
    expect(3, "run attention $VECTORS/nsa_gating.safetensors $DIR/old.safetensors", "tensor K is missing");
    expect(3, "run attention $VECTORS/nsa_small.safetensors $DIR/old.safetensors --without Q,V",
           "tensor Q is missing");
    expect(3, "run attention $VECTORS/nsa_small.safetensors $DIR/old.safetensors --window -1", "window");
    expect(3, "run nsa $VECTORS/nsa_small.safetensors $DIR/old.safetensors --tile 0 --block-size 32", "tile");
    expect(3, "run nsa $VECTORS/nsa_small.safetensors $DIR/old.safetensors --num-selected 1 --block-size 32",
           "num_selected");
    expect(3, "compare $DIR/none $DIR/empty", "none");
    expect(3, "compare $VECTORS/nsa_small.safetensors $VECTORS/nsa_small.safetensors no_such", "no_such");
    char now[sizeof old];
    FILE *f = fopen(path_of("old.safetensors"), "rb");
    assert_non_null(f);
    assert_int_equal(fread(now, 1, sizeof now, f), sizeof now);
    fclose(f);
    assert_memory_equal(now, old, sizeof old);
    check_no_leftovers();
}

static void shapes_that_do_not_fit_are_reported(void **state)
{
    (void)state;
    copy_renamed("nsa_small.safetensors", "full.lse_slc=Q K=K V=V", "flat.safetensors");
    expect(3, "run attention $DIR/flat.safetensors $DIR/out.safetensors", "tensor Q has 3 dimensions");
    copy_renamed("nsa_small.safetensors", "Q=Q full.K_cmp=K V=V", "short.safetensors");
    assert_int_equal(run("run attention $DIR/short.safetensors $DIR/out.safetensors"), 3);
    copy_renamed("nsa_small.safetensors", "full.block_idx=Q K=K V=V", "integers.safetensors");
    assert_int_equal(run("run attention $DIR/integers.safetensors $DIR/out.safetensors"), 3);
    copy_renamed("nsa_small.safetensors", "Q=Q K=K V=V gate=gate full.gates=gates", "both.safetensors");
    expect(3, "run nsa $DIR/both.safetensors $DIR/out.safetensors --block-size 32", "both gate and gates");
    assert_false(exists("out.safetensors"));
}

static void an_unwritable_output_is_an_input_error(void **state)
{
    (void)state;
    expect(3, "run attention $VECTORS/nsa_small.safetensors $DIR/no/such/place.safetensors",
           "place.safetensors");
    expect(3, "run attention $VECTORS/nsa_small.safetensors $DIR", "regular file");
    expect(3, "run attention $VECTORS/nsa_small.safetensors /dev/full", "/dev/full");
    assert_int_equal(
        run_with("ulimit -f 8;", "run attention $VECTORS/nsa_small.safetensors $DIR/large.safetensors"), 3);
    assert_non_null(strstr(output, "large.safetensors"));
    assert_false(exists("large.safetensors"));
    check_no_leftovers();
}

static void the_reference_page_is_what_the_command_prints(void **state)
{
    static char page[sizeof output];
    (void)state;
    assert_int_equal(run("run --list --markdown"), 0);
    FILE *f = fopen(QUERN_DOCS "/run.md", "rb");
    assert_non_null(f);
    page[fread(page, 1, sizeof page - 1, f)] = '\0';
    fclose(f);
    assert_string_equal(output, page); /* quern run --list --markdown > docs/run.md */
}

/* Options and words of values are written with dashes; words are read with underscores too. */
static void option_values_are_hyphenated(void **state)
{
    (void)state;
    assert_int_equal(run("run --list --markdown"), 0);
    for (const char *row = output; (row = strstr(row, "\n| `--")) != NULL; row++) {
        const char *value = strstr(row, " | ");
        assert_non_null(value);
        const size_t length = (size_t)(strstr(value + 3, " | ") - row);
        if (memchr(row, '_', length) != NULL) fail_msg("underscores in %.*s", (int)length - 1, row + 1);
    }
    expect(3, "run csa-compress $DIR/none $DIR/out.safetensors --format fp8_power", "none");
    expect(3, "run csa-compress $DIR/none $DIR/out.safetensors --format fp8-power", "none");
    expect(3, "run csa-compress $DIR/none $DIR/out.safetensors --index-format fp8_power", "none");
    expect(3, "run nvfp4-quantize $DIR/none $DIR/out.safetensors --scales four-over-six", "none");
}

static void compare_finds_differences(void **state)
{
    (void)state;
    expect(0, "compare $VECTORS/nsa_small.safetensors $VECTORS/nsa_small.safetensors", "PASS");
    expect(1,
           "compare $VECTORS/nsa_small.safetensors $VECTORS/nsa_small.safetensors full.mslk.O=full.causal.O",
           "FAIL");
    expect(1, "compare $VECTORS/nsa_small.safetensors $VECTORS/nsa_small.safetensors Q=K --tolerance 1e30",
           "shapes differ");
    expect(
        1,
        "compare $VECTORS/nsa_small.safetensors $VECTORS/nsa_small.safetensors full.block_idx=nogate.n_valid",
        "FAIL");
    expect(1,
           "compare $VECTORS/nsa_small.safetensors $VECTORS/nsa_small.safetensors "
           "full.mslk.lse_cmp=full.causal.lse_cmp --tolerance 1e30",
           "infinities");
}

/* One golden case: run, then compare. */
static void golden(const char *input, const char *options, const char *vectors, const char *pairs)
{
    char arguments[1024];
    snprintf(arguments, sizeof arguments, "%s $DIR/golden.safetensors %s", input, options);
    if (run(arguments) != 0) fail_msg("quern %s: %s", arguments, output);
    snprintf(arguments, sizeof arguments, "compare $DIR/golden.safetensors $VECTORS/%s %s --tolerance 2e-6",
             vectors, pairs);
    if (run(arguments) != 0) fail_msg("quern %s (%s): %s", arguments, options, output);
}

#define SMALL "--profile tile256 --block-size 32 --num-selected 3 --window 64 --tile 64 --save-branches "
#define GRADIENTS(v) "O=" v ".O dQ=" v ".dQ dK=" v ".dK dV=" v ".dV "
#define DWEIGHTS(v) "dW_k=" v ".dW_k dW_v=" v ".dW_v "

static void golden_nsa_small_passes(void **state)
{
    static const char in[] = "run nsa $VECTORS/nsa_small.safetensors", file[] = "nsa_small.safetensors";
    (void)state;
    golden(in, SMALL, file,
           GRADIENTS("full.mslk") DWEIGHTS(
               "full.mslk") "dgate=full.mslk.dgate O_cmp=full.mslk.O_cmp lse_cmp=full.mslk.lse_cmp "
                            "O_slc=full.O_slc O_win=full.O_sld lse_slc=full.lse_slc lse_win=full.lse_sld "
                            "gates=full.gates K_cmp=full.K_cmp "
                            "V_cmp=full.V_cmp block_idx=full.block_idx_sorted block_count=full.n_valid");
    golden(in, SMALL "--compressed-visibility complete", file,
           GRADIENTS("full.causal") DWEIGHTS(
               "full.causal") "dgate=full.causal.dgate O_cmp=full.causal.O_cmp lse_cmp=full.causal.lse_cmp");
    golden(in, SMALL "--without gate", file, GRADIENTS("nogate.mslk") DWEIGHTS("nogate.mslk"));
    golden(in, SMALL "--without gate --compressed-visibility complete", file,
           GRADIENTS("nogate.causal") DWEIGHTS("nogate.causal"));
    golden(in, SMALL "--without W_k,W_v", file,
           GRADIENTS("noproj.mslk") "dgate=noproj.mslk.dgate block_idx=noproj.block_idx_sorted");
    golden(in, SMALL "--without W_k,W_v --compressed-visibility complete", file,
           GRADIENTS("noproj.causal") "dgate=noproj.causal.dgate");
    golden(in, SMALL "--causal false", file,
           GRADIENTS("noncausal.mslk")
               DWEIGHTS("noncausal.mslk") "dgate=noncausal.mslk.dgate block_idx=noncausal.block_idx_sorted");
}

static void golden_window_passes_as_dense_attention(void **state)
{
    (void)state;
    golden("run attention $VECTORS/nsa_small.safetensors", "--window 64", "nsa_small.safetensors",
           "O=full.O_sld lse=full.lse_sld");
}

static void golden_nsa_paper_b_passes(void **state)
{
    (void)state;
    golden("run nsa $VECTORS/nsa_paper_b.safetensors", "--block-size 16 --num-selected 6 --window 48",
           "nsa_paper_b.safetensors",
           "O dQ dK dV dW_k dW_v dgate lse_cmp lse_slc lse_win=lse_sld block_idx=sel_idx");
}

static void golden_nsa_gating_passes(void **state)
{
    static const char file[] = "nsa_gating.safetensors", branches[] = "O_cmp=O_cmp O_slc=O_slc O_sld=O_win";
    char pairs[128];
    (void)state;
    snprintf(pairs, sizeof pairs, "Q=Q W=gate dO=dO %s", branches);
    copy_renamed(file, pairs, "gate.safetensors");
    golden("run nsa-gate $DIR/gate.safetensors", "", file,
           "O=out gates dO_cmp dO_slc dO_win=dO_sld dQ dgate=dW");
    golden("run nsa-gates $DIR/gate.safetensors", "", file, "gates");
    snprintf(pairs, sizeof pairs, "gates=gates %s", branches);
    copy_renamed(file, pairs, "combine.safetensors");
    golden("run nsa-combine $DIR/combine.safetensors", "", file, "O=out");
    copy_renamed(file, branches, "plain.safetensors");
    golden("run nsa-combine $DIR/plain.safetensors", "", file, "O=out_nogate");
}

static void stages_alone_give_what_the_whole_gives(void **state)
{
    (void)state;
    golden("run nsa-compress $VECTORS/nsa_small.safetensors", "--block-size 32", "nsa_small.safetensors",
           "K_cmp=full.K_cmp V_cmp=full.V_cmp");
    copy_renamed("nsa_small.safetensors",
                 "Q=Q K=K V=V full.K_cmp=K_cmp full.V_cmp=V_cmp full.block_idx=block_idx",
                 "attend.safetensors");
    golden("run nsa-select $DIR/attend.safetensors", SMALL, "nsa_small.safetensors",
           "block_idx=full.block_idx_sorted block_count=full.n_valid");
    golden("run nsa-attend $DIR/attend.safetensors", SMALL, "nsa_small.safetensors",
           "O_cmp=full.mslk.O_cmp O_slc=full.O_slc O_win=full.O_sld lse_slc=full.lse_slc "
           "lse_win=full.lse_sld lse_cmp=full.mslk.lse_cmp");
    copy_renamed("nsa_small.safetensors", "full.block_idx_sorted=block_idx", "list.safetensors");
    assert_int_equal(
        run("run nsa-list-convert $DIR/list.safetensors $DIR/halves.safetensors --from 32 --to 16 --n 192"),
        0);
    assert_int_equal(
        run("run nsa-list-convert $DIR/list.safetensors $DIR/halves.safetensors --from 32 --to 20 --n 192"),
        3);
}

/* Names, shapes and dtypes of results that the parameters choose. */
static void results_follow_the_options(void **state)
{
    (void)state;
    copy_renamed("nvfp4_weights_scales.safetensors",
                 "rne.codes.w1=codes rne.scales.w1=scales rne.gscale.w1=global in.w1=X", "w1.safetensors");
    expect(0, "run nvfp4-dequantize $DIR/w1.safetensors $DIR/w1.out --layout weight --json", "\"W\"");
    expect(0, "compare $DIR/w1.out $VECTORS/nvfp4_weights_scales.safetensors W=in.w1 --tolerance 0.2",
           "PASS");
    expect(3, "compare $DIR/w1.out $DIR/w1.out X", "X");
    expect(0, "run nvfp4-dequantize $DIR/w1.safetensors $DIR/w1.bf16 --layout weight --dtype bf16", "");
    expect(1, "compare $DIR/w1.bf16 $DIR/w1.out W --tolerance 0.2", "dtypes differ");
    expect(0, "compare $DIR/w1.bf16 $DIR/w1.out W --tolerance 4e-3 --widen", "PASS");
    copy_renamed("nvfp4_quant.safetensors",
                 "rne.codes.gauss_s1=codes rne.scales.gauss_s1=scales rne.gscale.gauss_s1=global",
                 "a.safetensors");
    expect(0, "run nvfp4-dequantize $DIR/a.safetensors $DIR/a.out", "");
    expect(0, "compare $DIR/a.out $VECTORS/nvfp4_quant.safetensors X=in.gauss_s1 --tolerance 0.2", "PASS");
    expect(0, "run nvfp4-dequantize $DIR/a.safetensors $DIR/a.cut --columns 61", "");
    expect(1, "compare $DIR/a.cut $DIR/a.out X", "shapes differ");
    expect(3, "run nvfp4-dequantize $DIR/a.safetensors $DIR/none.safetensors --columns 40", "codes.shape[1]");
    expect(0, "run nvfp4-dequantize $DIR/a.safetensors $DIR/a.row --global-per row", ""); /* [] is of all */
    expect(0, "compare $DIR/a.row $DIR/a.out X --tolerance 0", "PASS");
    expect(2, "run nvfp4-dequantize $DIR/a.safetensors $DIR/none.safetensors --layout matrix",
           "activation|weight");
    assert_false(exists("none.safetensors"));
}

/* Files of two sequences, with their compressed rows or without, whose cu_seqlens_cmp follow from
 * cu_seqlens. */
static void handed_in_entries_of_varlen_sequences_count(void **state)
{
    static const char *const names[] = {"Q", "K", "V", "K_cmp", "V_cmp"};
    int32_t cu_seqlens[] = {0, 70, 192};
    quern_safetensors *file = NULL, *results = NULL;
    quern_tensor views[6] = {quern_tensor_contiguous(cu_seqlens, QUERN_I32, 1, (int64_t[]){3})};
    quern_safetensors_item items[6] = {{"cu_seqlens", &views[0]}};
    (void)state;
    assert_int_equal(quern_safetensors_open(QUERN_TEST_VECTORS "/nsa_small.safetensors", &file), QUERN_OK);
    for (int i = 1; i < 6; i++) {
        items[i] = (quern_safetensors_item){names[i - 1], &views[i]};
        if (i == 4) {
            assert_int_equal(quern_safetensors_save(path_of("varlen.safetensors"), items, 4, NULL, 0),
                             QUERN_OK);
            expect(0,
                   "run nsa $DIR/varlen.safetensors $DIR/whole.safetensors --block-size 32 --num-selected 4 "
                   "--window 40",
                   "");
            assert_int_equal(quern_safetensors_open(path_of("whole.safetensors"), &results), QUERN_OK);
        }
        assert_int_equal(quern_safetensors_get(i < 4 ? file : results, names[i - 1], &views[i]), QUERN_OK);
        if (i < 4) views[i] = quern_tensor_contiguous(views[i].data, views[i].dtype, 3, views[i].shape + 1);
    }
    assert_int_equal(quern_safetensors_save(path_of("given.safetensors"), items, 6, NULL, 0), QUERN_OK);
    expect(0,
           "run nsa $DIR/given.safetensors $DIR/again.safetensors --compress given --block-size 32 "
           "--num-selected 4 --window 40",
           "");
    expect(0,
           "compare $DIR/again.safetensors $DIR/whole.safetensors O lse_cmp block_idx cu_seqlens_cmp "
           "--tolerance 0",
           "");
    quern_safetensors_close(results);
    quern_safetensors_close(file);
}

/* An output that the library does not write is not in the file, and never replaces a missing input. */
static void run_writes_what_was_computed(void **state)
{
    (void)state;
    copy_renamed("nsa_small.safetensors", "Q=Q K=K V=V", "plain.safetensors");
    expect(3, "run nsa $DIR/plain.safetensors $DIR/none.safetensors --compress given --block-size 32",
           "K_cmp is NULL");
    assert_false(exists("none.safetensors"));
    expect(0,
           "run nsa $DIR/plain.safetensors $DIR/window.safetensors --branches win --metric mean_logit "
           "--max-compressed-groups 1",
           "");
    expect(3, "compare $DIR/window.safetensors $DIR/window.safetensors K_cmp", "K_cmp");
    expect(3, "compare $DIR/window.safetensors $DIR/window.safetensors group_idx", "group_idx");
    copy_renamed("nsa_small.safetensors", "Q=Q K=K V=V full.block_idx=block_idx", "lists.safetensors");
    expect(0, "run nsa $DIR/lists.safetensors $DIR/counts.safetensors " SMALL, "");
    expect(3, "compare $DIR/counts.safetensors $DIR/counts.safetensors block_count", "block_count");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_verb_has_help),
        cmocka_unit_test(every_operation_has_help_of_its_own),
        cmocka_unit_test(wrong_command_lines_are_usage_errors),
        cmocka_unit_test(a_missing_device_or_level_is_reported),
        cmocka_unit_test(info_says_what_this_is),
        cmocka_unit_test(bad_files_leave_the_output_alone),
        cmocka_unit_test(shapes_that_do_not_fit_are_reported),
        cmocka_unit_test(an_unwritable_output_is_an_input_error),
        cmocka_unit_test(the_reference_page_is_what_the_command_prints),
        cmocka_unit_test(option_values_are_hyphenated),
        cmocka_unit_test(compare_finds_differences),
        cmocka_unit_test(golden_nsa_small_passes),
        cmocka_unit_test(golden_window_passes_as_dense_attention),
        cmocka_unit_test(golden_nsa_paper_b_passes),
        cmocka_unit_test(golden_nsa_gating_passes),
        cmocka_unit_test(stages_alone_give_what_the_whole_gives),
        cmocka_unit_test(handed_in_entries_of_varlen_sequences_count),
        cmocka_unit_test(run_writes_what_was_computed),
        cmocka_unit_test(results_follow_the_options),
    };
    return cmocka_run_group_tests(tests, make_directory, remove_directory);
}
