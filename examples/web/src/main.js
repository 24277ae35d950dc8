// The page: what its buttons and fields do.

import "./main.css";
import { api, client } from "./client.js";
import { Conversation } from "./conversation.js";
import { draw } from "./drawing.js";
import { decode, isCancel } from "./failure.js";
import { AnswerView, clearMessages, picture, showQuestion } from "./view.js";

const at = (id) => document.getElementById(id);

let models = [];
let conversation = new Conversation();
let images = [];
let running = null;

async function ask(text) {
  const asked = images;
  attach([]);
  showQuestion(text, asked);
  const view = new AnswerView();
  setRunning(new AbortController());
  try {
    for await (const event of answer(text, asked)) {
      if (event.case === "token") view.add(event.value.text);
      if (event.case === "progress") view.showProgress(event.value);
      if (event.case === "image") view.showImage(event.value, text);
      if (event.case === "finished") view.finish(event.value);
    }
  } catch (error) {
    if (isCancel(error)) view.stop();
    else view.fail(decode(error, api));
  } finally {
    setRunning(null);
  }
}

/** The events of a picture, if the chosen model only draws, or of an answer. */
function answer(text, asked) {
  const model = models.find(({ name }) => name === at("model").value);
  if (model?.imageGeneration && !model.workers.decode) return draw(text, model, running.signal);
  return conversation.ask(text, asked, options(), running.signal);
}

function options() {
  return {
    model: at("model").value,
    temperature: number("temperature"),
    maxTokens: number("max-tokens"),
  };
}

/** What a field says, or nothing if it is empty: then the model's default counts. */
function number(id) {
  return at(id).value === "" ? undefined : at(id).valueAsNumber;
}

function setRunning(controller) {
  running = controller;
  at("send").hidden = running !== null;
  at("stop").hidden = running === null;
}

function attach(chosen) {
  images = chosen;
  at("images").value = "";
  at("attachments").replaceChildren(...images.map(({ url, name }) => picture(url, name)));
}

async function read(file) {
  const data = new Uint8Array(await file.arrayBuffer());
  return { name: file.name, mimeType: file.type, data, url: URL.createObjectURL(file) };
}

async function showModels() {
  ({ models } = await client.listModels({}));
  at("model").replaceChildren(...models.map(({ name }) => new Option(name)));
}

at("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = at("prompt").value.trim();
  if (running !== null || (text === "" && images.length === 0)) return;
  at("prompt").value = "";
  ask(text);
});

at("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  at("composer").requestSubmit();
});

at("images").addEventListener("change", async (event) => {
  attach([...images, ...(await Promise.all([...event.target.files].map(read)))]);
});

at("stop").addEventListener("click", () => running?.abort());

at("clear").addEventListener("click", () => {
  running?.abort();
  conversation = new Conversation();
  clearMessages();
});

showModels().catch((error) => new AnswerView().fail(decode(error, api)));
