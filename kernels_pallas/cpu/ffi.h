// Reading XLA's call frame: what the CPU custom calls share.
#pragma once

#include <cstdint>
#include <cstring>

#include "xla/ffi/api/c_api.h"

namespace deepinfer {

inline int64_t pool_threads(XLA_FFI_CallFrame* frame) {
  int64_t threads = 1;
  XLA_FFI_ThreadPool_NumThreads_Args args{XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE, nullptr,
                                          frame->ctx, &threads};
  XLA_FFI_Error* error = frame->api->XLA_FFI_ThreadPool_NumThreads(&args);
  if (!error) return threads;
  XLA_FFI_Error_Destroy_Args destroy{XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, nullptr, error};
  frame->api->XLA_FFI_Error_Destroy(&destroy);
  return 1;
}

inline XLA_FFI_Error* fail(const XLA_FFI_CallFrame* frame, const char* message) {
  XLA_FFI_Error_Create_Args args{XLA_FFI_Error_Create_Args_STRUCT_SIZE, nullptr, message,
                                 XLA_FFI_Error_Code_INVALID_ARGUMENT};
  return frame->api->XLA_FFI_Error_Create(&args);
}

// Whether this call asks for anything but execution; then it is answered, and the handler returns
// nullptr.
inline bool answered(XLA_FFI_CallFrame* frame) {
  if (frame->extension_start && frame->extension_start->type == XLA_FFI_Extension_Metadata) {
    auto* metadata =
        reinterpret_cast<XLA_FFI_Metadata_Extension*>(frame->extension_start)->metadata;
    metadata->api_version.major_version = XLA_FFI_API_MAJOR;
    metadata->api_version.minor_version = XLA_FFI_API_MINOR;
    metadata->traits = 0;
    return true;
  }
  return frame->stage != XLA_FFI_ExecutionStage_EXECUTE;
}

inline const XLA_FFI_Buffer* argument(const XLA_FFI_CallFrame* frame, int64_t i) {
  return static_cast<const XLA_FFI_Buffer*>(frame->args.args[i]);
}
inline const XLA_FFI_Buffer* result(const XLA_FFI_CallFrame* frame, int64_t i) {
  return static_cast<const XLA_FFI_Buffer*>(frame->rets.rets[i]);
}
template <typename T> T* data(const XLA_FFI_Buffer* buffer) {
  return static_cast<T*>(buffer->data);
}

// The scalar attribute of this name and type; `fallback` if there is none.
template <typename T> T attribute(const XLA_FFI_CallFrame* frame, const char* name, T fallback) {
  for (int64_t i = 0; i < frame->attrs.size; i++) {
    const XLA_FFI_ByteSpan* found = frame->attrs.names[i];
    if (frame->attrs.types[i] != XLA_FFI_AttrType_SCALAR || found->len != std::strlen(name) ||
        std::memcmp(found->ptr, name, found->len))
      continue;
    std::memcpy(&fallback, static_cast<XLA_FFI_Scalar*>(frame->attrs.attrs[i])->value, sizeof(T));
  }
  return fallback;
}

}  // namespace deepinfer
