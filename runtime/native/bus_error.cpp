// Everything in the handler is safe in a signal: system calls and memory of its own.
#include "bus_error.h"

#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <cstring>
#include <string>

#include "llama_api.h"

namespace sidecar {

namespace {

constexpr char HAPPENED[] = " became shorter while it was in use, or its disk failed";
constexpr char TO_DO[] = "put it back whole and start again, and replace model files by renaming new ones";

// A part of the address space, and the file that is mapped there, in `line`; nullptr for none.
struct Mapping {
    uintptr_t start = 0, end = 0;
    const char * path = nullptr;
    bool holds(uintptr_t address) const { return start <= address && address < end; }
};

constexpr int MAX_REPLACED = 64;  // a model's files are mapped once each, and its parts on other devices unmapped in between

std::atomic_flag busy = ATOMIC_FLAG_INIT;  // guards what follows
char line[PATH_MAX + 256];                 // of /proc/self/maps
Mapping replaced[MAX_REPLACED];
int n_replaced = 0;
char broken[PATH_MAX];               // the first file
std::atomic<bool> is_broken{false};  // and then `broken` stays as it is

uintptr_t hex(const char *& at) {
    uintptr_t value = 0;
    for (;; at++) {
        const char c = *at;
        if (c >= '0' && c <= '9') {
            value = value * 16 + uintptr_t(c - '0');
        } else if (c >= 'a' && c <= 'f') {
            value = value * 16 + uintptr_t(c - 'a' + 10);
        } else {
            return value;
        }
    }
}

// What a line of /proc/self/maps says: "start-end rwxp offset device inode   path".
Mapping parsed() {
    const char * at = line;
    Mapping found;
    found.start = hex(at);
    if (*at++ != '-') return {};
    found.end = hex(at);
    found.path = strchr(at, '/');
    return found;
}

// The mapping that holds an address; an empty one where that is not known.
Mapping mapping_at(uintptr_t address) {
    const int fd = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
    if (fd < 0) return {};
    Mapping found;
    char part[4096];
    size_t n = 0;
    for (ssize_t n_read; found.end == 0 && (n_read = read(fd, part, sizeof part)) > 0;) {
        for (ssize_t i = 0; i < n_read && found.end == 0; i++) {
            if (part[i] != '\n') {
                if (n + 1 < sizeof line) line[n++] = part[i];
                continue;
            }
            line[n] = 0;
            n = 0;
            const Mapping one = parsed();
            if (one.holds(address)) found = one;
        }
    }
    close(fd);
    return found;
}

// Whether the product can go on: zeros are where the file's rest was. Another thread may have put them there meanwhile.
bool replace_from(uintptr_t address) {
    for (int i = 0; i < n_replaced; i++) {
        if (replaced[i].holds(address)) return true;
    }
    const Mapping found = mapping_at(address);
    if (found.path == nullptr || n_replaced == MAX_REPLACED) return false;
    const uintptr_t page = address & ~uintptr_t(sysconf(_SC_PAGESIZE) - 1);
    const int flags = MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS;
    if (mmap(reinterpret_cast<void *>(page), found.end - page, PROT_READ, flags, -1, 0) == MAP_FAILED) return false;
    replaced[n_replaced++] = {page, found.end, nullptr};
    if (!is_broken) {
        strncpy(broken, found.path, sizeof broken - 1);
        is_broken = true;
    }
    return true;
}

void say(const char * text) {
    const ssize_t ignored = write(STDERR_FILENO, text, strlen(text));
    static_cast<void>(ignored);
}

void handle(int number, siginfo_t * info, void *) {
    const int kept = errno;
    while (busy.test_and_set()) sched_yield();  // another thread's turn
    if (info->si_code > 0 && replace_from(reinterpret_cast<uintptr_t>(info->si_addr))) {
        busy.clear();
        errno = kept;
        return;  // looks there again
    }
    say("\nerror: a file that is in use");
    say(HAPPENED);
    say(" (SIGBUS): ");
    say(TO_DO);
    say("\n");
    signal(number, SIG_DFL);
    raise(number);  // comes when this returns, and nobody else gets a turn
}

}  // namespace

void survive_bus_errors() {
    struct sigaction now;
    if (sigaction(SIGBUS, nullptr, &now) != 0 || (now.sa_flags & SA_SIGINFO) != 0 || now.sa_handler != SIG_DFL) return;
    struct sigaction ours = {};
    ours.sa_sigaction = &handle;
    ours.sa_flags = SA_SIGINFO;
    sigemptyset(&ours.sa_mask);
    sigaction(SIGBUS, &ours, nullptr);
}

void check_mapped_files() {
    if (is_broken) throw LibraryError(std::string(broken) + HAPPENED + ": " + TO_DO);
}

}  // namespace sidecar
