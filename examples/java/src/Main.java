import static java.util.concurrent.TimeUnit.MILLISECONDS;
import static java.util.concurrent.TimeUnit.SECONDS;

import baton.inference.v1.Generate.CancelGenerationRequest;
import baton.inference.v1.Generate.CancelReceipt;
import baton.inference.v1.Generate.GenerateRequest;
import baton.inference.v1.Generate.GenerateResponse;
import baton.inference.v1.Generate.GenerateUnaryRequest;
import baton.inference.v1.InferenceServiceGrpc;
import baton.inference.v1.InferenceServiceGrpc.InferenceServiceBlockingStub;
import baton.inference.v1.Sampling.SamplingParams;
import com.google.protobuf.Any;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.protobuf.Message;
import com.google.protobuf.util.Durations;
import com.google.rpc.BadRequest;
import com.google.rpc.ErrorInfo;
import com.google.rpc.RetryInfo;
import io.grpc.Context;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.protobuf.StatusProto;
import java.util.Iterator;
import java.util.Optional;
import java.util.Set;
import java.util.UUID;
import java.util.concurrent.ThreadLocalRandom;

/** A client of Baton with grpc-java's blocking stub. */
public final class Main {
  private static final int ENOUGH = 3; // messages of tokens, before a cancel
  private static final int ATTEMPTS = 10;
  private static final int CALL_SECONDS = 10;
  private static final Set<Status.Code> MAY_PASS = Set.of(Status.Code.RESOURCE_EXHAUSTED, Status.Code.UNAVAILABLE);

  private final InferenceServiceBlockingStub stub;

  private Main(InferenceServiceBlockingStub stub) {
    this.stub = stub;
  }

  /** Prints a completion as it streams. */
  private void stream(String prompt) {
    print(stub.generate(greedy(prompt).build()));
  }

  /** Cancels the call in the middle, which cancels the request on the workers. */
  private void cancel(String prompt) {
    Context.CancellableContext context = Context.current().withCancellation();
    context.run(
        () -> {
          int count = 0;
          for (Iterator<GenerateResponse> call = stub.generate(greedy(prompt).build()); call.hasNext(); ) {
            GenerateResponse response = call.next();
            if (!response.hasToken()) {
              continue;
            }
            printNow(response.getToken().getText());
            if (++count == ENOUGH) {
              context.cancel(null);
            }
          }
        });
  }

  /** Cancels a request by its id, and prints what each worker confirmed. */
  private void stop(String prompt) {
    String id = UUID.randomUUID().toString();
    int count = 0;
    for (Iterator<GenerateResponse> call = stub.generate(greedy(prompt).setRequestId(id).build()); call.hasNext(); ) {
      if (call.next().hasToken() && ++count == ENOUGH) {
        cancelById(id);
      }
    }
  }

  private void cancelById(String id) {
    CancelGenerationRequest request = CancelGenerationRequest.newBuilder().setRequestId(id).build();
    for (CancelReceipt receipt :
        stub.withDeadlineAfter(CALL_SECONDS, SECONDS).cancelGeneration(request).getReceiptsList()) {
      System.out.printf(
          "stopped %s on %s: %d blocks freed%n", receipt.getStage(), receipt.getWorkerId(), receipt.getBlocksFreed());
    }
  }

  /** Sets a deadline, which travels with the call to every worker. */
  private void deadline(double seconds, String prompt) {
    print(stub.withDeadlineAfter((long) (seconds * 1000), MILLISECONDS).generate(greedy(prompt).build()));
  }

  /** Retries transient failures after the delay that the server asks for, but not after text has been printed. */
  private void retry(String prompt) throws InterruptedException {
    for (int attempt = 1; ; attempt++) {
      Iterator<GenerateResponse> call = stub.generate(greedy(prompt).build());
      try {
        // The first message comes after the request was admitted: later failures are not retried.
        call.hasNext();
      } catch (StatusRuntimeException error) {
        if (attempt == ATTEMPTS || !MAY_PASS.contains(error.getStatus().getCode())) {
          throw error;
        }
        MILLISECONDS.sleep(pauseMillis(error, attempt));
        continue;
      }
      print(call);
      return;
    }
  }

  /** Sends an invalid request, to show the details of an error. */
  private void errors() {
    SamplingParams wrong = SamplingParams.newBuilder().setTemperature(-1).setTopP(2).build();
    stub.generateUnary(GenerateUnaryRequest.newBuilder().setRequest(greedy("x").setSampling(wrong)).build());
  }

  private static GenerateRequest.Builder greedy(String prompt) {
    return GenerateRequest.newBuilder()
        .setPrompt(prompt)
        .setSampling(SamplingParams.newBuilder().setTemperature(0));
  }

  private static void print(Iterator<GenerateResponse> call) {
    call.forEachRemaining(response -> printNow(response.getToken().getText()));
    System.out.println();
  }

  private static void printNow(String text) {
    System.out.print(text);
    System.out.flush();
  }

  /** The delay before a retry: the server's, or else exponential backoff; with jitter in both cases. */
  private static long pauseMillis(StatusRuntimeException error, int attempt) {
    long asked =
        detail(error, RetryInfo.class)
            .map(info -> Durations.toMillis(info.getRetryDelay()))
            .orElse(Math.min(100L << attempt, 5000));
    long wait = asked + ThreadLocalRandom.current().nextLong(asked / 4 + 1);
    String reason = detail(error, ErrorInfo.class).map(ErrorInfo::getReason).orElse("");
    System.err.printf("again in %.2f s: %s%n", wait / 1000.0, reason);
    return wait;
  }

  /** Prints the whole status of a failed call. */
  private static void explain(StatusRuntimeException error) {
    Status status = error.getStatus();
    System.err.printf("status %d: %s%n", status.getCode().value(), status.getDescription());
    detail(error, ErrorInfo.class)
        .ifPresent(
            info -> {
              System.err.println("reason " + info.getReason());
              if (info.containsMetadata("stage")) {
                System.err.println("stage " + info.getMetadataOrThrow("stage"));
              }
            });
    detail(error, BadRequest.class)
        .ifPresent(
            bad ->
                bad.getFieldViolationsList()
                    .forEach(each -> System.err.printf("field %s: %s%n", each.getField(), each.getDescription())));
  }

  /** The detail of that type, if the status has one. */
  private static <T extends Message> Optional<T> detail(StatusRuntimeException error, Class<T> type) {
    com.google.rpc.Status status = StatusProto.fromThrowable(error);
    for (Any packed : status.getDetailsList()) {
      if (packed.is(type)) {
        try {
          return Optional.of(packed.unpack(type));
        } catch (InvalidProtocolBufferException broken) {
          return Optional.empty();
        }
      }
    }
    return Optional.empty();
  }

  private void run(String[] words) throws InterruptedException {
    switch (words[0]) {
      case "stream" -> stream(words[1]);
      case "cancel" -> cancel(words[1]);
      case "stop" -> stop(words[1]);
      case "deadline" -> deadline(Double.parseDouble(words[1]), words[2]);
      case "retry" -> retry(words[1]);
      case "errors" -> errors();
      default -> throw new IllegalArgumentException("no such command: " + words[0]);
    }
  }

  public static void main(String[] words) throws InterruptedException {
    String address = System.getenv().getOrDefault("BATON_ADDRESS", "127.0.0.1:7070");
    ManagedChannel channel = ManagedChannelBuilder.forTarget(address).usePlaintext().build();
    int code = 0;
    try {
      new Main(InferenceServiceGrpc.newBlockingStub(channel)).run(words);
    } catch (StatusRuntimeException error) {
      explain(error);
      code = 1;
    } finally {
      channel.shutdownNow();
    }
    System.exit(code);
  }
}
