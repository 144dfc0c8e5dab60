#include "graph_products.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "device.h"
#include "kernels.h"

namespace sidecar::smallbatch {

namespace {

using namespace ggml;

constexpr size_t serial_bytes = 32 * 1024;   // of weights: less is done before a second thread has its rows
constexpr size_t shared_bytes = 256 * 1024;  // up to here equal shares take less time than dealing, which costs a barrier
constexpr size_t shared_values = 8192;       // of rows that each thread then prepares for itself
constexpr size_t least_bytes = 64 * 1024;    // of weights dealt at a time
constexpr size_t line_floats = 16;          // parts begin at a cache line of the output
constexpr size_t line = 64;

struct {
    void (*barrier)(ThreadPool *);
    void (*chunk_set)(ThreadPool *, int);
    int (*chunk_add)(ThreadPool *, int);
} cpu_functions;

ExtraBuffers * as_before = nullptr;
const Tensor * tried = nullptr;  // is computed here, wherever its weights lie
bool has_computed = false;       // that one

size_t in_lines(size_t n_bytes) { return (n_bytes + line - 1) / line * line; }

// What each thread does before a barrier behind which deal() follows.
void begin_dealing(const ComputeParams & p) {
    if (p.i_thread == 0) cpu_functions.chunk_set(p.pool, 0);
}

// Calls work(begin, end) for parts of 0 .. n-1 until all are dealt, to whichever thread is free: cores differ, and other programs
// run. Many at first, since long runs of weights are read fastest, and `least` at the end, so that all threads end together.
template <class Work>
void deal(const ComputeParams & p, size_t n, size_t least, const Work & work) {
    const size_t n_shares = 2 * size_t(p.n_threads);
    size_t n_next = std::max(n / n_shares, least);
    for (size_t begin; (begin = size_t(cpu_functions.chunk_add(p.pool, int(n_next)))) < n;) {
        const size_t end = std::min(begin + n_next, n);
        work(begin, end);
        n_next = std::max((n - end) / n_shares, least);
    }
}

// The outputs of several products of one shape, side by side: parts of line_floats outputs, of which each product has as many.
struct Parts {
    size_t n_out, n_of_each, n;
    Parts(size_t n_products, const Tensor & weights)
        : n_out(size_t(weights.ne[1])), n_of_each((n_out + line_floats - 1) / line_floats), n(n_products * n_of_each) {}

    // Calls multiply(product, first output, end of outputs) for parts begin .. end-1.
    template <class Multiply>
    void each(size_t begin, size_t end, const Multiply & multiply) const {
        while (begin < end) {
            const size_t i = begin / n_of_each, n_here = std::min(end, (i + 1) * n_of_each) - begin;
            const size_t first = begin % n_of_each * line_floats;
            multiply(i, first, std::min(first + n_here * line_floats, n_out));
            begin += n_here;
        }
    }
};

template <class Multiply>
void deal_products(const ComputeParams & p, size_t n_products, const Tensor & weights, const Multiply & multiply) {
    const Parts parts(n_products, weights);
    const size_t least = 1 + least_bytes / (line_floats * weights.nb[1]);
    deal(p, parts.n, least, [&](size_t begin, size_t end) { parts.each(begin, end, multiply); });
}

const uint8_t * row_of(const Tensor & x, size_t row, size_t plane) {
    return static_cast<const uint8_t *>(x.data) + row * x.nb[1] + plane * x.nb[2];
}

Product product(const Tensor & weights, size_t matrix, const uint8_t * rows, size_t x_bytes, int n_rows, float * out) {
    const size_t n_in = size_t(weights.ne[0]), n_out = size_t(weights.ne[1]);
    const uint8_t * first = static_cast<const uint8_t *>(weights.data) + matrix * weights.nb[2];
    static const bool into_second = second_level_first();
    return {first, first + n_out * weights.nb[1], weights.nb[1], n_in, rows, x_bytes, out, n_out, n_rows, 0, n_out, into_second};
}

void multiply(const Kernel & kernel, Product product, size_t begin, size_t end) {
    product.begin = begin;
    product.end = end;
    kernel.multiply[product.n_rows - 1](product);
}

// (n_planes, n_rows, n_in) times (n_matrices, n_out, n_in): consecutive planes share a matrix.
struct PlanesInMemory {
    enum Way { serial, shared, dealt } way;
    size_t x_bytes, n_bytes;  // of a prepared row; of all of them
    PlanesInMemory(const Kernel & kernel, const Tensor & op) {
        const size_t n_in = size_t(op.src[0]->ne[0]), n_rows = size_t(op.ne[1] * op.ne[2]);
        const size_t n_weight_bytes = size_t(op.ne[0] * op.ne[2]) * op.src[0]->nb[1];
        x_bytes = kernel.format.n_bytes(n_in);
        n_bytes = n_rows * x_bytes;
        const bool is_small = n_weight_bytes <= shared_bytes && n_rows * n_in <= shared_values;
        way = n_weight_bytes <= serial_bytes ? serial : is_small ? shared : dealt;
    }
};

void multiply_planes(const ComputeParams & p, uint8_t * memory, const Kernel & kernel, const Tensor & op) {
    const Tensor & weights = *op.src[0];
    const Tensor & x = *op.src[1];
    const PlanesInMemory sizes(kernel, op);
    const size_t n_in = size_t(x.ne[0]), n_out = size_t(op.ne[0]), n_rows = size_t(op.ne[1]), n_planes = size_t(op.ne[2]);
    const size_t planes_per_matrix = n_planes / size_t(weights.ne[2]);  // heads that share keys and values
    const size_t i_thread = size_t(p.i_thread), n_threads = size_t(p.n_threads);
    if (sizes.way == PlanesInMemory::serial && i_thread > 0) return;
    if (sizes.way == PlanesInMemory::shared) memory += i_thread * sizes.n_bytes;
    const bool is_together = sizes.way == PlanesInMemory::dealt;
    for (size_t i = is_together ? i_thread : 0; i < n_rows * n_planes; i += is_together ? n_threads : 1) {
        const uint8_t * row = row_of(x, i % n_rows, i / n_rows);
        kernel.format.prepare(reinterpret_cast<const float *>(row), n_in, memory + i * sizes.x_bytes);
    }
    const auto multiply_plane = [&](size_t i, size_t begin, size_t end) {
        const uint8_t * rows = memory + i * n_rows * sizes.x_bytes;
        float * out = static_cast<float *>(op.data) + i * n_rows * n_out;
        multiply(kernel, product(weights, i / planes_per_matrix, rows, sizes.x_bytes, int(n_rows), out), begin, end);
    };
    if (is_together) {
        begin_dealing(p);
        cpu_functions.barrier(p.pool);
        deal_products(p, n_planes, weights, multiply_plane);
    } else {
        const Parts parts(n_planes, weights);
        const bool is_alone = sizes.way == PlanesInMemory::serial;
        parts.each(is_alone ? 0 : i_thread * parts.n / n_threads, is_alone ? parts.n : (i_thread + 1) * parts.n / n_threads,
                   multiply_plane);
    }
}

// out(t, u) = x(t, u or 0) times matrix ids(t, u), for tokens t and the experts u that each of them uses. Rows that use the same
// expert are brought together, so that its weights are read once.
struct Use {
    int32_t expert;
    int32_t token, i;  // the how-manieth of the token's
};
struct Group {  // rows begin .. end-1 of those sorted by expert
    int32_t begin, end;
};
struct ExpertsInMemory {
    size_t n_uses, x_bytes, groups, rows, outs, n_bytes;
    ExpertsInMemory(const Kernel & kernel, const Tensor & op)
        : n_uses(size_t(op.src[2]->ne[0] * op.src[2]->ne[1])), x_bytes(kernel.format.n_bytes(size_t(op.src[1]->ne[0]))),
          groups(in_lines(n_uses * sizeof(Use))), rows(groups + in_lines((n_uses + 1) * sizeof(Group))),
          outs(rows + n_uses * x_bytes), n_bytes(outs + n_uses * size_t(op.ne[0]) * sizeof(float)) {}
};

void sort_by_expert(const Tensor & ids, Use * uses, Group * groups) {
    const size_t n_used = size_t(ids.ne[0]), n = n_used * size_t(ids.ne[1]);
    for (size_t i = 0; i < n; ++i) {
        const size_t token = i / n_used, u = i % n_used;
        const uint8_t * id = static_cast<const uint8_t *>(ids.data) + token * ids.nb[1] + u * ids.nb[0];
        uses[i] = {*reinterpret_cast<const int32_t *>(id), int32_t(token), int32_t(u)};
    }
    std::sort(uses, uses + n, [](const Use & a, const Use & b) {
        if (a.expert != b.expert) return a.expert < b.expert;
        return a.token != b.token ? a.token < b.token : a.i < b.i;
    });
    int32_t begin = 0;
    for (int32_t i = 1; i <= int32_t(n); ++i) {
        if (i < int32_t(n) && uses[i].expert == uses[begin].expert && i - begin < max_rows) continue;
        *groups++ = {begin, i};
        begin = i;
    }
    *groups = {begin, begin};  // none follows
}

void multiply_by_id(const ComputeParams & p, uint8_t * memory, const Kernel & kernel, const Tensor & op) {
    const Tensor & weights = *op.src[0];
    const Tensor & x = *op.src[1];
    const ExpertsInMemory places(kernel, op);
    Use * uses = reinterpret_cast<Use *>(memory);
    Group * groups = reinterpret_cast<Group *>(memory + places.groups);
    uint8_t * rows = memory + places.rows;
    float * outs = reinterpret_cast<float *>(memory + places.outs);
    const size_t n_in = size_t(x.ne[0]), n_out = size_t(op.ne[0]), n_used = size_t(op.ne[1]);
    if (p.i_thread == 0) sort_by_expert(*op.src[2], uses, groups);
    begin_dealing(p);
    cpu_functions.barrier(p.pool);
    for (size_t i = size_t(p.i_thread); i < places.n_uses; i += size_t(p.n_threads)) {
        const uint8_t * row = row_of(x, size_t(uses[i].i) % size_t(x.ne[1]), size_t(uses[i].token));
        kernel.format.prepare(reinterpret_cast<const float *>(row), n_in, rows + i * places.x_bytes);
    }
    cpu_functions.barrier(p.pool);
    const size_t n_groups = size_t(std::find_if(groups, groups + places.n_uses, [](Group g) { return g.begin == g.end; }) - groups);
    deal_products(p, n_groups, weights, [&](size_t i, size_t begin, size_t end) {
        const Group group = groups[i];
        float * out = outs + size_t(group.begin) * n_out;
        const uint8_t * first = rows + size_t(group.begin) * places.x_bytes;
        multiply(kernel, product(weights, size_t(uses[group.begin].expert), first, places.x_bytes, group.end - group.begin, out), begin,
                 end);
        for (int32_t r = group.begin; r < group.end; ++r, out += n_out) {
            float * place = static_cast<float *>(op.data) + (size_t(uses[r].token) * n_used + size_t(uses[r].i)) * n_out;
            std::memcpy(place + begin, out + begin, (end - begin) * sizeof(float));
        }
    });
}

// ---------------------------------------------------------------------------------------------------------------------
// What the CPU backend asks

bool work_size(Traits *, int n_threads, const Tensor * op, size_t & n_bytes) {
    const Kernel & kernel = *kernel_in_use(op->src[0]->type);
    if (is_by_id(*op)) {
        n_bytes = line + ExpertsInMemory(kernel, *op).n_bytes;
    } else {
        const PlanesInMemory sizes(kernel, *op);
        n_bytes = line + (sizes.way == PlanesInMemory::shared ? size_t(n_threads) : 1) * sizes.n_bytes;
    }
    return true;
}

bool compute(Traits *, ComputeParams * p, Tensor * op) {
    if (op == tried) has_computed = p->n_threads == 1 && p->i_thread == 0 && p->memory != nullptr && p->n_bytes > 0;
    uint8_t * memory = reinterpret_cast<uint8_t *>(in_lines(reinterpret_cast<uintptr_t>(p->memory)));
    const Kernel & kernel = *kernel_in_use(op->src[0]->type);
    if (is_by_id(*op)) {
        multiply_by_id(*p, memory, kernel, *op);
    } else {
        multiply_planes(*p, memory, kernel, *op);
    }
    return true;
}

const TraitsMethods traits_methods{nullptr, nullptr, work_size, compute};
Traits traits{&traits_methods};

bool supports_op(ExtraBuffers *, Device * device, const Tensor * op) { return as_before->methods->supports_op(as_before, device, op); }

Traits * traits_of(ExtraBuffers *, const Tensor * op) {
    return op == tried || takes_product(*op) ? &traits : as_before->methods->traits_of(as_before, op);
}

// Whether a product on the CPU backend comes to compute(), and is right: 2 rows of weights times (1, 2).
bool computes_here(const Library & lib, Device * cpu) {
    Backend * backend = make_backend(lib, cpu, 1);
    Context * context = lib.init({1 << 16, nullptr, true});
    if (backend == nullptr || context == nullptr) return false;
    Tensor * weights = lib.new_tensor_2d(context, type_f32, 2, 2);
    Tensor * x = lib.new_tensor_2d(context, type_f32, 2, 1);
    Tensor * product = lib.mul_mat(context, weights, x);
    Graph * graph = lib.new_graph(context, 4, false);
    lib.build_forward_expand(graph, product);
    Buffer * buffer = lib.alloc_tensors(context, lib.cpu_buffer_type());
    const float values[4] = {1, 2, 3, 4};
    lib.tensor_set(weights, values, 0, sizeof values);
    lib.tensor_set(x, values, 0, 2 * sizeof(float));
    tried = product;
    const bool is_done = lib.graph_compute(backend, graph) == status_success;
    tried = nullptr;
    float found[2] = {};
    lib.tensor_get(product, found, 0, sizeof found);
    lib.buffer_free(buffer);
    lib.free(context);
    lib.backend_free(backend);
    return is_done && has_computed && found[0] == 5 && found[1] == 11;
}

const ExtraBuffersMethods methods{nullptr, nullptr, supports_op, traits_of};
ExtraBuffers extra_buffers{&methods};

}  // namespace

std::string join_graphs(const Library & library, Device * cpu, void * cpu_library) {
    const auto find = [&](auto & function, const char * name) {
        function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(cpu_library, name));
        return function != nullptr;
    };
    if (!find(cpu_functions.barrier, "ggml_barrier") || !find(cpu_functions.chunk_set, "ggml_threadpool_chunk_set") ||
        !find(cpu_functions.chunk_add, "ggml_threadpool_chunk_add")) {
        return "ggml's CPU backend keeps its threads to itself";
    }
    BufferType ** type = repacking_types(library, cpu);
    while (type != nullptr && *type != nullptr && std::strcmp((*type)->table.get_name(*type), "CPU_REPACK") != 0) ++type;
    if (type == nullptr || *type == nullptr || (*type)->context == nullptr) return "ggml's CPU backend was built without repacking";
    as_before = static_cast<ExtraBuffers *>((*type)->context);
    (*type)->context = &extra_buffers;
    if (computes_here(library, cpu)) return "";
    (*type)->context = as_before;
    return "ggml lays these out otherwise: what its CPU backend asks";
}

}  // namespace sidecar::smallbatch
