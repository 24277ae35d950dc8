// The Vercel AI SDK, unchanged, against Baton: OpenAI's provider by both of its APIs, and the one for compatible servers.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embedMany, generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const baseURL = process.env.BATON_OPENAI ?? "http://127.0.0.1:8000/v1";
const apiKey = process.env.BATON_TOKEN ?? "any";
const name = process.env.BATON_MODEL ?? "demo";
const openai = createOpenAI({ baseURL, apiKey });
const compatible = createOpenAICompatible({ name: "baton", baseURL, apiKey, supportsStructuredOutputs: true });

const city = z.enum(["Oslo", "Rome"]);
const weather = tool({
  description: "The weather in a city",
  inputSchema: z.object({ city }),
  execute: async ({ city }) => `rain in ${city}`,
});
const pet = z.object({ name: z.enum(["Rex", "Tom"]), kind: z.enum(["cat", "dog"]) });
// Nothing is stored, so the provider must send items, and not their ids.
const providerOptions = { openai: { store: false } };
const common = { maxRetries: 0, maxOutputTokens: 200, temperature: 0, providerOptions };
const onError = ({ error }) => console.error(`${error.name}: ${error.message}`);

// A small model calls a tool only where it must, so the first step requires it.
const calls = {
  ...common,
  prompt: "The weather in Oslo?",
  tools: { weather },
  stopWhen: stepCountIs(2),
  prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
};

function described(steps) {
  const [call] = steps[0].toolCalls;
  const known = city.safeParse(call.input.city).success ? "known" : "unknown";
  return `${call.toolName}, city ${known}, then ${typeof steps[1].text === "string" ? "a text" : steps[1].text}`;
}

const cases = {
  plain: async (model) => (await generateText({ ...common, model, prompt: "Sort: pear apple mango" })).text,
  streamed: async (model) => {
    let text = "";
    for await (const piece of streamText({ ...common, model, prompt: "Sort: pear apple mango", onError }).textStream) {
      text += piece;
    }
    return text;
  },
  tools: async (model) => described((await generateText({ ...calls, model })).steps),
  tools_streamed: async (model) => described(await streamText({ ...calls, model, onError }).steps),
  structured: async (model) => {
    const made = await generateText({ ...common, model, prompt: "A pet", output: Output.object({ schema: pet }) });
    return `Pet ${pet.safeParse(made.output).success}`;
  },
};

async function embeddings() {
  const { embeddings } = await embedMany({ model: openai.embedding(name), values: ["a", "b"], maxRetries: 0 });
  return `${embeddings.length} vectors, the same length ${embeddings[0].length === embeddings[1].length}`;
}

async function error() {
  try {
    return (await generateText({ ...common, model: openai("no-such-model"), prompt: "x" })).text;
  } catch (refused) {
    return `${refused.name} ${refused.statusCode}`;
  }
}

async function run(title, body) {
  try {
    console.log(`${title}: ${await body()}`);
  } catch (failure) {
    process.exitCode = 1;
    console.error(`${title}: ${failure.name}: ${failure.message}`);
  }
}

const models = { responses: openai(name), chat: openai.chat(name), compatible: compatible(name) };
for (const [api, model] of Object.entries(models)) {
  for (const [title, body] of Object.entries(cases)) {
    await run(`${api}_${title}`, () => body(model));
  }
}
await run("embeddings", embeddings);
await run("error", error);
