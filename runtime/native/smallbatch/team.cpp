#include "team.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>

namespace sidecar::smallbatch {

namespace {

constexpr size_t chunk_bytes = 64 * 1024;   // of weights dealt at a time
constexpr size_t serial_bytes = 32 * 1024;  // less is done before a second thread has woken up
constexpr size_t line_floats = 16;          // chunks begin at a cache line of the output

// What the compiler calls for `#pragma omp parallel`; libgomp's name, which libomp has too.
using Parallel = void (*)(void (*work)(void *), void * data, unsigned n_threads, unsigned flags);
Parallel parallel = nullptr;

struct Job {
    Multiply multiply;
    Product product;
    size_t chunk;
    std::atomic<size_t> next;
};

void work(void * data) {
    Job & job = *static_cast<Job *>(data);
    Product part = job.product;
    while ((part.begin = job.next.fetch_add(job.chunk, std::memory_order_relaxed)) < job.product.end) {
        part.end = std::min(part.begin + job.chunk, job.product.end);
        job.multiply(part);
    }
}

}  // namespace

bool bind_team(void * library) {
    parallel = reinterpret_cast<Parallel>(dlsym(library, "GOMP_parallel"));
    return parallel != nullptr;
}

void multiply(const Kernel & kernel, const Product & p, int n_rows, int n_threads) {
    Job job{kernel.multiply[n_rows - 1], p, 0, {0}};
    job.chunk = std::max<size_t>(1, chunk_bytes / p.row_bytes / line_floats) * line_floats;
    if (n_threads > 1 && parallel != nullptr && p.end * p.row_bytes > serial_bytes) {
        parallel(work, &job, unsigned(n_threads), 0);
    } else {
        work(&job);
    }
}

}  // namespace sidecar::smallbatch
