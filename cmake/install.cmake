# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
# What `make install` lays down: both libraries, the headers, quern.pc, the CMake package, the command, documents and
# examples; and the Debian package of the same.
include(CMakePackageConfigHelpers)

# The static library is one object whose hidden symbols are made local, so that only quern_* names can meet
# a program's own. Where oneDNN has no archive its references to that are weak: src/cpu/gemm.c does without where they
# stay empty.
set(QUERN_STATIC_LIBS "-lm -lpthread -ldl")
set(weaken)
if(QUERN_HAVE_ONEDNN)
  find_library(DNNL_ARCHIVE libdnnl.a)
  if(DNNL_ARCHIVE)
    # gemm.c's own weak reference takes no member from an archive.
    string(PREPEND QUERN_STATIC_LIBS "-Wl,-u,dnnl_get_effective_cpu_isa -ldnnl -lstdc++ ")
  else()
    set(weaken --wildcard --weaken-symbol=dnnl_*)
    # -lquern_dnnl is oneDNN's shared library, and nothing in a program that is linked with -static: the linker takes
    # the .so, a script, in the one case and the .a, an archive without members, in the other. Weak references alone
    # would not keep it under --as-needed. One word, so that nobody reorders its parts.
    string(PREPEND QUERN_STATIC_LIBS "-Wl,--push-state,--no-as-needed,-lquern_dnnl,--pop-state ")
    # It names the library's SONAME, since a machine without oneDNN's headers has no libdnnl.so.
    execute_process(COMMAND ${CMAKE_OBJDUMP} -p ${DNNL_LIBRARY} OUTPUT_VARIABLE dnnl_says COMMAND_ERROR_IS_FATAL ANY)
    string(REGEX MATCH "SONAME +([^ \n]+)" dnnl_soname "${dnnl_says}")
    set(dnnl_stand_in ${CMAKE_CURRENT_BINARY_DIR}/static/libquern_dnnl)
    file(WRITE ${dnnl_stand_in}.so "INPUT(-l:${CMAKE_MATCH_1})\n")
    execute_process(COMMAND ${CMAKE_AR} rcs ${dnnl_stand_in}.a COMMAND_ERROR_IS_FATAL ANY)
    install(FILES ${dnnl_stand_in}.so ${dnnl_stand_in}.a DESTINATION ${CMAKE_INSTALL_LIBDIR})
  endif()
endif()
set(static_library ${CMAKE_CURRENT_BINARY_DIR}/static/libquern.a)
add_custom_command(
  OUTPUT ${static_library}
  COMMAND ${CMAKE_COMMAND} -E make_directory static
  COMMAND ${CMAKE_LINKER} -r -o static/quern.o ${quern_objects}
  COMMAND ${CMAKE_OBJCOPY} --localize-hidden ${weaken} static/quern.o
  COMMAND ${CMAKE_COMMAND} -E rm -f ${static_library}
  COMMAND ${CMAKE_AR} rcs ${static_library} static/quern.o
  DEPENDS quern_plain ${QUERN_LEVELS} ${quern_objects}
  COMMAND_EXPAND_LISTS VERBATIM)
add_custom_target(quern_static ALL DEPENDS ${static_library})

if(OpenMP_C_FOUND)
  string(APPEND QUERN_STATIC_LIBS " ${OpenMP_C_FLAGS}")
endif()
# What is installed may be moved: quern.pc finds its prefix, and the command its library, from where they lie.
file(RELATIVE_PATH QUERN_PC_TO_PREFIX ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
file(RELATIVE_PATH bin_to_lib ${CMAKE_INSTALL_FULL_BINDIR} ${CMAKE_INSTALL_FULL_LIBDIR})
configure_file(cmake/quern.pc.in quern.pc @ONLY)
configure_package_config_file(cmake/quern-config.cmake.in quern-config.cmake
                              INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/quern)
write_basic_package_version_file(quern-config-version.cmake COMPATIBILITY SameMinorVersion)

install(TARGETS quern LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
if(TARGET quern_cuda AND NOT QUERN_CUDA_ONE_DTYPE)
  install(PROGRAMS ${quern_cuda_library} DESTINATION ${CMAKE_INSTALL_LIBDIR})
endif()
install(FILES ${static_library} DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY include/quern DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/quern.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/quern-config.cmake ${CMAKE_CURRENT_BINARY_DIR}/quern-config-version.cmake
        DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/quern)
if(TARGET quern_command)
  set_target_properties(quern_command PROPERTIES INSTALL_RPATH "\$ORIGIN/${bin_to_lib}")
  install(TARGETS quern_command RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
  if(TARGET quern_pages)
    install(FILES ${CMAKE_BINARY_DIR}/pages/quern.1 DESTINATION ${CMAKE_INSTALL_MANDIR}/man1)
    install(FILES ${CMAKE_BINARY_DIR}/pages/quern.bash DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions
            RENAME quern)
  endif()
endif()
install(FILES LICENSE README.md CHANGELOG.md SECURITY.md DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(DIRECTORY docs examples DESTINATION ${CMAKE_INSTALL_DOCDIR})

set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_PACKAGE_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/packages)
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "Kernels for long-context language models")
set(CPACK_PACKAGE_DESCRIPTION "Library, headers and command: dense and native sparse attention, DeepSeek-V4's compressed
attention, NVFP4 and mixtures of experts, on CPUs and NVIDIA GPUs.")
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_MAINTAINER "The Quern authors")
set(CPACK_DEBIAN_PACKAGE_SECTION libdevel)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS ON)
set(CPACK_STRIP_FILES ON)
include(CPack)
