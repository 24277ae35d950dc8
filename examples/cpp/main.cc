// A client of Baton with gRPC C++'s synchronous API: baton stream "Sort: pear apple mango".

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <google/protobuf/util/time_util.h>
#include <grpcpp/grpcpp.h>

#include "baton/inference/v1/inference_service.grpc.pb.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"

namespace {

namespace pb = baton::inference::v1;
using std::chrono::milliseconds;
using std::chrono::system_clock;
using Stub = pb::InferenceService::Stub;
// Takes the text of one message.
using Take = std::function<void(const std::string&)>;

constexpr int kEnough = 3;  // messages of tokens, before a cancel
constexpr int kAttempts = 10;
constexpr std::chrono::seconds kCallTimeout{10};

// The details of a failed call's status. Empty if it comes from a proxy, or from gRPC itself.
struct Details {
  google::rpc::ErrorInfo info;
  google::rpc::BadRequest bad_request;
  google::rpc::RetryInfo retry;

  explicit Details(const grpc::Status& failure) {
    google::rpc::Status status;
    if (!status.ParseFromString(failure.error_details())) return;
    for (const auto& packed : status.details()) {
      // Each takes what is of its own type, and leaves the rest alone.
      packed.UnpackTo(&info) || packed.UnpackTo(&bad_request) || packed.UnpackTo(&retry);
    }
  }
};

pb::GenerateRequest Greedy(const std::string& prompt) {
  pb::GenerateRequest request;
  request.set_prompt(prompt);
  request.mutable_sampling()->set_temperature(0);
  return request;
}

void Print(const std::string& text) { std::cout << text << std::flush; }

grpc::Status Each(Stub& stub, grpc::ClientContext& context, const pb::GenerateRequest& request, const Take& take) {
  auto call = stub.Generate(&context, request);
  for (pb::GenerateResponse response; call->Read(&response);) {
    if (response.has_token()) take(response.token().text());
  }
  return call->Finish();
}

grpc::Status PrintAnswer(Stub& stub, grpc::ClientContext& context, const std::string& prompt) {
  grpc::Status status = Each(stub, context, Greedy(prompt), Print);
  if (status.ok()) std::cout << std::endl;
  return status;
}

// Prints a completion as it streams.
grpc::Status Stream(Stub& stub, const std::string& prompt) {
  grpc::ClientContext context;
  return PrintAnswer(stub, context, prompt);
}

// Cancels the call in the middle, which cancels the request on the workers.
grpc::Status Cancel(Stub& stub, const std::string& prompt) {
  grpc::ClientContext context;
  int count = 0;
  return Each(stub, context, Greedy(prompt), [&](const std::string& text) {
    Print(text);
    if (++count == kEnough) context.TryCancel();
  });
}

void CancelById(Stub& stub, const std::string& id) {
  grpc::ClientContext context;
  context.set_deadline(system_clock::now() + kCallTimeout);
  pb::CancelGenerationRequest request;
  request.set_request_id(id);
  pb::CancelGenerationResponse response;
  stub.CancelGeneration(&context, request, &response);  // if it fails, the request goes on, and its stream says so
  for (const auto& receipt : response.receipts()) {
    std::cout << "stopped " << pb::Stage_Name(receipt.stage()) << " on " << receipt.worker_id() << ": "
              << receipt.blocks_freed() << " blocks freed" << std::endl;
  }
}

// Cancels a request by its id, and prints what each worker confirmed.
grpc::Status Stop(Stub& stub, const std::string& prompt) {
  pb::GenerateRequest request = Greedy(prompt);
  request.set_request_id("cpp-" + std::to_string(std::random_device{}()));
  grpc::ClientContext context;
  int count = 0;
  return Each(stub, context, request, [&](const std::string&) {
    if (++count == kEnough) CancelById(stub, request.request_id());
  });
}

// Sets a deadline, which travels with the call to every worker.
grpc::Status Deadline(Stub& stub, double seconds, const std::string& prompt) {
  grpc::ClientContext context;
  context.set_deadline(system_clock::now() + milliseconds(static_cast<int64_t>(seconds * 1000)));
  return PrintAnswer(stub, context, prompt);
}

bool MayPass(const grpc::Status& failure) {
  return failure.error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED ||
         failure.error_code() == grpc::StatusCode::UNAVAILABLE;
}

// The delay before a retry: the server's, or else exponential backoff; with jitter in both cases.
milliseconds Pause(const grpc::Status& failure, int attempt) {
  const Details details(failure);
  double asked = std::min(100.0 * (1 << attempt), 5000.0);
  if (details.retry.has_retry_delay()) {
    asked = static_cast<double>(google::protobuf::util::TimeUtil::DurationToMilliseconds(details.retry.retry_delay()));
  }
  std::mt19937 random(std::random_device{}());
  const double wait = asked * std::uniform_real_distribution<>(1, 1.25)(random);
  std::cerr << "again in " << wait / 1000 << " s: " << details.info.reason() << std::endl;
  return milliseconds(static_cast<int64_t>(wait));
}

// Retries transient failures after the delay that the server asks for, but not after text has been printed.
grpc::Status Retry(Stub& stub, const std::string& prompt) {
  for (int attempt = 1;; ++attempt) {
    grpc::ClientContext context;  // each call needs its own
    bool printed = false;
    grpc::Status status = Each(stub, context, Greedy(prompt), [&](const std::string& text) {
      printed = true;
      Print(text);
    });
    if (status.ok()) std::cout << std::endl;
    if (status.ok() || printed || attempt == kAttempts || !MayPass(status)) return status;
    std::this_thread::sleep_for(Pause(status, attempt));
  }
}

// Sends an invalid request, to show the details of an error.
grpc::Status Errors(Stub& stub) {
  grpc::ClientContext context;
  pb::GenerateUnaryRequest request;
  *request.mutable_request() = Greedy("x");
  request.mutable_request()->mutable_sampling()->set_temperature(-1);
  request.mutable_request()->mutable_sampling()->set_top_p(2);
  pb::GenerateUnaryResponse response;
  return stub.GenerateUnary(&context, request, &response);
}

// Prints the whole status of a failed call.
void Explain(const grpc::Status& failure) {
  const Details details(failure);
  std::cerr << "status " << failure.error_code() << ": " << failure.error_message() << std::endl;
  if (!details.info.reason().empty()) std::cerr << "reason " << details.info.reason() << std::endl;
  if (auto stage = details.info.metadata().find("stage"); stage != details.info.metadata().end()) {
    std::cerr << "stage " << stage->second << std::endl;
  }
  for (const auto& violation : details.bad_request.field_violations()) {
    std::cerr << "field " << violation.field() << ": " << violation.description() << std::endl;
  }
}

grpc::Status Run(Stub& stub, const std::vector<std::string>& words) {
  const std::string& name = words.at(0);
  if (name == "stream") return Stream(stub, words.at(1));
  if (name == "cancel") return Cancel(stub, words.at(1));
  if (name == "stop") return Stop(stub, words.at(1));
  if (name == "deadline") return Deadline(stub, std::stod(words.at(1)), words.at(2));
  if (name == "retry") return Retry(stub, words.at(1));
  if (name == "errors") return Errors(stub);
  throw std::invalid_argument("no such command: " + name);
}

}  // namespace

int main(int argc, char** argv) {
  const char* address = std::getenv("BATON_ADDRESS");
  auto channel = grpc::CreateChannel(address ? address : "127.0.0.1:7070", grpc::InsecureChannelCredentials());
  auto stub = pb::InferenceService::NewStub(channel);
  const grpc::Status status = Run(*stub, {argv + 1, argv + argc});
  if (!status.ok()) Explain(status);
  return status.ok() ? 0 : 1;
}
