// Which CPU back end runs.
#include <cstdlib>
#include <vector>

#include "tf_ops/codec/cpu/backend.h"

namespace hvd8bit {
namespace {

// Fastest first.
std::vector<const Backend*> Built() {
  std::vector<const Backend*> built;
  for (const Backend* backend : {Avx512Backend(), Avx2Backend(), ScalarBackend()}) {
    if (backend != nullptr) {
      built.push_back(backend);
    }
  }
  return built;
}

std::string Names(bool runnable_only) {
  std::string names;
  for (const Backend* backend : Built()) {
    if (!runnable_only || backend->supported()) {
      names += (names.empty() ? "" : ",") + std::string(backend->name);
    }
  }
  return names;
}

struct Choice {
  const Backend* backend;
  std::string error;
};

Choice Choose() {
  const char* forced = std::getenv("HVD8BIT_CPU");
  const std::string runnable = Names(true);
  const std::string name =
      forced == nullptr || *forced == '\0' ? runnable.substr(0, runnable.find(',')) : std::string(forced);
  const Backend* backend = FindBackend(name);
  return {backend, backend != nullptr
                       ? ""
                       : "HVD8BIT_CPU must name a back end that was built and that this CPU runs (" +
                             runnable + "), got '" + name + "'; unset it to take the fastest"};
}

}  // namespace

std::string ChooseBackend(const Backend** backend) {
  static const Choice* choice = new Choice(Choose());
  *backend = choice->backend;
  return choice->error;
}

std::string BuiltBackends() { return Names(false); }

std::string RunnableBackends() { return Names(true); }

const Backend* FindBackend(const std::string& name) {
  for (const Backend* backend : Built()) {
    if (backend->name == name && backend->supported()) {
      return backend;
    }
  }
  return nullptr;
}

}  // namespace hvd8bit
