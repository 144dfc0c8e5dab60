#include "llama_api.h"

#include <dlfcn.h>

#include <initializer_list>

namespace sidecar {

namespace {

LlamaApi bound;
bool is_bound = false;

// Collects all that is missing before anything is said.
struct Resolver {
    void * handle;
    std::string missing;

    template <typename F>
    void operator()(F *& function, std::initializer_list<const char *> names) {
        if (optional(function, names)) return;
        missing += missing.empty() ? "" : ", ";
        missing += *names.begin();
    }

    template <typename F>
    bool optional(F *& function, std::initializer_list<const char *> names) {
        for (const char * name : names) {
            if (void * symbol = dlsym(handle, name)) {
                function = reinterpret_cast<F *>(symbol);
                return true;
            }
        }
        return false;
    }
};

}  // namespace

void bind(void * handle) {
    LlamaApi found{};
    Resolver find{handle, {}};
    find(found.batch_init, {"llama_batch_ext_init"});
    find(found.batch_free, {"llama_batch_ext_free"});
    find(found.batch_clear, {"llama_batch_ext_clear"});
    find(found.batch_add_token, {"llama_batch_ext_add_token"});
    find(found.batch_add_embd, {"llama_batch_ext_add_embd"});
    find(found.batch_set_embd_token, {"llama_batch_ext_set_embd_token"});
    find(found.batch_set_output_logits, {"llama_batch_ext_set_output_logits"});
    find(found.batch_set_pos, {"llama_batch_ext_set_pos"});
    find(found.process, {"llama_process"});
    find(found.get_logits_ith, {"llama_get_logits_ith"});
    // Staging functions of src/llama-ext.h have C++ linkage: the mangled name follows the plain one.
    find(found.set_embeddings_nextn,
         {"llama_set_embeddings_nextn", "_Z26llama_set_embeddings_nextnP13llama_contextbb"});
    find(found.get_embeddings_nextn,
         {"llama_get_embeddings_nextn", "_Z26llama_get_embeddings_nextnP13llama_context"});
    find(found.get_embeddings_nextn_ith,
         {"llama_get_embeddings_nextn_ith", "_Z30llama_get_embeddings_nextn_ithP13llama_contexti"});
    find(found.set_embeddings_layer_inp,
         {"llama_set_embeddings_layer_inp", "_Z30llama_set_embeddings_layer_inpP13llama_contextjb"});
    find(found.get_embeddings_layer_inp,
         {"llama_get_embeddings_layer_inp", "_Z30llama_get_embeddings_layer_inpP13llama_contextj"});
    find(found.set_nextn_layer_offset,
         {"llama_set_nextn_layer_offset", "_Z28llama_set_nextn_layer_offsetP13llama_contexti"});
    find(found.model_target_layer_ids,
         {"llama_model_target_layer_ids", "_Z28llama_model_target_layer_idsPK11llama_model"});
    find(found.model_target_layer_ids_n,
         {"llama_model_target_layer_ids_n", "_Z30llama_model_target_layer_ids_nPK11llama_model"});
    find(found.model_dflash_selector_top_k,
         {"llama_model_dflash_selector_top_k", "_Z33llama_model_dflash_selector_top_kPK11llama_model"});
    find(found.set_causal_attn, {"llama_set_causal_attn"});
    find(found.get_sampled_token_ith, {"llama_get_sampled_token_ith"});
    find(found.set_sampler, {"llama_set_sampler"});
    find(found.perf_context, {"llama_perf_context"});
    find(found.get_memory, {"llama_get_memory"});
    find(found.memory_clear, {"llama_memory_clear"});
    find(found.memory_seq_rm, {"llama_memory_seq_rm"});
    find(found.memory_seq_pos_min, {"llama_memory_seq_pos_min"});
    find(found.memory_seq_pos_max, {"llama_memory_seq_pos_max"});
    find(found.state_seq_get_size, {"llama_state_seq_get_size_ext"});
    find(found.state_seq_get_data, {"llama_state_seq_get_data_ext"});
    find(found.state_seq_set_data, {"llama_state_seq_set_data_ext"});
    find(found.n_ctx, {"llama_n_ctx"});
    find(found.n_batch, {"llama_n_batch"});
    find(found.n_rs_seq, {"llama_n_rs_seq"});
    find(found.get_model, {"llama_get_model"});
    find(found.model_n_embd, {"llama_model_n_embd"});
    find(found.model_n_embd_out, {"llama_model_n_embd_out"});
    find(found.model_n_layer, {"llama_model_n_layer"});
    find(found.model_n_layer_nextn, {"llama_model_n_layer_nextn"});
    find(found.model_meta_val_str, {"llama_model_meta_val_str"});
    find(found.model_is_recurrent, {"llama_model_is_recurrent"});
    find(found.model_is_hybrid, {"llama_model_is_hybrid"});
    find(found.model_get_vocab, {"llama_model_get_vocab"});
    find(found.vocab_n_tokens, {"llama_vocab_n_tokens"});
    find(found.vocab_mask, {"llama_vocab_mask"});
    find(found.vocab_is_eog, {"llama_vocab_is_eog"});
    find(found.token_to_piece, {"llama_token_to_piece"});
    find(found.sampler_apply, {"llama_sampler_apply"});
    find(found.sampler_accept, {"llama_sampler_accept"});
    find(found.sampler_clone, {"llama_sampler_clone"});
    find(found.sampler_free, {"llama_sampler_free"});
    find(found.sampler_chain_init, {"llama_sampler_chain_init"});
    find(found.sampler_chain_add, {"llama_sampler_chain_add"});
    find(found.sampler_init_greedy, {"llama_sampler_init_greedy"});
    find.optional(found.tensor_map, {"llama_internal_get_tensor_map", "_Z29llama_internal_get_tensor_mapB5cxx11PK11llama_model",
                                     "_Z29llama_internal_get_tensor_mapPK11llama_model"});
    find.optional(found.tensor_n_bytes, {"ggml_nbytes"});
    find.optional(found.tensor_set, {"ggml_backend_tensor_set"});
    find.optional(found.get_type_traits, {"ggml_get_type_traits"});
    find.optional(found.quantize_chunk, {"ggml_quantize_chunk"});
    if (dlsym(handle, "__kmpc_fork_call") == nullptr) {  // LLVM's and Intel's have it, libgomp has not
        find.optional(found.gomp_parallel, {"GOMP_parallel"});
        find.optional(found.omp_pause_resource_all, {"omp_pause_resource_all"});
    }
    if (!find.missing.empty()) {
        throw LibraryError("the loaded llama.cpp library lacks " + find.missing);
    }
    bound = found;
    is_bound = true;
}

void release_team() {
    constexpr int soft = 1;  // omp_pause_soft
    if (bound.omp_pause_resource_all != nullptr) bound.omp_pause_resource_all(soft);
}

const LlamaApi & api() {
    if (!is_bound) {
        throw LibraryError("no llama.cpp library is bound: call bind() first");
    }
    return bound;
}

std::string token_bytes(const llama_vocab * vocab, llama_token token) {
    std::string bytes(64, '\0');
    int32_t n;
    while ((n = api().token_to_piece(vocab, token, bytes.data(), int32_t(bytes.size()), 0, false)) < 0) {
        bytes.resize(size_t(-n));
    }
    bytes.resize(size_t(n));
    return bytes;
}

}  // namespace sidecar
