// Buffers that ggml allocates on the CPU in pages of 2 MB: KV cache, recurrent states, what graphs compute in, weights not mapped.
//
// A decode walks through all of them. In a virtual machine a page of 4 KB that the processor has forgotten costs a walk through two
// tables, and a decode several times what it costs with huge pages; without one it costs some per cent. Linux gives
// huge pages to who asks before the memory is first written (where /sys/kernel/mm/transparent_hugepage/enabled says
// "madvise", the usual choice), and llama.cpp writes zeros as soon as it has a buffer: so this asks between the two.
#pragma once

namespace sidecar::smallbatch {

// From now on the library with this dlopen handle asks for huge pages for every larger buffer of its CPU buffer type. Does nothing
// the second time. Returns whether it asks: not where there are no huge pages to ask for, nor with a ggml that differs from the
// tested one. Not thread-safe against itself.
bool use_huge_pages(void * handle);

}  // namespace sidecar::smallbatch
