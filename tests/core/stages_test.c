/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* stages_test.c - the list of fields beside each stage's arguments is complete. Code that relocates, carries
 * or hashes pointers relies on it. */
#include "runtime/build_id.h"
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

/* The list names every field once: gaps between listed fields are smaller than the largest alignment (8). */
static void check_cover(const char *what, field *fields, size_t count, size_t size)
{
    size_t end = 0;
    qsort(fields, count, sizeof *fields, by_offset);
    for (size_t i = 0; i < count; i++) {
        if (fields[i].offset < end) fail_msg("%s: %s overlaps the field before it", what, fields[i].name);
        if (fields[i].offset - end >= 8 ||
            (fields[i].offset - end > 0 && fields[i].offset % 8 != 0 && fields[i].size >= 8))
            fail_msg("%s: a field before %s is not listed", what, fields[i].name);
        if (fields[i].offset - end >= 4 && fields[i].size < 8)
            fail_msg("%s: a field before %s is not listed", what, fields[i].name);
        end = fields[i].offset + fields[i].size;
    }
    if (size - end >= 8) fail_msg("%s: a field at the end is not listed", what);
}

#define FIELD(member) {#member, offsetof(fields_of, member), sizeof(((fields_of *)0)->member)},
#define CHECK(type, ...)                                                                                     \
    {                                                                                                        \
        typedef type fields_of;                                                                              \
        field fields[] = {__VA_ARGS__};                                                                      \
        check_cover(#type, fields, sizeof fields / sizeof *fields, sizeof(fields_of));                       \
    }
#define CHECK_ARGS(name, NAME) CHECK(name##_args, NAME##_TENSORS(FIELD, FIELD, FIELD) NAME##_VALUES(FIELD))

static void every_field_is_listed(void **unused)
{
    (void)unused;
    BACKEND_ARGS(CHECK_ARGS)
    CHECK(attend_gate_args, ATTEND_GATE_MEMBERS(FIELD) ATTEND_GATE_VALUES(FIELD))
    CHECK(stage_exec, STAGE_EXEC_VALUES(FIELD))
    CHECK(quern_cuda_plugin, PLUGIN_VALUES(FIELD))
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
