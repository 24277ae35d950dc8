// A client of Baton by OpenAI's own package: streams, tools, structured outputs, images, embeddings, errors and retries.
import { readFileSync } from "node:fs";
import OpenAI from "openai";
import { makeParseableResponseFormat } from "openai/lib/parser";

const [command, ...words] = process.argv.slice(2);
const client = new OpenAI({
  baseURL: process.env.BATON_OPENAI ?? "http://127.0.0.1:8000/v1",
  apiKey: process.env.BATON_TOKEN ?? "any",
  maxRetries: command === "retry" ? 5 : 0,
});
const model = process.env.BATON_MODEL ?? "demo";

const WEATHER = {
  type: "function",
  function: {
    name: "weather",
    description: "The weather in a city",
    parameters: { type: "object", properties: { city: { type: "string" } } },
  },
};

async function stream(prompt) {
  const answer = await client.chat.completions.create({
    model,
    messages: [{ role: "user", content: prompt }],
    temperature: 0,
    stream: true,
    stream_options: { include_usage: true },
  });
  let usage = null;
  for await (const chunk of answer) {
    process.stdout.write(chunk.choices[0]?.delta?.content ?? "");
    usage = chunk.usage ?? usage;
  }
  process.stdout.write("\n");
  console.error(`${usage.completion_tokens} tokens`);
}

async function tools(prompt) {
  const messages = [{ role: "user", content: prompt }];
  const first = client.chat.completions.stream({ model, messages, tools: [WEATHER] });
  const { message, finish_reason } = (await first.finalChatCompletion()).choices[0];
  for (const call of message.tool_calls ?? []) {
    console.log(`${finish_reason} ${call.function.name} ${call.function.arguments}`);
    messages.push(message, { role: "tool", tool_call_id: call.id, content: "rain" });
  }
  const second = await client.chat.completions.create({ model, messages, tools: [WEATHER], tool_choice: "none" });
  console.log(second.choices[0].message.content);
}

const PET = {
  type: "object",
  properties: { name: { type: "string", maxLength: 8 }, kind: { enum: ["cat", "dog"] } },
  required: ["name", "kind"],
  additionalProperties: false,
};

async function parse(prompt) {
  const format = { type: "json_schema", json_schema: { name: "pet", strict: true, schema: PET } };
  const { choices } = await client.chat.completions.parse({
    model,
    messages: [{ role: "user", content: prompt }],
    response_format: makeParseableResponseFormat(format, JSON.parse),
    max_tokens: 100,
  });
  const { name, kind } = choices[0].message.parsed;
  console.log(`${typeof name} ${kind}`);
}

async function picture(file, prompt) {
  const url = `data:image/png;base64,${readFileSync(file).toString("base64")}`;
  const content = [{ type: "image_url", image_url: { url } }, { type: "text", text: prompt }];
  const answer = await client.chat.completions.create({ model, messages: [{ role: "user", content }], temperature: 0 });
  console.log(answer.choices[0].message.content);
}

async function embed(...texts) {
  const { data, usage } = await client.embeddings.create({ model, input: texts });
  for (const { embedding } of data) {
    console.log(JSON.stringify(embedding));
  }
  console.error(`${usage.prompt_tokens} tokens`);
}

async function errors() {
  const wrong = [
    { model, prompt: "x", temperature: -1 },
    { model: "no-such-model", prompt: "x" },
    { model, prompt: "x", best_of: 2 },
  ];
  for (const body of wrong) {
    try {
      await client.completions.create(body);
    } catch (error) {
      console.log(`${error.constructor.name} ${error.status} ${error.code} ${error.param}`);
    }
  }
}

async function retry(prompt) {
  const answer = await client.completions.create({ model, prompt, max_tokens: 3 });
  console.log(answer.choices[0].finish_reason);
}

const commands = { stream, tools, parse, picture, embed, errors, retry };
try {
  await commands[command](...words);
} catch (error) {
  console.error(`${error.constructor.name} ${error.status}: ${error.message}`);
  process.exit(1);
}
