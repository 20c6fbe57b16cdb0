// A tour of every endpoint with OpenAI's own Node client. It prints one JSON object: what was seen.
import assert from "node:assert/strict";
import OpenAI from "openai";

const client = new OpenAI({ maxRetries: 0 }); // OPENAI_BASE_URL, OPENAI_API_KEY
const model = process.env.MODEL;
const brief = { model, temperature: 0, max_output_tokens: 12 };
const look = {
  type: "function",
  name: "look",
  description: "Look at a place.",
  strict: true,
  parameters: {
    type: "object",
    properties: { place: { type: "string", enum: ["pier", "ferry"] } },
    required: ["place"],
    additionalProperties: false,
  },
};
const seen = {};

async function all(stream) {
  const events = [];
  for await (const event of stream) events.push(event);
  assert.deepEqual(events.map((event) => event.sequence_number), events.map((_, index) => index));
  return events;
}

async function responses() {
  const first = await client.responses.create({ ...brief, input: "Say hello.", instructions: "Be brief." });
  assert.equal(first.usage.output_tokens, 12);
  const next = { ...brief, input: "Again.", instructions: "Be brief.", previous_response_id: first.id };
  const again = await client.responses.create(next);
  assert.ok(again.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens);
  assert.equal((await client.responses.retrieve(again.id)).output_text, again.output_text);
  const items = [];
  for await (const item of client.responses.inputItems.list(again.id, { order: "asc" })) items.push(item.role);
  assert.deepEqual(items, ["user", "assistant", "user"]);
  await client.responses.delete(again.id);
  await assert.rejects(client.responses.retrieve(again.id), OpenAI.NotFoundError);
  seen.cached = again.usage.input_tokens_details.cached_tokens;
}

async function streams() {
  // The helper throws at events that it does not know.
  const helper = client.responses.stream({ ...brief, input: "Count." });
  let text = "";
  helper.on("response.output_text.delta", (event) => (text += event.delta));
  const final = await helper.finalResponse().catch((error) => error);
  assert.ok(final.output_text === text || final instanceof Error);
  const created = await client.responses.create({ ...brief, input: "Count.", background: true, stream: true });
  const whole = await all(created);
  const id = whole[0].response.id;
  for (let cut = 0; cut < whole.length; cut++) {
    const rest = [];
    for await (const event of await client.responses.retrieve(id, { stream: true, starting_after: cut })) rest.push(event);
    assert.deepEqual(rest, whole.slice(cut + 1));
  }
  // Connections that are lost at every event: what is told then, and what is told after it, is the whole.
  for (let cut = 1; cut < whole.length; cut++) {
    const before = [];
    for await (const event of await client.responses.retrieve(id, { stream: true })) {
      before.push(event);
      if (before.length === cut) break; // which closes the connection
    }
    const after = [];
    const from = { stream: true, starting_after: cut - 1 };
    for await (const event of await client.responses.retrieve(id, from)) after.push(event);
    assert.deepEqual([...before, ...after], whole);
  }
  seen.events = whole.length;
}

async function functions() {
  const asked = { model, temperature: 0, max_output_tokens: 40, tools: [look] };
  const stream = client.responses.stream({ ...asked, input: "Look at the pier.", tool_choice: "required" });
  let written = "";
  stream.on("response.function_call_arguments.delta", (event) => (written += event.delta));
  const response = await stream.finalResponse();
  const [call] = response.output;
  assert.equal(call.arguments, written);
  const output = { type: "function_call_output", call_id: call.call_id, output: "Fog." };
  const next = { ...asked, input: [output], previous_response_id: response.id, tool_choice: "none" };
  seen.after = (await client.responses.create(next)).output_text.length > 0;
  const inside = { type: "mcp", server_label: "tenuto", allowed_tools: ["bash"], require_approval: "never" };
  const ran = client.responses.stream({
    ...asked, tools: [inside], input: "Run: echo tide", tool_choice: "required", max_tool_calls: 1, max_output_tokens: 60,
  });
  const kinds = new Set();
  ran.on("event", (event) => kinds.add(event.type));
  await ran.done().catch(() => {});
  assert.ok(kinds.has("response.mcp_call.completed") || kinds.has("response.mcp_call.failed"));
}

async function background() {
  const numbers = { type: "array", items: { type: "integer", minimum: 0, maximum: 9 }, minItems: 3000 };
  const text = { format: { type: "json_schema", name: "numbers", schema: numbers } };
  const made = await client.responses.create({ model, input: "Numbers.", background: true, text, max_output_tokens: 4000 });
  while ((await client.responses.retrieve(made.id)).output.length === 0) await new Promise((go) => setTimeout(go, 50));
  assert.equal((await client.responses.cancel(made.id)).status, "cancelled");
  const told = [];
  for await (const event of await client.responses.retrieve(made.id, { stream: true })) told.push(event.type);
  seen.cancelled = told.at(-1);
}

async function conversations() {
  const items = [{ type: "message", role: "user", content: "My name is Ada." }];
  const conversation = await client.conversations.create({ items, metadata: { a: "b" } });
  const first = await client.responses.create({ ...brief, conversation: conversation.id, input: "Hello." });
  const second = await client.responses.create({ ...brief, conversation: conversation.id, input: "Who am I?" });
  assert.equal(first.runtime.session, second.runtime.session);
  const roles = [];
  for await (const item of client.conversations.items.list(conversation.id, { order: "asc" })) roles.push(item.role);
  assert.deepEqual(roles, ["user", "user", "assistant", "user", "assistant"]);
  await client.conversations.items.create(conversation.id, { items });
  assert.deepEqual((await client.conversations.update(conversation.id, { metadata: { c: "d" } })).metadata, { c: "d" });
  assert.ok((await client.conversations.delete(conversation.id)).deleted);
}

async function chats() {
  const chat = { model, temperature: 0, max_completion_tokens: 40, seed: 7 };
  const messages = [{ role: "user", content: "Say hello." }];
  const first = await client.chat.completions.create({ ...chat, messages });
  messages.push(first.choices[0].message, { role: "user", content: "Again." });
  const stream = client.chat.completions.stream({ ...chat, messages, stream_options: { include_usage: true } });
  const whole = await stream.finalChatCompletion();
  assert.ok(whole.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens);
  const { type, ...about } = look;
  const asked = { ...chat, tools: [{ type, function: about }], messages: [{ role: "user", content: "Look." }] };
  const called = await client.chat.completions.create({ ...asked, tool_choice: "required" });
  const [call] = called.choices[0].message.tool_calls;
  asked.messages.push(called.choices[0].message, { role: "tool", tool_call_id: call.id, content: "Fog." });
  const done = await client.chat.completions.create({ ...asked, tool_choice: "none" });
  assert.ok(done.choices[0].message.content.length > 0);
  const several = await client.chat.completions.create({ ...chat, messages, n: 2, logprobs: true, temperature: 1 });
  assert.equal(several.choices.length, 2);
  assert.equal(several.choices[0].logprobs.content.map((one) => one.token).join(""), several.choices[0].message.content);
  seen.models = (await client.models.list()).data.map((one) => one.id);
  await assert.rejects(client.chat.completions.create({ ...chat, messages: [], functions: [] }), OpenAI.BadRequestError);
}

for (const part of [responses, streams, functions, background, conversations, chats]) await part();
console.log(JSON.stringify(seen));
