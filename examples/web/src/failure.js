// What a failed call says, for showing: google.rpc details where Baton sent them, the bare status where it could not.

import { Code, ConnectError } from "@connectrpc/connect";
import { durationMs } from "@bufbuild/protobuf/wkt";
import { BadRequestSchema, ErrorInfoSchema, RetryInfoSchema } from "../gen/google/rpc/error_details_pb.js";

/** Decodes whatever a call has thrown: `reason`, `message`, the wrong `fields`, and `hints` on where and when. */
export function decode(thrown, api) {
  const error = ConnectError.from(thrown);
  const [info] = error.findDetails(ErrorInfoSchema);
  const [retry] = error.findDetails(RetryInfoSchema);
  const fields = error.findDetails(BadRequestSchema).flatMap((each) => each.fieldViolations);
  const hints = [];
  if (info?.metadata.stage) hints.push(`at ${info.metadata.stage}`);
  if (info?.metadata.worker_id) hints.push(`on ${info.metadata.worker_id}`);
  if (retry?.retryDelay) hints.push(`retry in ${(durationMs(retry.retryDelay) / 1000).toFixed(1)} s`);
  // A browser does not say why it could not connect.
  if (!info && error.cause instanceof TypeError) hints.push(`is Envoy at ${api}, and does it allow this page?`);
  return { reason: info?.reason ?? Code[error.code], message: error.rawMessage, fields, hints };
}

/** Whether the call ended because this page ended it. */
export function isCancel(thrown) {
  return ConnectError.from(thrown).code === Code.Canceled;
}
