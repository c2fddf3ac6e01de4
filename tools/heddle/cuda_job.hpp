// The part of --engine cuda that only a build with CUDA has.
#pragma once

namespace heddle::tool {

/// Asked in a child process: a process that has used CUDA cannot fork ranks that do.
int gpus_present();

}  // namespace heddle::tool
