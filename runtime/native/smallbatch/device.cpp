#include "device.h"

#include <dlfcn.h>

#include <cstring>
#include <string>
#include <vector>

#include "ggml_abi.h"
#include "graph_products.h"
#include "kernels.h"

namespace sidecar::smallbatch {

namespace {

using namespace ggml;

constexpr const char * device_name = "SMALLBATCH";

Library library;
int32_t op_mul_mat = -1, op_mul_mat_id = -1;
thread_local uint64_t placed_types = 0;  // one bit per ggml type

const char * name_of(Device *) { return device_name; }
const char * name_of(Backend *) { return device_name; }
const char * name_of(BufferType *) { return device_name; }
const char * name_of(Registry *) { return device_name; }

// By ggml type, since products ask at every node of every graph.
struct KernelsInUse {
    const Kernel * of[64];
    KernelsInUse() { choose(nullptr); }
    void choose(const char * set) {
        for (int32_t type = 0; type < 64; ++type) of[type] = find_kernel(Type(type), set);
    }
};
KernelsInUse & kernels_in_use() {
    static KernelsInUse kernels;
    return kernels;
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
// What is computed by the kernels

// Products with weights that lie here, and the products inside attention whose rows come from such a product: were those
// left to the CPU backend, which computes one row otherwise than several, the widths would not agree. Not with weights that the
// CPU backend has repacked: those are no rows any more.

const Buffer * buffer_of(const Tensor & t) { return t.view_src != nullptr ? t.view_src->buffer : t.buffer; }

bool lies_here(const Tensor & t) {
    const Buffer * buffer = buffer_of(t);
    return buffer != nullptr && buffer->type == &weights_type;
}

bool is_in_rows(const Tensor & t) {
    const Buffer * buffer = buffer_of(t);
    return buffer != nullptr && library.is_host(buffer->type);
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

// The loader asks with an empty buffer and 512 rows whether weights could lie here at all. Anybody else is told to compute
// everything on the CPU backend, where takes_product() decides.
bool supports_op(Device *, const Tensor * op) {
    if (!is_product(*op)) return false;
    const Buffer * buffer = buffer_of(*op->src[0]);
    return buffer != nullptr && buffer->type == &weights_type && buffer->size == 0 && is_placed(op->src[0]->type);
}

// ---------------------------------------------------------------------------------------------------------------------
// Backend, device, registry

constexpr uint8_t guid[16] = {0x5d, 0x1f, 0x0a, 0xc3, 0x77, 0x42, 0x4e, 0x19,
                              0x9b, 0x06, 0xe8, 0x31, 0x2c, 0xd4, 0x60, 0xaf};

// llama.cpp makes one for each context, and has nothing for it to do.
Backend * init_backend(Device *, const char *) {
    BackendTable table{};
    table.get_name = name_of;
    table.free = [](Backend * backend) { delete backend; };
    table.graph_compute = [](Backend *, Graph *) -> int32_t { return status_failed; };
    return new Backend{guid, table, &device, nullptr};
}

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

Registry registry{
    api_version,
    {name_of, [](Registry *) -> size_t { return 1; }, [](Registry *, size_t) { return &device; },
     [](Registry *, const char *) -> void * { return nullptr; }},
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
}

std::string try_to_register(void * handle) {
    if (std::strcmp(set_for(type_f32), "portable") == 0)
        return "this processor has none of the instruction sets the kernels need";
    const std::string missing = resolve(handle, library);
    if (!missing.empty()) return "the loaded ggml lacks " + missing;
    const std::string differing = mismatch(library);
    if (!differing.empty()) return differing;
    void * cpu = cpu_library();
    if (cpu == nullptr) return "the library of ggml's CPU backend was not found";
    find_ops();
    const std::string refused = join_graphs(library, library.device_by_type(device_cpu), cpu);
    if (refused.empty()) library.register_backend(&registry);
    return refused;
}

}  // namespace

bool takes_product(const Tensor & op) {
    if (!is_product(op)) return false;
    const Tensor & weights = *op.src[0];
    const Tensor & x = *op.src[1];
    const bool is_small = op.op == op_mul_mat ? x.ne[1] <= max_rows && x.ne[2] % weights.ne[2] == 0
                                              : x.ne[2] <= max_rows && op.src[2]->type == type_i32;
    return is_small && x.type == type_f32 && op.type == type_f32 && x.ne[3] == 1 && weights.ne[3] == 1 &&
           op.op_params[1] != hint_hadamard && is_contiguous(op) && kernel_in_use(weights.type) != nullptr &&
           has_contiguous_rows(weights, block_of(Type(weights.type))) && has_contiguous_rows(x, block_of(Type::f32)) &&
           (lies_here(weights) || (is_in_rows(weights) && comes_from_here(&x)));
}

bool is_by_id(const Tensor & op) { return op.op == op_mul_mat_id; }

const Kernel * kernel_in_use(int32_t type) { return type >= 0 && type < 64 ? kernels_in_use().of[type] : nullptr; }

std::string register_device(void * handle) {
    static const std::string problem = try_to_register(handle);
    return problem;
}

const char * set_for(int32_t type) {
    const Kernel * kernel = kernel_in_use(type);
    return kernel == nullptr ? nullptr : set_of(*kernel);
}

void use_set(const std::string & name) { kernels_in_use().choose(name.empty() ? nullptr : name.c_str()); }

void set_placing(const std::vector<int32_t> & types) {
    placed_types = 0;
    for (int32_t type : types) {
        if (kernel_in_use(type) != nullptr) placed_types |= uint64_t(1) << type;
    }
}

ggml::BufferType * weights_buffer_type() { return &weights_type; }
const ggml::Library & bound_library() { return library; }

}  // namespace sidecar::smallbatch
