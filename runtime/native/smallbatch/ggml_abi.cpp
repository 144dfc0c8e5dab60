#include "ggml_abi.h"

#include <dlfcn.h>

#include <cstring>

namespace sidecar::smallbatch::ggml {

std::string resolve(void * handle, Library & library) {
    std::string missing;
    const auto find = [&](auto *& function, const char * name) {
        function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(handle, name));
        if (function == nullptr) missing += (missing.empty() ? "" : ", ") + std::string(name);
    };
    find(library.version, "ggml_version");
    find(library.register_backend, "ggml_backend_register");
    find(library.device_by_type, "ggml_backend_dev_by_type");
    find(library.device_registry, "ggml_backend_dev_backend_reg");
    find(library.device_name, "ggml_backend_dev_name");
    find(library.device_properties, "ggml_backend_dev_get_props");
    find(library.device_init, "ggml_backend_dev_init");
    find(library.backend_device, "ggml_backend_get_device");
    find(library.backend_free, "ggml_backend_free");
    find(library.cpu_buffer_type, "ggml_backend_cpu_buffer_type");
    find(library.cpu_buffer_from_ptr, "ggml_backend_cpu_buffer_from_ptr");
    find(library.alloc_buffer, "ggml_backend_buft_alloc_buffer");
    find(library.alignment, "ggml_backend_buft_get_alignment");
    find(library.is_host, "ggml_backend_buft_is_host");
    find(library.buffer_type, "ggml_backend_buffer_get_type");
    find(library.buffer_base, "ggml_backend_buffer_get_base");
    find(library.buffer_size, "ggml_backend_buffer_get_size");
    find(library.buffer_usage, "ggml_backend_buffer_get_usage");
    find(library.buffer_set_usage, "ggml_backend_buffer_set_usage");
    find(library.buffer_free, "ggml_backend_buffer_free");
    find(library.init, "ggml_init");
    find(library.free, "ggml_free");
    find(library.new_tensor_2d, "ggml_new_tensor_2d");
    find(library.view_1d, "ggml_view_1d");
    find(library.mul_mat, "ggml_mul_mat");
    find(library.scale, "ggml_scale");
    find(library.set_name, "ggml_set_name");
    find(library.new_graph, "ggml_new_graph_custom");
    find(library.build_forward_expand, "ggml_build_forward_expand");
    find(library.graph_compute, "ggml_backend_graph_compute");
    find(library.alloc_tensors, "ggml_backend_alloc_ctx_tensors_from_buft");
    find(library.tensor_set, "ggml_backend_tensor_set");
    find(library.tensor_get, "ggml_backend_tensor_get");
    find(library.n_bytes, "ggml_nbytes");
    find(library.supports_op, "ggml_backend_dev_supports_op");
    find(library.proc_address, "ggml_backend_reg_get_proc_address");
    find(library.tensor_overhead, "ggml_tensor_overhead");
    find(library.op_name, "ggml_op_name");
    return missing;
}

Backend * make_backend(const Library & library, Device * device, int n_threads) {
    using Set = void (*)(Backend *, int);
    Backend * backend = library.device_init(device, nullptr);
    void * set = library.proc_address(library.device_registry(device), "ggml_backend_set_n_threads");
    if (backend != nullptr && set != nullptr) reinterpret_cast<Set>(set)(backend, n_threads);
    return backend;
}

BufferType ** repacking_types(const Library & library, Device * cpu) {
    using List = BufferType ** (*)(Device *);
    void * list = library.proc_address(library.device_registry(cpu), "ggml_backend_dev_get_extra_bufts");
    return list == nullptr ? nullptr : reinterpret_cast<List>(list)(cpu);
}

namespace {

constexpr size_t object_bytes = 32;  // what ggml_tensor_overhead() counts besides the tensor

bool tensor_fits(const Library & library) {
    if (library.tensor_overhead() != object_bytes + sizeof(Tensor)) return false;
    Context * context = library.init({1 << 16, nullptr, true});
    if (context == nullptr) return false;
    Tensor * weights = library.new_tensor_2d(context, type_f32, 6, 5);
    Tensor * x = library.new_tensor_2d(context, type_f32, 6, 2);
    Tensor * product = library.mul_mat(context, weights, x);
    Tensor * view = library.view_1d(context, weights, 3, 24);
    library.set_name(view, "a view");
    const bool fits = weights->type == type_f32 && weights->buffer == nullptr && weights->data == nullptr &&
                      weights->ne[0] == 6 && weights->ne[1] == 5 && weights->ne[2] == 1 && weights->ne[3] == 1 &&
                      weights->nb[0] == 4 && weights->nb[1] == 24 && weights->nb[2] == 120 && weights->nb[3] == 120 &&
                      weights->op == 0 && weights->flags == 0 && weights->view_src == nullptr &&
                      std::strcmp(library.op_name(product->op), "MUL_MAT") == 0 && product->src[0] == weights &&
                      product->src[1] == x && product->src[2] == nullptr && product->ne[0] == 5 &&
                      product->ne[1] == 2 && product->op_params[1] == 0 && view->view_src == weights &&
                      view->view_offs == 24 && view->src[0] == weights && std::strcmp(view->name, "a view") == 0 &&
                      view->extra == nullptr;
    library.free(context);
    return fits;
}

bool buffer_fits(const Library & library) {
    BufferType * type = library.cpu_buffer_type();
    if (type->table.is_host == nullptr || type->table.get_alignment == nullptr || type->table.alloc_buffer == nullptr ||
        type->table.get_max_size != nullptr || type->device != nullptr || !type->table.is_host(type) ||
        type->table.get_alignment(type) != library.alignment(type)) {
        return false;
    }
    Buffer * buffer = library.alloc_buffer(type, 12345);
    if (buffer == nullptr) return false;
    library.buffer_set_usage(buffer, usage_weights);
    const bool fits = buffer->type == type && library.buffer_type(buffer) == type &&
                      buffer->size == library.buffer_size(buffer) && buffer->size >= 12345 &&
                      buffer->usage == usage_weights && library.buffer_usage(buffer) == usage_weights;
    library.buffer_free(buffer);
    return fits;
}

bool device_fits(const Library & library, Device * cpu) {
    if (cpu->registry != library.device_registry(cpu) || cpu->table.get_name(cpu) != library.device_name(cpu) ||
        cpu->table.get_type(cpu) != device_cpu || !cpu->table.supports_buffer_type(cpu, library.cpu_buffer_type()) ||
        cpu->table.event_synchronize != nullptr) {
        return false;
    }
    Properties properties = {};
    library.device_properties(cpu, &properties);
    return properties.name == library.device_name(cpu) && properties.type == device_cpu &&
           properties.buffer_from_host_ptr && !properties.async && !properties.events;
}

bool backend_fits(const Library & library, Device * cpu) {
    Backend * backend = library.device_init(cpu, nullptr);
    if (backend == nullptr) return false;
    const bool fits =
        backend->device == cpu && library.backend_device(backend) == cpu && backend->table.graph_compute != nullptr;
    library.backend_free(backend);
    return fits;
}

std::string version_mismatch(const Library & library) {
    const std::string version = library.version();
    return version == tested_version ? "" : "ggml is " + version + ", tested with " + tested_version;
}

}  // namespace

std::string buffer_mismatch(const Library & library) {
    const std::string untested = version_mismatch(library);
    return !untested.empty() || buffer_fits(library) ? untested : "ggml lays these out otherwise: buffer";
}

std::string mismatch(const Library & library) {
    const std::string untested = version_mismatch(library);
    if (!untested.empty()) return untested;
    Device * cpu = library.device_by_type(device_cpu);
    if (cpu == nullptr) return "ggml has no CPU device";
    const int32_t found = library.device_registry(cpu)->api_version;
    if (found != api_version)
        return "ggml's backend interface is version " + std::to_string(found) + ", not " + std::to_string(api_version);
    std::string differing;
    const auto check = [&](bool fits, const char * what) {
        if (!fits) differing += (differing.empty() ? "" : ", ") + std::string(what);
    };
    check(tensor_fits(library), "tensor");
    check(buffer_fits(library), "buffer");
    check(device_fits(library, cpu), "device");
    check(backend_fits(library, cpu), "backend");
    return differing.empty() ? "" : "ggml lays these out otherwise: " + differing;
}

}  // namespace sidecar::smallbatch::ggml
