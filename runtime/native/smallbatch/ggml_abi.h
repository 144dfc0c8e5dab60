// The parts of ggml's binary interface that are needed and that no installed header declares: the tables of functions behind
// devices, backends and buffers, what the CPU backend asks buffer types that repack, and the tensor. The layouts follow ggml
// 0.25.3 (ggml.h, ggml-backend.h, src/ggml-backend-impl.h, src/ggml-cpu/ggml-cpu-impl.h and traits.h); mismatch() compares them
// with the library that is loaded, and must come before any use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace sidecar::smallbatch::ggml {

constexpr const char * tested_version = "0.25.3";
constexpr int32_t api_version = 2;

enum DeviceType : int32_t { device_cpu = 0, device_accelerator = 3 };
enum Usage : int32_t { usage_any = 0, usage_weights = 1 };
enum Status : int32_t { status_success = 0, status_alloc_failed = -2, status_failed = -1 };
constexpr int32_t type_f32 = 0, type_i32 = 26;
constexpr int32_t hint_hadamard = 1;  // op_params[1] of a product whose weights are a Hadamard matrix

struct Tensor;
struct Buffer;
struct BufferType;
struct Backend;
struct Device;
struct Registry;
struct Graph;
struct Context;
struct ThreadPool;
struct Traits;
struct ExtraBuffers;
using Unused = void (*)();  // a table entry that is optional and stays null

struct BufferTypeTable {
    const char * (*get_name)(BufferType *);
    Buffer * (*alloc_buffer)(BufferType *, size_t);
    size_t (*get_alignment)(BufferType *);
    Unused get_max_size, get_alloc_size;
    bool (*is_host)(BufferType *);
};
struct BufferType {
    BufferTypeTable table;
    Device * device;
    void * context;
};

struct Buffer {
    Unused table[11];  // a CPU buffer's, never called from here
    BufferType * type;
    void * context;
    size_t size;
    int32_t usage;
};

struct BackendTable {
    const char * (*get_name)(Backend *);
    void (*free)(Backend *);
    Unused set_tensor_async, get_tensor_async, set_tensor_2d_async, get_tensor_2d_async, cpy_tensor_async, synchronize;
    Unused graph_plan_create, graph_plan_free, graph_plan_update, graph_plan_compute;
    int32_t (*graph_compute)(Backend *, Graph *);
    Unused event_record, event_wait, graph_optimize;
};
struct Backend {
    const uint8_t * guid;  // (16,)
    BackendTable table;
    Device * device;
    void * context;
};

struct Properties {
    const char * name;
    const char * description;
    size_t free_bytes, total_bytes;
    int32_t type;
    const char * id;
    bool async, host_buffer, buffer_from_host_ptr, events, mmap_support;
};

struct DeviceTable {
    const char * (*get_name)(Device *);
    const char * (*get_description)(Device *);
    void (*get_memory)(Device *, size_t * free_bytes, size_t * total_bytes);
    int32_t (*get_type)(Device *);
    void (*get_properties)(Device *, Properties *);
    Backend * (*init_backend)(Device *, const char * options);
    BufferType * (*get_buffer_type)(Device *);
    Unused get_host_buffer_type;
    Buffer * (*buffer_from_host_ptr)(Device *, void *, size_t, size_t max_tensor_size);
    bool (*supports_op)(Device *, const Tensor *);
    bool (*supports_buffer_type)(Device *, BufferType *);
    Unused offload_op, event_new, event_free, event_synchronize;
};
struct Device {
    DeviceTable table;
    Registry * registry;
    void * context;
};

struct RegistryTable {
    const char * (*get_name)(Registry *);
    size_t (*get_device_count)(Registry *);
    Device * (*get_device)(Registry *, size_t);
    void * (*get_proc_address)(Registry *, const char *);
};
struct Registry {
    int32_t api_version;
    RegistryTable table;
    void * context;
};

struct Tensor {
    int32_t type;
    Buffer * buffer;
    int64_t ne[4];
    size_t nb[4];
    int32_t op;
    int32_t op_params[16];
    int32_t flags;
    Tensor * src[10];
    Tensor * view_src;
    size_t view_offs;
    void * data;
    char name[64];
    void * extra;
    char padding[8];
};

// What each thread of the CPU backend computes an operation with.
struct ComputeParams {
    int i_thread, n_threads;
    size_t n_bytes;  // of memory
    void * memory;   // for all threads together, as much as the graph's operations asked for
    ThreadPool * pool;
};

// C++ objects of the CPU backend, as compilers but Microsoft's lay them out: a pointer to the virtual functions, of which the first
// two are destructors.
struct TraitsMethods {
    Unused destroy, destroy_and_free;
    bool (*work_size)(Traits *, int n_threads, const Tensor *, size_t & n_bytes);
    bool (*compute)(Traits *, ComputeParams *, Tensor *);
};
struct Traits {
    const TraitsMethods * methods;
};
struct ExtraBuffersMethods {
    Unused destroy, destroy_and_free;
    bool (*supports_op)(ExtraBuffers *, Device *, const Tensor *);
    Traits * (*traits_of)(ExtraBuffers *, const Tensor *);
};
struct ExtraBuffers {  // the context of a buffer type that repacks
    const ExtraBuffersMethods * methods;
};

struct InitOptions {
    size_t n_bytes;
    void * memory;
    bool no_alloc;
};

// Public functions of the loaded library.
struct Library {
    const char * (*version)();
    void (*register_backend)(Registry *);
    Device * (*device_by_type)(int32_t);
    Registry * (*device_registry)(Device *);
    const char * (*device_name)(Device *);
    void (*device_properties)(Device *, Properties *);
    Backend * (*device_init)(Device *, const char *);
    Device * (*backend_device)(Backend *);
    void (*backend_free)(Backend *);
    BufferType * (*cpu_buffer_type)();
    Buffer * (*cpu_buffer_from_ptr)(void *, size_t);
    Buffer * (*alloc_buffer)(BufferType *, size_t);
    size_t (*alignment)(BufferType *);
    bool (*is_host)(BufferType *);
    BufferType * (*buffer_type)(Buffer *);
    void * (*buffer_base)(Buffer *);
    size_t (*buffer_size)(Buffer *);
    int32_t (*buffer_usage)(Buffer *);
    void (*buffer_set_usage)(Buffer *, int32_t);
    void (*buffer_free)(Buffer *);
    Context * (*init)(InitOptions);
    void (*free)(Context *);
    Tensor * (*new_tensor_2d)(Context *, int32_t type, int64_t, int64_t);
    Tensor * (*view_1d)(Context *, Tensor *, int64_t n, size_t offset);
    Tensor * (*mul_mat)(Context *, Tensor *, Tensor *);
    Tensor * (*scale)(Context *, Tensor *, float);
    Tensor * (*set_name)(Tensor *, const char *);
    Graph * (*new_graph)(Context *, size_t n_most_nodes, bool gradients);
    void (*build_forward_expand)(Graph *, Tensor *);
    int32_t (*graph_compute)(Backend *, Graph *);
    Buffer * (*alloc_tensors)(Context *, BufferType *);
    void (*tensor_set)(Tensor *, const void *, size_t offset, size_t n_bytes);
    void (*tensor_get)(const Tensor *, void *, size_t offset, size_t n_bytes);
    size_t (*n_bytes)(const Tensor *);
    bool (*supports_op)(Device *, const Tensor *);
    void * (*proc_address)(Registry *, const char *);
    size_t (*tensor_overhead)();
    const char * (*op_name)(int32_t);
};

// Looks the functions up in the library with this dlopen handle and in what it depends on. Returns the names of those
// that are missing, or nothing.
std::string resolve(void * handle, Library & library);

// A backend of the device, on so many threads where it can be told. Null where ggml makes none.
Backend * make_backend(const Library & library, Device * device, int n_threads);

// The CPU device's buffer types that repack, with a null at their end; null where it has no such list.
BufferType ** repacking_types(const Library & library, Device * cpu);

// Compares the layouts above with objects that the library makes. Returns what differs, or nothing.
std::string mismatch(const Library & library);

// The same of buffers and their types alone, without a look at any device.
std::string buffer_mismatch(const Library & library);

}  // namespace sidecar::smallbatch::ggml
