// A producer in JavaScript: `node produce.js "def fibonacci(n):"`, text as it comes. It needs the submit script:
// `edgellm-producer script submit > submit.lua`, named by SUBMIT_LUA.
// EDGELLM_REDIS_URL (redis://...) or EDGELLM_REDIS_SOCKET says where the queue is.
import { randomUUID } from "node:crypto";
import { readFileSync } from "node:fs";
import { decode, encode } from "@msgpack/msgpack";
import { createClient, RESP_TYPES } from "redis";

const prompt = process.argv[2] ?? "def fibonacci(n):";
const prefix = `edgellm:{${process.env.EDGELLM_QUEUE ?? "default"}}:`;
const script = readFileSync(process.env.SUBMIT_LUA ?? "submit.lua", "utf8");
const path = process.env.EDGELLM_REDIS_SOCKET;
const address = path ? { socket: { path, tls: false } } : { url: process.env.EDGELLM_REDIS_URL ?? "redis://localhost" };
const client = createClient({ ...address, RESP: 2 }); // with RESP 3 the reply of XREAD is a map instead of a list
// Messages are binary: replies come as buffers.
const redis = client.withTypeMapping({ [RESP_TYPES.BLOB_STRING]: Buffer });

async function submit(fields) {
  const id = randomUUID();
  const job = Buffer.from(encode({ v: 1, id, ...fields }));
  const timeoutMs = fields.timeout_s === undefined ? "" : String(Math.round(fields.timeout_s * 1000));
  const replyTtlMs = String((fields.reply_ttl_s ?? 3600) * 1000);
  const [outcome] = await redis.eval(script, {
    keys: [`${prefix}config`],
    arguments: [id, fields.priority ?? "normal", fields.tenant ?? "", timeoutMs, replyTtlMs, "", "", job],
  });
  const [word, ...details] = outcome.map(String);
  if (word !== "queued" && word !== "known") throw new Error([word, ...details].join(" "));
  return id;
}

// Readers consume nothing: whoever was cut off goes on from the last id it saw.
async function* entries(id) {
  const key = `${prefix}reply:${id}`;
  for (let last = "0"; ; ) {
    const reply = await redis.sendCommand(["XREAD", "BLOCK", "1000", "STREAMS", key, last]);
    for (const [entry, [kind, message]] of reply?.[0]?.[1] ?? []) {
      last = entry.toString();
      yield [kind.toString(), decode(message)];
      if (kind.toString() === "done") return;
    }
  }
}

await client.connect();
try {
  const id = await submit({ prompt, max_tokens: 32, temperature: 0.0, stream: true });
  let attempt = 1;
  let streamed = "";
  for await (const [kind, message] of entries(id)) {
    if (kind === "done") {
      console.log(`${message.status} ${message.text}`);
      console.log(`streamed ${JSON.stringify(streamed)}`);
    } else {
      if (message.attempt !== attempt) [attempt, streamed] = [message.attempt, ""]; // it began anew
      streamed += message.text;
    }
  }
} finally {
  client.destroy();
}
