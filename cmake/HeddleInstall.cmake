# cmake --install: the library, its public headers, the command, and a package, so that another project can write
#   find_package(heddle REQUIRED)
#   target_link_libraries(program PRIVATE heddle::heddle)
# The CUDA part and groups over nodes by MPI, where they were built, are its components: find_package(heddle REQUIRED COMPONENTS cuda mpi),
# heddle::cuda and heddle::mpi. Who asks for neither needs neither CUDA nor MPI.
include(CMakePackageConfigHelpers)

set(HEDDLE_PACKAGE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/heddle)
install(TARGETS heddle EXPORT heddle_targets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/heddle DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.hpp")
install(FILES ${PROJECT_BINARY_DIR}/include/heddle/version.hpp DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/heddle)
if(TARGET heddle_command)
  install(TARGETS heddle_command RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
  install(DIRECTORY ${PROJECT_SOURCE_DIR}/tools/report DESTINATION ${CMAKE_INSTALL_DATADIR}/heddle FILES_MATCHING PATTERN "*.py")
endif()

install(EXPORT heddle_targets NAMESPACE heddle:: FILE heddle-targets.cmake DESTINATION ${HEDDLE_PACKAGE_DIR})
foreach(component cuda mpi)
  if(TARGET heddle::${component})
    get_target_property(library heddle::${component} ALIASED_TARGET)
    install(TARGETS ${library} EXPORT heddle_${component}_targets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
    install(EXPORT heddle_${component}_targets NAMESPACE heddle:: FILE heddle-${component}-targets.cmake DESTINATION ${HEDDLE_PACKAGE_DIR})
  endif()
endforeach()
configure_package_config_file(cmake/heddle-config.cmake.in heddle-config.cmake INSTALL_DESTINATION ${HEDDLE_PACKAGE_DIR})
# Before 1.0 a minor version may change the interface.
write_basic_package_version_file(heddle-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES
  ${PROJECT_BINARY_DIR}/heddle-config.cmake
  ${PROJECT_BINARY_DIR}/heddle-config-version.cmake
  ${PROJECT_SOURCE_DIR}/cmake/FindOpenBLAS.cmake
  DESTINATION ${HEDDLE_PACKAGE_DIR})
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
