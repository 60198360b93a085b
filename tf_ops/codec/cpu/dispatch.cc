// Which CPU back end runs.
#include <cstdlib>
#include <vector>

#include "tf_ops/codec/cpu/backend.h"

namespace hvd8bit {
namespace {

// Fastest first.
std::vector<const Backend*> Backends() { return {&ScalarBackend()}; }

struct Choice {
  const Backend* backend = nullptr;
  std::string error;
};

Choice Choose() {
  const char* forced = std::getenv("HVD8BIT_CPU");
  std::string runnable;
  for (const Backend* backend : Backends()) {
    if (!backend->supported()) {
      continue;
    }
    if (forced == nullptr || *forced == '\0' || backend->name == std::string(forced)) {
      return {backend, ""};
    }
    runnable += (runnable.empty() ? "" : ", ") + std::string(backend->name);
  }
  return {nullptr, "HVD8BIT_CPU must name a back end that was built and that this CPU runs (" + runnable + "), got '" +
                       forced + "'; unset it to take the fastest"};
}

}  // namespace

std::string ChooseBackend(const Backend** backend) {
  static const Choice* choice = new Choice(Choose());
  *backend = choice->backend;
  return choice->error;
}

std::string BuiltBackends() {
  std::string all;
  for (const Backend* backend : Backends()) {
    all += (all.empty() ? "" : ",") + std::string(backend->name);
  }
  return all;
}

}  // namespace hvd8bit
