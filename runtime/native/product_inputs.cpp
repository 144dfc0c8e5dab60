#include "product_inputs.h"

#include <cstring>

#include "llama_api.h"

namespace sidecar {

using smallbatch::ggml::Tensor;

namespace {

uint64_t digest(const uint8_t * bytes, size_t n) {
    uint64_t hash = 0x9e3779b97f4a7c15u;
    for (; n >= sizeof(uint64_t); bytes += sizeof(uint64_t), n -= sizeof(uint64_t)) {
        uint64_t word;
        std::memcpy(&word, bytes, sizeof(word));
        hash = (hash ^ word) * 0xff51afd7ed558ccdu;
        hash ^= hash >> 32;
    }
    for (; n > 0; ++bytes, --n) hash = (hash ^ *bytes) * 0xff51afd7ed558ccdu;
    return hash ^ hash >> 32;
}

}  // namespace

ProductInputs::ProductInputs(void * handle) {
    const std::string missing = smallbatch::ggml::resolve(handle, library_);
    const std::string wrong = missing.empty() ? smallbatch::ggml::mismatch(library_) : "it lacks " + missing;
    if (!wrong.empty()) throw LibraryError("what ggml computes cannot be looked at: " + wrong);
}

bool ProductInputs::watch(Tensor * node, bool ask, void * self) {
    ProductInputs & inputs = *static_cast<ProductInputs *>(self);
    if (ask) return inputs.is_watched(*node);
    inputs.see(*node);
    return true;
}

void ProductInputs::start(int32_t n_rows) {
    n_rows_ = n_rows;
    seen_.clear();
}

std::vector<std::pair<std::string, std::vector<uint64_t>>> ProductInputs::take() {
    n_rows_ = 0;
    return std::move(seen_);
}

// A product whose input has a row, or some rows side by side, for each token. Those inside attention have one for each head.
bool ProductInputs::is_watched(const Tensor & node) const {
    if (n_rows_ == 0 || std::strncmp(library_.op_name(node.op), "MUL_MAT", 7) != 0) return false;
    const Tensor & x = *node.src[1];
    const bool has_experts = std::strcmp(library_.op_name(node.op), "MUL_MAT_ID") == 0;
    const bool is_dense = x.nb[0] == sizeof(float) && x.nb[1] == x.nb[0] * size_t(x.ne[0]) && x.nb[2] == x.nb[1] * size_t(x.ne[1]);
    const bool by_token = has_experts ? x.ne[2] == n_rows_ : x.ne[1] == n_rows_ && x.ne[2] == 1;
    return x.type == smallbatch::ggml::type_f32 && is_dense && by_token && x.ne[3] == 1;
}

void ProductInputs::see(const Tensor & node) {
    const Tensor & x = *node.src[1];
    bytes_.resize(library_.n_bytes(&x));
    library_.tensor_get(&x, bytes_.data(), 0, bytes_.size());
    const size_t row_bytes = bytes_.size() / size_t(n_rows_);
    std::vector<uint64_t> rows;
    for (int32_t i = 0; i < n_rows_; ++i) rows.push_back(digest(bytes_.data() + size_t(i) * row_bytes, row_bytes));
    seen_.emplace_back(node.src[0]->name, std::move(rows));
}

}  // namespace sidecar
