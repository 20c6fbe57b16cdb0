// One decoder: its packed weights and what one step does with them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "crew.h"
#include "interface.h"
#include "matrix.h"
#include "scratch.h"

namespace tenuto {

class Decoder;

// A decode step whose buffers stay where they are: a step of at most as many rows as at its capture, over the same
// arrays, allocates nothing and dispatches the jobs that were recorded.
class CapturedStep {
 public:
  // `step` must outlive this; its arrays stay, their contents and its counts may change. Each row has at most `pages`.
  CapturedStep(Decoder& decoder, const Step& step, int pages);
  void replay();

 private:
  Decoder& decoder_;
  const Step& step_;
  Scratch scratch_;
};

class Decoder {
 public:
  Decoder(const Shape& shape, const Source& source, Isa isa, int threads);
  // False where pages that were to come never came; the step's pages and logits are then undefined.
  bool run(const Step& step);
  // Writes every job that is dispatched from now on into `diary`, until it is full; null: no more.
  void watch(Job* diary, int capacity);
  int watched() const { return watched_; }

 private:
  friend class CapturedStep;
  struct Layer {
    const float* attn_norm;
    const float* qkv_bias;
    const float* q_norm;
    const float* k_norm;
    const float* ffn_norm;
    int window;
    Matrix qkv, o, gate_up, down;
  };

  bool perform(const Step& step, Scratch& scratch);
  void perform(const Job& job, const Step& step, Scratch& scratch);
  void embed(const Job& job, const Step& step);
  void normalise(const Job& job, const float* weight, int rows, const int32_t* which);
  void project(const Job& job, int rows);
  void place(const Job& job, const Step& step);
  void attend(const Job& job, const Step& step, Scratch& scratch);
  void merge(const Job& job, const Step& step, Scratch& scratch);
  void gate(const Job& job, int rows);
  void head(const Job& job, int rows);
  void add(const Job& job, const Matrix& matrix, int rows);
  Attending attending(const Job& job, const Step& step, const Part& part, Scratch& scratch) const;
  void product(const Matrix& matrix, int panel, const void* a, int first, int rows, float* out) const;
  template <class Work>
  void each_panel(const Job& job, const Matrix& matrix, int together, int rows, const Work& work);
  template <class Store>
  void multiply(const Job& job, const Matrix& matrix, int rows, const Store& store);
  template <class Work>
  void each_row(const Job& job, int rows, const Work& work);
  template <class Work>
  void dispatch(const Job& job, int items, const Work& work);
  size_t run_at(int layer, int which) const;

  const Shape shape_;
  const Kernels kernels_;
  Crew crew_;
  Arena arena_;
  std::vector<Layer> layers_;
  Matrix head_;
  const char* embed_;
  const float* norm_;
  const float* cos_;
  const float* sin_;
  Scratch scratch_;  // of steps that are not captured: grown to the largest so far
  Job* diary_ = nullptr;
  int diary_capacity_ = 0, watched_ = 0;
};

}  // namespace tenuto
