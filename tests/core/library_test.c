/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* library_test.c - where a library that is loaded at run time is found: the environment variable, beside, the
 * loader. */
#include "cmocka_c11.h"

#include "core/library.h"

#include <limits.h>
#include <link.h>
#include <unistd.h>

static char folder[PATH_MAX];
static void *first; /* folder/first.so, a copy of libm */

static const char *file_of(void *library)
{
    struct link_map *map = NULL;
    assert_non_null(library);
    assert_int_equal(dlinfo(library, RTLD_DI_LINKMAP, &map), 0);
    return map->l_name;
}

static void copy_beside(const char *name)
{
    char path[PATH_MAX + 16];
    unsigned char bytes[65536];
    void *mathematics = dlopen("libm.so.6", RTLD_NOW);
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *in = fopen(file_of(mathematics), "rb"), *out = fopen(path, "wb");
    assert_non_null(in);
    assert_non_null(out);
    for (size_t n; (n = fread(bytes, 1, sizeof bytes, in)) > 0;)
        assert_int_equal(fwrite(bytes, 1, n, out), n);
    fclose(in);
    assert_int_equal(fclose(out), 0);
    dlclose(mathematics);
}

static void the_environment_comes_first_and_alone(void **unused)
{
    (void)unused;
    char path[PATH_MAX + 16];
    snprintf(path, sizeof path, "%s/named.so", folder);
    copy_beside("named.so");
    copy_beside("beside.so");
    setenv("QUERN_TEST_LIBRARY", path, 1);
    void *library = library_open("beside.so", "QUERN_TEST_LIBRARY", dlsym(first, "cbrt"));
    assert_string_equal(file_of(library), path);
    dlclose(library);
    setenv("QUERN_TEST_LIBRARY", "/nowhere/at.all", 1);
    assert_null(library_open("beside.so", "QUERN_TEST_LIBRARY", dlsym(first, "cbrt")));
    assert_non_null(strstr(dlerror(), "/nowhere/at.all"));
}

static void beside_comes_before_the_loader(void **unused)
{
    (void)unused;
    char path[PATH_MAX + 16];
    setenv("QUERN_TEST_LIBRARY", "", 1);
    void *library = library_open("libresolv.so.2", "QUERN_TEST_LIBRARY", dlsym(first, "cbrt"));
    assert_null(strstr(file_of(library), folder)); /* none beside */
    dlclose(library);
    copy_beside("other.so");
    unsetenv("QUERN_TEST_LIBRARY");
    snprintf(path, sizeof path, "%s/other.so", folder);
    library = library_open("other.so", "QUERN_TEST_LIBRARY", dlsym(first, "cbrt"));
    assert_string_equal(file_of(library), path);
    dlclose(library);
    assert_null(library_open("libquern_of_nowhere.so", "QUERN_TEST_LIBRARY", dlsym(first, "cbrt")));
}

static int make_folder(void **unused)
{
    (void)unused;
    char path[PATH_MAX + 16];
    snprintf(folder, sizeof folder, "/tmp/quern_library_XXXXXX");
    if (mkdtemp(folder) == NULL) return 1;
    copy_beside("first.so");
    snprintf(path, sizeof path, "%s/first.so", folder);
    return (first = dlopen(path, RTLD_NOW)) == NULL;
}

static int remove_folder(void **unused)
{
    (void)unused;
    char path[PATH_MAX + 16];
    static const char *const names[] = {"first.so", "named.so", "beside.so", "other.so"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        snprintf(path, sizeof path, "%s/%s", folder, names[i]);
        (void)unlink(path);
    }
    return rmdir(folder);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_environment_comes_first_and_alone),
        cmocka_unit_test(beside_comes_before_the_loader),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
