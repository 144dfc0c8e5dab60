#include "trial.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <limits>
#include <memory>
#include <stdexcept>
#include <utility>

#include "device.h"
#include "shares.h"

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
constexpr size_t context_bytes = 1 << 20, graphs_bytes = 16 << 20;
constexpr size_t most_matrices = 256;
constexpr uint8_t filling = 0x11;  // a small number in every type

template <typename Pointer>
Pointer made(Pointer pointer) {
    if (!pointer) throw std::runtime_error("ggml could not set up a trial of products");
    return pointer;
}

// Where llama.cpp's loader would put such weights for the CPU backend: the first repacking type that takes them.
BufferType * stock_buffer_type(const Library & lib, Device * cpu, const Trial & trial) {
    const ContextPtr context(made(lib.init({context_bytes, nullptr, true})));
    Tensor * weights = lib.new_tensor_2d(context.get(), trial.type, trial.n_in, trial.n_out);
    Tensor * x = lib.new_tensor_2d(context.get(), type_f32, trial.n_in, n_probe_rows);
    Tensor * product = lib.mul_mat(context.get(), weights, x);
    for (BufferType ** type = trial.repacked ? repacking_types(lib, cpu) : nullptr; type != nullptr && *type != nullptr; ++type) {
        const BufferPtr empty(lib.alloc_buffer(*type, 0));
        weights->buffer = empty.get();
        if (lib.supports_op(cpu, product)) return *type;
    }
    return lib.cpu_buffer_type();
}

// The weights, and for each number of rows the graphs of a pass.
class Contestant {
  public:
    Contestant(const Library & lib, const Trial & trial, const std::vector<int> & n_rows, bool ours) : lib_(lib) {
        Device * cpu = lib.device_by_type(device_cpu);
        cpu_.reset(made(make_backend(lib, cpu, trial.n_threads)));
        add_weights(trial, ours ? weights_buffer_type() : stock_buffer_type(lib, cpu, trial));
        for (int n : n_rows) add_pass(trial.n_in, n);
    }

    // Seconds of one pass with the i-th number of rows.
    double pass(size_t i) {
        const auto start = std::chrono::steady_clock::now();
        for (const Step & step : passes_[i].steps) {
            if (lib_.graph_compute(step.backend, step.graph) != status_success)
                throw std::runtime_error("ggml failed to compute a trial of products");
        }
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    }

  private:
    struct Step {
        Backend * backend;
        Graph * graph;
    };
    struct Pass {
        ContextPtr context;
        BufferPtr buffer;
        std::vector<Step> steps;
    };

    void add_weights(const Trial & trial, BufferType * type) {
        context_.reset(made(lib_.init({context_bytes, nullptr, true})));
        do {
            weights_.push_back(lib_.new_tensor_2d(context_.get(), trial.type, trial.n_in, trial.n_out));
        } while (weights_.size() < std::min(trial.n_bytes / lib_.n_bytes(weights_[0]), most_matrices));
        buffer_.reset(made(lib_.alloc_tensors(context_.get(), type)));
        lib_.buffer_set_usage(buffer_.get(), usage_weights);
        const std::vector<uint8_t> bytes(lib_.n_bytes(weights_[0]), filling);
        for (Tensor * matrix : weights_) lib_.tensor_set(matrix, bytes.data(), 0, bytes.size());
    }

    void add_pass(int64_t n_in, int n_rows) {
        ContextPtr context(made(lib_.init({graphs_bytes, nullptr, true})));
        Tensor * x = lib_.new_tensor_2d(context.get(), type_f32, n_in, n_rows);
        std::vector<Step> steps;
        const auto add = [&](Backend * backend, Tensor * tensor, bool is_new) {
            if (is_new) steps.push_back({backend, made(lib_.new_graph(context.get(), 2 * most_matrices, false))});
            lib_.build_forward_expand(steps.back().graph, tensor);
        };
        std::vector<Tensor *> inputs;
        for (size_t i = 0; i < weights_.size(); ++i) {
            if (i % 2 == 0) inputs.push_back(lib_.scale(context.get(), x, 0.5f));
        }
        for (size_t i = 0; i < weights_.size(); ++i) {
            Tensor * input = inputs[i / 2];
            if (i % 2 == 0) add(cpu_.get(), input, i == 0);
            add(cpu_.get(), lib_.mul_mat(context.get(), weights_[i], input), false);
        }
        BufferPtr buffer(made(lib_.alloc_tensors(context.get(), lib_.cpu_buffer_type())));
        const std::vector<float> ones(size_t(n_in * n_rows), 1.0f);
        lib_.tensor_set(x, ones.data(), 0, 4 * ones.size());
        passes_.push_back({std::move(context), std::move(buffer), std::move(steps)});
    }

    const Library & lib_;
    BackendPtr cpu_;
    ContextPtr context_;
    BufferPtr buffer_;
    std::vector<Tensor *> weights_;
    std::vector<Pass> passes_;
};

}  // namespace

uint64_t read_all(const uint8_t * bytes, size_t n_bytes, int n_threads) {
    using Words = uint64_t __attribute__((vector_size(16)));
    constexpr size_t n_streams = 4, line = 64, part = n_streams * line;
    std::atomic<uint64_t> total{0};
    share(n_bytes / part, n_threads, [&](size_t begin, size_t end) {
        Words sum = {};
        for (size_t i = 0; i < end - begin; ++i) {
            for (size_t j = 0; j < n_streams; ++j) {
                const uint8_t * p = bytes + begin * part + (j * (end - begin) + i) * line;
                __builtin_prefetch(p + 2048);
                Words words[4];
                std::memcpy(words, p, sizeof words);
                sum ^= (words[0] ^ words[1]) ^ (words[2] ^ words[3]);
            }
        }
        total ^= sum[0] ^ sum[1];
    });
    return total;
}

Times run_trial(const Trial & trial, const std::vector<int> & n_rows) {
    Contestant ours(bound_library(), trial, n_rows, true), stock(bound_library(), trial, n_rows, false);
    const std::vector<double> never(n_rows.size(), std::numeric_limits<double>::infinity());
    Times times{never, never};
    for (int turn = 0; turn <= trial.repeats; ++turn) {
        for (size_t i = 0; i < n_rows.size(); ++i) {
            const double ours_s = ours.pass(i), stock_s = stock.pass(i);
            if (turn == 0) continue;  // which wakes the threads and brings the weights into memory
            times.ours[i] = std::min(times.ours[i], ours_s);
            times.stock[i] = std::min(times.stock[i], stock_s);
        }
    }
    return times;
}

}  // namespace sidecar::smallbatch
