#include "team.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstring>

namespace sidecar::smallbatch {

namespace {

constexpr size_t chunk_bytes = 64 * 1024;  // of weights dealt at a time
constexpr size_t serial_bytes = 32 * 1024;  // less is done before a second thread has woken up
constexpr size_t line_floats = 16;  // chunks begin at a cache line of the output

// What the compiler calls for `#pragma omp parallel`; libgomp's name, which libomp has too.
using Parallel = void (*)(void (*work)(void *), void * data, unsigned n_threads, unsigned flags);
Parallel parallel = nullptr;

// Parts 0 .. n_parts-1 of a job, each done by whichever thread is free.
template <typename Part>
struct Job {
    const Part & part;
    size_t n_parts;
    std::atomic<size_t> next{0};

    static void work(void * data) {
        Job & job = *static_cast<Job *>(data);
        size_t i;
        while ((i = job.next.fetch_add(1, std::memory_order_relaxed)) < job.n_parts) job.part(i);
    }
};

template <typename Part>
void deal(size_t n_parts, size_t n_bytes, int n_threads, const Part & part) {
    Job<Part> job{part, n_parts};
    if (n_threads > 1 && n_parts > 1 && n_bytes > serial_bytes && parallel != nullptr) {
        parallel(&Job<Part>::work, &job, unsigned(n_threads), 0);
    } else {
        Job<Part>::work(&job);
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
    deal(n_rows, n_rows * n_bytes, n_threads, [&](size_t i) {
        const uint8_t * row = source.x + i / source.n_rows * source.plane_bytes + i % source.n_rows * source.row_bytes;
        kernel.format.prepare(reinterpret_cast<const float *>(row), source.n_in, prepared + i * n_bytes);
    });
}

void multiply(const Kernel & kernel, const Product * products, size_t n_products, int n_threads) {
    const size_t n_out = products->end, row_bytes = products->row_bytes;
    const size_t chunk = std::max<size_t>(1, chunk_bytes / row_bytes / line_floats) * line_floats;
    const size_t n_chunks = (n_out + chunk - 1) / chunk;
    deal(n_products * n_chunks, n_products * n_out * row_bytes, n_threads, [&](size_t i) {
        Product part = products[i / n_chunks];
        part.begin = i % n_chunks * chunk;
        part.end = std::min(part.begin + chunk, n_out);
        kernel.multiply[part.n_rows - 1](part);
    });
}

uint64_t read_all(const uint8_t * bytes, size_t n_bytes, int n_threads) {
    using Words = uint64_t __attribute__((vector_size(16)));
    std::atomic<uint64_t> total{0};
    deal((n_bytes + chunk_bytes - 1) / chunk_bytes, n_bytes, n_threads, [&](size_t i) {
        const uint8_t * end = bytes + std::min((i + 1) * chunk_bytes, n_bytes);
        Words sums[4] = {};
        for (const uint8_t * p = bytes + i * chunk_bytes; p < end; p += 64) {
            Words line[4];
            std::memcpy(line, p, sizeof line);
            for (int j = 0; j < 4; ++j) sums[j] ^= line[j];
        }
        const Words sum = sums[0] ^ sums[1] ^ sums[2] ^ sums[3];
        total ^= sum[0] ^ sum[1];
    });
    return total;
}

}  // namespace sidecar::smallbatch
