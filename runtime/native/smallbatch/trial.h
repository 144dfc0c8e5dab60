// How long products take here and on the CPU backend, on made-up weights: what the choice between the two rests on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace sidecar::smallbatch {

struct Trial {
    int32_t type;  // ggml's number
    int64_t n_in, n_out;
    size_t n_bytes;  // of weights in all, as many matrices as that takes: more than the caches hold
    int n_threads;
    int repeats;
};

// Seconds of the fastest pass over all matrices, for each number of rows.
struct Times {
    std::vector<double> ours;   // by the device
    std::vector<double> stock;  // by the CPU backend, with the weights repacked as llama.cpp would repack them
};

// Passes of both in turns, so that whatever slows the machine slows both. Needs a registered device; throws
// std::runtime_error where ggml refuses.
Times run_trial(const Trial & trial, const std::vector<int> & n_rows);

}  // namespace sidecar::smallbatch
