// Whose turn it is: sessions of one model compute one at a time, in the order they asked.
//
// A fair lock. It lives here and not in Python because taking it and entering a `with` block, or leaving the block and
// passing it on, must be one step each: a Ctrl-C between the two would leave a turn that nobody passes on, and every
// session waiting for it. Whose turn begins also looks how the threads should wait.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>

#include "llama_api.h"
#include "waiting.h"

namespace sidecar {

class Turns {
  public:
    // n_threads: of the sessions' contexts.
    explicit Turns(int n_threads) : n_threads_(n_threads) {}

    // Waits until all who asked before have had their turn. Not for a thread whose turn it is.
    void take() {
        std::unique_lock<std::mutex> lock(mutex_);
        const uint64_t mine = n_asked_++;
        passed_.wait(lock, [&] { return n_passed_ == mine; });
        began_ = std::chrono::steady_clock::now();
        if (n_threads_ > 1) Waiting::of_process().before(n_threads_);
    }

    // Ends the turn: once for each take(). After a long one the OpenMP team goes too, when another thread waits.
    void pass() {
        std::unique_lock<std::mutex> lock(mutex_);
        if (n_asked_ - n_passed_ > 1 && std::chrono::steady_clock::now() - began_ > long_turn) {
            lock.unlock();
            release_team();
            lock.lock();
        }
        if (n_threads_ > 1) Waiting::of_process().after();
        n_passed_ += 1;
        passed_.notify_all();
    }

  private:
    static constexpr std::chrono::milliseconds long_turn{20};  // a new team takes up to 5 ms

    const int n_threads_;
    std::mutex mutex_;
    std::condition_variable passed_;
    uint64_t n_asked_ = 0, n_passed_ = 0;
    std::chrono::steady_clock::time_point began_;
};

}  // namespace sidecar
