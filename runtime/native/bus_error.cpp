// Everything in the handler is safe in a signal: system calls and memory of its own.
#include "bus_error.h"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>
#include <cstring>

namespace sidecar {

namespace {

char line[PATH_MAX + 256];  // of /proc/self/maps
std::atomic_flag is_told = ATOMIC_FLAG_INIT;

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

// The path in a line of /proc/self/maps if its range holds the address: "start-end rwxp offset device inode   path".
const char * path_if_at(uintptr_t address) {
    const char * at = line;
    const uintptr_t start = hex(at);
    if (*at++ != '-' || address < start || address >= hex(at)) return nullptr;
    return strchr(at, '/');
}

// The file that is mapped at an address; nullptr where that is not known (there is no /proc on macOS).
const char * file_at(uintptr_t address) {
    const int fd = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
    if (fd < 0) return nullptr;
    const char * found = nullptr;
    char part[4096];
    size_t n = 0;
    for (ssize_t n_read; found == nullptr && (n_read = read(fd, part, sizeof part)) > 0;) {
        for (ssize_t i = 0; i < n_read && found == nullptr; i++) {
            if (part[i] != '\n') {
                const bool is_text = part[i] >= 0 ? part[i] >= ' ' && part[i] != 127 : true;
                if (n + 1 < sizeof line) line[n++] = is_text ? part[i] : '?';  // a name may hold codes for the terminal
                continue;
            }
            line[n] = 0;
            n = 0;
            found = path_if_at(address);
        }
    }
    close(fd);
    return found;
}

void say(const char * text) {
    const ssize_t ignored = write(STDERR_FILENO, text, strlen(text));
    static_cast<void>(ignored);
}

void explain(int number, siginfo_t * info, void *) {
    while (is_told.test_and_set()) pause();  // another thread is telling it, and ends the process
    const char * file = info->si_code > 0 ? file_at(reinterpret_cast<uintptr_t>(info->si_addr)) : nullptr;
    say("\nerror: ");
    say(file != nullptr ? file : "a file that is in use");
    say(" became shorter while it was in use, or its disk failed (SIGBUS): put it back whole, and replace model files by renaming new ones\n");
    signal(number, SIG_DFL);
    raise(number);  // comes when this returns
}

}  // namespace

void explain_bus_errors() {
    struct sigaction now;
    if (sigaction(SIGBUS, nullptr, &now) != 0 || (now.sa_flags & SA_SIGINFO) != 0 || now.sa_handler != SIG_DFL) return;
    struct sigaction ours = {};
    ours.sa_sigaction = &explain;
    ours.sa_flags = SA_SIGINFO;
    sigemptyset(&ours.sa_mask);
    sigaction(SIGBUS, &ours, nullptr);
}

}  // namespace sidecar
