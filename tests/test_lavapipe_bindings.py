"""scripts/dev/lavapipe_bindings.c writes all bindings of a set, before a stand-in for Vulkan's loader: no driver is needed, its headers are."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "scripts" / "dev" / "lavapipe_bindings.c"
CC = shutil.which("cc")
HEADER = Path("/usr/include/vulkan/vulkan.h")

LOADER = r"""
#include <stdio.h>
#include <string.h>
#include <vulkan/vulkan.h>
static void update(VkDevice d, uint32_t n, const VkWriteDescriptorSet * w, uint32_t c, const VkCopyDescriptorSet * copies) {
    for (uint32_t i = 0; i < n; ++i)
        for (uint32_t k = 0; k < w[i].descriptorCount; ++k)
            printf("%u=%u ", w[i].dstBinding + k, (unsigned) w[i].pBufferInfo[k].range);
}
static PFN_vkVoidFunction of_device(VkDevice d, const char * name) {
    return strcmp(name, "vkUpdateDescriptorSets") == 0 ? (PFN_vkVoidFunction) update : NULL;
}
PFN_vkVoidFunction vkGetInstanceProcAddr(VkInstance i, const char * name) {
    return strcmp(name, "vkGetDeviceProcAddr") == 0 ? (PFN_vkVoidFunction) of_device : of_device(NULL, name);
}
"""
PROGRAM = r"""
#include <vulkan/vulkan.h>
int main(int argc, char ** argv) {
    PFN_vkGetDeviceProcAddr of_device = (PFN_vkGetDeviceProcAddr) vkGetInstanceProcAddr(NULL, "vkGetDeviceProcAddr");
    const char * name = "vkUpdateDescriptorSets";
    PFN_vkUpdateDescriptorSets update = (PFN_vkUpdateDescriptorSets) (argc > 1 ? vkGetInstanceProcAddr(NULL, name) : of_device(NULL, name));
    VkDescriptorBufferInfo buffers[2] = {{.range = 7}, {.range = 8}};
    VkWriteDescriptorSet write = {.descriptorCount = 2, .pBufferInfo = buffers};
    update(NULL, 1, &write, 0, NULL);
    return of_device(NULL, "vkOfAnotherName") != NULL;
}
"""


@pytest.mark.skipif(CC is None or not HEADER.is_file(), reason="needs a C compiler and Vulkan's headers")
@pytest.mark.parametrize("asked", [[], ["instance"]], ids=["through the device", "through the instance"])
def test_every_binding_is_written(tmp_path: Path, asked: list[str]) -> None:
    (tmp_path / "loader.c").write_text(LOADER)
    (tmp_path / "program.c").write_text(PROGRAM)

    def compiled(*arguments: str | Path) -> None:
        subprocess.run([str(CC), "-Wall", "-Werror", "-Wno-unused", *arguments], check=True, cwd=tmp_path)

    compiled("-shared", "-fPIC", "loader.c", "-o", "libvulkan.so.1")
    compiled("-shared", "-fPIC", SOURCE, "-o", "bindings.so")
    compiled("program.c", "-L.", "-l:libvulkan.so.1", "-o", "program")
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    plain = subprocess.run([tmp_path / "program", *asked], env=environment, check=True, capture_output=True)
    assert plain.stdout.split() == [b"0=7", b"1=8"]
    environment["LD_PRELOAD"] = str(tmp_path / "bindings.so")
    whole = subprocess.run([tmp_path / "program", *asked], env=environment, check=True, capture_output=True)
    assert whole.stdout.split() == [b"0=7", b"1=8", *(b"%d=7" % binding for binding in range(2, 12))]
