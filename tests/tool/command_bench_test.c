/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* command_bench_test.c - `quern bench`: the JSON, help and chart of every subject, every option of attention
 * and NSA; `quern probe`: the longest sequence that a memory holds. */
#include "command.h"
#include "random.h"

static void bench_writes_its_schema(void **state)
{
    static const char *const keys[] = {"\"schema\": 1",
                                       "\"version\"",
                                       "\"commit\"",
                                       "\"machine\"",
                                       "\"cpu\"",
                                       "\"isa\"",
                                       "\"device\"",
                                       "\"ceilings\"",
                                       "\"op\": \"attention\"",
                                       "\"op\": \"attention-backward\"",
                                       "\"shape\"",
                                       "\"dtype\"",
                                       "\"threads\"",
                                       "\"reps\"",
                                       "\"ms_median\"",
                                       "\"ms_p10\"",
                                       "\"ms_p90\"",
                                       "\"gflops\"",
                                       "\"gbps\"",
                                       "\"ceiling\"",
                                       "\"fraction\"",
                                       "\"peer\"",
                                       "\"peer_ms\"",
                                       "\"mover_fraction\": null"};
    static char json[1 << 16];
    (void)state;
    assert_int_equal(run("bench attention --n 64,128 --heads 2/1 --dim 16 --threads 1 --reps 2 --backward "
                         "--json $DIR/bench.json"),
                     0);
    assert_non_null(strstr(output, "G/s of attention-backward: 2 (3 D + 2 Dv) B H pairs"));
    FILE *f = fopen(path_of("bench.json"), "rb");
    assert_non_null(f);
    json[fread(json, 1, sizeof json - 1, f)] = '\0';
    fclose(f);
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        if (strstr(json, keys[i]) == NULL) fail_msg("%s is missing from the bench's JSON", keys[i]);
    const double median = atof(strstr(json, "\"ms_median\": ") + 13),
                 low = atof(strstr(json, "\"ms_p10\": ") + 10);
    const double high = atof(strstr(json, "\"ms_p90\": ") + 10);
    if (!(low <= median && median <= high && low > 0))
        fail_msg("10%% %g, median %g, 90%% %g of two times", low, median, high);
    expect(3, "bench attention --n 64 --json $DIR/no/such/place", "no/such/place");
    expect(2, "bench attention --n 64 --rounds 102", "--rounds 102");
    expect(0, "bench nsa --n 256 --heads 2/1 --dim 16 --rounds 3 --no-peer --json $DIR/rounds.json", "");
    assert_int_equal(run_with("cat $DIR/rounds.json; true", ""), 0);
    assert_non_null(strstr(output, "\"reps\": 3"));
    const char *workspace = strstr(output, "\"workspace_fraction\": ");
    assert_true(workspace != NULL && atof(workspace + 22) > 0 && atof(workspace + 22) <= 1);
    expect(0, "bench gate --n 256 --dim 128 --reps 1 --backward --json $DIR/gate.json", "of mover");
    assert_int_equal(run_with("cat $DIR/gate.json; true", ""), 0);
    const char *moved = strstr(output, "\"mover_fraction\": ");
    assert_true(moved != NULL && atof(moved + 18) > 0);
    expect(0, "bench nvfp4-quantize --n 64 --reps 1", "of mover");
    expect(0, "bench nvfp4-quantize --n 64 --reps 1 --dtype f32", "of copy");
    assert_null(strstr(output, "of mover"));
}

/* Every option of the operations, alone, forward and backward: the bench takes it and its JSON says it. */
static void bench_takes_every_parameter(void **state)
{
    static const char *const options[][2] = {
        {"--block-size 32", "\"block-size\": 32"},
        {"--block-size 32 --stride 16", "\"stride\": 16"},
        {"--select-block 128", "\"select-block\": 128"},
        {"--num-selected 5", "\"num-selected\": 5"},
        {"--tile 7", "\"tile\": 7"},
        {"--window 33", "\"window\": 33"},
        {"--compress linear", "\"compress\": \"linear\""},
        {"--compress linear --encodings false", "\"encodings\": false"},
        {"--compress given", "\"compress\": \"given\""},
        {"--project both", "\"project\": \"both\""},
        {"--scope head", "\"scope\": \"head\""},
        {"--metric mean-logit", "\"metric\": \"mean-logit\""},
        {"--compressed-visibility started", "\"compressed-visibility\": \"started\""},
        {"--forced-first 0", "\"forced-first\": 0"},
        {"--forced-local 3", "\"forced-local\": 3"},
        {"--metric mean-logit --max-compressed-groups 2 --stride 0", "\"max-compressed-groups\": 2"},
        {"--causal false", "\"causal\": false"},
        {"--scale 0.5", "\"scale\": 0.5"},
        {"--branches slc,win", "\"branches\": \"slc,win\""},
        {"--gate given", "\"gate\": \"given\""},
        {"--gate none", "\"gate\": \"none\""},
        {"--separate both", "\"separate\": \"both\""},
        {"--selection given --metric mean-logit --max-compressed-groups 2", "\"selection\": \"given\""},
        {"--documents 3 --data smooth", "\"documents\": 3"},
        {"--documents 3 --compress given", "\"documents\": 3"},
        {"--weights input --dtype bf16 --project k", "\"weights\": \"input\""},
        {"--profile tile256 --num-selected 3", "\"tile\": 256"},
        {"--dim 16/24 --batch 2", "\"Dv\": 24"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof options / sizeof *options; i++) {
        char arguments[300];
        if (!test_in_share(i)) continue;
        snprintf(arguments, sizeof arguments,
                 "bench nsa --n 300 --heads 4/2 --dim 16 --threads 1 --reps 1 --backward --no-peer --json "
                 "$DIR/every.json %s",
                 options[i][0]);
        expect(0, arguments, "nsa-backward");
        assert_int_equal(run_with("cat $DIR/every.json; true", ""), 0);
        if (strstr(output, options[i][1]) == NULL)
            fail_msg("bench nsa %s: no %s in %s", options[i][0], options[i][1], output);
    }
    expect(0,
           "bench compress --n 300 --heads 2/1 --dim 16 --reps 1 --compress linear --documents 2 --backward",
           "nsa-compress-backward");
    expect(0,
           "bench select --n 300 --heads 2/1 --dim 16 --reps 1 --metric softmax --documents 2 --scope head",
           "nsa-select");
    expect(0, "bench gate --n 300 --heads 2/1 --dim 16 --reps 1 --gate given --documents 2 --backward",
           "nsa-gate-backward");
    /* All 300 keys chosen and in the window: twice as many pairs as causal ones have. */
    expect(0,
           "bench nsa --n 300 --heads 4/2 --dim 16 --reps 1 --no-peer --causal false --branches slc,win "
           "--window 600 --json $DIR/pairs.json",
           "");
    assert_int_equal(run_with("cat $DIR/pairs.json; true", ""), 0);
    const char *rate = strstr(output, "\"gflops\": "), *time = strstr(output, "\"ms_median\": ");
    assert_true(rate != NULL && time != NULL);
    const double work = atof(rate + 10) * atof(time + 13) * 1e6,
                 expected = 2.0 * (16 + 16) * 4 * 2 * 300 * 300;
    if (!(work > 0.99 * expected && work < 1.01 * expected))
        fail_msg("bench nsa --causal false counts %g operations, not %g", work, expected);
    expect(0, "bench nsa --help", "--compressed-visibility complete|started");
    expect(2, "bench nsa --documents 2 --batch 2", "--documents 2 --batch 2");
    assert_int_equal(run("bench nsa --n 300 --reps 1 --tile 300"), 3);
    assert_non_null(strstr(output, "tile is 300"));
}

/* Every subject at small sizes, and how many results it has. */
static const struct {
    const char *subject, *options;
    int results;
} subjects[] = {
    {"ceilings", "", 0},
    {"attention", "--n 64 --dim 16 --reps 1 --backward", 2},
    {"nsa", "--n 256 --dim 16 --reps 1", 1},
    {"compress", "--n 256 --dim 16 --reps 1 --backward", 2},
    {"select", "--n 256 --dim 16 --reps 1", 1},
    {"nsa",
     "--n 256 --dim 16 --reps 1 --profile msa --gate none --select-block 16 --num-selected 3 "
     "--selection indexed",
     1},
    {"nsa-index", "--n 256 --lists 2 --width 16 --rounds 1", 1},
    {"nsa-index-loss", "--n 256 --lists 2 --heads 4 --width 16 --num-selected 2 --rounds 1", 1},
    {"gate", "--n 64 --dim 16 --reps 1 --backward", 2},
    {"overhead", "", 4},
    {"csa-compress", "--n 256 --width 64 --rounds 1 --backward", 2},
    {"csa-compress", "--n 256 --width 64 --hidden 64 --index-width 32 --rounds 1 --backward", 2},
    {"csa-compress", "--n 256 --width 64 --hidden 64 --weights fp8 --rounds 1", 1},
    {"hca-compress", "--n 256 --width 64 --rounds 1 --backward", 2},
    {"hca-compress", "--n 256 --width 64 --hidden 64 --weights nvfp4 --dtype bf16 --rounds 1", 1},
    {"csa-append", "--n 64 --width 64 --ring 2", 2},
    {"ledger", "--n 64 --batch 3", 1},
    {"v4-index", "--n 256 --queries 2 --heads 2 --top-k 8 --rounds 1", 1},
    {"v4-attention", "--n 256 --queries 2 --heads 2 --top-k 8 --rounds 1 --backward", 2},
    {"v4-attention", "--n 256 --queries 0 --batch 2 --heads 2 --top-k 0 --ratio 128 --reps 1", 1},
    {"v4-layer", "--n 256 --hidden 64 --heads 2 --width 64 --q-lora 64 --groups 2 --o-lora 64 --rounds 1", 1},
    {"v4-layer",
     "--kind swa --n 256 --queries 65 --hidden 64 --heads 2 --width 64 --q-lora 64 --groups 2 --o-lora 64 "
     "--rounds 1",
     1},
    {"v4-index-loss",
     "--n 64 --queries 2 --heads 2 --width 16 --index-heads 2 --index-width 16 --top-k 4 --rounds 1", 1},
    {"v4-hyper", "--n 30 --width 64 --rounds 1 --backward", 2},
    {"nsa-decode", "--n 256 --heads 2/1 --dim 16 --sequences 2 --rounds 1 --page 64", 1},
    {"attention-decode", "--n 256 --heads 2/1 --dim 16 --sequences 2 --queries 3 --rounds 1", 1},
    {"nvfp4-gemm", "--n 1 --experts 2 --width 64 --depth 64 --rounds 1 --backward", 2},
    {"nvfp4-quantize", "--n 16 --depth 64 --rounds 1", 1},
    {"nvfp4-fused-quantize", "--n 16 --depth 64 --rounds 1", 1},
    {"nvfp4-dequantize", "--n 16 --depth 64 --rounds 1", 1},
    {"nvfp4-from-mxfp4", "--n 16 --depth 64 --rounds 1", 1},
    {"nvfp4-swizzle", "--n 16 --depth 64 --rounds 1", 1},
    {"nvfp4-interleave", "--n 16 --depth 64 --rounds 1", 1},
    {"nvfp4-profiles", "", 30},
    {"moe-prepack", "--experts 2 --width 64 --depth 64 --rounds 1", 1},
    {"moe-route", "--n 4 --experts 16 --depth 64 --rounds 1 --backward", 2},
    {"moe", "--n 4 --experts 4 --width 64 --depth 64 --rounds 1 --backward", 2},
};
enum { SUBJECTS = sizeof subjects / sizeof *subjects };

/* A number's text, or null, after every `"key": `; its count. */
static int count_numbers(const char *json, const char *key)
{
    char quoted[40];
    int count = 0;
    snprintf(quoted, sizeof quoted, "\"%s\": ", key);
    for (const char *at = json; (at = strstr(at, quoted)) != NULL; count++) {
        at += strlen(quoted);
        char *end;
        const double value = strtod(at, &end);
        if (end == at ? strncmp(at, "null", 4) != 0 : value < 0) fail_msg("%s is no number: %.40s", key, at);
    }
    return count;
}

static int count_of(const char *text, const char *word)
{
    int count = 0;
    for (const char *at = text; (at = strstr(at, word)) != NULL; at++) count++;
    return count;
}

/* Where work is counted, every result has a rate of it. */
static void every_subject_writes_the_same_fields(void **state)
{
    static const char *const texts[] = {"op", "shape", "dtype", "ceiling", "peer", "formula"},
                             *const numbers[] = {"reps",   "ms_median", "ms_p10",   "ms_p90",
                                                 "gflops", "gbps",      "fraction", "peer_ms"};
    (void)state;
    for (size_t i = 0; i < SUBJECTS; i++) {
        char arguments[300], quoted[40];
        if (!test_in_share(i)) continue;
        snprintf(arguments, sizeof arguments, "bench %s --threads 1 --json $DIR/fields.json %s",
                 subjects[i].subject, subjects[i].options);
        expect(0, arguments, "");
        assert_int_equal(run_with("cat $DIR/fields.json; true", ""), 0);
        assert_non_null(strstr(output, "\"device\": \"cpu\""));
        assert_non_null(strstr(output, "\"ceilings\": {"));
        assert_non_null(strstr(output, "\"peak_bytes\": "));
        const char *results = strstr(output, "\"results\": [");
        assert_non_null(results);
        for (size_t k = 0; k < sizeof texts / sizeof *texts; k++) {
            snprintf(quoted, sizeof quoted, "   \"%s\": ", texts[k]);
            const int count = count_of(results, quoted);
            if (count < subjects[i].results)
                fail_msg("quern %s: %d of %s, not %d", arguments, count, texts[k], subjects[i].results);
        }
        const int counted = subjects[i].results - count_of(results, "\"formula\": null"),
                  rates = 2 * subjects[i].results - count_of(results, "\"gflops\": null") -
                          count_of(results, "\"gbps\": null");
        if (rates < counted) fail_msg("quern %s: %d rates of %d formulas", arguments, rates, counted);
        for (size_t k = 0; k < sizeof numbers / sizeof *numbers; k++)
            if (count_numbers(results, numbers[k]) != subjects[i].results)
                fail_msg("quern %s: not %d times %s", arguments, subjects[i].results, numbers[k]);
    }
}

/* The page names what it runs, and each of its lines is accepted. */
static void the_page_runs_lines_that_are_accepted(void **state)
{
    char help[1 << 14], arguments[300];
    int lines = 0;
    (void)state;
    expect(0, "bench all --help", "quern-bench.json");
    snprintf(help, sizeof help, "%s", strstr(output, "runs on the CPU"));
    char *rest = NULL;
    for (char *line = strtok_r(help, "\n", &rest); line != NULL; line = strtok_r(NULL, "\n", &rest)) {
        if (strncmp(line, "  quern bench ", 14) != 0) {
            if (lines > 0) break;
            continue;
        }
        snprintf(arguments, sizeof arguments, "%s --help", line + strlen("  quern "));
        expect(0, arguments, "usage: quern bench ");
        lines++;
    }
    assert_true(lines > 10);
}

/* Help names the subjects and examples of them; a subject's its options. All draw a chart, and say where they
 * cannot use a GPU. */
static void every_subject_has_help_and_a_chart(void **state)
{
    (void)state;
    for (size_t i = 0; i < SUBJECTS; i++) {
        char arguments[300];
        if (!test_in_share(i)) continue;
        snprintf(arguments, sizeof arguments, "  %s ", subjects[i].subject);
        expect(0, "bench --help", arguments);
        snprintf(arguments, sizeof arguments, "bench %s --help", subjects[i].subject);
        expect(0, arguments, "--device cpu|cuda");
        assert_non_null(strstr(output, "example"));
        assert_non_null(strstr(output, "--svg"));
        snprintf(arguments, sizeof arguments, "bench %s --threads 1 --svg $DIR/chart.svg %s",
                 subjects[i].subject, subjects[i].options);
        expect(0, arguments, "");
        assert_int_equal(run_with("cat $DIR/chart.svg; true", ""), 0);
        assert_non_null(strstr(output, "</svg>"));
    }
    expect(4, "bench ledger --device cuda", "ledger runs on the cpu");
    expect(2, "bench dense", "'dense' is no subject");
    expect(2, "bench v4-index --backward", "'--backward'");
    expect(2, "bench csa-compress --weights fp8", "--hidden");
    expect(2, "bench hca-compress --hidden 64 --index-width 32", "--index-width 32");
    expect(2, "bench v4-layer --n 1 --queries 2", "--n 1 --queries 2");
    expect(2, "bench nsa-decode --queries 17", "--queries 17: 1 to 16 is accepted");
}

/* The whole number after `"key": ` in the last output. */
static long long json_number(const char *key)
{
    char quoted[40];
    snprintf(quoted, sizeof quoted, "\"%s\": ", key);
    const char *at = strstr(output, quoted);
    if (at == NULL) fail_msg("no %s in: %s", key, output);
    return atoll(at + strlen(quoted));
}

/* The length is the longest: its bytes are enough for it, one byte less is not. */
static void check_probe(const char *options)
{
    char arguments[300];
    snprintf(arguments, sizeof arguments,
             "probe %s --memory 24M --heads 2/1 --dim 32 --threads 2 --granularity 128 --json", options);
    expect(0, arguments, "resident_bytes");
    const long long n = json_number("N"), bytes = json_number("bytes"),
                    resident = json_number("resident_bytes");
    assert_true(n >= 128 && n % 128 == 0 && bytes <= 24 << 20);
    assert_true(resident > 0 && resident <= (24 + 64) << 20);
    for (int less = 0; less < 2; less++) {
        snprintf(arguments, sizeof arguments,
                 "probe %s --memory %lld --heads 2/1 --dim 32 --threads 2 --granularity 128 --json --dry-run",
                 options, bytes - less);
        expect(0, arguments, "\"bytes\"");
        assert_int_equal(json_number("N"), n - 128 * less);
    }
}

static void probe_finds_the_longest(void **state)
{
    static const char *const options[] = {
        "nsa", "nsa --backward",
        "nsa --backward --dtype bf16 --tile 64 --metric mean-logit --max-compressed-groups 4",
        "nsa --dtype f16 --compress linear --separate both --gate given --selection given",
        "attention --backward --dtype bf16"};
    (void)state;
    for (size_t i = 0; i < sizeof options / sizeof *options; i++)
        if (test_in_share(i)) check_probe(options[i]);
    expect(0, "probe nsa --memory 900T --heads 1/1 --dim 8 --num-selected 4 --granularity 1000000 --dry-run",
           "2147000000 tokens");
    expect(4, "probe attention --memory 900T --granularity 1000000", "--dry-run");
}

static void probe_keeps_to_its_limit(void **state)
{
    (void)state;
    expect(0, "probe attention --memory 8M --heads 2/1 --dim 16 --threads 1", "proven");
    expect(0, "probe attention --memory 1T --dry-run", "tokens fit into 1T");
    expect(4, "probe attention --memory 1k", "not even 1024 tokens");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bench_writes_its_schema),
        cmocka_unit_test(bench_takes_every_parameter),
        cmocka_unit_test(every_subject_writes_the_same_fields),
        cmocka_unit_test(the_page_runs_lines_that_are_accepted),
        cmocka_unit_test(every_subject_has_help_and_a_chart),
        cmocka_unit_test(probe_keeps_to_its_limit),
        cmocka_unit_test(probe_finds_the_longest),
    };
    return cmocka_run_group_tests(tests, make_directory, remove_directory);
}
