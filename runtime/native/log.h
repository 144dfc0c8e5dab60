// llama.cpp's log, for those who did not ask for it: all is dropped but errors, which our own messages quote.
//
// No Python in here. llama.cpp logs in the middle of a decode too, and a Python callback there would have to wait for the
// interpreter, and would swallow a Ctrl-C that came meanwhile.
#pragma once

#include <cstdint>
#include <string>

namespace sidecar {

inline thread_local std::string kept_errors;  // llama.cpp reports in the thread that called it

// A ggml_log_callback: keeps the text of errors.
inline void keep_errors(int32_t level, const char * text, void *) {
    constexpr int32_t error = 4, continued = 5;  // of ggml_log_level
    constexpr size_t most = 1 << 16;
    static thread_local bool is_error = false;
    if (level != continued) is_error = level == error;
    if (is_error && text != nullptr && kept_errors.size() < most) kept_errors += text;
}

// What this thread's calls have complained of since it was last asked.
inline std::string take_errors() {
    std::string taken;
    taken.swap(kept_errors);
    return taken;
}

}  // namespace sidecar
