// Work in equal shares on several threads, for tests and measurements; in a model ggml's threads do it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <thread>
#include <vector>

namespace sidecar::smallbatch {

// Calls work(begin, end) with an equal share of 0 .. n-1 on each of n_threads threads, the calling one among them.
template <typename Work>
void share(size_t n, int n_threads, const Work & work) {
    const size_t n_shares = size_t(std::max(n_threads, 1));
    const auto run = [&](size_t i) { work(i * n / n_shares, (i + 1) * n / n_shares); };
    std::vector<std::thread> others;
    for (size_t i = 1; i < n_shares; ++i) others.emplace_back(run, i);
    run(0);
    for (std::thread & other : others) other.join();
}

}  // namespace sidecar::smallbatch
