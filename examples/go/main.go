// Command baton is a client of Baton with grpc-go and generated stubs: baton stream "Sort: pear apple mango".
package main

import (
	"context"
	"fmt"
	"io"
	"math/rand"
	"os"
	"strconv"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"baton.example/client/inferencepb"
)

const (
	enough      = 3 // messages of tokens, before a cancel
	attempts    = 10
	callTimeout = 10 * time.Second

	// When a silent router is asked, and how long it and another one have to answer (docs/streams.md, "A router that hangs").
	gaps            = 2
	shortestSilence = 150 * time.Millisecond
	answerTimeout   = 100 * time.Millisecond
	progressTimeout = 250 * time.Millisecond
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

// answer is what has come of one answer: sums, and the ids.
type answer struct {
	position inferencepb.AnswerPosition
	ids      []uint32
}

// resume prints an answer without a gap, over the loss of a router: the next one gives the rest (docs/streams.md).
func resume(ctx context.Context, clients []client, prompt string) error {
	request := greedy(prompt)
	request.Response = &inferencepb.ResponseOptions{Keep: &durationpb.Duration{Seconds: 30}}
	handle, answers, failures := "", map[uint32]*answer{}, 0
	for attempt := 0; ; attempt++ {
		before := time.Now()
		c, another := clients[attempt%len(clients)], clients[(attempt+1)%len(clients)]
		isOver, err := read(ctx, c, another, uint32(attempt), request, &handle, answers)
		if isOver {
			fmt.Println()
			return nil
		}
		if time.Since(before) > time.Second {
			failures = 0
		}
		if failures++; handle == "" || failures > attempts || !isLost(err) {
			return err
		}
		if err := sleep(ctx, 50*time.Millisecond<<failures); err != nil {
			return err
		}
	}
}

// read reads one stream of an answer; true at its end.
func read(ctx context.Context, c, another client, attempt uint32, request *inferencepb.GenerateRequest, handle *string, answers map[uint32]*answer) (bool, error) {
	ctx, end := context.WithCancel(ctx)
	defer end()
	var responses receiver
	var err error
	if attempt == 0 {
		responses, err = c.Generate(ctx, request)
	} else {
		asked := &inferencepb.ResumeGenerationRequest{Handle: *handle, Attempt: attempt, Request: request}
		for index := uint32(0); index < uint32(len(answers)); index++ {
			one := answers[index]
			asked.Have = append(asked.Have, &one.position)
			asked.Received = append(asked.Received, &inferencepb.TokenIds{Ids: one.ids})
		}
		responses, err = c.ResumeGeneration(ctx, asked)
	}
	if err != nil {
		return false, err
	}
	arrived := receiveAll(ctx, responses)
	heard, gap, due := time.Now(), time.Duration(0), time.Second
	for {
		var response *inferencepb.GenerateResponse
		select {
		case next := <-arrived:
			if response = next.response; next.err != nil {
				return false, next.err
			}
		case <-time.After(due - time.Since(heard)):
			if *handle != "" && hangs(ctx, c, another, *handle, answers) {
				return false, status.Error(codes.Unavailable, "the router says nothing, and does not answer")
			}
			due = 2 * time.Since(heard)
			continue
		}
		started := response.GetStarted()
		if resumed := response.GetResumed(); resumed != nil {
			started = resumed.Started
		}
		if given := started.GetResumption(); given != nil {
			*handle, request.Sampling.Seed = given.Handle, &given.Seed
		}
		if token := response.GetToken(); token != nil {
			add(answers, token)
			printText(token.Text)
			if gap = gap * 9 / 10; time.Since(heard) > gap {
				gap = time.Since(heard)
			}
			if due = gaps * gap; due < shortestSilence {
				due = shortestSilence
			}
		}
		heard = time.Now()
		if response.GetFinished() != nil {
			return true, nil
		}
	}
}

type receiver interface {
	Recv() (*inferencepb.GenerateResponse, error)
}

type received struct {
	response *inferencepb.GenerateResponse
	err      error
}

// receiveAll passes on what comes of a call, until its end or that of the context.
func receiveAll(ctx context.Context, responses receiver) <-chan received {
	arrived := make(chan received)
	go func() {
		for {
			response, err := responses.Recv()
			select {
			case arrived <- received{response, err}:
			case <-ctx.Done():
				return
			}
			if err != nil {
				return
			}
		}
	}()
	return arrived
}

// hangs is true if a router does not answer, and another one sees more of the answer than has come.
func hangs(ctx context.Context, c, another client, handle string, answers map[uint32]*answer) bool {
	asking, end := context.WithTimeout(ctx, answerTimeout)
	defer end()
	if _, err := c.GetServerInfo(asking, &inferencepb.GetServerInfoRequest{}); err == nil {
		return false
	}
	asking, stop := context.WithTimeout(ctx, progressTimeout)
	defer stop()
	progress, err := another.GetGenerationProgress(asking, &inferencepb.GetGenerationProgressRequest{Handle: handle})
	if err != nil {
		return false
	}
	for _, one := range progress.Answers {
		if known := answers[one.Index]; one.IsOver || one.Tokens > 0 && (known == nil || one.Tokens > known.position.Tokens) {
			return true
		}
	}
	return false
}

func add(answers map[uint32]*answer, token *inferencepb.TokenDelta) {
	one := answers[token.Index]
	if one == nil {
		one = &answer{position: inferencepb.AnswerPosition{Index: token.Index}}
		answers[token.Index] = one
	}
	one.ids = append(one.ids, token.TokenIds...)
	one.position.Tokens = uint32(len(one.ids))
	one.position.TextBytes += uint64(len(token.Text))
	one.position.ReasoningBytes += uint64(len(token.Reasoning))
	one.position.ToolCalls += uint32(len(token.ToolCalls))
}

// isLost is true if the connection or the router is lost, and not if the request is refused.
func isLost(err error) bool {
	code := status.Code(err)
	return err == io.EOF || code == codes.Unavailable || code == codes.Internal || code == codes.Aborted
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

func run(ctx context.Context, clients []client, words []string) error {
	c := clients[0]
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
	case "resume":
		return resume(ctx, clients, words[1])
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
	var clients []client
	for _, one := range strings.Split(address, ",") {
		connection, err := grpc.Dial(one, grpc.WithInsecure())
		if err != nil {
			explain(err)
			os.Exit(1)
		}
		defer connection.Close()
		clients = append(clients, inferencepb.NewInferenceServiceClient(connection))
	}
	if err := run(context.Background(), clients, os.Args[1:]); err != nil {
		explain(err)
		os.Exit(1)
	}
}
