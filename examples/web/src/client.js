// The connection to Baton: gRPC-Web, as Envoy offers it. `?api=http://HOST:PORT` names another Envoy.

import { createClient } from "@connectrpc/connect";
import { createGrpcWebTransport } from "@connectrpc/connect-web";
import { ImageService } from "../gen/baton/inference/v1/image_pb.js";
import { InferenceService } from "../gen/baton/inference/v1/inference_service_pb.js";

export const api = new URLSearchParams(location.search).get("api") ?? "http://127.0.0.1:8080";

const transport = createGrpcWebTransport({ baseUrl: api });

export const client = createClient(InferenceService, transport);
export const drawer = createClient(ImageService, transport);
