// A crew of threads that share the items of one job after another.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace tenuto {

// The caller works too, so a crew of n has n - 1 helpers. A job ends when its items are done, not when every helper has
// looked at it: a helper that the kernel keeps off its core holds up nobody who has not given it an item. Whoever finds
// nothing to do spins for some microseconds and then sleeps.
class Crew {
 public:
  explicit Crew(int threads);
  ~Crew();
  Crew(const Crew&) = delete;
  Crew& operator=(const Crew&) = delete;

  int threads() const { return static_cast<int>(helpers_.size()) + 1; }

  // work(0) ... work(count - 1), in any order, on any thread; returns when all have returned.
  template <class Work>
  void run(int count, const Work& work) {
    if (count <= 1 || helpers_.empty()) {
      for (int i = 0; i < count; i++) work(i);
      return;
    }
    dispatch(count, [](const void* context, int item) { (*static_cast<const Work*>(context))(item); }, &work);
  }

 private:
  using Call = void (*)(const void* context, int item);

  void dispatch(int count, Call call, const void* context);
  bool take();
  void help();
  void await(int count);

  // job number : 24 | items : 20 | next item : 20. One word, so that a claim is one compare-and-swap.
  std::atomic<uint64_t> ticket_{0};
  std::atomic<Call> call_{nullptr};
  std::atomic<const void*> context_{nullptr};
  std::atomic<int> finished_{0};
  std::atomic<int> asleep_{0};
  std::atomic<bool> caller_asleep_{false};
  std::atomic<bool> stopping_{false};
  std::mutex mutex_;
  std::condition_variable work_came_, work_ended_;
  std::vector<std::thread> helpers_;
};

}  // namespace tenuto
