// How OpenMP's threads wait for one another: spinning while the processors are theirs, sleeping while others use them.
//
// A product ends when its slowest thread does. libgomp's threads spin until then, which is fastest on an idle machine; on a
// busy one the spinning keeps the very thread that all wait for from its processor, and decoding becomes ten times slower and
// more. libgomp reads how long to spin from the environment when it is loaded, too early for a library to choose. But while
// the process has more OpenMP threads than processors, it spins for a few microseconds only. So this keeps a parked team of
// more threads than there are processors while the machine is busy, and none while it is idle.
//
// Does nothing where the user has chosen (OMP_WAIT_POLICY, GOMP_SPINCOUNT), on runtimes other than libgomp, and where there is
// no /proc/stat.
#pragma once

#include <chrono>
#include <memory>
#include <mutex>
#include <string>

namespace sidecar {

// Whether n_threads should sleep rather than spin while there is room for `room` of them: processors idle or ours already.
// It takes half a processor to begin with and a quarter to go on, so that it does not alternate.
inline bool should_sleep(double room, int n_threads, bool sleeping) {
    return room < n_threads - (sleeping ? 0.25 : 0.5);
}

class Waiting {
  public:
    // The process's own: teams of all threads are counted together.
    static Waiting & of_process();

    // Before n_threads compute: looks how busy the machine is, and chooses. While the process computes it judges by the time
    // since the last look, and really looks a few times a second only; after a pause, in which others may have come and gone, by
    // what runs now.
    void before(int n_threads);
    // After they have computed.
    void after();

    // "spin", "sleep", or "as it is" where this does nothing.
    std::string state();

  private:
    Waiting();
    void sleep(bool wanted);

    std::mutex mutex_;  // two models take turns apart
    bool works_ = false;
    bool sleeping_ = false;
    int n_cpus_ = 0;
    std::chrono::steady_clock::time_point looked_at_, computed_at_;
    double idle_s_ = 0.0, ours_s_ = 0.0;  // processor seconds at the last look
    struct Parked;
    std::shared_ptr<Parked> parked_;  // the parked team's thread looks after it too
};

}  // namespace sidecar
