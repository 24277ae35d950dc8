// A client of Baton by Anthropic's own package: streams, tools, thinking, images, counts, errors and retries.
import { readFileSync } from "node:fs";
import Anthropic from "@anthropic-ai/sdk";

const [command, ...words] = process.argv.slice(2);
const client = new Anthropic({
  baseURL: process.env.BATON_ANTHROPIC ?? "http://127.0.0.1:8000",
  apiKey: process.env.BATON_TOKEN ?? "any",
  maxRetries: command === "retry" ? 5 : 0,
});
const model = process.env.BATON_MODEL ?? "demo";
const asks = (content) => ({ model, max_tokens: 200, messages: [{ role: "user", content }] });

const WEATHER = {
  name: "weather",
  description: "The weather in a city",
  input_schema: { type: "object", properties: { city: { type: "string" } } },
};

async function stream(prompt) {
  const answer = client.messages.stream(asks(prompt)).on("text", (text) => process.stdout.write(text));
  const { usage } = await answer.finalMessage();
  process.stdout.write("\n");
  console.error(`${usage.output_tokens} tokens`);
}

async function tools(prompt) {
  const body = { ...asks(prompt), tools: [WEATHER] };
  const first = await client.messages.stream(body).finalMessage();
  const results = [];
  for (const block of first.content.filter(({ type }) => type === "tool_use")) {
    console.log(`${first.stop_reason} ${block.name} ${JSON.stringify(block.input)}`);
    results.push({ type: "tool_result", tool_use_id: block.id, content: "rain" });
  }
  const turns = [...body.messages, { role: "assistant", content: first.content }, { role: "user", content: results }];
  const second = await client.messages.create({ ...body, messages: turns, tool_choice: { type: "none" } });
  console.log(second.content.map(({ text }) => text).join(""));
}

async function think(prompt) {
  const { content } = await client.messages.stream({ ...asks(prompt), thinking: { type: "adaptive" } }).finalMessage();
  console.log(content.map((block) => `${block.type}: ${block.thinking ?? block.text}`).join("\n"));
}

async function picture(file, prompt) {
  const source = { type: "base64", media_type: "image/png", data: readFileSync(file).toString("base64") };
  const { content } = await client.messages.create(asks([{ type: "image", source }, { type: "text", text: prompt }]));
  console.log(content[0].text);
}

async function count(prompt) {
  const { max_tokens: _, ...body } = asks(prompt);
  const { input_tokens } = await client.messages.countTokens(body);
  const { usage } = await client.messages.create(asks(prompt));
  console.log(input_tokens === usage.input_tokens + usage.cache_read_input_tokens);
}

async function models() {
  for await (const one of client.models.list()) {
    console.log(`${one.id} ${one.type}`);
  }
}

async function errors() {
  const wrong = [{ ...asks("x"), temperature: -1 }, { ...asks("x"), model: "no-such-model" }, { ...asks("x"), container: "x" }];
  for (const body of wrong) {
    try {
      await client.messages.create(body);
    } catch (error) {
      console.log(`${error.constructor.name} ${error.status} ${error.error.error.type} ${error.error.error.message}`);
    }
  }
}

async function retry(prompt) {
  const answer = await client.messages.create({ ...asks(prompt), max_tokens: 3 });
  console.log(answer.stop_reason);
}

const commands = { stream, tools, think, picture, count, models, errors, retry };
try {
  await commands[command](...words);
} catch (error) {
  console.error(`${error.constructor.name} ${error.status}: ${error.message}`);
  process.exit(1);
}
