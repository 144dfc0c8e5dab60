// Products of 1 to 8 rows inside the graphs of ggml's CPU backend, by the small-batch kernels.
//
// The CPU backend asks the buffer types that repack weights for it whether they compute an operation in its place, node by node
// and on every thread of its own. One of them is made to ask here first. So a product runs between the operations around it with
// no change of backend: no second team of threads, and no graph cut in two at each product, which took a small model longer than
// the product itself.
#pragma once

#include <string>

#include "ggml_abi.h"

namespace sidecar::smallbatch {

// From now on the CPU backend of `cpu`, whose functions are in `cpu_library` (what dlopen returned), computes here every operation
// that takes_product() names. Once. Returns why that is not possible, or nothing: it is tried out on a product, and taken back
// where that fails.
std::string join_graphs(const ggml::Library & library, ggml::Device * cpu, void * cpu_library);

}  // namespace sidecar::smallbatch
