// How long products take here and on the CPU backend, on made-up weights: what the choice between the two rests on.
//
// A pass is what a decode is: one graph of the CPU backend with something small, then two products of its result, and so on. What
// the products run on depends on where the weights lie alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace sidecar::smallbatch {

struct Trial {
    int32_t type;  // ggml's number
    int64_t n_in, n_out;
    size_t n_bytes;  // of weights in all, as many matrices as that takes
    int n_threads;
    int repeats;
    bool repacked;  // whether the CPU backend's weights are repacked as llama.cpp would repack them
};

// Seconds of the fastest pass over all matrices, for each number of rows.
struct Times {
    std::vector<double> ours;   // by the small-batch kernels
    std::vector<double> stock;  // by llama.cpp's own
};

// Passes of both in turns, so that whatever slows the machine slows both. Needs a registered device; throws
// std::runtime_error where ggml refuses.
Times run_trial(const Trial & trial, const std::vector<int> & n_rows);

// Reads n_bytes (a multiple of 256) and does nothing else: as fast as this memory can be read by so many threads.
// Returns the exclusive or of all words, so that nothing can be left out.
uint64_t read_all(const uint8_t * bytes, size_t n_bytes, int n_threads);

}  // namespace sidecar::smallbatch
