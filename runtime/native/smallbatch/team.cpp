#include "team.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstring>

namespace sidecar::smallbatch {

namespace {

constexpr size_t serial_bytes = 32 * 1024;  // less is done before a second thread has woken up
constexpr size_t least_bytes = 64 * 1024;  // of weights dealt at a time
constexpr size_t line_floats = 16;  // parts begin at a cache line of the output

// What the compiler calls for `#pragma omp parallel`; libgomp's name, which libomp has too.
using Parallel = void (*)(void (*work)(void *), void * data, unsigned n_threads, unsigned flags);
Parallel parallel = nullptr;

// Parts 0 .. n_parts-1 of a job, dealt to whichever thread is free: many at first, since long runs of weights are read
// fastest, and `least` at the end, so that all threads end together.
template <typename Work>
struct Job {
    const Work & work;
    size_t n_parts, least, n_shares;
    std::atomic<size_t> next{0};

    static void run(void * data) {
        Job & job = *static_cast<Job *>(data);
        size_t begin = job.next.load(std::memory_order_relaxed);
        while (begin < job.n_parts) {
            const size_t n = std::min(std::max((job.n_parts - begin) / job.n_shares, job.least), job.n_parts - begin);
            if (!job.next.compare_exchange_weak(begin, begin + n, std::memory_order_relaxed)) continue;
            job.work(begin, begin + n);
            begin = job.next.load(std::memory_order_relaxed);
        }
    }
};

// Calls work(begin, end) until parts 0 .. n_parts-1, of n_bytes in all, are done.
template <typename Work>
void deal(size_t n_parts, size_t n_bytes, int n_threads, const Work & work) {
    if (n_threads > 1 && n_parts > 1 && n_bytes > serial_bytes && parallel != nullptr) {
        Job<Work> job{work, n_parts, 1 + least_bytes * n_parts / n_bytes, 2 * size_t(n_threads)};
        parallel(&Job<Work>::run, &job, unsigned(n_threads), 0);
    } else {
        work(0, n_parts);
    }
}

}  // namespace

bool bind_team(void * library) {
    parallel = reinterpret_cast<Parallel>(dlsym(library, "GOMP_parallel"));
    return parallel != nullptr;
}

void prepare(const Kernel & kernel, const RowSource & source, uint8_t * prepared, int n_threads) {
    const size_t n_bytes = kernel.format.n_bytes(source.n_in);
    const size_t n_rows = source.n_rows * source.n_planes;
    deal(n_rows, n_rows * n_bytes, n_threads, [&](size_t begin, size_t end) {
        for (size_t i = begin; i < end; ++i) {
            const uint8_t * row =
                source.x + i / source.n_rows * source.plane_bytes + i % source.n_rows * source.row_bytes;
            kernel.format.prepare(reinterpret_cast<const float *>(row), source.n_in, prepared + i * n_bytes);
        }
    });
}

void multiply(const Kernel & kernel, const Product * products, size_t n_products, int n_threads) {
    const size_t n_out = products->end, n_parts = (n_out + line_floats - 1) / line_floats;  // of each product
    deal(n_products * n_parts, n_products * n_out * products->row_bytes, n_threads, [&](size_t begin, size_t end) {
        while (begin < end) {
            const size_t i = begin / n_parts, rest = std::min(end, (i + 1) * n_parts) - begin;
            Product product = products[i];
            product.begin = begin % n_parts * line_floats;
            product.end = std::min(product.begin + rest * line_floats, n_out);
            kernel.multiply[product.n_rows - 1](product);
            begin += rest;
        }
    });
}

uint64_t read_all(const uint8_t * bytes, size_t n_bytes, int n_threads) {
    using Words = uint64_t __attribute__((vector_size(16)));
    constexpr size_t n_streams = 4, line = 64, part = n_streams * line;
    std::atomic<uint64_t> total{0};
    deal(n_bytes / part, n_bytes, n_threads, [&](size_t begin, size_t end) {
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
