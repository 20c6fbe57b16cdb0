// llama.cpp behind a few flat calls. Compiled against the headers of the very tree that was built, so that no struct
// is mirrored by hand. Batch building and the copy of the logits are part of a step, as they are of ours.
#include <stdlib.h>
#include <string.h>

#include "llama.h"

#define EXPORT __attribute__((visibility("default")))

typedef struct {
  struct llama_model* model;
  struct llama_context* context;
  struct llama_batch batch;
  int32_t vocab;
} Peer;

static char logged[1 << 16];
static size_t logged_length = 0;

static void keep_log(enum ggml_log_level level, const char* text, void* user) {
  static int wanted = 0;
  (void)user;
  if (level != GGML_LOG_LEVEL_CONT) wanted = level != GGML_LOG_LEVEL_DEBUG;
  if (!wanted) return;
  size_t length = strlen(text);
  if (logged_length + length + 1 > sizeof logged) return;
  memcpy(logged + logged_length, text, length + 1);
  logged_length += length;
}

// What llama.cpp has said since the process began, but for debugging; what exceeds the buffer is left out.
EXPORT const char* peer_log(void) { return logged; }

EXPORT void peer_start(void) {
  llama_log_set(keep_log, NULL);
  llama_backend_init();
}

// The instruction sets and switches of the build, as llama.cpp itself reports them.
EXPORT const char* peer_system_info(void) { return llama_print_system_info(); }

EXPORT void peer_close(Peer* peer) {
  if (peer == NULL) return;
  if (peer->context != NULL) llama_free(peer->context);
  if (peer->model != NULL) llama_model_free(peer->model);
  llama_batch_free(peer->batch);
  free(peer);
}

// A model and a context, or null; peer_log says why. `context` counts the tokens of all `sequences` together.
EXPORT Peer* peer_open(const char* path, int context, int sequences, int batch, int micro, int threads, int flash,
                       int unified) {
  Peer* peer = calloc(1, sizeof(Peer));
  if (peer == NULL) return NULL;
  peer->batch = llama_batch_init(batch, 0, 1);
  struct llama_model_params loading = llama_model_default_params();
  loading.n_gpu_layers = 0;
  peer->model = llama_model_load_from_file(path, loading);
  if (peer->model == NULL) {
    peer_close(peer);
    return NULL;
  }
  struct llama_context_params wanted = llama_context_default_params();
  wanted.n_ctx = (uint32_t)context;
  wanted.n_seq_max = (uint32_t)sequences;
  wanted.n_batch = (uint32_t)batch;
  wanted.n_ubatch = (uint32_t)micro;
  wanted.n_threads = threads;
  wanted.n_threads_batch = threads;
  wanted.flash_attn_type = flash ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
  wanted.kv_unified = unified != 0;
  wanted.no_perf = true;
  peer->context = llama_init_from_model(peer->model, wanted);
  if (peer->context == NULL) {
    peer_close(peer);
    return NULL;
  }
  peer->vocab = llama_vocab_n_tokens(llama_model_get_vocab(peer->model));
  return peer;
}

EXPORT int peer_vocab(const Peer* peer) { return peer->vocab; }

// Bytes of the model's tensors.
EXPORT unsigned long long peer_model_bytes(const Peer* peer) { return llama_model_size(peer->model); }

// Forget positions from `from` on of a sequence. 0, or 1 where it cannot be done.
EXPORT int peer_cut(Peer* peer, int sequence, int from) {
  return llama_memory_seq_rm(llama_get_memory(peer->context), sequence, from, -1) ? 0 : 1;
}

// Run `count` tokens; the logits of those with `wants` set are copied to `logits`, [wanted, vocab]. llama.cpp's status.
EXPORT int peer_step(Peer* peer, int count, const int32_t* tokens, const int32_t* positions, const int32_t* sequences,
                     const int8_t* wants, float* logits) {
  struct llama_batch* batch = &peer->batch;
  batch->n_tokens = count;
  for (int i = 0; i < count; i++) {
    batch->token[i] = tokens[i];
    batch->pos[i] = positions[i];
    batch->n_seq_id[i] = 1;
    batch->seq_id[i][0] = sequences[i];
    batch->logits[i] = wants[i];
  }
  const int status = llama_decode(peer->context, *batch);
  if (status != 0) return status;
  size_t row = 0;
  for (int i = 0; i < count; i++) {
    if (!wants[i]) continue;
    const float* from = llama_get_logits_ith(peer->context, i);
    if (from == NULL) return -1000;
    memcpy(logits + row++ * (size_t)peer->vocab, from, (size_t)peer->vocab * sizeof(float));
  }
  return 0;
}

// Write `target` as `source` in one of llama.cpp's file types, as its own tool does; `pure`: also those matrices that it
// would keep in more bits. 0 is success.
EXPORT int peer_quantize(const char* source, const char* target, int type, int pure, int threads) {
  struct llama_model_quantize_params wanted = llama_model_quantize_default_params();
  wanted.ftype = (enum llama_ftype)type;
  wanted.nthread = threads;
  wanted.pure = pure != 0;
  return (int)llama_model_quantize(source, target, &wanted);
}
