// Command baton is a client of Baton with grpc-go and generated stubs: baton stream "Sort: pear apple mango".
package main

import (
	"context"
	"fmt"
	"io"
	"math/rand"
	"os"
	"strconv"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"baton.example/client/inferencepb"
)

const (
	enough      = 3 // messages of tokens, before a cancel
	attempts    = 10
	callTimeout = 10 * time.Second
)

type client = inferencepb.InferenceServiceClient

// stream prints a completion as it streams.
func stream(ctx context.Context, c client, prompt string) error {
	if err := each(ctx, c, greedy(prompt), printText); err != nil {
		return err
	}
	fmt.Println()
	return nil
}

// cancel cancels the call in the middle, which cancels the request on the workers.
func cancel(ctx context.Context, c client, prompt string) error {
	ctx, end := context.WithCancel(ctx)
	defer end()
	count := 0
	return each(ctx, c, greedy(prompt), func(text string) error {
		if count++; count == enough {
			end()
		}
		return printText(text)
	})
}

// stop cancels a request by its id, and prints what each worker confirmed.
func stop(ctx context.Context, c client, prompt string) error {
	request := greedy(prompt)
	request.RequestId = fmt.Sprintf("go-%016x", rand.Uint64())
	count := 0
	return each(ctx, c, request, func(string) error {
		if count++; count == enough {
			return cancelByID(ctx, c, request.RequestId)
		}
		return nil
	})
}

func cancelByID(ctx context.Context, c client, id string) error {
	ctx, end := context.WithTimeout(ctx, callTimeout)
	defer end()
	response, err := c.CancelGeneration(ctx, &inferencepb.CancelGenerationRequest{RequestId: id})
	for _, receipt := range response.GetReceipts() {
		fmt.Printf("stopped %v on %s: %d blocks freed\n", receipt.Stage, receipt.WorkerId, receipt.BlocksFreed)
	}
	return err
}

// deadline sets a deadline, which travels with the call to every worker.
func deadline(ctx context.Context, c client, seconds, prompt string) error {
	limit, err := strconv.ParseFloat(seconds, 64)
	if err != nil {
		return err
	}
	ctx, end := context.WithTimeout(ctx, time.Duration(limit*float64(time.Second)))
	defer end()
	return stream(ctx, c, prompt)
}

// retry retries transient failures after the delay that the server asks for, but not after text has been printed.
func retry(ctx context.Context, c client, prompt string) error {
	for attempt := 1; ; attempt++ {
		printed := false
		err := each(ctx, c, greedy(prompt), func(text string) error {
			printed = true
			return printText(text)
		})
		if err == nil {
			fmt.Println()
			return nil
		}
		if printed || attempt == attempts || !mayPass(err) {
			return err
		}
		if err := sleep(ctx, pause(err, attempt)); err != nil {
			return err
		}
	}
}

// provoke sends an invalid request, to show the details of an error.
func provoke(ctx context.Context, c client) error {
	request := greedy("x")
	temperature, topP := float32(-1), float32(2)
	request.Sampling = &inferencepb.SamplingParams{Temperature: &temperature, TopP: &topP}
	_, err := c.GenerateUnary(ctx, &inferencepb.GenerateUnaryRequest{Request: request})
	return err
}

func greedy(prompt string) *inferencepb.GenerateRequest {
	temperature := float32(0)
	return &inferencepb.GenerateRequest{
		Input:    &inferencepb.GenerateRequest_Prompt{Prompt: prompt},
		Sampling: &inferencepb.SamplingParams{Temperature: &temperature},
	}
}

func each(ctx context.Context, c client, request *inferencepb.GenerateRequest, take func(string) error) error {
	// Leaving early has to end the call.
	ctx, end := context.WithCancel(ctx)
	defer end()
	responses, err := c.Generate(ctx, request)
	if err != nil {
		return err
	}
	for {
		response, err := responses.Recv()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		if token := response.GetToken(); token != nil {
			if err := take(token.Text); err != nil {
				return err
			}
		}
	}
}

func printText(text string) error {
	_, err := fmt.Print(text)
	return err
}

func mayPass(err error) bool {
	code := status.Code(err)
	return code == codes.ResourceExhausted || code == codes.Unavailable
}

// pause is the delay before a retry: the server's, or else exponential backoff; with jitter in both cases.
func pause(err error, attempt int) time.Duration {
	asked, reason := 100*time.Millisecond<<attempt, ""
	if asked > 5*time.Second {
		asked = 5 * time.Second
	}
	for _, detail := range status.Convert(err).Details() {
		switch detail := detail.(type) {
		case *errdetails.RetryInfo:
			asked = detail.RetryDelay.AsDuration()
		case *errdetails.ErrorInfo:
			reason = detail.Reason
		}
	}
	wait := asked + time.Duration(rand.Int63n(int64(asked)/4+1))
	fmt.Fprintf(os.Stderr, "again in %.2f s: %s\n", wait.Seconds(), reason)
	return wait
}

func sleep(ctx context.Context, wait time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(wait):
		return nil
	}
}

// explain prints the whole status of a failed call.
func explain(err error) {
	failure := status.Convert(err)
	fmt.Fprintf(os.Stderr, "status %d: %s\n", failure.Code(), failure.Message())
	for _, detail := range failure.Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			fmt.Fprintf(os.Stderr, "reason %s\n", detail.Reason)
			if stage := detail.Metadata["stage"]; stage != "" {
				fmt.Fprintf(os.Stderr, "stage %s\n", stage)
			}
		case *errdetails.BadRequest:
			for _, violation := range detail.FieldViolations {
				fmt.Fprintf(os.Stderr, "field %s: %s\n", violation.Field, violation.Description)
			}
		}
	}
}

func run(ctx context.Context, c client, words []string) error {
	switch words[0] {
	case "stream":
		return stream(ctx, c, words[1])
	case "cancel":
		return cancel(ctx, c, words[1])
	case "stop":
		return stop(ctx, c, words[1])
	case "deadline":
		return deadline(ctx, c, words[1], words[2])
	case "retry":
		return retry(ctx, c, words[1])
	case "errors":
		return provoke(ctx, c)
	}
	return fmt.Errorf("no such command: %s", words[0])
}

func main() {
	rand.Seed(time.Now().UnixNano())
	address := os.Getenv("BATON_ADDRESS")
	if address == "" {
		address = "127.0.0.1:7070"
	}
	// Understood by every grpc-go since 1.33; newer ones would rather have NewClient and insecure.NewCredentials.
	connection, err := grpc.Dial(address, grpc.WithInsecure())
	if err == nil {
		defer connection.Close()
		err = run(context.Background(), inferencepb.NewInferenceServiceClient(connection), os.Args[1:])
	}
	if err != nil {
		explain(err)
		os.Exit(1)
	}
}
