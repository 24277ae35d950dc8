// The elements of the page: what was said, by whom, and what went wrong. Text is only ever text, never markup.

const messages = document.getElementById("messages");

function element(name, className, text = "") {
  const made = document.createElement(name);
  made.className = className;
  made.textContent = text;
  return made;
}

/** Shows one turn, and returns its text, which may grow. */
function turn(speaker) {
  const card = element("article", `turn ${speaker}`);
  const text = element("p", "text");
  card.append(text);
  messages.append(card);
  return { card, text };
}

export function showQuestion(question, images) {
  const { card, text } = turn("user");
  text.textContent = question;
  for (const { url, name } of images) card.prepend(picture(url, name));
  scrollToEnd();
}

export function picture(url, name) {
  const image = element("img", "picture");
  image.src = url;
  image.alt = name;
  return image;
}

/** An answer that comes. */
export class AnswerView {
  #turn = turn("assistant");
  #began = performance.now();
  #firstMs;
  #progress;
  #image;
  #drawn = "";

  constructor() {
    this.#turn.card.classList.add("running");
  }

  add(text) {
    this.#firstMs ??= performance.now() - this.#began;
    this.#turn.text.append(text);
    scrollToEnd();
  }

  /** Of a picture that is drawn: how far it is, and how it looks. */
  showProgress({ step, steps, preview }) {
    this.#firstMs ??= performance.now() - this.#began;
    this.#progress ??= this.#turn.card.appendChild(element("progress", "drawing"));
    this.#progress.max = steps;
    this.#progress.value = step;
    if (preview.length > 0) this.#show(preview, "a preview");
    scrollToEnd();
  }

  showImage({ data, width, height, seed }, prompt) {
    this.#drawn = `${width} × ${height} · seed ${seed}`;
    this.#show(data, prompt);
  }

  #show(png, description) {
    this.#image ??= this.#turn.card.appendChild(element("img", "picture drawn"));
    URL.revokeObjectURL(this.#image.src);
    this.#image.src = URL.createObjectURL(new Blob([png], { type: "image/png" }));
    this.#image.alt = description;
    this.#image.onload = scrollToEnd;
  }

  finish({ usage, prefillWorkerId, decodeWorkerId }) {
    if (this.#drawn) {
      this.#end("done", this.#drawn);
      return;
    }
    const workers = [...new Set([prefillWorkerId, decodeWorkerId].filter(Boolean))].join(" → ");
    const first = `first after ${Math.round(this.#firstMs ?? 0)} ms`;
    this.#end("done", `${usage.promptTokens} + ${usage.completionTokens} tokens · ${first} · ${workers}`);
  }

  stop() {
    this.#end("stopped", "stopped");
  }

  fail({ reason, message, fields, hints }) {
    const error = element("div", "error");
    error.setAttribute("role", "alert");
    error.append(element("strong", "reason", reason));
    if (fields.length === 0) error.append(element("p", "message", message));
    for (const { field, description } of fields) {
      const line = element("p", "field");
      line.append(element("code", "", field), ` ${description}`);
      error.append(line);
    }
    if (hints.length > 0) error.append(element("p", "hints", hints.join(", ")));
    this.#turn.card.append(error);
    this.#end("failed", "");
  }

  #end(outcome, note) {
    this.#progress?.remove();
    this.#turn.card.classList.replace("running", outcome);
    if (note) this.#turn.card.append(element("footer", "note", note));
    scrollToEnd();
  }
}

export function clearMessages() {
  messages.replaceChildren();
}

function scrollToEnd() {
  messages.scrollTop = messages.scrollHeight;
}
