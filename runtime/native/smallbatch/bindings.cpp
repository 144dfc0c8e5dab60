#include "bindings.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdlib>
#include <memory>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "device.h"
#include "huge_pages.h"
#include "kernels.h"
#include "shares.h"
#include "trial.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace sidecar::smallbatch;

namespace {

using Weights = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Rows = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Out = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

std::vector<std::string> sets() {
    size_t n_sets;
    const KernelSet * all = kernel_sets(n_sets);
    std::vector<std::string> names;
    for (size_t i = 0; i < n_sets; ++i) {
        if (all[i].runs_here()) names.push_back(all[i].name);
    }
    return names;
}

// For tests and measurements.
void multiply_rows(int32_t type, Weights weights, Rows x, Out out, const std::string & set, int n_threads) {
    const Block block = block_of(Type(type));
    const size_t n_out = weights.shape(0), row_bytes = weights.shape(1), n_rows = x.shape(0), n_in = x.shape(1);
    if (block.n_values == 0 || n_in % block.n_values != 0 || row_bytes != n_in / block.n_values * block.n_bytes ||
        n_rows < 1 || n_rows > size_t(max_rows) || out.shape(0) != n_rows || out.shape(1) != n_out || n_in == 0) {
        throw std::invalid_argument("the shapes do not fit: " + std::to_string(n_rows) + " rows of " +
                                    std::to_string(n_in) + " values, weights of " + std::to_string(row_bytes) +
                                    " bytes a row");
    }
    const Kernel * kernel = find_kernel(Type(type), set.empty() ? nullptr : set.c_str());
    if (kernel == nullptr)
        throw std::invalid_argument("set '" + set + "' has no kernel for type " + std::to_string(type));
    nb::gil_scoped_release release;
    const size_t x_bytes = kernel->format.n_bytes(n_in);
    const std::unique_ptr<uint8_t, void (*)(void *)> rows(
        static_cast<uint8_t *>(std::aligned_alloc(64, n_rows * x_bytes)), std::free);
    if (!rows) throw std::bad_alloc();
    for (size_t i = 0; i < n_rows; ++i) kernel->format.prepare(x.data() + i * n_in, n_in, rows.get() + i * x_bytes);
    share(n_out, n_threads, [&](size_t begin, size_t end) {
        if (begin == end) return;
        kernel->multiply[n_rows - 1]({weights.data(), weights.data() + n_out * row_bytes, row_bytes, n_in, rows.get(), x_bytes,
                                      out.data(), n_out, int(n_rows), begin, end, second_level_first()});
    });
}

}  // namespace

void bind_smallbatch(nb::module_ & m) {
    m.def("smallbatch_sets", &sets, "Names of the kernel sets that run on this processor, fastest first.");
    m.def(
        "smallbatch_has_kernel",
        [](int32_t type, const std::string & set) { return find_kernel(Type(type), set.c_str()) != nullptr; }, "type"_a,
        "set"_a);
    m.def(
        "smallbatch_register",
        [](uintptr_t handle) -> std::optional<std::string> {
            const std::string problem = register_device(reinterpret_cast<void *>(handle));
            return problem.empty() ? std::nullopt : std::optional(problem);
        },
        "handle"_a, "Registers the device with the library with this dlopen handle, once. Returns why not, or None.");
    m.def(
        "use_huge_pages", [](uintptr_t handle) { return use_huge_pages(reinterpret_cast<void *>(handle)); },
        "handle"_a, "Makes the library with this dlopen handle ask for huge pages, once; False when it cannot.");
    m.def(
        "smallbatch_set_for",
        [](int32_t type) {
            const char * name = set_for(type);
            return name == nullptr ? std::nullopt : std::optional<std::string>(name);
        },
        "type"_a, "The kernel set that products with weights of this ggml type use, or None.");
    m.def("smallbatch_use_set", &use_set, "name"_a,
          "For tests: products use this set from now on (\"\": the fastest).");
    m.def("smallbatch_set_placing", &set_placing, "types"_a,
          "Models that this thread loads from now on have their matrices of these types placed for the kernels.");
    m.def("smallbatch_multiply", &multiply_rows, "type"_a, "weights"_a, "x"_a, "out"_a, "set"_a = "", "threads"_a = 1,
          "out (n_rows, n_out) = x (n_rows, n_in) times weights (n_out, row_bytes), which are blocks of ggml type "
          "`type`.");
    m.def(
        "smallbatch_takes",
        [](uintptr_t op) { return takes_product(*reinterpret_cast<const ggml::Tensor *>(op)); }, "op"_a,
        "For tests: whether the operation at this address is computed by the small-batch kernels.");
    m.def(
        "smallbatch_read",
        [](nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> bytes, int n_threads) {
            return read_all(bytes.data(), bytes.shape(0) / 256 * 256, n_threads);
        },
        "bytes"_a, "threads"_a, nb::call_guard<nb::gil_scoped_release>(),
        "Reads memory and does nothing else: the roofline.");
    m.def(
        "smallbatch_trial",
        [](int32_t type, int64_t n_in, int64_t n_out, size_t n_bytes, const std::vector<int> & n_rows, int n_threads,
           int repeats, bool repacked) {
            const Times times = run_trial({type, n_in, n_out, n_bytes, n_threads, repeats, repacked}, n_rows);
            return std::pair(times.ours, times.stock);
        },
        "type"_a, "n_in"_a, "n_out"_a, "n_bytes"_a, "n_rows"_a, "n_threads"_a, "repeats"_a, "repacked"_a,
        nb::call_guard<nb::gil_scoped_release>(),
        "Seconds of the fastest pass over n_bytes of weights, for each number of rows: by the small-batch "
        "kernels, and by llama.cpp's.");
}
