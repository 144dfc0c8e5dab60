// How OpenMP's threads wait for one another: spinning for a moment, or sleeping at once.
//
// A product ends when its slowest thread does. Threads that spin until then are fastest while the processors are theirs. Beside
// others it depends. Where every processor has another program's thread too, ours run together or not at all, and spin for at
// most a millisecond: those that sleep at once sleep and wake a thousand times a token, and one that spins for longer than the
// scheduler's slice keeps the very thread that all wait for from its processor. Where others use some of the processors, two
// threads of ours share one, for good, and the one that spins is always in the other's way: they sleep at once. So they
// do wherever two of them are seen on one processor.
//
// libgomp reads how long to spin from the environment when it is loaded, and never again; its own choice is a number of looks, which
// last 3 ms on one processor and 16 ms on another. runtime/openmp.py tells it a millisecond. But while the process has more OpenMP
// threads than processors, it spins for a few microseconds only. So this keeps a parked team of more threads than there are
// processors while threads should sleep, and none while they should spin.
//
// Does nothing where the user has chosen (OMP_WAIT_POLICY, GOMP_SPINCOUNT), on runtimes other than libgomp, and where there is
// no /proc/stat.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

namespace sidecar {

// How often a thread of libgomp's looks whether its wait is over in so many seconds: what GOMP_SPINCOUNT counts. Takes half a
// millisecond: it is measured, since processors pause for 10 to 140 cycles between two looks, and some not at all.
int64_t spins_in(double seconds);

// Whether there is less room than for n_threads: processors idle or ours already. It takes half a processor to begin with and a
// quarter to go on, so that it does not alternate.
inline bool is_crowded(double room, int n_threads, bool sleeping) {
    return room < n_threads - (sleeping ? 0.25 : 0.5);
}

// Whether n_others threads of other programs are enough for each of n_cpus processors; with a margin for the same reason.
inline bool is_full(double n_others, int n_cpus, bool sleeping) { return n_others > n_cpus - (sleeping ? 0.25 : 0.75); }

class Waiting {
  public:
    // The process's own: teams of all threads are counted together.
    static Waiting & of_process();

    // Before n_threads compute: looks how busy the machine is, and chooses. While the process computes it judges by the time
    // since the last look, a few times a second only, and at other programs only where it had not all of it; after a pause, in which
    // others may have come and gone, by what runs now, and soon again where that is another program.
    void before(int n_threads);
    // After they have computed.
    void after();

    // libgomp was told to spin for so long at most.
    void spins_for(int ms);

    // "spin 1 ms" (libgomp was told), "spin", "sleep", or "as it is" where this does nothing.
    std::string state();

  private:
    Waiting();
    void glance(std::chrono::steady_clock::time_point now);
    void sleep(bool wanted);

    std::mutex mutex_;  // two models take turns apart
    bool works_ = false;
    bool sleeping_ = false;
    int told_ms_ = 0;         // how long libgomp was told to spin; 0: it was not
    bool is_short_ = false;   // its spin is shorter than a scheduler's slice
    double n_others_ = 0.0;   // threads of other programs that run or could, a moving mean
    int n_cpus_ = 0;
    bool is_sleep_doubtful_ = false;  // it was chosen by what ran at one moment
    std::chrono::steady_clock::time_point looked_at_, glanced_at_, computed_at_, asleep_until_;
    double idle_s_ = 0.0, ours_s_ = 0.0;  // processor seconds at the last look
    bool knows_idle_ = true;              // idle_s_ is of then, too
    struct Parked;
    std::shared_ptr<Parked> parked_;  // the parked team's thread looks after it too
};

}  // namespace sidecar
