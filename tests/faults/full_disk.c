// LD_PRELOAD: a disk that is full from the n-th write below a folder on, see full_disk().
// A write is opening a file for writing, writing, syncing, renaming or making a folder, by whatever library.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static atomic_long visits, first = -1;
static char below[PATH_MAX];

// Called by the probe in each of its children. at: 0 for a disk that is never full. Returns the writes so far.
long full_disk(long at, const char *folder) {
    snprintf(below, sizeof below, "%s", folder);
    first = at;
    return atomic_exchange(&visits, 0);
}

static int full(const char *path, int directory) {
    char whole[PATH_MAX * 2], link[64];
    if (!below[0] || !path) return 0;
    if (path[0] != '/') {
        snprintf(link, sizeof link, directory == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", directory);
        ssize_t size = readlink(link, whole, PATH_MAX - 1);
        if (size < 0) return 0;
        snprintf(whole + size, sizeof whole - size, "/%s", path);
        path = whole;
    }
    if (strncmp(path, below, strlen(below))) return 0;
    long visit = ++visits;
    if (first <= 0 || visit < first) return 0;
    errno = ENOSPC;
    return 1;
}

static int full_file(int file) {
    char link[64], path[PATH_MAX];
    if (!below[0]) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size <= 0) return 0;
    path[size] = 0;
    return full(path, AT_FDCWD);
}

#define OPENED(name, flags, directory, path, ...)                                        \
    mode_t mode = 0;                                                                      \
    if (flags & (O_CREAT | O_TMPFILE)) {                                                  \
        va_list more;                                                                     \
        va_start(more, flags);                                                            \
        mode = va_arg(more, mode_t);                                                      \
        va_end(more);                                                                     \
    }                                                                                     \
    if (flags & (O_WRONLY | O_RDWR) && full(path, directory)) return -1;                  \
    return REAL(name)(__VA_ARGS__, flags, mode);

int open(const char *path, int flags, ...) { OPENED(open, flags, AT_FDCWD, path, path) }
int open64(const char *path, int flags, ...) { OPENED(open64, flags, AT_FDCWD, path, path) }
int openat(int at, const char *path, int flags, ...) { OPENED(openat, flags, at, path, at, path) }
int openat64(int at, const char *path, int flags, ...) { OPENED(openat64, flags, at, path, at, path) }

ssize_t write(int file, const void *data, size_t size) { return full_file(file) ? -1 : REAL(write)(file, data, size); }
ssize_t writev(int file, const struct iovec *data, int n) { return full_file(file) ? -1 : REAL(writev)(file, data, n); }
size_t fwrite(const void *data, size_t size, size_t n, FILE *file) {
    return full_file(fileno(file)) ? 0 : REAL(fwrite)(data, size, n, file);
}
ssize_t sendfile64(int to, int from, off64_t *offset, size_t size) {
    static ssize_t (*real)(int, int, off64_t *, size_t);
    real = real ? real : dlsym(RTLD_NEXT, "sendfile64");
    return full_file(to) ? -1 : real(to, from, offset, size);
}
ssize_t copy_file_range(int from, off64_t *a, int to, off64_t *b, size_t size, unsigned flags) {
    return full_file(to) ? -1 : REAL(copy_file_range)(from, a, to, b, size, flags);
}
int ftruncate64(int file, off64_t size) { return full_file(file) ? -1 : REAL(ftruncate64)(file, size); }
int fsync(int file) { return full_file(file) ? -1 : REAL(fsync)(file); }
int fdatasync(int file) { return full_file(file) ? -1 : REAL(fdatasync)(file); }
int mkdir(const char *path, mode_t mode) { return full(path, AT_FDCWD) ? -1 : REAL(mkdir)(path, mode); }
int rename(const char *old, const char *new) { return full(new, AT_FDCWD) ? -1 : REAL(rename)(old, new); }
