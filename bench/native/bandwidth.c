// How fast threads can read memory, and do nothing else with it: the ceiling of a decode step.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#define EXPORT __attribute__((visibility("default")))

enum { kLine = 64, kBlock = 4096, kMaxThreads = 64 };

typedef uint64_t Line __attribute__((vector_size(kLine), aligned(1)));

typedef struct {
  const uint8_t* const* parts;
  const size_t* sizes;
  int count, threads, passes, streams, ahead;
  pthread_barrier_t barrier;
  double* seconds;  // [passes]
} Job;

typedef struct {
  Job* job;
  int index;
  uint64_t sum;
} Worker;

static double now(void) {
  struct timespec at;
  clock_gettime(CLOCK_MONOTONIC, &at);
  return (double)at.tv_sec + 1e-9 * (double)at.tv_nsec;
}

// XOR of one block, four lines at a time.
static Line read_block(const uint8_t* at, int ahead) {
  Line a = {0}, b = {0}, c = {0}, d = {0};
  for (int i = 0; i < kBlock; i += 4 * kLine) {
    if (ahead) {
      __builtin_prefetch(at + i + ahead);
      __builtin_prefetch(at + i + ahead + kLine);
      __builtin_prefetch(at + i + ahead + 2 * kLine);
      __builtin_prefetch(at + i + ahead + 3 * kLine);
    }
    a ^= *(const Line*)(at + i);
    b ^= *(const Line*)(at + i + kLine);
    c ^= *(const Line*)(at + i + 2 * kLine);
    d ^= *(const Line*)(at + i + 3 * kLine);
  }
  return (a ^ b) ^ (c ^ d);
}

// One thread's share of one part, cut into `streams` runs that are read side by side.
static Line read_share(const uint8_t* at, size_t blocks, int streams, int ahead) {
  Line sum = {0};
  const size_t run = blocks / (size_t)streams;
  for (size_t block = 0; block < run; block++)
    for (int stream = 0; stream < streams; stream++)
      sum ^= read_block(at + ((size_t)stream * run + block) * kBlock, ahead);
  for (size_t block = run * (size_t)streams; block < blocks; block++) sum ^= read_block(at + block * kBlock, ahead);
  return sum;
}

static void* work(void* argument) {
  Worker* worker = argument;
  Job* job = worker->job;
  Line sum = {0};
  for (int pass = 0; pass < job->passes; pass++) {
    pthread_barrier_wait(&job->barrier);
    const double began = now();
    for (int part = 0; part < job->count; part++) {
      const size_t blocks = job->sizes[part] / kBlock;
      const size_t first = blocks * (size_t)worker->index / (size_t)job->threads;
      const size_t last = blocks * (size_t)(worker->index + 1) / (size_t)job->threads;
      sum ^= read_share(job->parts[part] + first * kBlock, last - first, job->streams, job->ahead);
    }
    pthread_barrier_wait(&job->barrier);
    if (worker->index == 0) job->seconds[pass] = now() - began;
  }
  for (int i = 0; i < 8; i++) worker->sum ^= sum[i];
  return NULL;
}

// Read all parts `passes` times; the seconds of each pass go to `seconds`. Of a part, whole blocks of 4 KiB are read.
// Returns what was read, XORed together, so that no read can be left out; threads that cannot be had are an abort.
EXPORT uint64_t bandwidth_read(const uint8_t* const* parts, const size_t* sizes, int count, int threads, int passes,
                               int streams, int ahead, double* seconds) {
  Job job = {.parts = parts, .sizes = sizes, .count = count, .threads = threads, .passes = passes,
             .streams = streams, .ahead = ahead, .seconds = seconds};
  Worker workers[kMaxThreads];
  pthread_t handles[kMaxThreads];
  if (threads > kMaxThreads) abort();
  pthread_barrier_init(&job.barrier, NULL, (unsigned)threads);
  for (int i = 0; i < threads; i++) {
    workers[i] = (Worker){.job = &job, .index = i};
    if (i > 0 && pthread_create(&handles[i], NULL, work, &workers[i]) != 0) abort();
  }
  work(&workers[0]);
  uint64_t sum = workers[0].sum;
  for (int i = 1; i < threads; i++) {
    pthread_join(handles[i], NULL);
    sum ^= workers[i].sum;
  }
  pthread_barrier_destroy(&job.barrier);
  return sum;
}

// Memory in huge pages where the system has them, every byte written; null where there is none.
EXPORT uint8_t* bandwidth_buffer(size_t size) {
  uint8_t* memory = aligned_alloc((size_t)1 << 21, size);
  if (memory == NULL) return NULL;
  madvise(memory, size, MADV_HUGEPAGE);
  memset(memory, 0x5a, size);
  return memory;
}

EXPORT void bandwidth_free(uint8_t* memory) { free(memory); }
