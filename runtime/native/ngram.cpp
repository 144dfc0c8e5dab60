#include "ngram.h"

#include <algorithm>
#include <stdexcept>

namespace sidecar {

void Ngram::clear() {
    text_.clear();
    latest_.clear();
    earlier_.clear();
}

void Ngram::observe(int32_t pos, const llama_token * tokens, int32_t n) {
    if (pos != int32_t(text_.size())) throw std::logic_error("the look-up was not shown every position");
    for (int32_t i = pos; i < pos + n; ++i) {
        text_.push_back(tokens[i - pos]);
        earlier_.push_back(-1);
        if (i == 0) continue;
        const auto [found, is_new] = latest_.try_emplace(key(text_[size_t(i - 1)], text_[size_t(i)]), i);
        if (!is_new) {
            earlier_.back() = found->second;
            found->second = i;
        }
    }
}

void Ngram::go_back(int32_t n) {
    while (int32_t(text_.size()) > n) {
        if (text_.size() > 1) {
            const auto latest = latest_.find(key(text_[text_.size() - 2], text_.back()));
            if (earlier_.back() >= 0) {
                latest->second = earlier_.back();
            } else {
                latest_.erase(latest);
            }
        }
        text_.pop_back();
        earlier_.pop_back();
    }
}

int32_t Ngram::find(llama_token last, int32_t n, std::vector<llama_token> & out) const {
    if (text_.empty() || n < 1) return 0;
    const auto found = latest_.find(key(text_.back(), last));
    if (found == latest_.end()) return 0;
    const int32_t size = int32_t(text_.size());
    int32_t best = 0, best_pos = 0;
    int32_t pos = found->second;
    for (int32_t look = 0; pos >= 0 && look < n_looks && best < longest; ++look, pos = earlier_[size_t(pos)]) {
        int32_t length = shortest;
        while (length < longest && pos - length >= 0 && text_[size_t(pos - length)] == text_[size_t(size - length)]) length += 1;
        if (length > best) {
            best = length;
            best_pos = pos;
        }
    }
    const size_t first = out.size();
    for (int32_t i = 0; i < n; ++i) {
        const int32_t next = best_pos + 1 + i;
        out.push_back(next < size ? text_[size_t(next)] : next == size ? last : out[first + size_t(next - size - 1)]);
    }
    return best;
}

}  // namespace sidecar
