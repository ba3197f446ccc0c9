# mla::mla: the headers, what they need, and the backend that MLA_BACKEND names. Used by the project and by its package.
#
# Hints: CMAKE_PREFIX_PATH, or ORT_ROOT, TENSORRT_ROOT and CUDA_ROOT: folders with include/ and lib/.

find_package(nlohmann_json 3.10 REQUIRED)
find_package(OpenSSL REQUIRED COMPONENTS Crypto)
find_package(Threads REQUIRED)

if(NOT TARGET mla_backend)
  add_library(mla_backend INTERFACE IMPORTED GLOBAL)
endif()
if(MLA_BACKEND STREQUAL "ort")
  find_path(ORT_INCLUDE onnxruntime_cxx_api.h HINTS ${ORT_ROOT} PATH_SUFFIXES include include/onnxruntime)
  find_library(ORT_LIBRARY NAMES onnxruntime HINTS ${ORT_ROOT} PATH_SUFFIXES lib)
  if(NOT ORT_INCLUDE OR NOT ORT_LIBRARY)
    message(FATAL_ERROR "ONNX Runtime was not found (headers: ${ORT_INCLUDE}, library: ${ORT_LIBRARY}); expected "
                        "onnxruntime_cxx_api.h and libonnxruntime.so; set ORT_ROOT to the folder that holds them")
  endif()
  target_compile_definitions(mla_backend INTERFACE MLA_BACKEND_ORT=1)
  target_include_directories(mla_backend SYSTEM INTERFACE ${ORT_INCLUDE})
  target_link_libraries(mla_backend INTERFACE ${ORT_LIBRARY})
elseif(MLA_BACKEND STREQUAL "trt" OR MLA_BACKEND STREQUAL "trt-rtx")
  set(MLA_TRT_NAMES nvinfer libnvinfer.so.10)
  set(MLA_TRT_DEFINE MLA_BACKEND_TRT)
  if(MLA_BACKEND STREQUAL "trt-rtx")
    set(MLA_TRT_NAMES tensorrt_rtx libtensorrt_rtx.so.1)
    set(MLA_TRT_DEFINE MLA_BACKEND_TRT_RTX)
  endif()
  find_path(TENSORRT_INCLUDE NvInfer.h HINTS ${TENSORRT_ROOT} PATH_SUFFIXES include)
  find_library(TENSORRT_LIBRARY NAMES ${MLA_TRT_NAMES} NAMES_PER_DIR HINTS ${TENSORRT_ROOT} PATH_SUFFIXES lib lib64)
  find_path(CUDART_INCLUDE cuda_runtime_api.h HINTS ${CUDA_ROOT} PATHS /usr/local/cuda PATH_SUFFIXES include)
  find_library(CUDART_LIBRARY NAMES cudart libcudart.so.13 libcudart.so.12 NAMES_PER_DIR HINTS ${CUDA_ROOT}
               PATHS /usr/local/cuda PATH_SUFFIXES lib lib64)
  if(NOT TENSORRT_INCLUDE OR NOT TENSORRT_LIBRARY OR NOT CUDART_INCLUDE OR NOT CUDART_LIBRARY)
    message(FATAL_ERROR "TensorRT or CUDA was not found (NvInfer.h: ${TENSORRT_INCLUDE}, library: ${TENSORRT_LIBRARY}, "
                        "cuda_runtime_api.h: ${CUDART_INCLUDE}, cudart: ${CUDART_LIBRARY}); set TENSORRT_ROOT and "
                        "CUDA_ROOT to the folders that hold them")
  endif()
  target_compile_definitions(mla_backend INTERFACE ${MLA_TRT_DEFINE}=1)
  target_include_directories(mla_backend SYSTEM INTERFACE ${TENSORRT_INCLUDE} ${CUDART_INCLUDE})
  target_link_libraries(mla_backend INTERFACE ${TENSORRT_LIBRARY} ${CUDART_LIBRARY})
else()
  message(FATAL_ERROR "MLA_BACKEND is '${MLA_BACKEND}'; expected ort, trt or trt-rtx")
endif()
target_link_libraries(mla_backend INTERFACE mla::headers nlohmann_json::nlohmann_json OpenSSL::Crypto Threads::Threads)
if(NOT TARGET mla::mla)
  add_library(mla::mla ALIAS mla_backend)
endif()
