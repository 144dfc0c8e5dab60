// Whose turn it is: sessions of one model compute one at a time, in the order they asked.
//
// A fair lock. It lives here and not in Python because taking it and entering a `with` block, or leaving the block and
// passing it on, must be one step each: a Ctrl-C between the two would leave a turn that nobody passes on, and every
// session waiting for it.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace sidecar {

class Turns {
  public:
    // Waits until all who asked before have had their turn. Not for a thread whose turn it is.
    void take() {
        std::unique_lock<std::mutex> lock(mutex_);
        const uint64_t mine = n_asked_++;
        passed_.wait(lock, [&] { return n_passed_ == mine; });
    }

    // Ends the turn: once for each take().
    void pass() {
        const std::lock_guard<std::mutex> lock(mutex_);
        n_passed_ += 1;
        passed_.notify_all();
    }

  private:
    std::mutex mutex_;
    std::condition_variable passed_;
    uint64_t n_asked_ = 0, n_passed_ = 0;
};

}  // namespace sidecar
