# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
# libquern_cuda, the GPU backend, where nvcc is found. Each .cu is one nvcc command that keeps the assembler's report
# (registers, stack, spills) beside the object: tests/registers.sh compares it with src/cuda/registers.txt. Where ptxas
# says that warpgroups' products wait for each other, which costs a third of a kernel's speed, the build fails. Quotes
# within an option keep a path with spaces together when nvcc hands it on; its own target of a list of headers it would not
# escape.
find_program(QUERN_NVCC nvcc HINTS ENV CUDA_PATH ENV CUDA_HOME PATHS /usr/local/cuda/bin PATH_SUFFIXES bin)
if(NOT QUERN_NVCC)
  message(STATUS "No nvcc: the GPU backend is not built")
  return()
endif()
set(quern_cuda_default 80-real 90a-real 90-virtual)
if(DEFINED ENV{CUDAARCHS})
  set(quern_cuda_default $ENV{CUDAARCHS})
endif()
set(CMAKE_CUDA_ARCHITECTURES "${quern_cuda_default}" CACHE STRING
    "GPUs that libquern_cuda holds code for: 90a-real machine code, 90-virtual PTX for newer GPUs")
set(nvcc_flags -std=c++17 -O3 -DNDEBUG --expt-relaxed-constexpr -Werror all-warnings
    -Xcompiler=-fPIC,-fvisibility=hidden,-Wall,-Wextra,-Wno-missing-field-initializers
    "-Xcompiler=\"-ffile-prefix-map=${PROJECT_SOURCE_DIR}/=\""
    -Xptxas=-v -I${PROJECT_SOURCE_DIR}/include
    -I${PROJECT_SOURCE_DIR}/src -I${PROJECT_SOURCE_DIR}/src/cuda)
# Folders whose names begin with sm90 are compiled for sm_90a alone, and left out where that is not asked for.
set(nvcc_targets)
set(nvcc_sm90)
foreach(architecture ${CMAKE_CUDA_ARCHITECTURES})
  string(REGEX REPLACE "-(real|virtual)$" "" number ${architecture})
  if(architecture MATCHES "-virtual$")
    list(APPEND nvcc_targets -gencode=arch=compute_${number},code=compute_${number})
  else()
    list(APPEND nvcc_targets -gencode=arch=compute_${number},code=sm_${number})
  endif()
  if(architecture MATCHES "^90a(-real)?$")
    set(nvcc_sm90 -gencode=arch=compute_90a,code=sm_90a)
    list(APPEND nvcc_flags -DQUERN_SM90)
  endif()
endforeach()

# cuBLASLt: its header, of the CUDA toolkit or of the package nvidia-cublas of the python3 on PATH. libquern_cuda opens
# the library at first use (src/cuda/common/gemm.cu says where); a link beside it serves the build's own copy.
execute_process(COMMAND ${QUERN_NVCC} --dryrun -x cu -E /dev/null OUTPUT_QUIET ERROR_VARIABLE nvcc_says)
string(REGEX MATCH "TOP=([^\r\n]+)" nvcc_top "${nvcc_says}")
set(nvcc_top "${CMAKE_MATCH_1}")
execute_process(COMMAND python3 -c "import nvidia; print(';'.join(q for p in nvidia.__path__ for q in (p + '/cu13', p + '/cublas')), end='')"
                OUTPUT_VARIABLE nvidia_packages ERROR_QUIET)
find_path(CUBLASLT_INCLUDE cublasLt.h HINTS ${nvcc_top} PATHS /usr/local/cuda ${nvidia_packages}
          PATH_SUFFIXES include targets/x86_64-linux/include)
if(CUBLASLT_INCLUDE)
  list(APPEND nvcc_flags -DQUERN_CUBLASLT -isystem ${CUBLASLT_INCLUDE})
  file(STRINGS ${CUBLASLT_INCLUDE}/cublas_api.h cublas_major REGEX "define CUBLAS_VER_MAJOR")
  string(REGEX MATCH "[0-9]+$" cublas_major "${cublas_major}")
  find_library(CUBLASLT_LIBRARY NAMES libcublasLt.so.${cublas_major} HINTS ${nvcc_top} PATHS /usr/local/cuda ${nvidia_packages}
               PATH_SUFFIXES lib lib64 targets/x86_64-linux/lib)
  if(CUBLASLT_LIBRARY)
    file(CREATE_LINK ${CUBLASLT_LIBRARY} ${PROJECT_BINARY_DIR}/libcublasLt.so.${cublas_major} SYMBOLIC)
  endif()
else()
  message(STATUS "No cublasLt.h (CUDA toolkit, or PyPI's nvidia-cublas): the GPU multiplies by compression's weights in f32, slowly")
endif()

# For CI, which runs no GPU code: each template for bf16 alone where it takes bf16, and for one head dim. Files that
# instantiate f16 (their names say so), those for f32 that stand beside the same for bf16, and those that differ from
# another in the head dim that ends their names alone are left out, and with them what the library would need to be
# loaded.
option(QUERN_CUDA_ONE_DTYPE "Compile the GPU's kernels for bf16 and one head dim, only to see that they compile" OFF)
set(undefined_symbols ,--no-undefined)
if(QUERN_CUDA_ONE_DTYPE)
  list(APPEND nvcc_flags -DQUERN_CUDA_ONE_DTYPE)
  set(undefined_symbols)
endif()

set(launcher ${CMAKE_CUDA_COMPILER_LAUNCHER} $ENV{CMAKE_CUDA_COMPILER_LAUNCHER})
list(REMOVE_DUPLICATES launcher)
set(quern_cuda_objects)
file(GLOB_RECURSE cuda_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/cuda/*.cu)
if(QUERN_CUDA_ONE_DTYPE)
  list(FILTER cuda_sources EXCLUDE REGEX "[/_]f16[_.]")
  foreach(source ${cuda_sources})
    string(REGEX REPLACE "([/_])bf16\\.cu$" "\\1f32.cu" twin ${source})
    if(NOT twin STREQUAL source)
      list(REMOVE_ITEM cuda_sources ${twin})
    endif()
  endforeach()
  set(templates) # a name without head dim and the headers included: 128, sorted first, stands for the others
  foreach(source ${cuda_sources})
    string(REGEX REPLACE "_[0-9]+\\.cu$" "" template ${source})
    if(NOT template STREQUAL source)
      file(STRINGS ${source} headers REGEX "^#include")
      string(REPLACE ";" " " template "${template} ${headers}")
      if(template IN_LIST templates)
        list(REMOVE_ITEM cuda_sources ${source})
      endif()
      list(APPEND templates ${template})
    endif()
  endforeach()
endif()
file(MAKE_DIRECTORY ${PROJECT_BINARY_DIR}/cuda)
foreach(source ${cuda_sources})
  file(RELATIVE_PATH name ${PROJECT_SOURCE_DIR}/src/cuda ${source})
  string(REGEX REPLACE "[/.]" "_" object_name ${name})
  set(object ${PROJECT_BINARY_DIR}/cuda/${object_name})
  set(targets ${nvcc_targets})
  if(name MATCHES "/sm90")
    if(NOT nvcc_sm90)
      continue()
    endif()
    set(targets ${nvcc_sm90})
  endif()
  add_custom_command(
    OUTPUT ${object}.o
    COMMAND ${CMAKE_COMMAND} -E env sh -c "{ \"$@\" >\"$0\" 2>&1 && ! grep -q 'are serialized' \"$0\"; } || { cat \"$0\" >&2; rm -f \"\${0%log}o\"; exit 1; }"
            ${object}.log
            ${launcher} ${QUERN_NVCC} ${nvcc_flags} ${targets} -MD -MT cuda/${object_name}.o -MF ${object}.d -c ${source} -o ${object}.o
    DEPENDS ${source}
    DEPFILE ${object}.d
    COMMENT "Compiling ${name}"
    VERBATIM)
  list(APPEND quern_cuda_objects ${object}.o)
endforeach()
# What an earlier configuration compiled and this one leaves out: tests/registers.sh reads every report that is there.
file(GLOB left_out ${PROJECT_BINARY_DIR}/cuda/*.o)
list(REMOVE_ITEM left_out ${quern_cuda_objects})
foreach(object ${left_out})
  string(REGEX REPLACE "o$" "log" report ${object})
  file(REMOVE ${object} ${report})
endforeach()

# nvcc names the toolkit's static runtime; nothing of it shows outside.
set(quern_cuda_library ${PROJECT_BINARY_DIR}/libquern_cuda.so.${QUERN_ABI})
add_custom_command(
  OUTPUT ${quern_cuda_library}
  COMMAND ${QUERN_NVCC} -shared -cudart=static -o ${quern_cuda_library} ${quern_cuda_objects}
          -Xlinker=-soname=libquern_cuda.so.${QUERN_ABI},--as-needed${undefined_symbols}
          "-Xlinker=\"--version-script=${PROJECT_SOURCE_DIR}/cmake/quern.map\""
          -Xcompiler=-static-libstdc++,-static-libgcc -ldl
  DEPENDS ${quern_cuda_objects} ${PROJECT_SOURCE_DIR}/cmake/quern.map
  COMMENT "Linking libquern_cuda.so.${QUERN_ABI}"
  VERBATIM)
add_custom_target(quern_cuda ALL DEPENDS ${quern_cuda_library})
