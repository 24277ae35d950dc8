// Pictures from text, by a model that draws.

import { drawer } from "./client.js";

const PREVIEWS = 4;

/**
 * Draws, and yields the events as they come: `progress` with a preview from time to time, `image`, `finished`. Aborting the
 * signal stops the request on the worker. Throws ConnectError.
 */
export async function* draw(prompt, { name, imageGeneration }, signal) {
  const previewSteps = imageGeneration.previews ? Math.max(1, Math.floor(imageGeneration.steps / (PREVIEWS + 1))) : 0;
  const request = { model: name, options: { prompt, previewSteps } };
  for await (const { event } of drawer.generate(request, { signal })) yield event;
}
