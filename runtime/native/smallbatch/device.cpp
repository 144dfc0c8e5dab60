#include "device.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <new>
#include <vector>

#include "ggml_abi.h"
#include "kernels.h"
#include "team.h"

namespace sidecar::smallbatch {

namespace {

using namespace ggml;

constexpr const char * device_name = "SMALLBATCH";

Library library;
int32_t op_mul_mat = -1, op_mul_mat_id = -1, op_reshape = -1;
int32_t row_op_numbers[n_row_ops] = {-1, -1, -1, -1};  // ggml's
std::string forced_set;
thread_local uint64_t placed_types = 0;  // one bit per ggml type

const char * name_of(Device *) { return device_name; }
const char * name_of(Backend *) { return device_name; }
const char * name_of(BufferType *) { return device_name; }
const char * name_of(Registry *) { return device_name; }

const Kernel * kernel_for(int32_t type) {
    return find_kernel(Type(type), forced_set.empty() ? nullptr : forced_set.c_str());
}

bool is_placed(int32_t type) { return type >= 0 && type < 64 && (placed_types >> type & 1) != 0; }

// ---------------------------------------------------------------------------------------------------------------------
// Buffers: the CPU's, under a type of our own

extern Device device;
Buffer * alloc_buffer(BufferType *, size_t n_bytes);

BufferType weights_type{
    {name_of, alloc_buffer, [](BufferType *) { return library.alignment(library.cpu_buffer_type()); }, nullptr, nullptr,
     [](BufferType *) { return true; }},
    &device,
    nullptr,
};

Buffer * adopt(Buffer * buffer) {
    if (buffer != nullptr) buffer->type = &weights_type;
    return buffer;
}

Buffer * alloc_buffer(BufferType *, size_t n_bytes) {
    return adopt(library.alloc_buffer(library.cpu_buffer_type(), n_bytes));
}

// ---------------------------------------------------------------------------------------------------------------------
// What is computed here

// Products with weights that lie here, and the products inside attention whose rows come from such a product: were those
// left to the CPU backend, which computes one row otherwise than several, the widths would not agree.

const Buffer * buffer_of(const Tensor & t) { return t.view_src != nullptr ? t.view_src->buffer : t.buffer; }

bool lies_here(const Tensor & t) {
    const Buffer * buffer = buffer_of(t);
    return buffer != nullptr && buffer->type == &weights_type;
}

bool is_product(const Tensor & t) { return t.op == op_mul_mat || t.op == op_mul_mat_id; }

// Whether t's first argument, its first argument and so on lead to a product with weights that lie here.
bool comes_from_here(const Tensor * t) {
    for (int i = 0; t != nullptr && i < 64; ++i) {
        if (is_product(*t) && lies_here(*t->src[0])) return true;
        t = is_product(*t) ? t->src[1] : t->src[0];
    }
    return false;
}

bool has_contiguous_rows(const Tensor & t, Block block) {
    return block.n_values != 0 && t.nb[0] == block.n_bytes && t.ne[0] % int64_t(block.n_values) == 0;
}

bool is_contiguous(const Tensor & t) {
    return t.nb[0] == 4 && t.nb[1] == t.nb[0] * size_t(t.ne[0]) && t.nb[2] == t.nb[1] * size_t(t.ne[1]) &&
           t.nb[3] == t.nb[2] * size_t(t.ne[2]);
}

bool is_small_product(const Tensor * op);

// Which of the operations on rows it is; n_row_ops for any other.
int row_op_of(const Tensor & t) {
    const int i = int(std::find(row_op_numbers, row_op_numbers + n_row_ops, t.op) - row_op_numbers);
    return i == row_swiglu && (t.op_params[0] != glu_swiglu || t.op_params[1] != 0 || t.src[1] == nullptr) ? n_row_ops : i;
}

// An operation on the rows of a product with weights that lie here, or on those of such an operation: (n, n_rows) all along, so
// that n_rows says at every width how wide the decode is. Left to the CPU backend, each would part two products: to hand over and
// back takes longer than it does itself.
bool follows_a_product(const Tensor * op) {
    for (int i = 0; i < 16; ++i) {
        const int name = row_op_of(*op);
        if (name == n_row_ops) return false;  // a leaf has no first argument either
        const Tensor & x = *op->src[0];
        const Tensor * y = op->src[1];
        if (op->ne[1] > max_rows || op->ne[2] != 1 || op->ne[3] != 1 || op->type != type_f32 ||
            !is_contiguous(*op) || x.type != type_f32 || !is_contiguous(x) || !std::equal(x.ne, x.ne + 4, op->ne)) {
            return false;
        }
        if (name != row_rms_norm && (y->type != type_f32 || !is_contiguous(*y) || y->ne[0] != x.ne[0] ||
                                     (y->ne[1] != 1 && y->ne[1] != x.ne[1]) || y->ne[2] != 1 || y->ne[3] != 1)) {
            return false;
        }
        op = &x;
        while (op->op == op_reshape) op = op->src[0];  // to the same shape: one of a single sequence
        if (op->op == op_mul_mat) return op->ne[0] == x.ne[0] && op->ne[1] == x.ne[1] && lies_here(*op->src[0]) && is_small_product(op);
    }
    return false;
}

bool supports_op(Device *, const Tensor * op) {
    return is_product(*op) ? is_small_product(op) : follows_a_product(op);
}

bool is_small_product(const Tensor * op) {
    const Tensor & weights = *op->src[0];
    const Tensor & x = *op->src[1];
    const bool is_placed_here = lies_here(weights);
    // The loader asks with an empty buffer and 512 rows whether weights could lie here at all.
    if (is_placed_here && buffer_of(weights)->size == 0) return is_placed(weights.type);
    if (!(is_placed_here || comes_from_here(&x)) || kernel_for(weights.type) == nullptr) return false;
    const bool is_small = op->op == op_mul_mat ? x.ne[1] <= max_rows && x.ne[2] % weights.ne[2] == 0
                                               : x.ne[2] <= max_rows && op->src[2]->type == type_i32;
    return is_small && x.type == type_f32 && op->type == type_f32 && op->op_params[1] != hint_hadamard &&
           is_contiguous(*op) && has_contiguous_rows(weights, block_of(Type(weights.type))) &&
           has_contiguous_rows(x, block_of(Type::f32)) && x.ne[3] == 1 && weights.ne[3] == 1;
}

// One context's stream of products.
class Stream {
  public:
    int n_threads = 4;  // ggml's default, until the context says otherwise

    // Forgets which rows are prepared: a tensor's address may mean another one in the next graph.
    void begin() {
        jobs_.clear();
        x_ = nullptr;
        n_buffers_ = 0;
    }

    // Does what the calls since begin() asked for.
    void run() { jobs_.run(n_threads); }

    // (n_planes, n_rows, n_in) times (n_matrices, n_out, n_in): consecutive planes share a matrix.
    void multiply_planes(const Tensor & op) {
        const Tensor & weights = *op.src[0];
        const Kernel & kernel = *kernel_for(weights.type);
        const size_t n_out = size_t(weights.ne[1]), n_rows = size_t(op.ne[1]), n_planes = size_t(op.ne[2]);
        if (n_rows == 0 || n_planes == 0) return;  // a decode without outputs
        prepare_rows(kernel, *op.src[1]);
        const size_t planes_per_matrix = n_planes / size_t(weights.ne[2]);  // heads that share keys and values
        products_.clear();
        for (size_t i = 0; i < n_planes; ++i) {
            products_.push_back(product(weights, i / planes_per_matrix, rows_ + i * n_rows * x_bytes_, int(n_rows),
                                        static_cast<float *>(op.data) + i * n_rows * n_out));
        }
        jobs_.multiply(kernel, products_.data(), products_.size());
    }

    // out = op(x, y), row by row.
    void apply_to_rows(const Tensor & op, int name) {
        const Tensor & x = *op.src[0];
        const Tensor & y = name == row_rms_norm ? x : *op.src[1];
        float parameter;
        std::memcpy(&parameter, op.op_params, sizeof parameter);
        const RowOp * ops = find_row_ops(forced_set.empty() ? nullptr : forced_set.c_str());
        jobs_.apply({ops[name], static_cast<const float *>(x.data), static_cast<const float *>(y.data), static_cast<float *>(op.data),
                     size_t(op.ne[0]), size_t(op.ne[1]), x.nb[1], y.ne[1] == 1 ? 0 : y.nb[1], op.nb[1], parameter});
    }

    // out(t, u) = x(t, u or 0) times matrix ids(t, u), for tokens t and the experts u that each of them uses. Rows that
    // use the same expert are brought together, so that its weights are read once.
    void multiply_by_id(const Tensor & op) {
        const Tensor & weights = *op.src[0];
        const Tensor & x = *op.src[1];
        const Tensor & ids = *op.src[2];
        const Kernel & kernel = *kernel_for(weights.type);
        const size_t n_out = size_t(weights.ne[1]), n_used = size_t(ids.ne[0]), n_tokens = size_t(ids.ne[1]);
        if (n_used == 0 || n_tokens == 0) return;
        prepare_rows(kernel, x);
        run();
        uses_.clear();
        for (size_t t = 0; t < n_tokens; ++t) {
            for (size_t u = 0; u < n_used; ++u) {
                const uint8_t * id = static_cast<const uint8_t *>(ids.data) + t * ids.nb[1] + u * ids.nb[0];
                const size_t x_row = t * size_t(x.ne[1]) + u % size_t(x.ne[1]);
                uses_.push_back({*reinterpret_cast<const int32_t *>(id), x_row, t * n_used + u});
            }
        }
        std::sort(uses_.begin(), uses_.end(), [](const Use & a, const Use & b) {
            return a.expert != b.expert ? a.expert < b.expert : a.out_row < b.out_row;
        });
        uint8_t * sorted_x = sorted_x_.reserve(uses_.size() * x_bytes_);
        float * sorted_out = reinterpret_cast<float *>(sorted_out_.reserve((uses_.size() * n_out * 4 + 63) / 64 * 64));
        products_.clear();
        for (size_t i = 0; i < uses_.size(); ++i) {
            std::memcpy(sorted_x + i * x_bytes_, rows_ + uses_[i].x_row * x_bytes_, x_bytes_);
            if (i > 0 && uses_[i].expert == uses_[i - 1].expert && products_.back().n_rows < max_rows) {
                products_.back().n_rows += 1;
            } else {
                products_.push_back(
                    product(weights, size_t(uses_[i].expert), sorted_x + i * x_bytes_, 1, sorted_out + i * n_out));
            }
        }
        jobs_.multiply(kernel, products_.data(), products_.size());
        run();
        for (size_t i = 0; i < uses_.size(); ++i) {
            std::memcpy(static_cast<float *>(op.data) + uses_[i].out_row * n_out, sorted_out + i * n_out, n_out * 4);
        }
    }

  private:
    struct Use {
        int32_t expert;
        size_t x_row, out_row;
    };

    // All rows of x, for this kernel. Those prepared last are kept: q, k and v, or gate and up, have theirs in common.
    void prepare_rows(const Kernel & kernel, const Tensor & x) {
        if (x_ == &x && prepared_by_ == kernel.format.prepare) return;
        const size_t n_in = size_t(x.ne[0]), n_rows = size_t(x.ne[1]), n_planes = size_t(x.ne[2]);
        x_bytes_ = kernel.format.n_bytes(n_in);
        if (n_buffers_ == buffers_.size()) buffers_.emplace_back();
        rows_ = buffers_[n_buffers_++].reserve(n_rows * n_planes * x_bytes_);
        jobs_.prepare(kernel, {static_cast<const uint8_t *>(x.data), n_in, n_rows, n_planes, x.nb[1], x.nb[2]}, rows_);
        x_ = &x;
        prepared_by_ = kernel.format.prepare;
    }

    Product product(const Tensor & weights, size_t matrix, const uint8_t * rows, int n_rows, float * out) const {
        const size_t n_in = size_t(weights.ne[0]), n_out = size_t(weights.ne[1]);
        const uint8_t * first = static_cast<const uint8_t *>(weights.data) + matrix * weights.nb[2];
        return {first, first + n_out * weights.nb[1], weights.nb[1], n_in, rows, x_bytes_, out, n_out, n_rows, 0, n_out};
    }

    const Tensor * x_ = nullptr;
    Prepare prepared_by_ = nullptr;
    uint8_t * rows_ = nullptr;
    size_t x_bytes_ = 0;
    Jobs jobs_;
    std::deque<RowBuffer> buffers_;  // prepared rows; the first n_buffers_ are in use
    size_t n_buffers_ = 0;
    RowBuffer sorted_x_, sorted_out_;
    std::vector<Product> products_;
    std::vector<Use> uses_;
};

int32_t graph_compute(Backend * backend, Graph * graph) {
    Stream & stream = *static_cast<Stream *>(backend->context);
    stream.begin();
    try {
        const int n_nodes = library.graph_n_nodes(graph);
        for (int i = 0; i < n_nodes; ++i) {
            const Tensor & node = *library.graph_node(graph, i);
            if ((node.flags & flag_compute) == 0) continue;
            if (node.op == op_mul_mat) stream.multiply_planes(node);
            if (node.op == op_mul_mat_id) stream.multiply_by_id(node);
            const int row_op = row_op_of(node);
            if (row_op != n_row_ops) stream.apply_to_rows(node, row_op);
        }
        stream.run();
    } catch (const std::bad_alloc &) {
        return status_alloc_failed;
    }
    return status_success;
}

// ---------------------------------------------------------------------------------------------------------------------
// Backend, device, registry

constexpr uint8_t guid[16] = {0x5d, 0x1f, 0x0a, 0xc3, 0x77, 0x42, 0x4e, 0x19,
                              0x9b, 0x06, 0xe8, 0x31, 0x2c, 0xd4, 0x60, 0xaf};

void free_backend(Backend * backend) {
    delete static_cast<Stream *>(backend->context);
    delete backend;
}

Backend * init_backend(Device *, const char *) {
    BackendTable table{};
    table.get_name = name_of;
    table.free = free_backend;
    table.graph_compute = graph_compute;
    return new Backend{guid, table, &device, new Stream};
}

void set_n_threads(Backend * backend, int n_threads) { static_cast<Stream *>(backend->context)->n_threads = n_threads; }

void get_memory(Device *, size_t * free_bytes, size_t * total_bytes) { *free_bytes = *total_bytes = 0; }

const char * description(Device *) { return "llama-sidecar: matrix products of 1 to 8 rows"; }

void get_properties(Device * self, Properties * properties) {
    *properties = {name_of(self), description(self), 0, 0, device_accelerator, nullptr, false, false, true, false,
                   true};
}

// Not the type of the weights for anybody but a loader that is placing: computed values lie in the CPU's buffers.
BufferType * buffer_type(Device *) { return placed_types != 0 ? &weights_type : library.cpu_buffer_type(); }

Buffer * buffer_from_host_ptr(Device *, void * p, size_t n_bytes, size_t) {
    return adopt(library.cpu_buffer_from_ptr(p, n_bytes));
}

extern Registry registry;

Device device{
    {name_of, description, get_memory, [](Device *) -> int32_t { return device_accelerator; }, get_properties,
     init_backend, buffer_type, nullptr, buffer_from_host_ptr, supports_op,
     [](Device *, BufferType * type) { return library.is_host(type); }, nullptr, nullptr, nullptr, nullptr},
    &registry,
    nullptr,
};

void * get_proc_address(Registry *, const char * name) {
    return std::strcmp(name, "ggml_backend_set_n_threads") == 0 ? reinterpret_cast<void *>(set_n_threads) : nullptr;
}

Registry registry{
    api_version,
    {name_of, [](Registry *) -> size_t { return 1; }, [](Registry *, size_t) { return &device; }, get_proc_address},
    nullptr,
};

// The library that holds the CPU backend, which may have been loaded apart from the one Python knows.
void * cpu_library() {
    Registry * cpu = library.device_registry(library.device_by_type(device_cpu));
    Dl_info info;
    if (dladdr(reinterpret_cast<void *>(cpu->table.get_device), &info) == 0) return nullptr;
    return dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
}

void find_ops() {
    Context * context = library.init({1 << 16, nullptr, true});
    Tensor * t = library.new_tensor_2d(context, type_f32, 1, 1);
    op_mul_mat = library.mul_mat(context, t, t)->op;
    library.free(context);
    if (std::strcmp(library.op_name(op_mul_mat + 1), "MUL_MAT_ID") == 0) op_mul_mat_id = op_mul_mat + 1;
    constexpr const char * names[n_row_ops] = {"ADD", "MUL", "RMS_NORM", "GLU"};
    for (int32_t op = 0; row_op_numbers[row_swiglu] < 0; ++op) {  // GLU is the last of them, and is there in the version tested
        for (int i = 0; i < n_row_ops; ++i) {
            if (std::strcmp(library.op_name(op), names[i]) == 0) row_op_numbers[i] = op;
        }
        if (std::strcmp(library.op_name(op), "RESHAPE") == 0) op_reshape = op;
    }
}

std::string try_to_register(void * handle) {
    if (std::strcmp(set_for(type_f32), "portable") == 0)
        return "this processor has none of the instruction sets the kernels need";
    const std::string missing = resolve(handle, library);
    if (!missing.empty()) return "the loaded ggml lacks " + missing;
    const std::string differing = mismatch(library);
    if (!differing.empty()) return differing;
    void * cpu = cpu_library();
    if (cpu == nullptr || !bind_team(cpu)) return "ggml's CPU backend was built without OpenMP";
    find_ops();
    library.register_backend(&registry);
    return "";
}

}  // namespace

std::string register_device(void * handle) {
    static const std::string problem = try_to_register(handle);
    return problem;
}

const char * set_for(int32_t type) {
    const Kernel * kernel = kernel_for(type);
    return kernel == nullptr ? nullptr : set_of(*kernel);
}

void use_set(const std::string & name) { forced_set = name; }

void set_placing(const std::vector<int32_t> & types) {
    placed_types = 0;
    for (int32_t type : types) {
        if (type >= 0 && type < 64 && kernel_for(type) != nullptr) placed_types |= uint64_t(1) << type;
    }
}

ggml::Device * registered_device() { return &device; }
ggml::BufferType * weights_buffer_type() { return &weights_type; }
const ggml::Library & bound_library() { return library; }

}  // namespace sidecar::smallbatch
