#include "waiting.h"

#include <dirent.h>
#include <sched.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "llama_api.h"

namespace sidecar {

namespace {

constexpr std::chrono::milliseconds between_looks{250};  // /proc/stat counts hundredths of a second

constexpr std::chrono::milliseconds between_glances{20};  // at what else runs

constexpr std::chrono::milliseconds pause{50};  // spinning threads have long gone to sleep

constexpr std::chrono::seconds after_sharing{5};  // threads of ours that shared a processor sleep so long

constexpr double slice_s = 0.004;      // what a scheduler gives a thread at a time, at most
constexpr double default_spins = 3e5;  // libgomp's own choice

// What /proc/stat says of the processors that this process may use.
struct Processors {
    int n = 0;            // none where it says nothing
    double idle_s = 0.0;  // processor seconds idle, waiting for a disk or taken by the hypervisor
    int n_running = 0;    // threads that run or could, of all programs on all processors
    int n_others = 0;     // processors that this process may not use
};

Processors processors() {
    Processors found;
#ifdef __linux__
    cpu_set_t usable;
    if (sched_getaffinity(0, sizeof usable, &usable) != 0) return found;
    std::FILE * file = std::fopen("/proc/stat", "re");
    if (file == nullptr) return found;
    char line[4096];
    while (std::fgets(line, sizeof line, file) != nullptr) {
        int cpu = 0;
        long long idle = 0, disk = 0, stolen = 0;
        std::sscanf(line, "procs_running %d", &found.n_running);
        if (std::strncmp(line, "cpu", 3) != 0 || line[3] < '0' || line[3] > '9') continue;  // the sum of all comes first
        if (std::sscanf(line, "cpu%d %*d %*d %*d %lld %lld %*d %*d %lld", &cpu, &idle, &disk, &stolen) != 4) continue;
        if (cpu >= CPU_SETSIZE || !CPU_ISSET(cpu, &usable)) {
            found.n_others += 1;
            continue;
        }
        found.n += 1;
        found.idle_s += double(idle + disk + stolen) / double(sysconf(_SC_CLK_TCK));
    }
    std::fclose(file);
#endif
    return found;
}

// Threads of this process that run or could.
struct OwnRunning {
    int n = 0;
    bool share = false;  // two of them are on one processor
};

OwnRunning own_running() {
    OwnRunning own;
#ifdef __linux__
    cpu_set_t taken;
    CPU_ZERO(&taken);
    DIR * tasks = opendir("/proc/self/task");
    if (tasks == nullptr) return own;
    while (const dirent * task = readdir(tasks)) {
        char path[288], line[1024];
        std::snprintf(path, sizeof path, "/proc/self/task/%s/stat", task->d_name);
        std::FILE * file = task->d_name[0] == '.' ? nullptr : std::fopen(path, "re");
        if (file == nullptr) continue;
        const char * field = std::fgets(line, sizeof line, file) == nullptr ? nullptr : std::strrchr(line, ')');
        std::fclose(file);
        if (field == nullptr || std::strncmp(field, ") R", 3) != 0) continue;
        own.n += 1;
        for (int i = 2; i < 39 && field != nullptr; ++i) field = std::strchr(field + 1, ' ');  // the 39th is the processor
        const int cpu = field == nullptr ? CPU_SETSIZE : std::atoi(field);
        if (cpu < 0 || cpu >= CPU_SETSIZE) continue;
        own.share = own.share || CPU_ISSET(cpu, &taken);
        CPU_SET(cpu, &taken);
    }
    closedir(tasks);
#endif
    return own;
}

// What libgomp does between two looks.
inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#else
    asm volatile("" ::: "memory");
#endif
}

double own_seconds() {
    timespec used{};
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
    return double(used.tv_sec) + 1e-9 * double(used.tv_nsec);
}

}  // namespace

int64_t spins_in(double seconds) {
    constexpr int n_looks = 2000, n_tries = 5;
    constexpr double least_s = 1e-10;  // of a look: a clock may be too coarse to tell
    const std::atomic<int> awaited{0};
    double shortest_s = 1;  // another program may have had the processor meanwhile
    for (int i = 0; i < n_tries; ++i) {
        const auto started = std::chrono::steady_clock::now();
        for (int look = 0; look < n_looks && awaited.load(std::memory_order_acquire) == 0; ++look) relax();
        shortest_s = std::min(shortest_s, std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count());
    }
    return int64_t(seconds / std::max(shortest_s / n_looks, least_s));
}

struct Waiting::Parked {
    std::mutex mutex;
    std::condition_variable changed;
    bool wanted = true;

    // A thread's team goes with the thread.
    static void park(const std::shared_ptr<Parked> & parked, unsigned n_threads) {
        std::thread([parked, n_threads] {
            api().gomp_parallel([](void *) {}, nullptr, n_threads, 0);
            std::unique_lock<std::mutex> lock(parked->mutex);
            parked->changed.wait(lock, [&] { return !parked->wanted; });
        }).detach();
    }

    void end() {
        const std::lock_guard<std::mutex> lock(mutex);
        wanted = false;
        changed.notify_all();
    }
};

Waiting & Waiting::of_process() {
    static Waiting & waiting = *new Waiting;  // never destroyed: the parked thread may outlive static objects
    return waiting;
}

Waiting::Waiting() : looked_at_(std::chrono::steady_clock::now()), ours_s_(own_seconds()) {
    const Processors found = processors();
    n_cpus_ = found.n;
    idle_s_ = found.idle_s;
    works_ = n_cpus_ > 0 && api().gomp_parallel != nullptr && std::getenv("OMP_WAIT_POLICY") == nullptr &&
             std::getenv("GOMP_SPINCOUNT") == nullptr;
    if (works_) is_short_ = default_spins < double(spins_in(slice_s));
}

void Waiting::before(int n_threads) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto now = std::chrono::steady_clock::now();
    const bool paused = now - computed_at_ > pause;
    if (!works_) return;
    if (!paused && now - looked_at_ < between_looks) {
        if (is_sleep_doubtful_ && now - glanced_at_ >= between_glances) glance(now);
        return;
    }
    const int n_wanted = std::min(n_threads, n_cpus_);
    const double seconds = std::chrono::duration<double>(now - looked_at_).count(), ours_s = own_seconds();
    double room = (ours_s - ours_s_) / seconds;  // at least
    const bool had_all = !paused && !is_crowded(room, n_wanted, sleeping_);  // whatever else there is: /proc/stat takes long to read
    const bool knows_idle = knows_idle_;
    looked_at_ = glanced_at_ = now;
    ours_s_ = ours_s;
    knows_idle_ = !had_all;
    if (had_all) {
        n_others_ = 0;
        sleep(false);
        return;
    }
    Processors found = processors();
    room += (found.idle_s - idle_s_) / seconds;
    idle_s_ = found.idle_s;
    if (!paused && !knows_idle) return;  // the next look can say
    if (paused) {
        const auto room_now = [&] { return found.n_others == 0 ? n_cpus_ - (found.n_running - 1) : n_cpus_; };  // one is this
        for (int i = 0; i < 4 && is_crowded(room_now(), n_wanted, sleeping_); ++i) {  // what runs for a moment is no load
            std::this_thread::sleep_for(std::chrono::microseconds(500));
            found = processors();
        }
        room = room_now();
    }
    const bool crowded = is_crowded(room, n_wanted, sleeping_);
    if (crowded && found.n_others == 0) {
        const OwnRunning own = own_running();
        const double n_others = std::max(0, found.n_running - own.n);
        n_others_ = n_others_ > 0 ? (n_others_ + n_others) / 2 : n_others;
        const bool is_team = !paused && own.n <= n_wanted;  // or others of ours run, too: one that reads what is written
        if (own.share && is_team) asleep_until_ = now + after_sharing;
    } else {
        n_others_ = 0;
    }
    is_sleep_doubtful_ = crowded && paused && now >= asleep_until_;
    sleep(crowded && (now < asleep_until_ || !(is_short_ && is_full(n_others_, n_cpus_, sleeping_))));
}

// Whoever ran when a text began may have been its reader, who is done: then threads need not sleep until the next look.
void Waiting::glance(std::chrono::steady_clock::time_point now) {
    glanced_at_ = now;
    if (!sleeping_ || processors().n_running > own_running().n) return;
    is_sleep_doubtful_ = false;
    n_others_ = 0;
    sleep(false);
}

void Waiting::after() {
    const std::lock_guard<std::mutex> lock(mutex_);
    computed_at_ = std::chrono::steady_clock::now();
}

void Waiting::sleep(bool wanted) {
    if (wanted == sleeping_) return;
    sleeping_ = wanted;
    if (wanted) {
        parked_ = std::make_shared<Parked>();
        Parked::park(parked_, unsigned(n_cpus_) + 1);
    } else {
        parked_->end();
        parked_.reset();
    }
}

void Waiting::spins_for(int ms) {
    const std::lock_guard<std::mutex> lock(mutex_);
    told_ms_ = ms;
    is_short_ = ms < 1000 * slice_s;
}

std::string Waiting::state() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!works_) return "as it is";
    if (sleeping_) return "sleep";
    return told_ms_ > 0 ? "spin " + std::to_string(told_ms_) + " ms" : "spin";
}

}  // namespace sidecar
