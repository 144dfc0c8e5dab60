#include "session.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>

namespace sidecar {

namespace {

double seconds_since(std::chrono::steady_clock::time_point & mark) {
    const auto now = std::chrono::steady_clock::now();
    const double elapsed = std::chrono::duration<double>(now - mark).count();
    mark = now;
    return elapsed;
}

}  // namespace

Session::Session(llama_context * ctx, std::unique_ptr<Drafter> drafter, DraftVocab * vocab)
    : main_target_(ctx, drafter ? drafter->layers() : std::vector<int32_t>()), target_(&main_target_), drafter_(std::move(drafter)),
      vocab_(vocab) {
    clear();
}

void Session::set_plain_context(llama_context * ctx) {
    if (plain_target_) throw std::logic_error("the session has a plain context");
    plain_target_ = std::make_unique<Target>(ctx, drafter_ ? drafter_->layers() : std::vector<int32_t>());
}

void Session::clear() {
    target_ = &main_target_;
    target_->clear();
    block_.clear();
    n_emitted_ = 0;
    last_ = -1;
    if (drafter_) drafter_->begin();
}

void Session::feed(const std::vector<llama_token> & tokens, bool wants_logits) {
    use_plain(false);  // the plain context decodes a row at a time
    observe_block();
    block_pos_ = target_->n_past();
    target_->decode(tokens.data(), int32_t(tokens.size()), wants_logits ? Outputs::last : Outputs::none);
    block_ = tokens;
    n_emitted_ = 0;
}

llama_token Session::first(Chooser & chooser) {
    last_ = chooser.choose(target_->logits(int32_t(block_.size()) - 1), target_->n_vocab(), -1);
    return last_;
}

Round Session::step(Chooser & chooser, int32_t depth, bool ignore_eog) {
    Round round;
    auto mark = std::chrono::steady_clock::now();

    if (drafter_) {
        observe_block();
        const int32_t n_room = std::min(target_->n_ctx() - target_->n_past(), target_->n_batch()) - 1;
        if (!is_plain() && std::min(depth, n_room) > 0) {
            if (lacks_rows_) adopt();
            Picker & picker = chooser.picker() != nullptr ? *chooser.picker() : best_picker();
            picker.begin();
            drafter_->propose(last_, std::min(depth, n_room), picker, round.drafts);
        }
    }
    round.draft_s = seconds_since(mark);

    block_pos_ = target_->n_past();
    block_.assign(1, last_);
    block_.insert(block_.end(), round.drafts.begin(), round.drafts.end());
    target_->decode(block_.data(), int32_t(block_.size()), Outputs::all, true);
    target_->logits(0);  // waits for the backend, so that its time is counted here
    round.verify_s = seconds_since(mark);

    round.n_accepted = accept(*target_, round.drafts, chooser, ignore_eog, round.tokens);
    block_.resize(1);
    block_.insert(block_.end(), round.tokens.begin(), round.tokens.end());
    n_emitted_ = int32_t(round.tokens.size());
    keep(n_emitted_);
    round.accept_s = seconds_since(mark);
    return round;
}

void Session::catch_up() {
    observe_block();
    if (drafter_) drafter_->catch_up();
}

void Session::use_plain(bool plain) {
    Target * wanted = plain && plain_target_ ? plain_target_.get() : &main_target_;
    if (wanted == target_) return;
    observe_block();  // its hidden rows lie where the sequence leaves
    wanted->restore(target_->state(), target_->n_past());
    target_ = wanted;
    n_emitted_ = 0;
}

void Session::keep(int32_t n) {
    // block_ is the last token of the round before, then what this round emitted: the final one is not decoded yet.
    if (n < 1 || n > n_emitted_) {
        throw std::logic_error("keep(" + std::to_string(n) + ") of " + std::to_string(n_emitted_) + " emitted tokens");
    }
    target_->rewind(block_pos_ + n);
    last_ = block_[n];
    n_emitted_ = n;
    block_.resize(n + 1);
}

std::vector<double> Session::time_rows(const std::vector<llama_token> & tokens, int32_t n_rows, int32_t repeats) {
    if (tokens.empty()) throw std::invalid_argument("time_rows of no tokens");
    std::vector<double> seconds;
    std::vector<llama_token> rows(size_t(std::max(n_rows, 0)));
    size_t next = 0;
    for (int32_t i = 0; i < repeats; ++i) {
        for (llama_token & row : rows) row = tokens[next++ % tokens.size()];
        if (target_->n_past() + n_rows > target_->n_ctx()) target_->clear();
        target_->settle();
        auto mark = std::chrono::steady_clock::now();
        target_->decode(rows.data(), n_rows, Outputs::all);
        target_->logits(0);  // waits for the backend
        seconds.push_back(seconds_since(mark));
    }
    return seconds;
}

bool Session::see(llama_token token) {
    if (vocab_ == nullptr) return true;
    seen_.push_back(token);
    const bool known = vocab_->has(token);
    lacks_rows_ |= !known;
    return known;
}

void Session::adopt(const std::vector<llama_token> & tokens) {
    if (vocab_ == nullptr) return;
    seen_.insert(seen_.end(), tokens.begin(), tokens.end());
    vocab_->adopt(seen_);
    seen_.clear();
    lacks_rows_ = false;
}

const std::string & Session::piece(llama_token token) {
    const auto [found, is_new] = pieces_.try_emplace(token);
    if (is_new) found->second = token_bytes(main_target_.vocab(), token);
    return found->second;
}

bool Session::is_eog(llama_token token) const { return api().vocab_is_eog(main_target_.vocab(), token); }

void Session::observe_block() {
    if (drafter_ && !block_.empty()) {
        const int32_t n = target_->n_past() - block_pos_;
        drafter_->observe(block_pos_, block_.data(), target_->hidden_rows(n), n);
    }
    block_.clear();
}

}  // namespace sidecar
