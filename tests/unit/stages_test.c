/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* stages_test.c - the lists of fields beside each stage's arguments are whole: pointers are relocated, carried and hashed
 * by them. */
#include "build_id.h"
#include "cmocka_c11.h"

#include <stdlib.h>
#include <string.h>

typedef struct field {
    const char *name;
    size_t offset, size;
} field;

static int by_offset(const void *a, const void *b)
{
    const field *x = a, *y = b;
    return x->offset < y->offset ? -1 : x->offset > y->offset;
}

/* The fields lie side by side but for the padding that the largest alignment (8) makes, and all are listed once. */
static void check_cover(const char *what, field *fields, size_t count, size_t size)
{
    size_t end = 0;
    qsort(fields, count, sizeof *fields, by_offset);
    for (size_t i = 0; i < count; i++) {
        if (fields[i].offset < end) fail_msg("%s: %s overlaps the field before it", what, fields[i].name);
        if (fields[i].offset - end >= 8 || (fields[i].offset - end > 0 && fields[i].offset % 8 != 0 && fields[i].size >= 8))
            fail_msg("%s: a field before %s is not listed", what, fields[i].name);
        if (fields[i].offset - end >= 4 && fields[i].size < 8) fail_msg("%s: a field before %s is not listed", what, fields[i].name);
        end = fields[i].offset + fields[i].size;
    }
    if (size - end >= 8) fail_msg("%s: a field at the end is not listed", what);
}

#define FIELD(member) {#member, offsetof(ARGS, member), sizeof(((ARGS *)0)->member)},

static void every_field_is_listed(void **unused)
{
    (void)unused;
#define ARGS attend_args
    field attend[] = {ATTEND_TENSORS(FIELD) ATTEND_VALUES(FIELD)};
    check_cover("attend_args", attend, sizeof attend / sizeof *attend, sizeof(ARGS));
#undef ARGS
#define ARGS compress_args
    field compress[] = {COMPRESS_TENSORS(FIELD) COMPRESS_VALUES(FIELD)};
    check_cover("compress_args", compress, sizeof compress / sizeof *compress, sizeof(ARGS));
#undef ARGS
#define ARGS select_args
    field select[] = {SELECT_TENSORS(FIELD) SELECT_VALUES(FIELD)};
    check_cover("select_args", select, sizeof select / sizeof *select, sizeof(ARGS));
#undef ARGS
#define ARGS gate_args
    field gate[] = {GATE_TENSORS(FIELD) GATE_VALUES(FIELD)};
    check_cover("gate_args", gate, sizeof gate / sizeof *gate, sizeof(ARGS));
#undef ARGS
#define ARGS convert_args
    field convert[] = {CONVERT_TENSORS(FIELD) CONVERT_VALUES(FIELD)};
    check_cover("convert_args", convert, sizeof convert / sizeof *convert, sizeof(ARGS));
#undef ARGS
#define ARGS rowdot_args
    field rowdot[] = {ROWDOT_TENSORS(FIELD) ROWDOT_VALUES(FIELD)};
    check_cover("rowdot_args", rowdot, sizeof rowdot / sizeof *rowdot, sizeof(ARGS));
#undef ARGS
#define ARGS list_convert_args
    field list_convert[] = {LIST_CONVERT_TENSORS(FIELD) LIST_CONVERT_VALUES(FIELD)};
    check_cover("list_convert_args", list_convert, sizeof list_convert / sizeof *list_convert, sizeof(ARGS));
#undef ARGS
#define ARGS check_args
    field check[] = {CHECK_TENSORS(FIELD) CHECK_VALUES(FIELD)};
    check_cover("check_args", check, sizeof check / sizeof *check, sizeof(ARGS));
#undef ARGS
#define ARGS gemm_args
    field gemm[] = {GEMM_TENSORS(FIELD) GEMM_VALUES(FIELD)};
    check_cover("gemm_args", gemm, sizeof gemm / sizeof *gemm, sizeof(ARGS));
#undef ARGS
#define ARGS pool_args
    field pool[] = {POOL_TENSORS(FIELD) POOL_VALUES(FIELD)};
    check_cover("pool_args", pool, sizeof pool / sizeof *pool, sizeof(ARGS));
#undef ARGS
#define ARGS pool_append_args
    field append[] = {POOL_APPEND_TENSORS(FIELD) POOL_APPEND_VALUES(FIELD)};
    check_cover("pool_append_args", append, sizeof append / sizeof *append, sizeof(ARGS));
#undef ARGS
#define ARGS attend_gate_args
    field fused[] = {ATTEND_GATE_MEMBERS(FIELD) ATTEND_GATE_VALUES(FIELD)};
    check_cover("attend_gate_args", fused, sizeof fused / sizeof *fused, sizeof(ARGS));
#undef ARGS
#define ARGS quantise_args
    field quantise[] = {QUANTISE_TENSORS(FIELD) QUANTISE_VALUES(FIELD)};
    check_cover("quantise_args", quantise, sizeof quantise / sizeof *quantise, sizeof(ARGS));
#undef ARGS
#define ARGS dequantise_args
    field dequantise[] = {DEQUANTISE_TENSORS(FIELD) DEQUANTISE_VALUES(FIELD)};
    check_cover("dequantise_args", dequantise, sizeof dequantise / sizeof *dequantise, sizeof(ARGS));
#undef ARGS
#define ARGS fused_quantise_args
    field fused_quantise[] = {FUSED_QUANTISE_TENSORS(FIELD) FUSED_QUANTISE_VALUES(FIELD)};
    check_cover("fused_quantise_args", fused_quantise, sizeof fused_quantise / sizeof *fused_quantise, sizeof(ARGS));
#undef ARGS
#define ARGS from_mxfp4_args
    field from_mxfp4[] = {FROM_MXFP4_TENSORS(FIELD) FROM_MXFP4_VALUES(FIELD)};
    check_cover("from_mxfp4_args", from_mxfp4, sizeof from_mxfp4 / sizeof *from_mxfp4, sizeof(ARGS));
#undef ARGS
#define ARGS swizzle_args
    field swizzle[] = {SWIZZLE_TENSORS(FIELD) SWIZZLE_VALUES(FIELD)};
    check_cover("swizzle_args", swizzle, sizeof swizzle / sizeof *swizzle, sizeof(ARGS));
#undef ARGS
#define ARGS interleave_args
    field interleave[] = {INTERLEAVE_TENSORS(FIELD) INTERLEAVE_VALUES(FIELD)};
    check_cover("interleave_args", interleave, sizeof interleave / sizeof *interleave, sizeof(ARGS));
#undef ARGS
#define ARGS prepack_args
    field prepack[] = {PREPACK_TENSORS(FIELD) PREPACK_VALUES(FIELD)};
    check_cover("prepack_args", prepack, sizeof prepack / sizeof *prepack, sizeof(ARGS));
#undef ARGS
#define ARGS grouped_gemm_args
    field grouped_gemm[] = {GROUPED_GEMM_TENSORS(FIELD) GROUPED_GEMM_VALUES(FIELD)};
    check_cover("grouped_gemm_args", grouped_gemm, sizeof grouped_gemm / sizeof *grouped_gemm, sizeof(ARGS));
#undef ARGS
#define ARGS route_args
    field route[] = {ROUTE_TENSORS(FIELD) ROUTE_VALUES(FIELD)};
    check_cover("route_args", route, sizeof route / sizeof *route, sizeof(ARGS));
#undef ARGS
#define ARGS stage_exec
    field exec[] = {STAGE_EXEC_VALUES(FIELD)};
    check_cover("stage_exec", exec, sizeof exec / sizeof *exec, sizeof(ARGS));
#undef ARGS
#define ARGS quern_cuda_plugin
    field plugin[] = {PLUGIN_VALUES(FIELD)};
    check_cover("quern_cuda_plugin", plugin, sizeof plugin / sizeof *plugin, sizeof(ARGS));
#undef ARGS
}

static void the_build_id_follows_names_places_and_sizes(void **unused)
{
    (void)unused;
    const uint64_t h = build_id_add(1, "window", 8, 8);
    assert_true(h == build_id_add(1, "window", 8, 8));
    assert_true(h != build_id_add(1, "windows", 8, 8) && h != build_id_add(1, "window", 16, 8));
    assert_true(h != build_id_add(1, "window", 8, 4) && h != build_id_add(2, "window", 8, 8));
    assert_true(build_id() == build_id() && build_id() != 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_field_is_listed),
        cmocka_unit_test(the_build_id_follows_names_places_and_sizes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
