// Lets ggml-vulkan run on lavapipe, Mesa's Vulkan driver for the processor, which otherwise corrupts the heap (seen with Mesa 22.3.6).
//
//   cc -shared -fPIC scripts/dev/lavapipe_bindings.c -o lavapipe_bindings.so
//   LD_PRELOAD=$PWD/lavapipe_bindings.so GGML_VK_VISIBLE_DEVICES=0 python scripts/dev/gpu_check.py MAIN.gguf
//
// Every shader of ggml-vulkan gets a descriptor set for 12 buffers, in which those that it reads or writes are put. The rest may be
// buffers that were destroyed since the set was used before, and Vulkan allows that: a descriptor must be valid only where the
// shader uses it (VUID-vkCmdDispatch-None-08114). lavapipe takes references to all 12 at each dispatch, to freed ones, too. Here,
// each write of buffers from the first on puts the first buffer into what is left of the set as well.
// It knows nothing of sets of other layouts: preload it for ggml-vulkan alone.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>
#include <vulkan/vulkan.h>

enum { N_BINDINGS = 12 };  // MAX_PARAMETER_COUNT of ggml-vulkan

static PFN_vkGetDeviceProcAddr get_device_function;
static PFN_vkUpdateDescriptorSets update_descriptor_sets;

static void update_whole_sets(VkDevice device, uint32_t n_writes, const VkWriteDescriptorSet * writes, uint32_t n_copies,
                              const VkCopyDescriptorSet * copies) {
    update_descriptor_sets(device, n_writes, writes, n_copies, copies);
    for (uint32_t i = 0; i < n_writes; ++i) {
        const uint32_t n_used = writes[i].descriptorCount;
        if (writes[i].pBufferInfo == NULL || writes[i].dstBinding != 0 || n_used == 0 || n_used >= N_BINDINGS) continue;
        VkDescriptorBufferInfo first[N_BINDINGS];
        for (int k = 0; k < N_BINDINGS; ++k) first[k] = writes[i].pBufferInfo[0];
        VkWriteDescriptorSet rest = writes[i];
        rest.dstBinding = n_used;
        rest.descriptorCount = N_BINDINGS - n_used;
        rest.pBufferInfo = first;
        update_descriptor_sets(device, 1, &rest, 0, NULL);
    }
}

static PFN_vkVoidFunction own(const char * name, PFN_vkVoidFunction theirs);

static PFN_vkVoidFunction device_function(VkDevice device, const char * name) {
    return own(name, get_device_function(device, name));
}

// Puts this file's function in the place of theirs, if it has one of that name.
static PFN_vkVoidFunction own(const char * name, PFN_vkVoidFunction theirs) {
    if (theirs != NULL && strcmp(name, "vkGetDeviceProcAddr") == 0) {
        get_device_function = (PFN_vkGetDeviceProcAddr) theirs;
        return (PFN_vkVoidFunction) device_function;
    }
    if (theirs != NULL && strcmp(name, "vkUpdateDescriptorSets") == 0) {
        update_descriptor_sets = (PFN_vkUpdateDescriptorSets) theirs;
        return (PFN_vkVoidFunction) update_whole_sets;
    }
    return theirs;
}

// The loader's one entry point that ggml-vulkan calls by its symbol; all else it asks this for.
PFN_vkVoidFunction vkGetInstanceProcAddr(VkInstance instance, const char * name) {
    static PFN_vkGetInstanceProcAddr theirs;
    if (theirs == NULL) theirs = (PFN_vkGetInstanceProcAddr) dlsym(RTLD_NEXT, "vkGetInstanceProcAddr");
    if (theirs == NULL) theirs = (PFN_vkGetInstanceProcAddr) dlsym(dlopen("libvulkan.so.1", RTLD_NOW), "vkGetInstanceProcAddr");
    return own(name, theirs(instance, name));
}
