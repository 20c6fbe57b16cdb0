#include "crew.h"

#include <cassert>

namespace tenuto {
namespace {

constexpr int kSpins = 1000;  // tens of microseconds: longer than the gaps between the jobs of one step
constexpr int kItemBits = 20;
constexpr uint64_t kItemMask = (uint64_t{1} << kItemBits) - 1;

int next_item(uint64_t ticket) { return static_cast<int>(ticket & kItemMask); }
int items(uint64_t ticket) { return static_cast<int>((ticket >> kItemBits) & kItemMask); }
bool has_items(uint64_t ticket) { return next_item(ticket) < items(ticket); }

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

Crew::Crew(int threads) {
  for (int i = 1; i < threads; i++) helpers_.emplace_back([this] { help(); });
}

Crew::~Crew() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  work_came_.notify_all();
  for (std::thread& helper : helpers_) helper.join();
}

void Crew::dispatch(int count, Call call, const void* context) {
  assert(static_cast<uint64_t>(count) <= kItemMask);
  call_.store(call, std::memory_order_relaxed);
  context_.store(context, std::memory_order_relaxed);
  finished_.store(0, std::memory_order_relaxed);
  const uint64_t job = (ticket_.load(std::memory_order_relaxed) >> (2 * kItemBits)) + 1;
  ticket_.store((job << (2 * kItemBits)) | (static_cast<uint64_t>(count) << kItemBits));
  if (asleep_.load() > 0) {  // after the ticket: a helper counts itself asleep before it looks at the ticket once more
    { std::lock_guard<std::mutex> lock(mutex_); }
    work_came_.notify_all();
  }
  while (take()) {
  }
  await(count);
}

// Claims one item and does it. What belongs to the job is read after the claim: until a claimed item is done, the job
// cannot end and the next one cannot be put in its place.
bool Crew::take() {
  uint64_t ticket = ticket_.load(std::memory_order_acquire);
  do {
    if (!has_items(ticket)) return false;
  } while (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel, std::memory_order_acquire));
  call_.load(std::memory_order_relaxed)(context_.load(std::memory_order_relaxed), next_item(ticket));
  if (finished_.fetch_add(1) + 1 == items(ticket) && caller_asleep_.load()) {
    { std::lock_guard<std::mutex> lock(mutex_); }
    work_ended_.notify_one();
  }
  return true;
}

void Crew::help() {
  for (int spins = 0; !stopping_.load(std::memory_order_relaxed);) {
    if (take()) {
      spins = 0;
    } else if (++spins < kSpins) {
      pause();
    } else {
      std::unique_lock<std::mutex> lock(mutex_);
      asleep_.fetch_add(1);
      work_came_.wait(lock, [this] { return stopping_ || has_items(ticket_.load()); });
      asleep_.fetch_sub(1);
      spins = 0;
    }
  }
}

void Crew::await(int count) {
  for (int spins = 0; spins < kSpins; spins++) {
    if (finished_.load(std::memory_order_acquire) == count) return;
    pause();
  }
  std::unique_lock<std::mutex> lock(mutex_);
  caller_asleep_ = true;
  work_ended_.wait(lock, [this, count] { return finished_.load() == count; });
  caller_asleep_ = false;
}

}  // namespace tenuto
