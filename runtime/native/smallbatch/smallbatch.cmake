# The small-batch kernels, as part of the target _native. Each set_*.cpp gets the instructions it is named after and no
# others (never -march=native, and never AMX: GCC 12 breaks its set-up); everything else stays with the baseline.
include(CheckCXXSourceCompiles)

set(SMALLBATCH_OPTIMIZATION -O2 CACHE STRING "How the kernels are optimised: -O1 where compiling soon matters more than speed")
set(smallbatch_flags ${SMALLBATCH_OPTIMIZATION} -ffp-contract=off -fno-exceptions -fno-asynchronous-unwind-tables)
# No contraction: every width must compute alike. Nothing throws there: no tables for unwinding.

# Adds a kernel set where the compiler knows its instructions.
function(add_kernel_set name)
    string(TOUPPER "SMALLBATCH_${name}" macro)
    list(JOIN ARGN " " CMAKE_REQUIRED_FLAGS)
    check_cxx_source_compiles("int main() {}" HAVE_${macro})
    if(HAVE_${macro})
        set_source_files_properties(smallbatch/set_${name}.cpp PROPERTIES COMPILE_OPTIONS "${smallbatch_flags};${ARGN}")
        target_sources(_native PRIVATE smallbatch/set_${name}.cpp)
        target_compile_definitions(_native PRIVATE ${macro})
    endif()
endfunction()

set(smallbatch_rest smallbatch/device.cpp smallbatch/ggml_abi.cpp smallbatch/graph_products.cpp
    smallbatch/huge_pages.cpp smallbatch/kernels.cpp smallbatch/trial.cpp)
set_source_files_properties(${smallbatch_rest} PROPERTIES COMPILE_OPTIONS ${SMALLBATCH_OPTIMIZATION})
target_sources(_native PRIVATE ${smallbatch_rest} smallbatch/bindings.cpp)
add_kernel_set(portable)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    set(avx2 -mavx2 -mfma -mf16c)
    set(avx512 ${avx2} -mavx512f -mavx512bw -mavx512dq -mavx512vl -Wno-maybe-uninitialized)  # GCC 12's own headers warn
    add_kernel_set(avx2 ${avx2})
    add_kernel_set(avx_vnni ${avx2} -mavxvnni)
    add_kernel_set(avx512_vnni ${avx512} -mavx512vnni)
    add_kernel_set(avx512_bf16 ${avx512} -mavx512bf16)
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "aarch64|arm64")
    add_kernel_set(neon_dotprod -march=armv8.2-a+dotprod)
    add_kernel_set(neon_i8mm -march=armv8.2-a+dotprod+i8mm)
endif()
