#include "team.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>

namespace sidecar::smallbatch {

namespace {

constexpr size_t serial_bytes = 32 * 1024;  // less is done before a second thread has woken up
constexpr size_t least_bytes = 64 * 1024;  // of weights dealt at a time
constexpr size_t line_floats = 16;  // parts begin at a cache line of the output

// What the compiler calls for `#pragma omp parallel`; libgomp's name, which libomp has too.
using Parallel = void (*)(void (*work)(void *), void * data, unsigned n_threads, unsigned flags);
Parallel parallel = nullptr;

constexpr int n_spins = 2000;  // some 50 microseconds; then others get the processor

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace

bool bind_team(void * library) {
    parallel = reinterpret_cast<Parallel>(dlsym(library, "GOMP_parallel"));
    return parallel != nullptr;
}

struct Jobs::Job {
    enum Kind { prepare, multiply, apply } kind;
    const Kernel * kernel;
    RowSource source;
    uint8_t * prepared;
    std::vector<Product> products;
    RowsOp rows;
    size_t n_parts, least;
    std::atomic<size_t> next{0}, done{0};

    void run(size_t begin, size_t end) const {
        switch (kind) {
            case prepare: {
                const size_t n_bytes = kernel->format.n_bytes(source.n_in);
                for (size_t i = begin; i < end; ++i) {
                    const uint8_t * row =
                        source.x + i / source.n_rows * source.plane_bytes + i % source.n_rows * source.row_bytes;
                    kernel->format.prepare(reinterpret_cast<const float *>(row), source.n_in, prepared + i * n_bytes);
                }
                break;
            }
            case multiply: {
                const size_t n_out = products[0].end, n_of_each = (n_out + line_floats - 1) / line_floats;
                while (begin < end) {
                    const size_t i = begin / n_of_each, rest = std::min(end, (i + 1) * n_of_each) - begin;
                    Product product = products[i];
                    product.begin = begin % n_of_each * line_floats;
                    product.end = std::min(product.begin + rest * line_floats, n_out);
                    kernel->multiply[product.n_rows - 1](product);
                    begin += rest;
                }
                break;
            }
            case apply:
                for (size_t i = begin; i < end; ++i) {
                    const auto at = [i](auto * p, size_t n_bytes) {
                        return reinterpret_cast<decltype(p)>(reinterpret_cast<uintptr_t>(p) + i * n_bytes);
                    };
                    rows.op(at(rows.x, rows.x_bytes), at(rows.y, rows.y_bytes), at(rows.out, rows.out_bytes), rows.n,
                            rows.parameter);
                }
        }
    }
};

Jobs::Jobs() = default;
Jobs::~Jobs() = default;

void Jobs::prepare(const Kernel & kernel, const RowSource & source, uint8_t * prepared) {
    const size_t n_rows = source.n_rows * source.n_planes;
    Job & job = add(n_rows, n_rows * kernel.format.n_bytes(source.n_in));
    job.kind = Job::prepare;
    job.kernel = &kernel;
    job.source = source;
    job.prepared = prepared;
}

void Jobs::multiply(const Kernel & kernel, const Product * products, size_t n_products) {
    const size_t n_out = products->end, n_parts = (n_out + line_floats - 1) / line_floats;  // of each product
    Job & job = add(n_products * n_parts, n_products * n_out * products->row_bytes);
    job.kind = Job::multiply;
    job.kernel = &kernel;
    job.products.assign(products, products + n_products);
}

void Jobs::apply(const RowsOp & rows) {
    Job & job = add(rows.n_rows, 12 * rows.n * rows.n_rows);
    job.kind = Job::apply;
    job.rows = rows;
}

Jobs::Job & Jobs::add(size_t n_parts, size_t n_bytes) {
    if (n_ == jobs_.size()) jobs_.push_back(std::make_unique<Job>());
    Job & job = *jobs_[n_++];
    const bool is_large = n_parts > 1 && n_bytes > serial_bytes;
    any_large_ = any_large_ || is_large;
    job.n_parts = n_parts;
    job.least = is_large ? 1 + least_bytes * n_parts / n_bytes : n_parts;
    job.next = job.done = 0;
    return job;
}

// Of a job's parts many are taken at first, since long runs of weights are read fastest, and `least` at the end, so that all
// threads end together.
void Jobs::work(void * p) {
    Jobs & jobs = *static_cast<Jobs *>(p);
    const size_t n_shares = 2 * jobs.n_threads_;
    for (size_t i = 0; i < jobs.n_; ++i) {
        Job & job = *jobs.jobs_[i];
        size_t begin = job.next.load(std::memory_order_relaxed);
        while (begin < job.n_parts) {
            const size_t n = std::min(std::max((job.n_parts - begin) / n_shares, job.least), job.n_parts - begin);
            if (!job.next.compare_exchange_weak(begin, begin + n, std::memory_order_relaxed)) continue;
            job.run(begin, begin + n);
            job.done.fetch_add(n, std::memory_order_release);
            begin = job.next.load(std::memory_order_relaxed);
        }
        for (int spins = 0; job.done.load(std::memory_order_acquire) < job.n_parts; ++spins) {
            if (spins < n_spins) {
                pause();
            } else {
                std::this_thread::yield();
            }
        }
    }
}

void Jobs::run(int n_threads) {
    n_threads_ = size_t(std::max(n_threads, 1));
    if (n_threads_ > 1 && any_large_ && parallel != nullptr) {
        parallel(&Jobs::work, this, unsigned(n_threads_), 0);
    } else {
        n_threads_ = 1;
        work(this);
    }
    clear();
}

void Jobs::clear() {
    n_ = 0;
    any_large_ = false;
}

// Calls work(begin, end) with an equal share of 0 .. n-1 on each thread.
template <typename Work>
static void share(size_t n, int n_threads, const Work & work) {
    struct Shares {
        const Work & work;
        size_t n, n_threads;
        std::atomic<size_t> next;
    } shares{work, n, size_t(std::max(n_threads, 1)), {0}};
    const auto run = [](void * p) {
        Shares & all = *static_cast<Shares *>(p);
        for (size_t i; (i = all.next++) < all.n_threads;) all.work(i * all.n / all.n_threads, (i + 1) * all.n / all.n_threads);
    };
    if (n_threads > 1 && parallel != nullptr) {
        parallel(run, &shares, unsigned(n_threads), 0);
    } else {
        run(&shares);
    }
}

uint64_t read_all(const uint8_t * bytes, size_t n_bytes, int n_threads) {
    using Words = uint64_t __attribute__((vector_size(16)));
    constexpr size_t n_streams = 4, line = 64, part = n_streams * line;
    std::atomic<uint64_t> total{0};
    share(n_bytes / part, n_threads, [&](size_t begin, size_t end) {
        Words sum = {};
        for (size_t i = 0; i < end - begin; ++i) {
            for (size_t j = 0; j < n_streams; ++j) {
                const uint8_t * p = bytes + begin * part + (j * (end - begin) + i) * line;
                __builtin_prefetch(p + 2048);
                Words words[4];
                std::memcpy(words, p, sizeof words);
                sum ^= (words[0] ^ words[1]) ^ (words[2] ^ words[3]);
            }
        }
        total ^= sum[0] ^ sum[1];
    });
    return total;
}

}  // namespace sidecar::smallbatch
