#include "huge_pages.h"

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>

#include "ggml_abi.h"

namespace sidecar::smallbatch {

#ifdef MADV_HUGEPAGE

namespace {

constexpr size_t least_bytes = 4 << 20;  // of a buffer: two huge pages
constexpr uintptr_t page_bytes = 4096;   // begins there whatever the system's pages are

ggml::Library library;
decltype(ggml::BufferTypeTable::alloc_buffer) alloc_as_before = nullptr;

ggml::Buffer * alloc_in_huge_pages(ggml::BufferType * type, size_t n_bytes) {
    ggml::Buffer * buffer = alloc_as_before(type, n_bytes);
    if (buffer != nullptr && n_bytes >= least_bytes) {
        const uintptr_t begin = uintptr_t(library.buffer_base(buffer)) / page_bytes * page_bytes;
        madvise(reinterpret_cast<void *>(begin), uintptr_t(library.buffer_base(buffer)) + n_bytes - begin, MADV_HUGEPAGE);
    }
    return buffer;
}

}  // namespace

bool use_huge_pages(void * handle) {
    if (alloc_as_before != nullptr) return true;
    if (!resolve(handle, library).empty() || !buffer_mismatch(library).empty()) return false;
    ggml::BufferTypeTable & table = library.cpu_buffer_type()->table;
    alloc_as_before = table.alloc_buffer;
    table.alloc_buffer = alloc_in_huge_pages;
    return true;
}

#else

bool use_huge_pages(void *) { return false; }

#endif

}  // namespace sidecar::smallbatch
