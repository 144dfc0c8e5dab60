// The only file, with its .cpp, that knows llama.cpp's symbols.
//
// Nothing here includes llama.cpp's headers and nothing links its library: the functions are looked up in the library
// that Python has already loaded (llama_cpp._lib), so one build of this module serves every build of that library
// (CPU, CUDA, Metal, Vulkan). The declarations follow include/llama.h and src/llama-ext.h of llama.cpp 0c1e57098,
// which llama-cpp-python 0.3.36 carries.
//
// Order of calls: bind() once, from Python, before anything else; api() from then on. It is never undone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

// llama.cpp's own types: opaque, or one line of the public header.
struct llama_model;
struct llama_vocab;
struct llama_context;
struct llama_sampler;
struct llama_batch_ext;
struct llama_memory_i;
struct ggml_tensor;
// Of ggml.h: what its types can do.
struct ggml_type_traits {
    const char * type_name;
    int64_t blck_size, blck_size_interleave;
    size_t type_size;
    bool is_quantized;
    void (*to_float)(const void * from, float * to, int64_t n);
    void (*from_float_ref)(const float * from, void * to, int64_t n);
};
// What llama_perf_context returns, by value.
struct llama_perf_context_data {
    double t_start_ms, t_load_ms, t_p_eval_ms, t_eval_ms;
    int32_t n_p_eval, n_eval;
    int32_t n_reused;  // decodes that ran the graph of the one before
};
// What llama_sampler_chain_init takes, by value.
struct llama_sampler_chain_params {
    bool no_perf;
};
using llama_memory_t = llama_memory_i *;
using llama_pos = int32_t;
using llama_token = int32_t;
using llama_seq_id = int32_t;

// Rows of floats, passed by value; the callee copies `data` (n_rows, n_embd).
struct llama_embd {
    const float * data;
    size_t n_rows;
    size_t n_embd;
};

// A candidate, and a row of them: samplers reorder `data`, lower `size`, and set `selected` where they choose.
struct llama_token_data {
    llama_token id;
    float logit;
    float p;
};
struct llama_token_data_array {
    llama_token_data * data;
    size_t size;
    int64_t selected;
    bool sorted;
};

namespace sidecar {

// Anything wrong with the library: a symbol it lacks, a call it refused. Becomes LibraryError in Python.
struct LibraryError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

constexpr int32_t GGML_F32 = 0;  // the one ggml_type that has no to_float
constexpr int32_t PROCESS_ENCODE = 0;
constexpr int32_t PROCESS_DECODE = 1;
// The part of a sequence's state that cannot be trimmed (recurrent state), from llama_state_seq_flags.
constexpr uint32_t STATE_PARTIAL_ONLY = 1;

struct LlamaApi {
    // batches; every add returns the entry's index, or a negative error code
    llama_batch_ext * (*batch_init)(llama_context *);
    void (*batch_free)(llama_batch_ext *);
    void (*batch_clear)(llama_batch_ext *);
    int32_t (*batch_add_token)(llama_batch_ext *, llama_seq_id, llama_token);
    int32_t (*batch_add_embd)(llama_batch_ext *, llama_seq_id, llama_embd);
    bool (*batch_set_embd_token)(llama_batch_ext *, int32_t index, llama_embd);
    bool (*batch_set_output_logits)(llama_batch_ext *, int32_t index, bool);
    bool (*batch_set_pos)(llama_batch_ext *, int32_t index, const llama_pos *);
    int32_t (*process)(llama_context *, int32_t type, llama_batch_ext *);

    // outputs of the last decode; they wait for the backend to finish
    float * (*get_logits_ith)(llama_context *, int32_t index);
    void (*set_embeddings_nextn)(llama_context *, bool value, bool masked);
    float * (*get_embeddings_nextn)(llama_context *);
    float * (*get_embeddings_nextn_ith)(llama_context *, int32_t index);
    void (*set_embeddings_layer_inp)(llama_context *, uint32_t layer, bool value);
    float * (*get_embeddings_layer_inp)(llama_context *, uint32_t layer);
    // the token that the backend sampled for a row, -1 where none was
    llama_token (*get_sampled_token_ith)(llama_context *, int32_t index);

    // what a context computes
    void (*set_nextn_layer_offset)(llama_context *, int32_t);
    void (*set_causal_attn)(llama_context *, bool);
    // the backend then samples this sequence's output rows, at most n_outputs_max_per_seq a decode, and hands out no logits; null ends
    // that. False: this chain it cannot. Not owned. The next decode reserves its buffers anew.
    bool (*set_sampler)(llama_context *, llama_seq_id, llama_sampler *);
    llama_perf_context_data (*perf_context)(const llama_context *);

    // memory and state of sequence 0
    llama_memory_t (*get_memory)(const llama_context *);
    void (*memory_clear)(llama_memory_t, bool data);
    bool (*memory_seq_rm)(llama_memory_t, llama_seq_id, llama_pos from, llama_pos to);
    llama_pos (*memory_seq_pos_min)(llama_memory_t, llama_seq_id);
    llama_pos (*memory_seq_pos_max)(llama_memory_t, llama_seq_id);
    size_t (*state_seq_get_size)(llama_context *, llama_seq_id, uint32_t flags);
    size_t (*state_seq_get_data)(llama_context *, uint8_t *, size_t, llama_seq_id, uint32_t flags);
    size_t (*state_seq_set_data)(llama_context *, const uint8_t *, size_t, llama_seq_id, uint32_t flags);

    // sizes
    uint32_t (*n_ctx)(const llama_context *);
    uint32_t (*n_batch)(const llama_context *);
    uint32_t (*n_rs_seq)(const llama_context *);
    const llama_model * (*get_model)(const llama_context *);
    int32_t (*model_n_embd)(const llama_model *);
    int32_t (*model_n_embd_out)(const llama_model *);
    int32_t (*model_n_layer)(const llama_model *);
    int32_t (*model_n_layer_nextn)(const llama_model *);
    bool (*model_is_recurrent)(const llama_model *);
    bool (*model_is_hybrid)(const llama_model *);
    const llama_vocab * (*model_get_vocab)(const llama_model *);
    const int32_t * (*model_target_layer_ids)(const llama_model *);
    uint32_t (*model_target_layer_ids_n)(const llama_model *);
    int32_t (*model_dflash_selector_top_k)(const llama_model *);
    // writes at most n_bytes, a closing zero with them; returns how many there are without it, or -1
    int32_t (*model_meta_val_str)(const llama_model *, const char * key, char * bytes, size_t n_bytes);
    int32_t (*vocab_n_tokens)(const llama_vocab *);
    llama_token (*vocab_mask)(const llama_vocab *);
    bool (*vocab_is_eog)(const llama_vocab *, llama_token);
    // writes at most n_bytes; returns how many, or minus how many it takes
    int32_t (*token_to_piece)(const llama_vocab *, llama_token, char * bytes, int32_t n_bytes, int32_t lstrip, bool special);

    // samplers: apply() changes a row of candidates, accept() tells of a token that was chosen
    void (*sampler_apply)(llama_sampler *, llama_token_data_array *);
    void (*sampler_accept)(llama_sampler *, llama_token);
    llama_sampler * (*sampler_clone)(const llama_sampler *);
    void (*sampler_free)(llama_sampler *);
    llama_sampler * (*sampler_chain_init)(llama_sampler_chain_params);
    void (*sampler_chain_add)(llama_sampler * chain, llama_sampler * owned);
    llama_sampler * (*sampler_init_greedy)();

    // weights, by name; null where the library does not show them
    const std::vector<std::pair<std::string, ggml_tensor *>> & (*tensor_map)(const llama_model *);
    size_t (*tensor_n_bytes)(const ggml_tensor *);
    void (*tensor_set)(ggml_tensor *, const void * data, size_t offset, size_t n_bytes);
    const ggml_type_traits * (*get_type_traits)(int32_t type);
    size_t (*quantize_chunk)(int32_t type, const float * from, void * to, int64_t start, int64_t n_rows, int64_t width,
                             const float * importance);

    // of the OpenMP runtime that the library computes on; null unless that is libgomp
    void (*gomp_parallel)(void (*work)(void *), void * data, unsigned n_threads, unsigned flags);
    int (*omp_pause_resource_all)(int kind);
};

// Looks every function up in the loaded library `handle` (what dlopen returned). Throws LibraryError that names all
// missing symbols; a failed bind leaves an earlier one in place.
void bind(void * handle);

// Ends the OpenMP threads that wait for the calling thread's next product; it makes new ones (0.1 ms). libgomp gives each
// thread that computes a team of its own, and while the process has more of them than processors every wait in any of them
// goes to sleep at once instead of spinning: small models run several times slower. So who has computed and is not to go
// on at once gives its team back. Does nothing on other runtimes.
void release_team();

// The bound library. Throws LibraryError when bind() has not succeeded yet.
const LlamaApi & api();

// The bytes of a token; nothing for control tokens.
std::string token_bytes(const llama_vocab * vocab, llama_token token);

}  // namespace sidecar
