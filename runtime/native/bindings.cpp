// nanobind, and nothing else: Python's view of the native loop. Imports alone; bind() comes later.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/unordered_map.h>
#include <nanobind/stl/vector.h>

#include <dlfcn.h>

#include <cstring>
#include <optional>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "bus_error.h"
#include "generation.h"
#include "log.h"
#include "pace_bindings.h"
#include "product_inputs.h"
#include "sampling.h"
#include "session.h"
#include "smallbatch/bindings.h"
#include "turns.h"
#include "waiting.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace sidecar;

namespace {

// Python's names of Origin, in its order.
constexpr const char * origin_names[] = {"plain", "drafted", "ngram", "corrected"};

// A matrix as Python names it: the members of DraftVocab::Matrix.
using Matrix = std::tuple<std::string, std::string, uint64_t, uint64_t, int32_t, int32_t, int64_t>;

// The Python class that a LibraryError becomes; bind() replaces it by the package's own.
PyObject * library_error = PyExc_RuntimeError;

void translate(const std::exception_ptr & error, void *) {
    try {
        std::rethrow_exception(error);
    } catch (const LibraryError & e) {
        PyObject * text = PyUnicode_DecodeUTF8(e.what(), Py_ssize_t(std::strlen(e.what())), "replace");  // names of files are bytes
        if (text == nullptr) return;
        PyErr_SetObject(library_error, text);
        Py_DECREF(text);
    }
}

const llama_vocab * vocab_of(uintptr_t model) {
    if (model == 0) throw std::invalid_argument("the model is null");
    return api().model_get_vocab(reinterpret_cast<const llama_model *>(model));
}

Picker & picker_of(Chooser & chooser) { return chooser.picker() != nullptr ? *chooser.picker() : best_picker(); }

llama_context * context_at(uintptr_t address) {
    if (address == 0) throw std::invalid_argument("the context is null");
    return reinterpret_cast<llama_context *>(address);
}

std::optional<std::string> openmp_library() {
    Dl_info info;
    if (api().gomp_parallel == nullptr || dladdr(reinterpret_cast<void *>(api().gomp_parallel), &info) == 0) return {};
    return info.dli_fname;
}

struct Ahead {
    Turns & turns;
};

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "The native draft loop of llama-sidecar: see session.h, drafter.h and target.h.";
    nb::register_exception_translator(translate);
    nb::set_leak_warnings(false);  // a daemon thread's text is not freed when the interpreter ends

    m.def(
        "bind",
        [](uintptr_t handle, nb::object error) {
            library_error = error.inc_ref().ptr();
            bind(reinterpret_cast<void *>(handle));
        },
        "handle"_a, "error"_a,
        "Looks up llama.cpp's functions in the library with this dlopen handle; `error` is raised for library faults.");
    bind_smallbatch(m);
    bind_pace(m);
    m.def(
        "log_callback", [] { return reinterpret_cast<uintptr_t>(&keep_errors); },
        "The address of a ggml_log_callback that keeps errors.");
    m.def(
        "take_errors",
        [] {
            const std::string text = take_errors();
            return nb::bytes(text.data(), text.size());
        },
        "llama.cpp's errors in this thread since the last call.");
    m.def("survive_bus_errors", &survive_bus_errors,
          "For programs: a model file that becomes shorter while it is in use is an error of every decode from then on, and not the process's end.");
    m.def("check_mapped_files", &check_mapped_files, "Raises LibraryError, after survive_bus_errors, for a model file that has become shorter.");
    // With the GIL: a thread that asks for it back while the interpreter ends would end the process. Those that compute are
    // safe from that by their turns, which llm.py takes for good before.
    m.def("release_team", &release_team,
          "Ends the OpenMP threads that wait for this thread's next product.");
    m.def("waiting", [] { return Waiting::of_process().state(); },
          "How OpenMP's threads wait: 'spin 1 ms' at most (or 'spin', where libgomp could not be told), 'sleep' while others use some of "
          "the processors, or 'as it is' set by the user or the system.");
    m.def("spins_for", [](int ms) { Waiting::of_process().spins_for(ms); }, "ms"_a, "libgomp was told to spin so long at most.");
    m.def("is_crowded", &is_crowded, "room"_a, "n_threads"_a, "sleeping"_a);
    m.def("is_full", &is_full, "n_others"_a, "n_cpus"_a, "sleeping"_a);
    m.def("spins_in", &spins_in, "seconds"_a, "GOMP_SPINCOUNT for so many seconds, as measured.");
    m.def("openmp_library", &openmp_library, "The file of the libgomp that llama.cpp computes on, or None.");
    m.def(
        "piece",
        [](uintptr_t model, llama_token token) {
            const std::string bytes = token_bytes(vocab_of(model), token);
            return nb::bytes(bytes.data(), bytes.size());
        },
        "model"_a, "token"_a, "The bytes of a token of the model at this address; nothing for control tokens.");
    m.def("drafter_kinds", &drafter_kinds);
    m.def(
        "argmax",
        [](const std::vector<float> & values) {
            if (values.empty()) throw std::invalid_argument("argmax of nothing");
            return argmax(values.data(), int32_t(values.size()));
        },
        "values"_a);

    nb::class_<ProductInputs>(m, "ProductInputs", "For measuring: what goes into every product of a decode. See product_inputs.h.")
        .def(
            "__init__",
            [](ProductInputs * self, uintptr_t handle) { new (self) ProductInputs(reinterpret_cast<void *>(handle)); }, "handle"_a)
        .def_prop_ro("callback", [](const ProductInputs &) { return reinterpret_cast<uintptr_t>(&ProductInputs::watch); })
        .def_prop_ro("address", [](const ProductInputs & self) { return reinterpret_cast<uintptr_t>(&self); })
        .def("start", &ProductInputs::start, "n_rows"_a)
        .def("take", &ProductInputs::take);

    nb::class_<Chooser>(m, "Chooser")
        .def(
            "begin_draft", [](Chooser & self) { picker_of(self).begin(); }, "For tests: as a round does before its drafts.")
        .def(
            "pick",
            [](Chooser & self, const std::vector<float> & logits) {
                if (logits.empty()) throw std::invalid_argument("a pick from no logits");
                return picker_of(self).pick(logits.data(), int32_t(logits.size()), nullptr);
            },
            "logits"_a, "For tests: the draft's next token, from a row of the drafter's logits.")
        .def(
            "choose",
            [](Chooser & self, const std::vector<float> & logits, llama_token drafted) {
                if (logits.empty()) throw std::invalid_argument("a choice from no logits");
                return self.choose(logits.data(), int32_t(logits.size()), drafted);
            },
            "logits"_a, "drafted"_a = -1, "For tests: the token for a row of logits.");
    m.def("greedy_chooser", &greedy_chooser);
    m.def(
        "chain_chooser",
        [](uintptr_t chain, uintptr_t grammar) {
            return chain_chooser(reinterpret_cast<llama_sampler *>(chain), reinterpret_cast<llama_sampler *>(grammar));
        },
        "chain"_a, "grammar"_a = 0, "Chooses by a llama_sampler chain, and a grammar's sampler if given; both must outlive the result.");
    nb::class_<RuleChoice>(m, "RuleChoice", "Finds out which rule of acceptance is faster: see sampling.h.")
        .def(nb::init<>())
        .def("observe", &RuleChoice::observe, "n_tokens"_a, "seconds"_a)
        .def_prop_ro("rejects", &RuleChoice::rejects, "Whether the next round accepts by speculative sampling.");
    m.def(
        "speculative_chooser",
        [](uintptr_t chain, bool remembers, uintptr_t grammar, uint32_t seed, RuleChoice * rules) {
            return speculative_chooser(reinterpret_cast<llama_sampler *>(chain), remembers,
                                       reinterpret_cast<llama_sampler *>(grammar), seed, rules);
        },
        nb::keep_alive<0, 5>(), "chain"_a, "remembers"_a, "grammar"_a, "seed"_a, "rules"_a.none(),
        "Accepts by speculative sampling, with a llama_sampler chain that makes no choice; what it is given must outlive the result.");
    nb::class_<TokenLogprobs>(m, "TokenLogprobs")
        .def_ro("token", &TokenLogprobs::token)
        .def_ro("logprob", &TokenLogprobs::logprob)
        .def_ro("top", &TokenLogprobs::top);
    nb::class_<LogprobsChooser, Chooser>(m, "LogprobsChooser", "Chooses as `inner` does, and remembers how likely that was.")
        .def(nb::init<Chooser &, int32_t>(), nb::keep_alive<1, 2>(), "inner"_a, "n_top"_a)
        .def("found", &LogprobsChooser::found, "start"_a = 0, "Of the tokens from the `start`th on.");
    m.def("coin_chooser", &coin_chooser, "p_accept"_a, "seed"_a);
    m.def("forced_chooser", &forced_chooser, "tokens"_a, "Chooses these tokens, whatever the logits are.");

    nb::class_<Round>(m, "Round")
        .def_ro("tokens", &Round::tokens)
        .def_ro("drafts", &Round::drafts)
        .def_prop_ro("n_drafted", [](const Round & round) { return round.drafts.size(); })
        .def_ro("n_accepted", &Round::n_accepted)
        .def_ro("draft_s", &Round::draft_s)
        .def_ro("verify_s", &Round::verify_s)
        .def_ro("accept_s", &Round::accept_s);

    const auto no_gil = nb::call_guard<nb::gil_scoped_release>();
    nb::class_<Turns> turns(m, "Turns", "A fair lock, as a context manager: sessions of one model take turns at compute.");
    nb::class_<Ahead>(turns, "Ahead")
        .def("__enter__", [](Ahead & self) { self.turns.take(true); }, no_gil)
        .def(
            "__exit__", [](Ahead & self, const nb::args &) { self.turns.pass(); },
            nb::sig("def __exit__(self, *args: object) -> None"));
    turns.def(nb::init<int>(), "n_threads"_a = 1)
        .def("__enter__", [](Turns & self) { self.take(); }, no_gil)
        .def_prop_ro("ahead", [](Turns & self) { return Ahead{self}; }, nb::keep_alive<0, 1>(), "The same, ahead of all who have not asked so.")
        .def(
            "__exit__", [](Turns & self, const nb::args &) { self.pass(); },
            nb::sig("def __exit__(self, *args: object) -> None"))
        .def_prop_ro("n_waiting", &Turns::n_waiting)
        .def_prop_ro("is_over", &Turns::is_over, "In a turn: whether it has lasted as long as it may while others wait.");

    nb::class_<DraftVocab>(m, "DraftVocab", "Which tokens a compact head has rows for: see draft_vocab.h.")
        .def(
            "__init__",
            [](DraftVocab * self, uintptr_t head, int32_t n_vocab, const std::vector<llama_token> & ids,
               const std::vector<int32_t> & spare, const std::vector<Matrix> & matrices) {
                std::vector<DraftVocab::Matrix> sources;
                for (const auto & [name, path, offset, row_bytes, type, own_type, width] : matrices) {
                    sources.push_back({name, path, offset, row_bytes, type, own_type, width});
                }
                new (self) DraftVocab(reinterpret_cast<const llama_model *>(head), n_vocab, ids, spare, std::move(sources));
            },
            "head"_a, "n_vocab"_a, "ids"_a, "spare"_a, "matrices"_a)
        .def_prop_ro("ids", &DraftVocab::ids, "The token of each row.")
        .def("adopt", &DraftVocab::adopt, "tokens"_a, no_gil, "Gives rows to those that have none; in the model's turn.")
        .def(
            "read",
            [](const DraftVocab & self, const std::string & name, llama_token token) {
                const std::vector<uint8_t> row = self.read(name, token);
                return nb::bytes(reinterpret_cast<const char *>(row.data()), row.size());
            },
            "name"_a, "token"_a, "A token's row of a matrix as the head would have it.");

    nb::class_<Session>(m, "Session")
        .def(
            "__init__",
            [](Session * self, uintptr_t ctx, const std::optional<std::string> & kind, uintptr_t draft_ctx,
               DraftVocab * vocab, float min_confidence, const std::vector<llama_token> & script,
               int32_t n_right, bool hidden_rows, bool looks_up, bool picks_on_backend, int32_t n_checkpoints) {
                const LlamaApi & llama = api();
                llama_context * target = context_at(ctx);
                DrafterOptions options;
                options.n_vocab = llama.vocab_n_tokens(llama.model_get_vocab(llama.get_model(target)));
                options.n_layers = llama.model_n_layer(llama.get_model(target));
                options.n_embd = llama.model_n_embd(llama.get_model(target));
                options.ctx = draft_ctx == 0 ? nullptr : context_at(draft_ctx);
                options.vocab = vocab;
                options.min_confidence = min_confidence;
                options.script = script;
                options.n_right = n_right;
                options.hidden_rows = hidden_rows;
                new (self) Session(target, kind ? make_drafter(*kind, options) : nullptr, vocab, looks_up, picks_on_backend,
                                   n_checkpoints);
                release_team();  // the drafter may have looked what the graph does; another thread may generate
            },
            nb::keep_alive<1, 5>(), "ctx"_a, nb::kw_only(), "kind"_a = nb::none(), "draft_ctx"_a = 0, "vocab"_a.none() = nb::none(),
            "min_confidence"_a = 0.0f, "script"_a = std::vector<llama_token>(), "n_right"_a = 0,
            "hidden_rows"_a = true, "looks_up"_a = false, "picks_on_backend"_a = false, "n_checkpoints"_a = 0)
        .def("clear", &Session::clear, no_gil)
        .def(
            "feed",
            [](Session & self, const std::vector<llama_token> & tokens, bool wants_logits, Turns * turns) {
                const auto feed = [&] { self.feed(tokens, wants_logits); };
                turns != nullptr ? turns->run(feed) : feed();
            },
            "tokens"_a, "wants_logits"_a, "turns"_a.none() = nb::none(), no_gil, "In a turn of `turns`, on the thread that computes for all.")
        .def("first", &Session::first, "chooser"_a, no_gil)
        .def("step", &Session::step, "chooser"_a, "depth"_a, "ignore_eog"_a = false, "found"_a = std::vector<llama_token>(), no_gil)
        .def(
            "look_up",
            [](Session & self, int32_t n) {
                Found found = self.look_up(n);
                return std::make_pair(std::move(found.tokens), found.n_matched);
            },
            "n"_a, "At most n tokens that followed the last time the sequence ended as now, and the length of the match.")
        .def("keep", &Session::keep, "n"_a)
        .def("go_back", &Session::go_back, "n"_a, no_gil, "To a position of at most n, which is returned.")
        .def("checkpoint", &Session::checkpoint, no_gil)
        .def_prop_ro(
            "checkpoints",
            [](const Session & self) {
                std::vector<std::pair<int32_t, size_t>> found;
                for (const Checkpoint & one : self.checkpoints()) found.emplace_back(one.pos, one.target.size() + one.drafter.size());
                return found;
            },
            "Positions that a recurrent sequence can go back to, and the bytes kept for each.")
        .def("catch_up", &Session::catch_up, no_gil)
        .def(
            "set_plain_context", [](Session & self, uintptr_t ctx) { self.set_plain_context(context_at(ctx)); }, "ctx"_a)
        .def("use_plain", &Session::use_plain, "plain"_a, no_gil)
        .def_prop_ro("is_plain", &Session::is_plain)
        .def("adopt", &Session::adopt, "tokens"_a = std::vector<llama_token>(), no_gil)
        .def("set_widths", &Session::set_widths, "widths"_a)
        .def_prop_ro("min_width", &Session::min_width)
        .def_prop_ro("last_row", &Session::last_row)
        .def("decode", &Session::decode, "rows"_a, no_gil)
        .def(
            "save",
            [](Session & self) {
                const Saved saved = [&self] {
                    const nb::gil_scoped_release released;
                    return self.save();
                }();
                const auto bytes = [](const std::vector<uint8_t> & b) { return nb::bytes(b.data(), b.size()); };
                return std::pair(bytes(saved.target), bytes(saved.drafter));
            },
            "The target's state and the drafter's.")
        .def(
            "restore",
            [](Session & self, const nb::bytes & target, const nb::bytes & drafter, const std::vector<llama_token> & tokens) {
                const auto bytes = [](const nb::bytes & b) {
                    const uint8_t * data = static_cast<const uint8_t *>(b.data());
                    return std::vector<uint8_t>(data, data + b.size());
                };
                const Saved saved{bytes(target), bytes(drafter)};
                const nb::gil_scoped_release no_gil;
                self.restore(saved, tokens);
            },
            "target"_a, "drafter"_a, "tokens"_a)
        .def("time_rows", &Session::time_rows, "tokens"_a, "n_rows"_a, "repeats"_a, no_gil)
        .def(
            "rewind", [](Session & self, int32_t n_standing) { self.target().rewind(n_standing); }, "n_standing"_a,
            "For tests: takes positions back; refuses what the target's memory cannot do.")
        .def(
            "logits",
            [](Session & self, int32_t row) {
                const float * values = self.target().logits(row);
                return std::vector<float>(values, values + self.target().n_vocab());
            },
            "row"_a, "Logits of a row of the last decode.")
        .def(
            "state",
            [](Session & self) {
                const std::vector<uint8_t> bytes = self.target().state();
                return nb::bytes(bytes.data(), bytes.size());
            },
            "KV cache and recurrent state of the standing positions, as llama.cpp serialises them.")
        .def("cancel", [](Session & self) { self.cancelled = true; }, "Ends the running text after its current round.")
        .def("uncancel", [](Session & self) { self.cancelled = false; })
        .def_prop_ro("last", &Session::last)
        .def_prop_ro("n_past", &Session::n_past)
        .def_prop_ro("n_slots", [](Session & self) { return self.target().n_slots(); })
        .def_prop_ro("recurrent", [](Session & self) { return self.target().recurrent(); })
        .def_prop_ro("can_rewind", [](Session & self) { return !self.target().recurrent() || self.target().n_slots() > 0; })
        .def_prop_ro("traffic", &Session::traffic, "What its decodes have moved so far.")
        .def_prop_ro("n_restores", [](Session & self) { return self.target().n_restores(); })
        .def_prop_ro("dirty", [](Session & self) { return self.target().dirty(); });

    nb::class_<TextStream>(m, "TextStream", "Tokens' bytes to text, whole characters and no part of a stop string: see text.h.")
        .def(nb::init<std::vector<std::string>>(), "stop"_a = std::vector<std::string>())
        .def(
            "push",
            [](TextStream & self, const nb::bytes & piece) {
                return self.push(std::string(static_cast<const char *>(piece.data()), piece.size()));
            },
            "piece"_a)
        .def("finish", &TextStream::finish, nb::kw_only(), "cut"_a = false)
        .def_prop_ro("stopped", &TextStream::stopped);

    nb::class_<Traffic>(m, "Traffic", "What decodes move between host and devices: see traffic.h.")
        .def_ro("n_decodes", &Traffic::n_decodes)
        .def_ro("n_graphs_reused", &Traffic::n_graphs_reused)
        .def_ro("n_syncs", &Traffic::n_syncs)
        .def_ro("logits_bytes", &Traffic::logits_bytes)
        .def_ro("hidden_bytes", &Traffic::hidden_bytes)
        .def_ro("fed_bytes", &Traffic::fed_bytes)
        .def_ro("state_bytes", &Traffic::state_bytes);

    nb::class_<Counts>(m, "Counts")
        .def_ro("n_rounds", &Counts::n_rounds)
        .def_ro("n_drafted", &Counts::n_drafted)
        .def_ro("n_accepted", &Counts::n_accepted)
        .def_ro("drafted_at", &Counts::drafted_at)
        .def_ro("accepted_at", &Counts::accepted_at)
        .def_ro("n_ngram_rounds", &Counts::n_ngram_rounds)
        .def_ro("n_ngram_drafted", &Counts::n_ngram_drafted)
        .def_ro("n_ngram_accepted", &Counts::n_ngram_accepted)
        .def_ro("n_tokens", &Counts::n_tokens)
        .def_ro("n_known", &Counts::n_known)
        .def_ro("n_chosen", &Counts::n_chosen)
        .def_ro("draft_s", &Counts::draft_s)
        .def_ro("verify_s", &Counts::verify_s)
        .def_ro("accept_s", &Counts::accept_s)
        .def_ro("traffic", &Counts::traffic);

    nb::class_<Generation>(m, "Generation", "A text: rounds one after another until it ends. See generation.h.")
        .def(
            "__init__",
            [](Generation * self, Chooser & chooser, Pacing * pacing, int32_t n_ctx, int32_t max_tokens, int32_t depth,
               bool ignore_eog, const std::vector<std::string> & stop, std::unordered_map<llama_token, std::string> preserved) {
                new (self) Generation(chooser, pacing, {n_ctx, max_tokens, depth, ignore_eog, stop, std::move(preserved)});
            },
            nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), "chooser"_a, "pacing"_a.none(), nb::kw_only(), "n_ctx"_a, "max_tokens"_a, "depth"_a, "ignore_eog"_a = false,
            "stop"_a = std::vector<std::string>(), "preserved"_a = std::unordered_map<llama_token, std::string>(),
            "preserved: control tokens that the text has, and how it spells them.")
        .def("begin", &Generation::begin, "session"_a, "first"_a, no_gil)
        .def(
            "rounds",
            [](Generation & self, Session & session, Turns & turns, double seconds) {
                const auto look_for_signals = [&turns] {
                    const nb::gil_scoped_acquire acquired;
                    turns.pass();  // with the GIL: see release_team above
                    if (PyErr_CheckSignals() != 0) throw nb::python_error();
                };
                std::optional<std::string> shown;
                {
                    const nb::gil_scoped_release released;
                    shown = self.rounds(session, turns, seconds, look_for_signals);
                }
                turns.pass();  // with the GIL, as above
                return shown;
            },
            "session"_a, "turns"_a, "seconds"_a = 0.0)
        .def("finish", &Generation::finish)
        .def_prop_ro("wants_plain_context", &Generation::wants_plain_context)
        .def_prop_ro(
            "end",
            [](const Generation & self) -> std::optional<std::string> {
                switch (self.end()) {
                    case Generation::End::stop: return "stop";
                    case Generation::End::length: return "length";
                    case Generation::End::cancelled: return "cancelled";
                    default: return {};
                }
            },
            "How the text ended; None while it goes on.")
        .def_prop_ro("whole", &Generation::whole)
        .def_prop_ro("tokens", &Generation::tokens)
        .def_prop_ro("chosen", &Generation::chosen)
        .def_prop_ro("text", &Generation::text)
        .def_prop_ro("counts", &Generation::counts)
        .def(
            "pieces",
            [](const Generation & self, size_t from) {
                std::vector<std::tuple<std::string, llama_token, const char *>> pieces;
                for (Piece & piece : self.pieces(from)) {
                    pieces.emplace_back(std::move(piece.text), piece.token, origin_names[size_t(piece.origin)]);
                }
                return pieces;
            },
            "start"_a, "Emitted tokens whose text is shown: text, token, origin.");
}
