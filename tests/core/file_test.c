/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* file_test.c - files are written whole or not at all, only regular files are replaced, and no temporary
 * file is left: where the file system has nameless files, and once more as if it had none. */
#include "cmocka_c11.h"

#include <quern/file.h>

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static char start[PATH_MAX], directory[32];
static bool nameless; /* temporary files have no name */

static int enter_directory(void **state)
{
    (void)state;
    umask(022);
    strcpy(directory, "file_test.XXXXXX");
    if (getcwd(start, sizeof start) == NULL || mkdtemp(directory) == NULL || chdir(directory) != 0) return -1;
    const int fd = open(".", O_WRONLY | O_TMPFILE, 0600);
    nameless = fd >= 0;
    if (nameless) close(fd);
    return 0;
}

/* From here on this process gets no nameless files, as from file systems that have none. */
static int deny_nameless_files(void **state)
{
    enum { TMPFILE = O_TMPFILE & ~O_DIRECTORY, FLAGS = offsetof(struct seccomp_data, args[2]) };
    struct sock_filter lines[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_openat, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, FLAGS), /* little-endian: the low half */
        BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, TMPFILE, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EOPNOTSUPP),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    const struct sock_fprog filter = {sizeof lines / sizeof *lines, lines};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
        prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) != 0)
        print_message("no seccomp: this file system's files twice\n");
    return enter_directory(state);
}

static int leave_directory(void **state)
{
    (void)state;
    return chdir(start) != 0 || rmdir(directory) != 0; /* fails where a test left a file behind */
}

static int files(void)
{
    int n = 0;
    DIR *d = opendir(".");
    assert_non_null(d);
    for (const struct dirent *e; (e = readdir(d)) != NULL;)
        n += strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0;
    closedir(d);
    return n;
}

static void expect_text(const char *path, const char *text)
{
    char found[64];
    FILE *f = fopen(path, "rb");
    if (f == NULL) fail_msg("%s is missing", path);
    found[fread(found, 1, sizeof found - 1, f)] = '\0';
    fclose(f);
    assert_string_equal(found, text);
}

static void make(const char *path, const char *text, mode_t mode)
{
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    fputs(text, f);
    assert_int_equal(fclose(f), 0);
    assert_int_equal(chmod(path, mode), 0);
}

static quern_status save(const char *path, const char *text)
{
    quern_file *file = NULL;
    const quern_status status = quern_file_create(path, &file);
    if (status != QUERN_OK) return status;
    assert_int_equal(quern_file_write(file, text, strlen(text)), QUERN_OK);
    return quern_file_commit(file);
}

static mode_t mode_of(const char *path)
{
    struct stat st;
    assert_int_equal(stat(path, &st), 0);
    return st.st_mode & 07777;
}

static void a_file_is_replaced_and_keeps_its_mode(void **state)
{
    (void)state;
    make("a.tmp", "foreign", 0600);
    assert_int_equal(save("a", "first"), QUERN_OK);
    assert_int_equal(mode_of("a"), 0644);
    assert_int_equal(chmod("a", 0640), 0);
    assert_int_equal(save("a", "second"), QUERN_OK);
    expect_text("a", "second");
    assert_int_equal(mode_of("a"), 0640);
    expect_text("a.tmp", "foreign");
    assert_int_equal(files(), 2);
    unlink("a");
    unlink("a.tmp");
}

static void readers_see_the_old_file_until_the_commit(void **state)
{
    (void)state;
    quern_file *file = NULL;
    make("a", "old", 0644);
    assert_int_equal(quern_file_check("a"), QUERN_OK);
    assert_int_equal(files(), 1);
    assert_int_equal(quern_file_create("a", &file), QUERN_OK);
    assert_int_equal(quern_file_write(file, "new", 3), QUERN_OK);
    expect_text("a", "old");
    assert_int_equal(files(), nameless ? 1 : 2);
    quern_file_discard(file);
    quern_file_discard(NULL);
    expect_text("a", "old");
    assert_int_equal(files(), 1);
    unlink("a");
}

static void a_change_of_folder_in_between_changes_nothing(void **state)
{
    (void)state;
    quern_file *file = NULL;
    assert_int_equal(mkdir("sub", 0755), 0);
    assert_int_equal(quern_file_create("a", &file), QUERN_OK);
    assert_int_equal(chdir("sub"), 0);
    assert_int_equal(quern_file_commit(file), QUERN_OK);
    assert_int_equal(chdir(".."), 0);
    expect_text("a", "");
    assert_int_equal(rmdir("sub"), 0);
    unlink("a");
}

static void links_are_followed(void **state)
{
    (void)state;
    struct stat st;
    assert_int_equal(mkdir("sub", 0755), 0);
    assert_int_equal(symlink("sub/target", "link"), 0);
    assert_int_equal(symlink("link", "chain"), 0);
    assert_int_equal(save("chain", "made"), QUERN_OK); /* the target did not exist */
    expect_text("sub/target", "made");
    assert_int_equal(save("chain", "replaced"), QUERN_OK);
    expect_text("sub/target", "replaced");
    assert_int_equal(lstat("link", &st), 0);
    assert_true(S_ISLNK(st.st_mode));
    assert_int_equal(lstat("chain", &st), 0);
    assert_true(S_ISLNK(st.st_mode));
    assert_int_equal(symlink("round", "round"), 0);
    assert_int_equal(save("round", "x"), QUERN_ERR_IO);
    assert_non_null(strstr(quern_last_error(NULL), strerror(ELOOP)));
    unlink("round");
    unlink("link");
    unlink("chain");
    unlink("sub/target");
    assert_int_equal(rmdir("sub"), 0);
}

static void what_is_no_regular_file_is_never_renamed_over(void **state)
{
    (void)state;
    struct stat st;
    assert_int_equal(quern_file_check("/dev/full"), QUERN_OK);
    assert_int_equal(save("/dev/full", "x"), QUERN_ERR_IO);
    assert_non_null(strstr(quern_last_error(NULL), "/dev/full"));
    assert_non_null(strstr(quern_last_error(NULL), strerror(ENOSPC)));
    assert_int_equal(save("/dev/null", "x"), QUERN_OK);
    assert_int_equal(stat("/dev/full", &st), 0);
    assert_true(S_ISCHR(st.st_mode));
    assert_int_equal(save(".", "x"), QUERN_ERR_IO);
    assert_non_null(strstr(quern_last_error(NULL), "folder"));
    assert_int_equal(mkfifo("fifo", 0600), 0);
    assert_int_equal(quern_file_check("fifo"), QUERN_OK); /* though it has no reader */
    const int reader = open("fifo", O_RDONLY | O_NONBLOCK);
    char got[8] = {0};
    assert_int_equal(save("fifo", "through"), QUERN_OK);
    assert_int_equal(read(reader, got, sizeof got), 7);
    assert_string_equal(got, "through");
    close(reader);
    assert_int_equal(stat("fifo", &st), 0);
    assert_true(S_ISFIFO(st.st_mode));
    assert_int_equal(files(), 1);
    unlink("fifo");
}

/* A file that is standard output is written at its current offset, not replaced. */
static void standard_output_is_written_in_order(void **state)
{
    (void)state;
    const pid_t child = fork();
    if (child == 0) {
        const int out = open("out", O_WRONLY | O_CREAT | O_TRUNC, 0644);
        if (out < 0 || dup2(out, STDOUT_FILENO) < 0 || write(STDOUT_FILENO, "before ", 7) != 7) _exit(1);
        if (quern_file_check("/dev/stdout") != QUERN_OK || save("/dev/stdout", "between") != QUERN_OK)
            _exit(2);
        if (save("out", " by name") != QUERN_OK || write(STDOUT_FILENO, " after", 6) != 6) _exit(3);
        _exit(0);
    }
    int how;
    assert_int_equal(waitpid(child, &how, 0), child);
    assert_int_equal(how, 0);
    expect_text("out", "before between by name after");
    assert_int_equal(files(), 1);
    unlink("out");
}

static void bad_paths_are_reported(void **state)
{
    (void)state;
    static char path[PATH_MAX + 100];
    char longest[NAME_MAX + 2];
    memset(longest, 'n', sizeof longest);
    longest[NAME_MAX] = '\0';
    assert_int_equal(save(longest, "x"), QUERN_OK); /* the temporary name is no longer than this one */
    unlink(longest);
    longest[NAME_MAX] = 'n';
    longest[NAME_MAX + 1] = '\0';
    assert_int_equal(save(longest, "x"), QUERN_ERR_IO);
    assert_int_equal(save("", "x"), QUERN_ERR_IO);
    assert_int_equal(save("no/such/folder", "x"), QUERN_ERR_IO);
    assert_int_equal(quern_file_check("no/such/folder"), QUERN_ERR_IO);
    assert_int_equal(save("folder/", "x"), QUERN_ERR_IO);
    assert_int_equal(quern_file_check(NULL), QUERN_ERR_INVALID_ARGUMENT);
    assert_int_equal(quern_file_create("a", NULL), QUERN_ERR_INVALID_ARGUMENT);
    assert_int_equal(quern_file_write(NULL, "x", 1), QUERN_ERR_INVALID_ARGUMENT);
    assert_int_equal(quern_file_commit(NULL), QUERN_ERR_INVALID_ARGUMENT);
    assert_int_equal(quern_file_write_at(NULL, 0, "x", 1), QUERN_ERR_INVALID_ARGUMENT);
    /* A message shortens a long path in the middle and keeps the reason; it escapes control characters. */
    for (int i = 0; i < 3000; i += 10) memcpy(path + i, "\x1b[31mdir\n/", 10);
    strcpy(path + 3000, "the-end");
    assert_int_equal(save(path, "x"), QUERN_ERR_IO);
    assert_non_null(strstr(quern_last_error(NULL), strerror(ENOENT)));
    assert_non_null(strstr(quern_last_error(NULL), "the-end"));
    assert_non_null(strstr(quern_last_error(NULL), "\\x1b[31mdir\\x0a/"));
    for (const char *c = quern_last_error(NULL); *c != '\0'; c++) assert_true(*c >= ' ' && *c < 0x7f);
    memset(path, 'p', sizeof path - 1);
    assert_int_equal(save(path, "x"), QUERN_ERR_IO);
    assert_non_null(strstr(quern_last_error(NULL), strerror(ENAMETOOLONG)));
    assert_int_equal(files(), 0);
}

static void a_read_only_file_is_not_replaced(void **state)
{
    (void)state;
    assert_int_equal(chmod(".", 0777), 0);
    const pid_t child = fork();
    if (child == 0) {
        if (geteuid() == 0 && setuid(65534) != 0) _exit(1); /* root may write everything */
        make("a", "old", 0444);
        if (quern_file_check("a") != QUERN_ERR_IO || save("a", "x") != QUERN_ERR_IO) _exit(2);
        _exit(strstr(quern_last_error(NULL), strerror(EACCES)) != NULL ? 0 : 3);
    }
    int how;
    assert_int_equal(waitpid(child, &how, 0), child);
    assert_int_equal(how, 0);
    expect_text("a", "old");
    assert_int_equal(files(), 1);
    unlink("a");
}

/* A file size limit simulates a full disk: write() fails half-way, and once more in the commit. */
static void a_full_disk_leaves_the_old_file(void **state)
{
    (void)state;
    make("a", "old", 0644);
    for (int large = 0; large < 2; large++) {
        const pid_t child = fork();
        if (child == 0) {
            static char bytes[1 << 20];
            quern_file *file = NULL;
            const struct rlimit limit = {1000, 1000};
            signal(SIGXFSZ, SIG_IGN);
            if (setrlimit(RLIMIT_FSIZE, &limit) != 0 || quern_file_create("a", &file) != QUERN_OK) _exit(1);
            const quern_status written = quern_file_write(file, bytes, large != 0 ? sizeof bytes : 2000);
            if (written != (large != 0 ? QUERN_ERR_IO : QUERN_OK)) _exit(2);
            if (large != 0 && quern_file_write(file, "x", 1) != QUERN_ERR_IO) _exit(3);
            _exit(quern_file_commit(file) == QUERN_ERR_IO ? 0 : 4);
        }
        int how;
        assert_int_equal(waitpid(child, &how, 0), child);
        assert_int_equal(how, 0);
        expect_text("a", "old");
        assert_int_equal(files(), 1);
    }
    unlink("a");
}

static void every_temporary_file_can_be_removed_at_once(void **state)
{
    (void)state;
    enum { MOST = 64 };
    quern_file *all[MOST], *more = NULL;
    char name[16];
    for (int i = 0; i < MOST; i++) {
        snprintf(name, sizeof name, "f%d", i);
        assert_int_equal(quern_file_create(name, &all[i]), QUERN_OK);
    }
    assert_int_equal(quern_file_create("more", &more), QUERN_ERR_OUT_OF_MEMORY);
    assert_int_equal(files(), nameless ? 0 : MOST);
    const pid_t child = fork(); /* the child must not discard its parent's files */
    if (child == 0) {
        quern_file_discard_all();
        _exit(0);
    }
    int how;
    assert_int_equal(waitpid(child, &how, 0), child);
    assert_int_equal(files(), nameless ? 0 : MOST);
    quern_file_discard_all();
    assert_int_equal(files(), 0);
    assert_int_equal(quern_file_commit(all[0]), QUERN_ERR_IO);
    for (int i = 1; i < MOST; i++) quern_file_discard(all[i]);
    assert_int_equal(quern_file_create("more", &more), QUERN_OK);
    quern_file_discard(more);
    assert_int_equal(files(), 0);
}

/* Nobody's handler runs then. */
static void a_killed_process_leaves_a_name_at_most(void **state)
{
    (void)state;
    make("a", "old", 0644);
    const pid_t child = fork();
    if (child == 0) {
        quern_file *file = NULL;
        if (quern_file_create("a", &file) != QUERN_OK || quern_file_write_at(file, 0, "new", 3) != QUERN_OK)
            _exit(1);
        kill(getpid(), SIGKILL);
    }
    int how;
    assert_int_equal(waitpid(child, &how, 0), child);
    assert_true(WIFSIGNALED(how));
    expect_text("a", "old");
    assert_int_equal(files(), nameless ? 1 : 2);
    assert_int_equal(system("rm -f a .quern-*.tmp"), 0);
}

static void offsets_are_written_in_any_order(void **state)
{
    (void)state;
    quern_file *file = NULL;
    assert_int_equal(quern_file_create("at", &file), QUERN_OK);
    assert_int_equal(quern_file_write_at(file, 4, "ef", 2), QUERN_OK);
    assert_int_equal(quern_file_write_at(file, 0, "abcd", 4), QUERN_OK);
    assert_int_equal(quern_file_write_at(file, -1, "x", 1), QUERN_ERR_INVALID_ARGUMENT);
    assert_int_equal(quern_file_write_at(file, 0, NULL, 1), QUERN_ERR_INVALID_ARGUMENT);
    assert_int_equal(quern_file_commit(file), QUERN_OK);
    expect_text("at", "abcdef");
    assert_int_equal(unlink("at"), 0);
    assert_int_equal(quern_file_create("/dev/null", &file), QUERN_OK);
    assert_int_equal(quern_file_write_at(file, 0, "x", 1), QUERN_ERR_IO);
    assert_non_null(strstr(quern_last_error(NULL), "regular file"));
    quern_file_discard(file);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(offsets_are_written_in_any_order),
        cmocka_unit_test(a_file_is_replaced_and_keeps_its_mode),
        cmocka_unit_test(readers_see_the_old_file_until_the_commit),
        cmocka_unit_test(a_change_of_folder_in_between_changes_nothing),
        cmocka_unit_test(links_are_followed),
        cmocka_unit_test(what_is_no_regular_file_is_never_renamed_over),
        cmocka_unit_test(standard_output_is_written_in_order),
        cmocka_unit_test(bad_paths_are_reported),
        cmocka_unit_test(a_read_only_file_is_not_replaced),
        cmocka_unit_test(a_full_disk_leaves_the_old_file),
        cmocka_unit_test(every_temporary_file_can_be_removed_at_once),
        cmocka_unit_test(a_killed_process_leaves_a_name_at_most),
    };
    const int failed = cmocka_run_group_tests_name("as it is", tests, enter_directory, leave_directory);
    return failed + cmocka_run_group_tests_name("named", tests, deny_nameless_files, leave_directory);
}
