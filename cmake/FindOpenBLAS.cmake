# Finds OpenBLAS with its C interface and gives the target OpenBLAS::OpenBLAS. Debian keeps cblas.h in a folder of its own
# for each way of threading, and its own config file sets variables only; hence this module.
find_path(OpenBLAS_INCLUDE_DIR cblas.h
  PATH_SUFFIXES openblas openblas-pthread ${CMAKE_LIBRARY_ARCHITECTURE}/openblas-pthread ${CMAKE_LIBRARY_ARCHITECTURE})
find_library(OpenBLAS_LIBRARY openblas)
mark_as_advanced(OpenBLAS_INCLUDE_DIR OpenBLAS_LIBRARY)

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(OpenBLAS REQUIRED_VARS OpenBLAS_LIBRARY OpenBLAS_INCLUDE_DIR)

if(OpenBLAS_FOUND AND NOT TARGET OpenBLAS::OpenBLAS)
  add_library(OpenBLAS::OpenBLAS UNKNOWN IMPORTED)
  set_target_properties(OpenBLAS::OpenBLAS PROPERTIES
    IMPORTED_LOCATION "${OpenBLAS_LIBRARY}"
    INTERFACE_INCLUDE_DIRECTORIES "${OpenBLAS_INCLUDE_DIR}")
endif()
