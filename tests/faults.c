// Faults by injection, for tests: LD_PRELOAD stands between a process and libc, and lets the nth call of some sort that
// concerns files under one folder fail, or kills the process there.
//
//   FAULTS="how first folder"      how: k kill before the call, t kill within it (a write is then half done),
//                                  e<errno> fail from that call on, o<errno> fail that call alone, c only count,
//                                  i fail every nth call, of a full disk, a read error, no permission and a signal in turn
//   FAULTS_SORTS="wo..."           which calls count, by the letters below; all that write by default
//
// faults_arm() does the same from within, faults_log() has a letter for every call that was counted. Calls that a C library makes
// inside itself (fwrite, fread) are not seen: Python's own files, os and numpy's tofile go through these.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static char folder[PATH_MAX], sorts[32], seen[1 << 16];
static char how;          // 0: not armed
static int wrong;         // errno
static long first, n_seen;

static const int in_turn[] = {ENOSPC, EIO, EACCES, EINTR};

#define WRITING "owtfrlumd"  // open to write, write, truncate, fsync, rename, link, unlink, make a folder, (un)make one

void faults_arm(const char * in, const char * what, long nth, const char * which) {
    snprintf(folder, sizeof folder, "%s", in);
    snprintf(sorts, sizeof sorts, "%s", which[0] ? which : WRITING);
    how = what[0];
    wrong = how == 'e' || how == 'o' ? atoi(what + 1) : 0;
    first = nth;
    n_seen = 0;
    memset(seen, 0, sizeof seen);
}

const char * faults_log(void) { return seen; }

__attribute__((constructor)) static void begin(void) {
    const char * text = getenv("FAULTS"), * which = getenv("FAULTS_SORTS");
    char what[16], where[PATH_MAX];
    long nth;
    if (text != NULL && sscanf(text, "%15s %ld %4095[^\n]", what, &nth, where) == 3) faults_arm(where, what, nth, which != NULL ? which : "");
}

// Whether this call is the one; kills the process where that was asked for. `can_tear`: the caller does half of it before.
static int strikes(char sort, const char * path, int fd, int * tears) {
    char named[PATH_MAX], link[64];
    if (how == 0 || strchr(sorts, sort) == NULL) return 0;
    if (path == NULL) {
        snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        const ssize_t n = readlink(link, named, sizeof named - 1);
        if (n < 0) return 0;
        named[n] = 0;
        path = named;
    }
    const size_t length = strlen(folder);
    if (strncmp(path, folder, length) != 0 || (path[length] != '/' && path[length] != 0)) return 0;
    pthread_mutex_lock(&mutex);
    const long n = ++n_seen;
    if (n < (long) sizeof seen) seen[n - 1] = sort;
    pthread_mutex_unlock(&mutex);
    const int is_it = how == 'e' ? n >= first : how == 'i' ? n % first == 0 : n == first;
    if (!is_it || how == 'c') return 0;
    if (how == 't' && tears != NULL) {
        *tears = 1;
        return 0;
    }
    if (how == 'k' || how == 't') kill(getpid(), SIGKILL);
    errno = how == 'i' ? in_turn[n / first % 4] : wrong;
    return 1;
}

#define REAL(name) ((__typeof__(&name)) dlsym(RTLD_NEXT, #name))
#define FAIL_IF(sort, path, fd) \
    if (strikes(sort, path, fd, NULL)) return -1

static int writes(int flags) { return (flags & O_ACCMODE) != O_RDONLY || (flags & O_CREAT) != 0; }

static mode_t mode_of(int flags, va_list list) {
    return (flags & (O_CREAT | __O_TMPFILE)) != 0 ? va_arg(list, mode_t) : 0;
}

#define OPEN(name)                                                    \
    int name(const char * path, int flags, ...) {                     \
        va_list list;                                                 \
        va_start(list, flags);                                        \
        const mode_t mode = mode_of(flags, list);                     \
        va_end(list);                                                 \
        FAIL_IF(writes(flags) ? 'o' : 'O', path, -1);                 \
        return REAL(name)(path, flags, mode);                         \
    }
#define OPENAT(name)                                                  \
    int name(int at, const char * path, int flags, ...) {             \
        va_list list;                                                 \
        va_start(list, flags);                                        \
        const mode_t mode = mode_of(flags, list);                     \
        va_end(list);                                                 \
        FAIL_IF(writes(flags) ? 'o' : 'O', path, -1);                 \
        return REAL(name)(at, path, flags, mode);                     \
    }
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)

#define WRITE(name, type, arguments, half)                            \
    ssize_t name type {                                               \
        int tears = 0;                                                \
        if (strikes('w', NULL, fd, &tears)) return -1;                \
        if (tears) {                                                  \
            REAL(name) half;                                          \
            kill(getpid(), SIGKILL);                                  \
        }                                                             \
        return REAL(name) arguments;                                  \
    }
WRITE(write, (int fd, const void * data, size_t n), (fd, data, n), (fd, data, n / 2))
WRITE(pwrite, (int fd, const void * data, size_t n, off_t at), (fd, data, n, at), (fd, data, n / 2, at))
WRITE(pwrite64, (int fd, const void * data, size_t n, off64_t at), (fd, data, n, at), (fd, data, n / 2, at))

#define CALL(sort, path, fd, result, name, type, arguments)           \
    result name type {                                                \
        FAIL_IF(sort, path, fd);                                      \
        return REAL(name) arguments;                                  \
    }
CALL('R', NULL, fd, ssize_t, read, (int fd, void * data, size_t n), (fd, data, n))
CALL('R', NULL, fd, ssize_t, pread, (int fd, void * data, size_t n, off_t at), (fd, data, n, at))
CALL('R', NULL, fd, ssize_t, pread64, (int fd, void * data, size_t n, off64_t at), (fd, data, n, at))
CALL('R', NULL, fd, ssize_t, preadv, (int fd, const struct iovec * parts, int n, off_t at), (fd, parts, n, at))
CALL('R', NULL, fd, ssize_t, preadv64, (int fd, const struct iovec * parts, int n, off64_t at), (fd, parts, n, at))
CALL('R', NULL, fd, ssize_t, preadv2, (int fd, const struct iovec * parts, int n, off_t at, int flags), (fd, parts, n, at, flags))
CALL('R', NULL, fd, ssize_t, preadv64v2, (int fd, const struct iovec * parts, int n, off64_t at, int flags), (fd, parts, n, at, flags))
CALL('t', NULL, fd, int, ftruncate, (int fd, off_t n), (fd, n))
CALL('t', NULL, fd, int, ftruncate64, (int fd, off64_t n), (fd, n))
CALL('t', path, -1, int, truncate, (const char * path, off_t n), (path, n))
CALL('t', path, -1, int, truncate64, (const char * path, off64_t n), (path, n))
CALL('f', NULL, fd, int, fsync, (int fd), (fd))
CALL('f', NULL, fd, int, fdatasync, (int fd), (fd))
CALL('r', to, -1, int, rename, (const char * from, const char * to), (from, to))
CALL('r', to, -1, int, renameat, (int a, const char * from, int b, const char * to), (a, from, b, to))
CALL('l', to, -1, int, link, (const char * from, const char * to), (from, to))
CALL('l', to, -1, int, linkat, (int a, const char * from, int b, const char * to, int flags), (a, from, b, to, flags))
CALL('u', path, -1, int, unlink, (const char * path), (path))
CALL('u', path, -1, int, unlinkat, (int at, const char * path, int flags), (at, path, flags))
CALL('m', path, -1, int, mkdir, (const char * path, mode_t mode), (path, mode))
CALL('m', path, -1, int, mkdirat, (int at, const char * path, mode_t mode), (at, path, mode))
CALL('d', path, -1, int, rmdir, (const char * path), (path))
