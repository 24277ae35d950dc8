// A conversation: what was said so far, and asking for what comes next.

import { client } from "./client.js";

export class Conversation {
  #messages = [];

  /**
   * Asks, and yields the events of the answer as they come: `started`, `token`, `finished`. What was said is kept once the
   * answer is complete. Aborting the signal stops the request on the workers. Throws ConnectError.
   */
  async *ask(text, images, { model, temperature, maxTokens }, signal) {
    const media = images.map(({ mimeType, data }) => ({
      part: { case: "media", value: { mimeType, source: { case: "data", value: data } } },
    }));
    const question = { role: "user", parts: [...media, { part: { case: "text", value: text } }] };
    const request = {
      model,
      input: { case: "chat", value: { messages: [...this.#messages, question] } },
      sampling: { temperature },
      stopping: { maxTokens },
    };
    let answer = "";
    for await (const { event } of client.generate(request, { signal })) {
      if (event.case === "token") answer += event.value.text;
      yield event;
    }
    this.#messages.push(question, { role: "assistant", parts: [{ part: { case: "text", value: answer } }] });
  }
}
