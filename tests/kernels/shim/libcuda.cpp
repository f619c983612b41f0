// As much of CUDA's driver as `kernels.cuda.device_memory` calls, on a CPU: memory is a memfd.
//
// The declarations are those of cuda.h.  New memory is NaN; what is mapped to read is read-only; a
// thread without a context, a handle that is none, and a size or a device that is not the memory's
// are refused, as on a GPU.
#include <cuda.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

namespace {
constexpr size_t GRANULARITY = 64 << 10;
thread_local CUcontext context;
char refused[64];  // the name of a call that fails
int num_handles, num_reserved, num_mapped;

size_t size_of(int descriptor) {
  struct stat found;
  return fstat(descriptor, &found) || !S_ISREG(found.st_mode) ? 0 : found.st_size;
}
int of_handle(CUmemGenericAllocationHandle handle) { return (int)(handle - 1000); }
bool place(CUdeviceptr at, size_t size, int descriptor) {
  int flags = MAP_FIXED | (descriptor < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED);
  return mmap((void*)at, size, PROT_NONE, flags, descriptor, 0) == (void*)at;
}
CUresult handle_of(int descriptor, CUmemGenericAllocationHandle* handle) {
  if (!size_of(descriptor)) return CUDA_ERROR_INVALID_VALUE;
  *handle = 1000 + fcntl(descriptor, F_DUPFD_CLOEXEC, 0);
  num_handles++;
  return CUDA_SUCCESS;
}
}  // namespace

#define CHECK(condition, error) if (!(condition)) return error
#define BEGIN(name)                                                  \
  CHECK(strcmp(refused, #name), CUDA_ERROR_NOT_SUPPORTED);           \
  CHECK(context, CUDA_ERROR_INVALID_CONTEXT)

extern "C" {
void shim_refuse(const char* name) { strncpy(refused, name, sizeof refused - 1); }
int shim_live() { return num_handles + num_reserved + num_mapped; }
int shim_device() { return (int)(uintptr_t)context - 1; }  // that of this thread's context

CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext* found, CUdevice device) {
  *found = (CUcontext)(uintptr_t)(1 + device);
  return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext it) {
  context = it;
  return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult, const char** text) {
  *text = "not here";
  return CUDA_SUCCESS;
}
CUresult cuMemGetAllocationGranularity(size_t* found, const CUmemAllocationProp* wanted,
                                       CUmemAllocationGranularity_flags kind) {
  BEGIN(cuMemGetAllocationGranularity);
  CHECK(wanted->type == CU_MEM_ALLOCATION_TYPE_PINNED, CUDA_ERROR_INVALID_VALUE);
  CHECK(kind == CU_MEM_ALLOC_GRANULARITY_MINIMUM, CUDA_ERROR_INVALID_VALUE);
  *found = GRANULARITY;
  return CUDA_SUCCESS;
}
CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size,
                     const CUmemAllocationProp* wanted, unsigned long long flags) {
  BEGIN(cuMemCreate);
  CHECK(wanted->type == CU_MEM_ALLOCATION_TYPE_PINNED, CUDA_ERROR_INVALID_VALUE);
  CHECK(wanted->requestedHandleTypes == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, CUDA_ERROR_INVALID_VALUE);
  CHECK(wanted->location.type == CU_MEM_LOCATION_TYPE_DEVICE, CUDA_ERROR_INVALID_VALUE);
  CHECK(wanted->location.id == (int)(uintptr_t)context - 1, CUDA_ERROR_INVALID_DEVICE);
  CHECK(!wanted->win32HandleMetaData && !wanted->allocFlags.usage && !flags, CUDA_ERROR_INVALID_VALUE);
  CHECK(size && size % GRANULARITY == 0, CUDA_ERROR_INVALID_VALUE);
  int made = memfd_create("shim-cuda", MFD_CLOEXEC);
  CHECK(!ftruncate(made, size), CUDA_ERROR_OUT_OF_MEMORY);
  void* whole = mmap(nullptr, size, PROT_WRITE, MAP_SHARED, made, 0);
  memset(whole, 0xff, size);
  munmap(whole, size);
  CUresult result = handle_of(made, handle);
  close(made);
  return result;
}
CUresult cuMemExportToShareableHandle(void* found, CUmemGenericAllocationHandle handle,
                                      CUmemAllocationHandleType type, unsigned long long flags) {
  BEGIN(cuMemExportToShareableHandle);
  CHECK(type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR && !flags, CUDA_ERROR_INVALID_VALUE);
  *(int*)found = dup(of_handle(handle));
  return CUDA_SUCCESS;
}
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* os_handle,
                                        CUmemAllocationHandleType type) {
  BEGIN(cuMemImportFromShareableHandle);
  CHECK(type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, CUDA_ERROR_INVALID_VALUE);
  return handle_of((int)(intptr_t)os_handle, handle);
}
CUresult cuMemAddressReserve(CUdeviceptr* at, size_t size, size_t alignment, CUdeviceptr wanted,
                             unsigned long long flags) {
  BEGIN(cuMemAddressReserve);
  CHECK(size % GRANULARITY == 0 && !alignment && !wanted && !flags, CUDA_ERROR_INVALID_VALUE);
  void* found = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(found != MAP_FAILED, CUDA_ERROR_OUT_OF_MEMORY);
  *at = (CUdeviceptr)found;
  num_reserved++;
  return CUDA_SUCCESS;
}
CUresult cuMemMap(CUdeviceptr at, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
  BEGIN(cuMemMap);
  CHECK(size == size_of(of_handle(handle)) && !offset && !flags, CUDA_ERROR_INVALID_VALUE);
  CHECK(place(at, size, of_handle(handle)), CUDA_ERROR_INVALID_VALUE);
  num_mapped++;
  return CUDA_SUCCESS;
}
CUresult cuMemSetAccess(CUdeviceptr at, size_t size, const CUmemAccessDesc* wanted, size_t count) {
  BEGIN(cuMemSetAccess);
  CHECK(count == 1 && wanted->location.type == CU_MEM_LOCATION_TYPE_DEVICE, CUDA_ERROR_INVALID_VALUE);
  CHECK(wanted->location.id == (int)(uintptr_t)context - 1, CUDA_ERROR_INVALID_DEVICE);
  bool writes = wanted->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  CHECK(writes || strcmp(refused, "reading alone"), CUDA_ERROR_NOT_SUPPORTED);
  CHECK(!mprotect((void*)at, size, writes ? PROT_READ | PROT_WRITE : PROT_READ), CUDA_ERROR_INVALID_VALUE);
  return CUDA_SUCCESS;
}
CUresult cuMemUnmap(CUdeviceptr at, size_t size) {
  BEGIN(cuMemUnmap);
  CHECK(place(at, size, -1), CUDA_ERROR_INVALID_VALUE);
  num_mapped--;
  return CUDA_SUCCESS;
}
CUresult cuMemAddressFree(CUdeviceptr at, size_t size) {
  BEGIN(cuMemAddressFree);
  CHECK(!munmap((void*)at, size), CUDA_ERROR_INVALID_VALUE);
  num_reserved--;
  return CUDA_SUCCESS;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  BEGIN(cuMemRelease);
  CHECK(!close(of_handle(handle)), CUDA_ERROR_INVALID_VALUE);
  num_handles--;
  return CUDA_SUCCESS;
}
}
