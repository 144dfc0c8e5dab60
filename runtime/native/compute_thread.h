// One thread that computes for others, one after another, while they wait.
//
// libgomp gives each thread that computes a team of its own, and while the process has more threads in teams than processors,
// every wait in any of them sleeps at once: two threads that take turns at a small model are several times slower than one. Here
// both compute on this one's team.
#pragma once

#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

#include "llama_api.h"

namespace sidecar {

class ComputeThread {
  public:
    ~ComputeThread() {
        if (!thread_.joinable()) return;
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            ends_ = true;
        }
        asked_.notify_one();
        thread_.join();
    }

    // Runs `work` there and waits for it; throws what it throws. One caller at a time.
    void run(const std::function<void()> & work) {
        std::unique_lock<std::mutex> lock(mutex_);
        if (!thread_.joinable()) thread_ = std::thread([this] { serve(); });
        work_ = &work;
        has_team_ = true;
        asked_.notify_one();
        done_.wait(lock, [&] { return work_ == nullptr; });
        if (error_ != nullptr) std::rethrow_exception(std::exchange(error_, nullptr));
    }

    // Its team ends, as soon as it is free; it also does when nobody asks for a while. From any thread; waits for nothing.
    void release() {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (!has_team_) return;
        releases_ = true;
        asked_.notify_one();
    }

  private:
    static constexpr std::chrono::milliseconds idle{50};

    void serve() {
        const auto asked = [&] { return work_ != nullptr || releases_ || ends_; };
        std::unique_lock<std::mutex> lock(mutex_);
        while (true) {
            bool is_idle = false;
            if (has_team_) {
                is_idle = !asked_.wait_for(lock, idle, asked);
            } else {
                asked_.wait(lock, asked);
            }
            if (work_ != nullptr) {
                const std::function<void()> & work = *work_;
                lock.unlock();
                std::exception_ptr error;
                try {
                    work();
                } catch (...) {
                    error = std::current_exception();
                }
                lock.lock();
                error_ = error;
                work_ = nullptr;
                done_.notify_one();
            } else if (releases_ || is_idle) {
                release_team();
                releases_ = has_team_ = false;
            } else {
                return;
            }
        }
    }

    std::mutex mutex_;
    std::condition_variable asked_, done_;
    const std::function<void()> * work_ = nullptr;
    std::exception_ptr error_;
    bool has_team_ = false, releases_ = false, ends_ = false;
    std::thread thread_;
};

}  // namespace sidecar
