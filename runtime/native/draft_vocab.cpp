#include "draft_vocab.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <stdexcept>
#include <unordered_set>

namespace sidecar {

DraftVocab::DraftVocab(const llama_model * head, int32_t n_vocab, std::vector<llama_token> ids, const std::vector<int32_t> & spare,
                       std::vector<Matrix> matrices)
    : ids_(std::move(ids)), row_of_(size_t(std::max(n_vocab, 0)), -1), place_of_(ids_.size(), spare_.end()) {
    const auto check = [](int64_t value, size_t end, const char * what) {
        if (value < 0 || size_t(value) >= end) {
            throw std::invalid_argument(std::string(what) + " " + std::to_string(value) + " of " + std::to_string(end));
        }
    };
    if (ids_.empty()) throw std::invalid_argument("a compact head without rows");
    for (size_t row = 0; row < ids_.size(); ++row) {
        check(ids_[row], row_of_.size(), "token");
        row_of_[size_t(ids_[row])] = int32_t(row);
    }
    for (const int32_t row : spare) {
        check(row, ids_.size(), "row");
        place_of_[size_t(row)] = spare_.insert(spare_.end(), row);
    }
    const LlamaApi & llama = api();
    if (!llama.tensor_map || !llama.tensor_n_bytes || !llama.tensor_set || !llama.get_type_traits || !llama.quantize_chunk) {
        can_give_ = false;
        return;
    }
    for (const Matrix & matrix : matrices) {
        Source source{matrix, File(matrix.path), {}, 0};
        for (const auto & [name, tensor] : llama.tensor_map(head)) {
            if (name != source.matrix.name) continue;
            source.tensors.push_back(tensor);
            source.own_row_bytes = llama.tensor_n_bytes(tensor) / ids_.size();
        }
        if (source.tensors.empty()) throw std::invalid_argument("there is no tensor " + source.matrix.name);
        can_give_ = can_give_ && source.file.number() >= 0;
        sources_.push_back(std::move(source));
    }
    can_give_ = can_give_ && !sources_.empty() && !spare_.empty();
}

DraftVocab::File::File(const std::string & path) : number_(open(path.c_str(), O_RDONLY | O_CLOEXEC)) {}

DraftVocab::File::~File() {
    if (number_ >= 0) close(number_);
}

void DraftVocab::adopt(const std::vector<llama_token> & tokens) {
    if (!can_give_) return;
    std::vector<llama_token> wanted;
    std::unordered_set<llama_token> is_wanted;
    for (const llama_token token : tokens) {
        const int32_t row = row_of_.at(size_t(token));
        if (row < 0) {
            if (is_wanted.insert(token).second) wanted.push_back(token);
        } else if (place_of_[size_t(row)] != spare_.end()) {
            spare_.splice(spare_.end(), spare_, place_of_[size_t(row)]);
        }
    }
    const size_t n_kept = std::min(wanted.size(), spare_.size());
    for (auto token = wanted.end() - ptrdiff_t(n_kept); token != wanted.end(); ++token) {
        std::vector<std::vector<uint8_t>> weights;
        for (const Source & source : sources_) {
            weights.push_back(read(source, *token));
            if (weights.back().empty()) {  // drafts are then worse, and nothing else
                can_give_ = false;
                return;
            }
        }
        const int32_t row = spare_.front();
        for (size_t i = 0; i < sources_.size(); ++i) {
            const size_t n_bytes = sources_[i].own_row_bytes;
            for (ggml_tensor * tensor : sources_[i].tensors) {
                api().tensor_set(tensor, weights[i].data(), size_t(row) * n_bytes, n_bytes);
            }
        }
        row_of_[size_t(ids_[size_t(row)])] = -1;
        row_of_[size_t(*token)] = row;
        ids_[size_t(row)] = *token;
        spare_.splice(spare_.end(), spare_, spare_.begin());
    }
}

std::vector<uint8_t> DraftVocab::read(const std::string & name, llama_token token) const {
    for (const Source & source : sources_) {
        if (source.matrix.name == name && source.file.number() >= 0 && size_t(token) < row_of_.size()) return read(source, token);
    }
    return {};
}

// As the compact sidecar's writer makes it: as it lies in the file, or through floats to the head's own type.
std::vector<uint8_t> DraftVocab::read(const Source & source, llama_token token) const {
    const Matrix & from = source.matrix;
    std::vector<uint8_t> stored(from.row_bytes);
    size_t done = 0;
    while (done < stored.size()) {
        const ssize_t n = pread(source.file.number(), stored.data() + done, stored.size() - done,
                                off_t(from.offset + uint64_t(token) * from.row_bytes + done));
        if (n <= 0) return {};
        done += size_t(n);
    }
    if (from.type == from.own_type) return stored.size() == source.own_row_bytes ? stored : std::vector<uint8_t>();
    std::vector<float> values(size_t(from.width));
    if (from.type == GGML_F32) {
        if (stored.size() != values.size() * sizeof(float)) return {};
        std::copy(stored.begin(), stored.end(), reinterpret_cast<uint8_t *>(values.data()));
    } else {
        const auto to_float = api().get_type_traits(from.type)->to_float;
        if (to_float == nullptr) return {};
        to_float(stored.data(), values.data(), from.width);
    }
    std::vector<uint8_t> own(source.own_row_bytes);
    api().quantize_chunk(from.own_type, values.data(), own.data(), 0, 1, from.width, nullptr);
    return own;
}

}  // namespace sidecar
