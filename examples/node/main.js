// A client of Baton with Connect's gRPC transport and generated stubs: node main.js stream "Sort: pear apple mango".

import { randomUUID } from "node:crypto";
import { setTimeout as sleep } from "node:timers/promises";
import { Code, ConnectError, createClient } from "@connectrpc/connect";
import { createGrpcTransport, Http2SessionManager } from "@connectrpc/connect-node";
import { durationMs } from "@bufbuild/protobuf/wkt";
import { InferenceService } from "./gen/baton/inference/v1/inference_service_pb.js";
import { Stage } from "./gen/baton/inference/v1/timing_pb.js";
import { BadRequestSchema, ErrorInfoSchema, RetryInfoSchema } from "./gen/google/rpc/error_details_pb.js";

const ENOUGH = 3; // messages of tokens, before a cancel
const ATTEMPTS = 10;
const CALL_MS = 10_000;
// When a silent router is asked, and how long it and another one have to answer (docs/streams.md, "A router that hangs").
const GAPS = 2;
const SHORTEST_MS = 150;
const ANSWER_MS = 100;
const PROGRESS_MS = 250;
const LOST = [Code.Unavailable, Code.Internal, Code.Aborted, Code.Canceled]; // also of proxies, and of cut connections
const MAY_PASS = [Code.ResourceExhausted, Code.Unavailable];

/** Prints a completion as it streams. */
async function stream(client, prompt) {
  for await (const text of texts(client.generate(greedy(prompt)))) process.stdout.write(text);
  process.stdout.write("\n");
}

/** Cancels the call in the middle, which cancels the request on the workers. */
async function cancel(client, prompt) {
  const controller = new AbortController();
  let count = 0;
  for await (const text of texts(client.generate(greedy(prompt), { signal: controller.signal }))) {
    process.stdout.write(text);
    if (++count === ENOUGH) controller.abort();
  }
}

/** Cancels a request by its id, and prints what each worker confirmed. */
async function stop(client, prompt) {
  const requestId = randomUUID();
  let count = 0;
  for await (const _ of texts(client.generate({ ...greedy(prompt), requestId }))) {
    if (++count !== ENOUGH) continue;
    const { receipts } = await client.cancelGeneration({ requestId }, { timeoutMs: CALL_MS });
    for (const { stage, workerId, blocksFreed } of receipts) {
      console.log(`stopped STAGE_${Stage[stage]} on ${workerId}: ${blocksFreed} blocks freed`);
    }
  }
}

/** Sets a deadline, which travels with the call to every worker. */
async function deadline(client, seconds, prompt) {
  const options = { timeoutMs: Number(seconds) * 1000 };
  for await (const text of texts(client.generate(greedy(prompt), options))) process.stdout.write(text);
  process.stdout.write("\n");
}

/** Retries transient failures after the delay that the server asks for, but not after text has been printed. */
async function retry(client, prompt) {
  for (let attempt = 1; ; attempt++) {
    let printed = false;
    try {
      for await (const text of texts(client.generate(greedy(prompt)))) {
        printed = true;
        process.stdout.write(text);
      }
      process.stdout.write("\n");
      return;
    } catch (error) {
      if (printed || attempt === ATTEMPTS || !MAY_PASS.includes(ConnectError.from(error).code)) throw error;
      await sleep(pauseMs(ConnectError.from(error), attempt));
    }
  }
}

/** Prints an answer without a gap, over the loss of a router: the next one gives the rest (docs/streams.md). */
async function resume(clients, prompt) {
  const request = { ...greedy(prompt), response: { keep: { seconds: 30n } } };
  const answers = new Map(); // by index: what has come, as sums, and the ids
  const heard = { at: Date.now(), gap: 0 };
  let handle = "";
  for (let attempt = 0, failures = 0; ; attempt++) {
    const have = [...answers.values()].map(({ ids, ...position }) => ({ ...position, tokens: ids.length }));
    const received = [...answers.values()].map(({ ids }) => ({ ids }));
    const [client, another] = [0, 1].map((next) => clients[(attempt + next) % clients.length]);
    const hung = new AbortController();
    const options = { signal: hung.signal };
    const call = attempt
      ? client.resumeGeneration({ handle, attempt, have, received, request }, options)
      : client.generate(request, options);
    const watch = setInterval(ask, 50);
    let due = 1000;
    try {
      for await (const { event } of call) {
        failures = 0;
        if (event.case === "token") {
          heard.gap = Math.max(0.9 * heard.gap, Math.min(Date.now() - heard.at, 1000));
          due = Math.max(SHORTEST_MS, GAPS * heard.gap);
        }
        heard.at = Date.now();
        const started = event.case === "resumed" ? event.value.started : event.case === "started" ? event.value : undefined;
        if (started?.resumption) {
          handle = started.resumption.handle;
          request.sampling.seed = started.resumption.seed;
        }
        if (event.case === "token") add(answers, event.value);
        if (event.case === "finished") return void process.stdout.write("\n");
      }
    } catch (error) {
      if (!handle || ++failures > ATTEMPTS || !LOST.includes(ConnectError.from(error).code)) throw error;
      await sleep(Math.min(1000, 50 * 2 ** (failures - 1)));
    } finally {
      clearInterval(watch);
    }

    /** Leaves a router that says nothing, and does not answer, if another one sees more of the answer than has come. */
    async function ask() {
      const silent = Date.now() - heard.at;
      if (!handle || silent < due) return;
      due = 2 * silent;
      const answered = () => true;
      if (await client.getServerInfo({}, { timeoutMs: ANSWER_MS }).then(answered, () => false)) return;
      const progress = await another.getGenerationProgress({ handle }, { timeoutMs: PROGRESS_MS }).catch(() => undefined);
      const isBehind = ({ index, tokens, isOver }) => isOver || tokens > (answers.get(index)?.ids.length ?? 0);
      if (Date.now() - heard.at >= silent && progress?.answers.some(isBehind)) hung.abort();
    }
  }
}

function add(answers, { index, text, reasoning, tokenIds, toolCalls }) {
  const empty = { index, ids: [], textBytes: 0n, reasoningBytes: 0n, toolCalls: 0 };
  const answer = answers.get(index) ?? empty;
  answers.set(index, answer);
  answer.ids.push(...tokenIds);
  answer.textBytes += BigInt(Buffer.byteLength(text));
  answer.reasoningBytes += BigInt(Buffer.byteLength(reasoning));
  answer.toolCalls += toolCalls.length;
  process.stdout.write(text);
}

/** Sends an invalid request, to show the details of an error. */
async function errors(client) {
  await client.generateUnary({ request: { ...greedy("x"), sampling: { temperature: -1, topP: 2 } } });
}

function greedy(prompt) {
  return { input: { case: "prompt", value: prompt }, sampling: { temperature: 0 } };
}

async function* texts(responses) {
  for await (const { event } of responses) if (event.case === "token") yield event.value.text;
}

/** The delay before a retry: the server's, or else exponential backoff; with jitter in both cases. */
function pauseMs(error, attempt) {
  const delay = error.findDetails(RetryInfoSchema)[0]?.retryDelay;
  const asked = delay ? durationMs(delay) : Math.min(100 * 2 ** attempt, 5000);
  const milliseconds = asked * (1 + Math.random() / 4);
  console.error(`again in ${(milliseconds / 1000).toFixed(2)} s: ${error.findDetails(ErrorInfoSchema)[0]?.reason}`);
  return milliseconds;
}

/** Prints the whole status of a failed call. */
function explain(error) {
  console.error(`status ${error.code}: ${error.rawMessage}`);
  for (const { reason, metadata } of error.findDetails(ErrorInfoSchema)) {
    console.error(`reason ${reason}`);
    if (metadata.stage) console.error(`stage ${metadata.stage}`);
  }
  for (const { fieldViolations } of error.findDetails(BadRequestSchema)) {
    for (const { field, description } of fieldViolations) console.error(`field ${field}: ${description}`);
  }
}

const [name, ...words] = process.argv.slice(2);
const command = { stream, cancel, stop, deadline, retry, errors }[name];
const addresses = (process.env.BATON_ADDRESS ?? "127.0.0.1:7070").split(",");
const managers = addresses.map((address) => new Http2SessionManager(`http://${address}`));
const clients = managers.map((sessionManager, at) =>
  createClient(InferenceService, createGrpcTransport({ baseUrl: `http://${addresses[at]}`, sessionManager })),
);
try {
  await (name === "resume" ? resume(clients, ...words) : command(clients[0], ...words));
} catch (error) {
  explain(ConnectError.from(error));
  process.exitCode = 1;
} finally {
  for (const manager of managers) manager.abort(); // else an open connection keeps the process
}
