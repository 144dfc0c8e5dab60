#include "trial.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <stdexcept>

#include "device.h"

namespace sidecar::smallbatch {

namespace {

using namespace ggml;

template <typename T, void (*Library::*free)(T *)>
struct Free {
    void operator()(T * object) const { (bound_library().*free)(object); }
};
using ContextPtr = std::unique_ptr<Context, Free<Context, &Library::free>>;
using BufferPtr = std::unique_ptr<Buffer, Free<Buffer, &Library::buffer_free>>;
using BackendPtr = std::unique_ptr<Backend, Free<Backend, &Library::backend_free>>;

constexpr int64_t n_probe_rows = 512;  // what llama.cpp's loader asks with
constexpr size_t context_bytes = 1 << 20;
constexpr uint8_t filling = 0x11;  // a small number in every type

template <typename Pointer>
Pointer made(Pointer pointer) {
    if (!pointer) throw std::runtime_error("ggml could not set up a trial of products");
    return pointer;
}

// Where llama.cpp's loader would put such weights for the CPU backend: the first repacking type that takes them.
BufferType * stock_buffer_type(const Library & lib, Device * cpu, const Trial & trial) {
    using Extra = BufferType ** (*)(Device *);
    const auto extra =
        reinterpret_cast<Extra>(lib.proc_address(lib.device_registry(cpu), "ggml_backend_dev_get_extra_bufts"));
    const ContextPtr context(made(lib.init({context_bytes, nullptr, true})));
    Tensor * weights = lib.new_tensor_2d(context.get(), trial.type, trial.n_in, trial.n_out);
    Tensor * x = lib.new_tensor_2d(context.get(), type_f32, trial.n_in, n_probe_rows);
    Tensor * product = lib.mul_mat(context.get(), weights, x);
    for (BufferType ** type = extra == nullptr ? nullptr : extra(cpu); type != nullptr && *type != nullptr; ++type) {
        const BufferPtr empty(lib.alloc_buffer(*type, 0));
        weights->buffer = empty.get();
        if (lib.supports_op(cpu, product)) return *type;
    }
    return lib.cpu_buffer_type();
}

void set_n_threads(const Library & lib, Device * device, Backend * backend, int n_threads) {
    using Set = void (*)(Backend *, int);
    const auto set = reinterpret_cast<Set>(lib.proc_address(lib.device_registry(device), "ggml_backend_set_n_threads"));
    if (set != nullptr) set(backend, n_threads);
}

}  // namespace

std::vector<double> run_trial(const Trial & trial, const std::vector<int> & n_rows, bool ours) {
    const Library & lib = bound_library();
    Device * device = ours ? registered_device() : lib.device_by_type(device_cpu);
    BufferType * weights_type = ours ? weights_buffer_type() : stock_buffer_type(lib, device, trial);
    const BackendPtr backend(made(lib.device_init(device, nullptr)));
    set_n_threads(lib, device, backend.get(), trial.n_threads);

    const ContextPtr weights_context(made(lib.init({context_bytes, nullptr, true})));
    std::vector<Tensor *> weights{lib.new_tensor_2d(weights_context.get(), trial.type, trial.n_in, trial.n_out)};
    const size_t n_bytes = lib.n_bytes(weights[0]);
    while (weights.size() < std::min<size_t>(trial.n_bytes / n_bytes, 256)) {
        weights.push_back(lib.new_tensor_2d(weights_context.get(), trial.type, trial.n_in, trial.n_out));
    }
    const BufferPtr weights_buffer(made(lib.alloc_tensors(weights_context.get(), weights_type)));
    lib.buffer_set_usage(weights_buffer.get(), usage_weights);
    const std::vector<uint8_t> bytes(n_bytes, filling);
    for (Tensor * matrix : weights) lib.tensor_set(matrix, bytes.data(), 0, n_bytes);

    std::vector<double> seconds;
    for (int n : n_rows) {
        const ContextPtr context(made(lib.init({context_bytes, nullptr, true})));
        Tensor * x = lib.new_tensor_2d(context.get(), type_f32, trial.n_in, n);
        Graph * graph = made(lib.new_graph(context.get()));
        for (Tensor * matrix : weights) lib.build_forward_expand(graph, lib.mul_mat(context.get(), matrix, x));
        const BufferPtr buffer(made(lib.alloc_tensors(context.get(), lib.cpu_buffer_type())));
        const std::vector<float> ones(size_t(trial.n_in * n), 1.0f);
        lib.tensor_set(x, ones.data(), 0, 4 * ones.size());
        double fastest = 0;
        for (int i = 0; i <= trial.repeats; ++i) {  // the first pass wakes the threads and does not count
            const auto start = std::chrono::steady_clock::now();
            if (lib.graph_compute(backend.get(), graph) != status_success)
                throw std::runtime_error("ggml failed to compute a trial of products");
            const double elapsed = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
            if (i == 1 || (i > 1 && elapsed < fastest)) fastest = elapsed;
        }
        seconds.push_back(fastest);
    }
    return seconds;
}

}  // namespace sidecar::smallbatch
