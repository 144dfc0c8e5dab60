#include "pace_bindings.h"

#include <nanobind/stl/vector.h>
#include <nanobind/trampoline.h>

#include <utility>
#include <vector>

#include "pace.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace sidecar;

namespace {

// A Python class as Pacing. Each call takes the GIL itself.
class PythonPacing final : public Pacing {
    NB_TRAMPOLINE(Pacing);

    bool drafting() const override { NB_OVERRIDE_PURE(drafting); }
    int32_t depth() const override { NB_OVERRIDE_PURE(depth); }
    void plain_in_place() override { NB_OVERRIDE_PURE(plain_in_place); }
    void switched(double seconds) override { NB_OVERRIDE_PURE(switched, seconds); }
    void observe(int32_t n_drafted, int32_t n_accepted, double draft_s, double verify_s) override {
        NB_OVERRIDE_PURE(observe, n_drafted, n_accepted, draft_s, verify_s);
    }
};

}  // namespace

void bind_pace(nb::module_ & m) {
    nb::class_<Pacing, PythonPacing>(
        m, "Pacing", "Who chooses the depth of each round: asked before it, told after it. A subclass implements every method.")
        .def(nb::init<>())
        .def("drafting", &Pacing::drafting,
             "Where the next round belongs: in the context that drafts, or (False) in the plain one.")
        .def("depth", &Pacing::depth, "How many tokens to draft in the next round; 0 while drafting: one row, decoded in place.")
        .def("plain_in_place", &Pacing::plain_in_place,
             "Tells that plain rounds run in the context that drafts, for want of another.")
        .def("switched", &Pacing::switched, "seconds"_a, "Tells how long moving from one context to the other took.")
        .def("delayed", &Pacing::delayed, "seconds"_a, "Tells how long making the plain context took.")
        .def("observe", &Pacing::observe, "n_drafted"_a, "n_accepted"_a, "draft_s"_a, "verify_s"_a,
             "Tells what a round did: drafts made, those that stood, seconds of the drafter and of the target's decode.");

    // What the look-up found is never asked of a Python class: these are Pace's alone.
    auto pace = nb::class_<Pace, Pacing>(m, "Pace", "See pace.h, and pace.py for Python's view.");
    pace.def(
            "__init__",
            [](Pace * self, int32_t max_depth, double plain_s, std::vector<double> verify_s, double first_draft_s,
               double draft_step_s, double catch_up_s, double draft_change_s, double overhead_s, double change_s,
               double switch_s, bool has_drafter) {
                new (self) Pace({plain_s, std::move(verify_s), first_draft_s, draft_step_s, catch_up_s, draft_change_s, overhead_s,
                                 change_s},
                                max_depth, switch_s, has_drafter);
            },
            nb::kw_only(), "max_depth"_a, "plain_s"_a, "verify_s"_a, "first_draft_s"_a, "draft_step_s"_a, "catch_up_s"_a,
            "draft_change_s"_a, "overhead_s"_a, "change_s"_a, "switch_s"_a, "has_drafter"_a = true)
        .def("depth_found", &Pace::depth_found, "n_found"_a, "n_matched"_a,
             "How many of the tokens found after a match the next round is to verify in place of drafts.")
        .def("observe_found", &Pace::observe_found, "n_drafted"_a, "n_accepted"_a, "verify_s"_a,
             "Tells what such a round did.")
        .def("compare_found", &Pace::compare_found, "n_matched"_a, "n_compared"_a, "n_right"_a,
             "Tells how many of the tokens found could be compared with the text, and were right.")
        .def_prop_ro("max_depth", &Pace::max_depth)
        .def_prop_ro("plain_s", &Pace::plain_s, "Seconds of a plain decode; of a single row's after plain_in_place().")
        .def_prop_rw("switch_s", &Pace::switch_s, &Pace::switched, "Seconds of moving to the other context, one way.")
        .def_prop_ro("acceptance", &Pace::acceptance, "By position: the chance that a draft stands when all before it do.")
        .def("speedup", &Pace::speedup, "depth"_a, "Expected speed at this depth over plain decoding's.");
    pace.attr("MAX_WAIT") = Pace::max_wait;
}
