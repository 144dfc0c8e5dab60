#include "drafter.h"

#include <map>
#include <stdexcept>

namespace sidecar {

namespace {

std::map<std::string, MakeDrafter> & registry() {
    static std::map<std::string, MakeDrafter> makers;  // a local static: drafters register before main's own statics
    return makers;
}

}  // namespace

Registered::Registered(const char * kind, MakeDrafter make) { registry()[kind] = make; }

std::vector<std::string> drafter_kinds() {
    std::vector<std::string> kinds;
    for (const auto & [kind, make] : registry()) kinds.push_back(kind);
    return kinds;
}

std::unique_ptr<Drafter> make_drafter(const std::string & kind, const DrafterOptions & options) {
    const auto found = registry().find(kind);
    if (found == registry().end()) {
        std::string known;
        for (const std::string & name : drafter_kinds()) known += known.empty() ? name : ", " + name;
        throw std::invalid_argument("no drafter of kind '" + kind + "' (there are: " + known + ")");
    }
    return found->second(options);
}

}  // namespace sidecar
