// Whose turn it is: sessions of one model compute one at a time, in the order they asked.
//
// A fair lock. It lives here and not in Python because taking it and entering a `with` block, or leaving the block and
// passing it on, must be one step each: a Ctrl-C between the two would leave a turn that nobody passes on, and every
// session waiting for it. Whose turn begins also looks how the threads should wait.
//
// A change of turns wakes a thread, and the next one's data into the caches. So one turn may have several short rounds, until
// is_over(); and while threads alternate, run() computes for all of them on one thread: see compute_thread.h.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>

#include "compute_thread.h"
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
        began_ = Clock::now();
        if (const auto thread = std::this_thread::get_id(); thread != thread_) {
            alternates_until_ = changed_at_ + alternating;
            changed_at_ = began_;
            thread_ = thread;
        }
        if (n_threads_ > 1) Waiting::of_process().before(n_threads_);
    }

    // Ends the turn: once for each take(). After a long one, or while threads alternate, the OpenMP team goes too.
    void pass() {
        std::unique_lock<std::mutex> lock(mutex_);
        const bool is_long = n_asked_ - n_passed_ > 1 && Clock::now() - began_ > long_turn;
        if (n_threads_ > 1 && (is_long || alternates())) {
            lock.unlock();
            release_team();
            lock.lock();
        }
        if (n_threads_ > 1) Waiting::of_process().after();
        n_passed_ += 1;
        passed_.notify_all();
    }

    // In a turn: whether it has lasted as long as it may while others wait. All of them have had theirs after twice `longest`.
    bool is_over() {
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto n_others = int64_t(n_asked_ - n_passed_) - 1;
        return n_others > 0 && Clock::now() - began_ >= std::min(longest, 2 * longest / n_others);
    }

    // In a turn: computes, here or on the thread that does it for all.
    void run(const std::function<void()> & work) {
        if (n_threads_ > 1 && alternates()) {
            release_team();
            shared_.run(work);
        } else {
            shared_.release();
            work();
        }
    }

  private:
    using Clock = std::chrono::steady_clock;
    static constexpr std::chrono::nanoseconds longest = std::chrono::milliseconds(20);
    static constexpr std::chrono::milliseconds long_turn{20};  // a new team takes up to 5 ms
    static constexpr std::chrono::seconds alternating{1};      // two changes within it

    // Whether turns go to and fro between threads; in a turn.
    bool alternates() const { return began_ < alternates_until_; }

    const int n_threads_;
    std::mutex mutex_;
    std::condition_variable passed_;
    uint64_t n_asked_ = 0, n_passed_ = 0;
    Clock::time_point began_, changed_at_, alternates_until_;
    std::thread::id thread_;  // of the last turn
    ComputeThread shared_;
};

}  // namespace sidecar
