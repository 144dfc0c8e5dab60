// How long products take here and on the CPU backend, on made-up weights: what the choice between the two rests on.
//
// A pass is what a decode is: something small on the CPU backend, then two products of its result, and so on. For the CPU
// backend all of it is one graph. The device's products are graphs of their own, which costs small models more than it gains.
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
    std::vector<double> ours;   // by the device
    std::vector<double> stock;  // by the CPU backend alone
};

// Passes of both in turns, so that whatever slows the machine slows both. Needs a registered device; throws
// std::runtime_error where ggml refuses.
Times run_trial(const Trial & trial, const std::vector<int> & n_rows);

}  // namespace sidecar::smallbatch
