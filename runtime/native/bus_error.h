// What becomes of a program whose model file changes under it.
//
// llama.cpp maps model files. Where a page of one can no longer be read (the file became shorter, its disk failed), the system
// sends SIGBUS to the thread that looked there, in the middle of a product. The handler puts zeros in the place of the file's
// rest, so that the product comes to its end, and notes which file it was; whoever decodes asks afterwards, and hands nothing
// out. Knows no model.
#pragma once

namespace sidecar {

// Handles SIGBUS so from now on. For programs, not for libraries: the handler is the process's. Does nothing where SIGBUS has a
// handler already, or there is no such signal. Where the file cannot be known (there is no /proc on macOS) or replaced, a line
// on stderr says what has happened, and the process ends as it would.
void survive_bus_errors();

// Throws LibraryError that names the first file of which a part was replaced by zeros, for as long as the process lives: what is
// loaded of it is no model any more.
void check_mapped_files();

}  // namespace sidecar
