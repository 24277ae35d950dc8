// The connection to Baton: gRPC-Web, as Envoy offers it. `?api=http://HOST:PORT` names another Envoy.

import { createClient } from "@connectrpc/connect";
import { createGrpcWebTransport } from "@connectrpc/connect-web";
import { InferenceService } from "../gen/baton/inference/v1/inference_service_pb.js";

export const api = new URLSearchParams(location.search).get("api") ?? "http://127.0.0.1:8080";

export const client = createClient(InferenceService, createGrpcWebTransport({ baseUrl: api }));
