// The library's own operators new and delete, which count. -Bsymbolic keeps them to this library.
#include "allocations.h"

#include <atomic>
#include <cstdlib>
#include <new>

namespace tenuto {
namespace {

std::atomic<int64_t> count{0};

void* counted(void* memory) {
  count.fetch_add(1, std::memory_order_relaxed);
  if (!memory) throw std::bad_alloc();
  return memory;
}

size_t rounded(size_t size, size_t alignment) { return (size + alignment - 1) / alignment * alignment; }

}  // namespace

int64_t allocations() { return count.load(std::memory_order_relaxed); }

}  // namespace tenuto

void* operator new(size_t size) { return tenuto::counted(std::malloc(size ? size : 1)); }
void* operator new[](size_t size) { return operator new(size); }
void* operator new(size_t size, std::align_val_t alignment) {
  const auto bytes = static_cast<size_t>(alignment);
  return tenuto::counted(std::aligned_alloc(bytes, tenuto::rounded(size ? size : 1, bytes)));
}
void* operator new[](size_t size, std::align_val_t alignment) { return operator new(size, alignment); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t, std::align_val_t) noexcept { std::free(memory); }
