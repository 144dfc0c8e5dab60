#include "session.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>

#include "draft_context.h"

namespace sidecar {

namespace {

double seconds_since(std::chrono::steady_clock::time_point & mark) {
    const auto now = std::chrono::steady_clock::now();
    const double elapsed = std::chrono::duration<double>(now - mark).count();
    mark = now;
    return elapsed;
}

}  // namespace

Session::Session(llama_context * ctx, std::unique_ptr<Drafter> drafter, DraftVocab * vocab, bool looks_up, bool picks_on_backend,
                 int32_t n_checkpoints)
    : main_target_(ctx, drafter ? drafter->layers() : std::vector<int32_t>()), target_(&main_target_), drafter_(std::move(drafter)),
      ngram_(looks_up ? std::make_unique<Ngram>() : nullptr), vocab_(vocab),
      // of all the drafter's tokens, so those must be the target's
      picks_on_backend_(picks_on_backend && drafter_ && drafter_->context() != nullptr &&
                        drafter_->context()->n_vocab() <= main_target_.n_vocab()),
      n_checkpoints_(n_checkpoints) {
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
    checkpoints_.clear();
    if (drafter_) drafter_->begin();
    if (ngram_) ngram_->clear();
}

void Session::set_widths(std::vector<int32_t> widths) {
    const int32_t n_kept = main_target_.recurrent() ? main_target_.n_slots() + 1 : main_target_.n_batch();
    const int32_t most = std::min(main_target_.n_batch(), n_kept);
    if (!widths.empty() && (widths.front() < 1 || widths.back() > most || !std::is_sorted(widths.begin(), widths.end()))) {
        throw std::invalid_argument("decodes of " + std::to_string(widths.front()) + " to " + std::to_string(widths.back()) +
                                    " rows: here they have 1 to " + std::to_string(most));
    }
    widths_ = std::move(widths);
}

void Session::feed(const std::vector<llama_token> & tokens, bool wants_logits) {
    use_plain(false);  // the plain context decodes a row at a time
    if (wants_logits && !widths_.empty()) {
        if (tokens.size() > 1) feed({tokens.begin(), tokens.end() - 1}, false);
        observe_block();
        block_.assign(1, tokens.back());
        decode_block();
        target_->rewind(block_pos_ + 1);
        n_emitted_ = 0;
        return;
    }
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

Round Session::step(Chooser & chooser, int32_t depth, bool ignore_eog, const std::vector<llama_token> & found) {
    Round round;
    auto mark = std::chrono::steady_clock::now();

    observe_block();
    Picker & picker = chooser.picker() != nullptr ? *chooser.picker() : best_picker();
    if (!found.empty()) {
        picker.begin();
        for (const llama_token token : found) picker.take(token);
        round.drafts = found;
    } else if (drafter_) {
        const int32_t n_drafts = most_drafts(*target_, depth);
        if (!is_plain() && n_drafts > 0) {
            if (lacks_rows_) adopt();
            if (drafter_->reads_cache()) target_->settle();
            if (picks_on_backend_) drafter_->context()->pick_on_backend(&picker == &best_picker());
            picker.begin();
            drafter_->propose(last_, n_drafts, picker, round.drafts);
        }
    }
    round.draft_s = seconds_since(mark);

    block_.assign(1, last_);
    block_.insert(block_.end(), round.drafts.begin(), round.drafts.end());
    decode_block();
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

Found Session::look_up(int32_t n) {
    Found found;
    if (!ngram_) return found;
    observe_block();
    found.n_matched = ngram_->find(last_, most_drafts(main_target_, n), found.tokens);
    return found;
}

// How many of so many drafts a step can verify there.
int32_t Session::most_drafts(const Target & target, int32_t depth) const {
    const int32_t n_room = std::min(target.n_ctx() - target_->n_past(), target.n_batch());
    return std::min(depth, widest(std::min(depth + 1, n_room)) - 1);
}

// The most rows that a decode of up to `n` may have, or the least there may be.
int32_t Session::widest(int32_t n) const {
    if (widths_.empty()) return n;
    const auto above = std::upper_bound(widths_.begin(), widths_.end(), n);
    return above == widths_.begin() ? widths_.front() : *(above - 1);
}

// Decodes block_ so that all or part of it can be taken back; further rows fill it up to one of widths_.
void Session::decode_block() {
    block_pos_ = target_->n_past();
    std::vector<llama_token> rows = block_;
    const auto width = std::lower_bound(widths_.begin(), widths_.end(), int32_t(rows.size()));
    if (width != widths_.end()) rows.resize(size_t(*width), rows.back());
    target_->decode(rows.data(), int32_t(rows.size()), Outputs::all, true);
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

Saved Session::save() {
    observe_block();
    n_emitted_ = 0;
    return {target_->state(), drafter_ ? drafter_->state() : std::vector<uint8_t>()};
}

void Session::restore(const Saved & saved, const std::vector<llama_token> & tokens) {
    if (tokens.empty()) throw std::invalid_argument("restore behind no tokens");
    clear();
    target_->restore(saved.target, int32_t(tokens.size()) - 1);
    if (drafter_) drafter_->restore({tokens.begin(), tokens.end() - 1}, saved.drafter);
    if (ngram_) ngram_->observe(0, tokens.data(), int32_t(tokens.size()) - 1);
    last_ = tokens.back();
}

int32_t Session::go_back(int32_t n) {
    static const std::vector<uint8_t> nothing;
    if (n > 0 && n >= target_->n_past()) {
        throw std::logic_error("go back from " + std::to_string(target_->n_past()) + " to " + std::to_string(n));
    }
    while (!checkpoints_.empty() && checkpoints_.back().pos > n) checkpoints_.pop_back();
    if (main_target_.recurrent()) n = checkpoints_.empty() ? 0 : checkpoints_.back().pos;
    if (!main_target_.recurrent() && !main_target_.has_all_cells()) n = 0;
    if (n < 1) {
        clear();
        return 0;
    }
    use_plain(false);  // its cells are the ones that stay
    observe_block();
    n_emitted_ = 0;
    last_ = -1;
    const bool has_mark = main_target_.recurrent();
    target_->go_back(n, has_mark ? checkpoints_.back().target : nothing);
    if (drafter_) drafter_->go_back(n, has_mark ? checkpoints_.back().drafter : nothing);
    if (ngram_) ngram_->go_back(n);
    return n;
}

void Session::checkpoint() {
    if (n_checkpoints_ < 1 || !main_target_.recurrent()) return;
    observe_block();
    n_emitted_ = 0;
    checkpoints_.push_back({target_->n_past(), target_->mark(), drafter_ ? drafter_->mark() : std::vector<uint8_t>()});
    if (int32_t(checkpoints_.size()) <= n_checkpoints_) return;
    size_t closest = 0;  // of all but the new one
    for (size_t i = 1; i + 1 < checkpoints_.size(); ++i) {
        const int32_t before = closest == 0 ? 0 : checkpoints_[closest - 1].pos;
        if (checkpoints_[i].pos - checkpoints_[i - 1].pos < checkpoints_[closest].pos - before) closest = i;
    }
    checkpoints_.erase(checkpoints_.begin() + ptrdiff_t(closest));
}

void Session::decode(const std::vector<llama_token> & rows) {
    use_plain(false);
    target_->decode(rows.data(), int32_t(rows.size()), Outputs::all);
    target_->logits(0);  // waits for the backend
    block_.clear();
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

Traffic Session::traffic() const {
    Traffic traffic = main_target_.traffic();
    if (plain_target_) traffic += plain_target_->traffic();
    if (drafter_ && drafter_->context() != nullptr) traffic += drafter_->context()->traffic();
    return traffic;
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
    if (!block_.empty()) {
        const int32_t n = target_->n_past() - block_pos_;
        if (ngram_) ngram_->observe(block_pos_, block_.data(), n);
        if (drafter_) drafter_->observe(block_pos_, block_.data(), target_->hidden_rows(n), n);
    }
    block_.clear();
}

}  // namespace sidecar
