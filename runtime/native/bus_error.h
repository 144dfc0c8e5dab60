// A line for whoever loses a program to a model file that changed under it.
//
// llama.cpp maps model files. Where a page of one can no longer be read (the file became shorter, its disk failed), the system
// sends SIGBUS to the thread that looked there, in the middle of a product: nothing can go on from that. So the process ends as it
// would, and only says before which file it was. Knows no model.
#pragma once

namespace sidecar {

// Writes such a line to stderr before a SIGBUS ends the process (exit status 128 + 7, to a shell). For programs, not for libraries:
// the handler is the process's. Does nothing where SIGBUS has a handler already, or there is no such signal.
void explain_bus_errors();

}  // namespace sidecar
