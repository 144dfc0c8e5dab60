// Whose turn it is: sessions of one model compute one at a time, in the order they asked; a text that begins goes first.
//
// A fair lock. It lives here and not in Python because taking it and entering a `with` block, or leaving the block and
// passing it on, must be one step each: a Ctrl-C between the two would leave a turn that nobody passes on, and every
// session waiting for it. Whose turn begins also looks how the threads should wait.
//
// A change of turns wakes a thread, and the next one's data into the caches. So one turn may have several short rounds, until
// is_over(); and while threads alternate, run() computes for all of them on one thread: see compute_thread.h.
//
// Whoever waits for a text's first token has nothing to read yet, those whose texts go on do. So the first piece of a prompt may
// ask for a turn ahead of all that go on, which have every second turn at least: texts that only begin do not hold them up.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
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

    // Waits until all who asked before have had their turn; `ahead`, only those who asked so too, and one other after each of them.
    // Not for a thread whose turn it is.
    void take(bool ahead = false) {
        std::unique_lock<std::mutex> lock(mutex_);
        std::deque<uint64_t> & mine = ahead ? ahead_ : asked_;
        const uint64_t number = n_asked_++;
        mine.push_back(number);
        passed_.wait(lock, [&] { return !is_taken_ && next() == number; });
        mine.pop_front();
        is_taken_ = true;
        was_ahead_ = ahead;
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
        const bool is_long = waits() && Clock::now() - began_ > long_turn;
        if (n_threads_ > 1 && (is_long || alternates())) {
            lock.unlock();
            release_team();
            lock.lock();
        }
        if (n_threads_ > 1) Waiting::of_process().after();
        is_taken_ = false;
        passed_.notify_all();
    }

    // In a turn: whether it has lasted as long as it may while others wait, all of whom have had theirs after twice `longest`, or
    // somebody waits who goes ahead.
    bool is_over() {
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto n = int64_t(asked_.size());
        return !ahead_.empty() || (n > 0 && Clock::now() - began_ >= std::min(longest, 2 * longest / n));
    }

    size_t n_waiting() {
        const std::lock_guard<std::mutex> lock(mutex_);
        return asked_.size() + ahead_.size();
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

    bool waits() const { return !(asked_.empty() && ahead_.empty()); }  // anybody
    // Whose turn is next, of those who wait.
    uint64_t next() const { return ahead_.empty() || (was_ahead_ && !asked_.empty()) ? asked_.front() : ahead_.front(); }

    // Whether turns go to and fro between threads; in a turn.
    bool alternates() const { return began_ < alternates_until_; }

    const int n_threads_;
    std::mutex mutex_;
    std::condition_variable passed_;
    std::deque<uint64_t> asked_, ahead_;  // numbers of those who wait
    uint64_t n_asked_ = 0;
    bool is_taken_ = false, was_ahead_ = false;  // the present or last turn
    Clock::time_point began_, changed_at_, alternates_until_;
    std::thread::id thread_;  // of the last turn
    ComputeThread shared_;
};

}  // namespace sidecar
