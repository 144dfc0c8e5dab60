// For measuring: what goes into every product of a decode, as a digest of each token's row.
//
// Where two decodes of the same token differ by a rounding, the logits need not show it: a product rounds its input to the few
// bits of its weights' type, or to F16, and swallows most of it, now and then letting one through. Its input shows all of it.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "smallbatch/ggml_abi.h"

namespace sidecar {

class ProductInputs {
  public:
    // Looks up ggml's functions in the library with this dlopen handle. Throws LibraryError where its tensors are not as ours.
    explicit ProductInputs(void * handle);

    // A ggml_backend_sched_eval_callback, for the context that is to be watched; its user data is the object, which must outlive
    // the context. It computes on, whatever it sees.
    static bool watch(smallbatch::ggml::Tensor * node, bool ask, void * self);

    // From now on decodes of so many rows are watched; until take(), which returns the name of each product's weights and the
    // digest (n_rows,) of each row that goes into it, in the order of computation.
    void start(int32_t n_rows);
    std::vector<std::pair<std::string, std::vector<uint64_t>>> take();

  private:
    bool is_watched(const smallbatch::ggml::Tensor & node) const;
    void see(const smallbatch::ggml::Tensor & node);

    smallbatch::ggml::Library library_;
    int32_t n_rows_ = 0;  // 0: watches nothing
    std::vector<uint8_t> bytes_;
    std::vector<std::pair<std::string, std::vector<uint64_t>>> seen_;
};

}  // namespace sidecar
