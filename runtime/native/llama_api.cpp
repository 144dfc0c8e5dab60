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
        for (const char * name : names) {
            if (void * symbol = dlsym(handle, name)) {
                function = reinterpret_cast<F *>(symbol);
                return;
            }
        }
        missing += missing.empty() ? "" : ", ";
        missing += *names.begin();
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
    find(found.synchronize, {"llama_synchronize"});
    find(found.get_memory, {"llama_get_memory"});
    find(found.memory_clear, {"llama_memory_clear"});
    find(found.memory_seq_rm, {"llama_memory_seq_rm"});
    find(found.memory_seq_pos_max, {"llama_memory_seq_pos_max"});
    find(found.state_seq_get_size, {"llama_state_seq_get_size_ext"});
    find(found.state_seq_get_data, {"llama_state_seq_get_data_ext"});
    find(found.state_seq_set_data, {"llama_state_seq_set_data_ext"});
    find(found.n_ctx, {"llama_n_ctx"});
    find(found.n_batch, {"llama_n_batch"});
    find(found.n_rs_seq, {"llama_n_rs_seq"});
    find(found.get_model, {"llama_get_model"});
    find(found.model_n_embd_out, {"llama_model_n_embd_out"});
    find(found.model_is_recurrent, {"llama_model_is_recurrent"});
    find(found.model_is_hybrid, {"llama_model_is_hybrid"});
    find(found.model_get_vocab, {"llama_model_get_vocab"});
    find(found.vocab_n_tokens, {"llama_vocab_n_tokens"});
    find(found.vocab_is_eog, {"llama_vocab_is_eog"});
    find(found.sampler_sample, {"llama_sampler_sample"});
    find(found.sampler_reset, {"llama_sampler_reset"});
    if (!find.missing.empty()) {
        throw LibraryError("the loaded llama.cpp library lacks " + find.missing);
    }
    bound = found;
    is_bound = true;
}

const LlamaApi & api() {
    if (!is_bound) {
        throw LibraryError("no llama.cpp library is bound: call bind() first");
    }
    return bound;
}

}  // namespace sidecar
