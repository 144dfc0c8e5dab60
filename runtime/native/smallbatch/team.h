// A product on several threads: those of the OpenMP runtime that ggml's CPU backend runs on, so that no second pool of
// spinning threads fights the first. Nothing is linked: the runtime is looked up in the library that is loaded already.
#pragma once

#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "kernels.h"

namespace sidecar::smallbatch {

// Memory for prepared rows: aligned, grows when it must, never shrinks.
class RowBuffer {
  public:
    // What earlier calls returned is lost. Throws std::bad_alloc.
    uint8_t * reserve(size_t n_bytes) {
        if (n_bytes > n_bytes_) {
            n_bytes_ = 0;
            memory_.reset(static_cast<uint8_t *>(std::aligned_alloc(64, n_bytes)));
            if (memory_ == nullptr) throw std::bad_alloc();
            n_bytes_ = n_bytes;
        }
        return memory_.get();
    }

  private:
    struct Free {
        void operator()(uint8_t * p) const { std::free(p); }
    };
    std::unique_ptr<uint8_t, Free> memory_;
    size_t n_bytes_ = 0;
};

// Takes the OpenMP runtime that `library` (what dlopen returned) was linked with. False when there is none; products
// then run on the calling thread.
bool bind_team(void * library);

// Rows of F32 values, (n_planes, n_rows, n_in), with their strides in bytes; the values of a row are contiguous.
struct RowSource {
    const uint8_t * x;
    size_t n_in, n_rows, n_planes;
    size_t row_bytes, plane_bytes;
};

// An operation on the rows of x and y, (n_rows, n) in memory each; y may have one row for all of x's.
struct RowsOp {
    RowOp op;
    const float *x, *y;
    float * out;
    size_t n, n_rows;
    size_t x_bytes, y_bytes, out_bytes;  // from row to row
    float parameter;
};

// Jobs for the team, done one after another in one go: to call it together and send it home takes as long as a small product.
//
// A job's parts are dealt to whichever thread is free, since cores differ and other programs run; each part is computed whole by
// one thread. A thread waits for a job's parts, not for the other threads: one that never got a processor holds nobody up. Small
// jobs are one part, and where all are small none but the calling thread works.
class Jobs {
  public:
    Jobs();
    ~Jobs();

    // Prepares all rows for `kernel`: they come to lie one after another in `prepared`.
    void prepare(const Kernel & kernel, const RowSource & source, uint8_t * prepared);

    // All outputs 0 .. end-1 of several products with the same kernel and shape of weights.
    void multiply(const Kernel & kernel, const Product * products, size_t n_products);

    void apply(const RowsOp & rows);

    // Does all that has been added since, in that order.
    void run(int n_threads);

    // Forgets it instead.
    void clear();

  private:
    struct Job;
    Job & add(size_t n_parts, size_t n_bytes);
    static void work(void * jobs);

    std::vector<std::unique_ptr<Job>> jobs_;  // the first n_ are to be done; the others are kept for their memory
    size_t n_ = 0;
    bool any_large_ = false;
    size_t n_threads_ = 1;
};

// Reads n_bytes (a multiple of 256) and does nothing else: as fast as this memory can be read by so many threads.
// Returns the exclusive or of all words, so that nothing can be left out.
uint64_t read_all(const uint8_t * bytes, size_t n_bytes, int n_threads);

}  // namespace sidecar::smallbatch
