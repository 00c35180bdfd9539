// The openai package for JavaScript: node openai_javascript.mjs URL MODEL
import assert from "node:assert";
import OpenAI from "openai";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "What is the capital of France? One word." }];
const asked = { model, messages, temperature: 0, max_completion_tokens: 16 };

const models = await client.models.list();
assert.deepEqual(models.data.map((m) => m.id), [model]);
const whole = await client.chat.completions.create(asked);
const text = whole.choices[0].message.content;
assert.match(text, /Paris/);
let streamed = "";
for await (const part of await client.chat.completions.create({ ...asked, stream: true }))
  streamed += part.choices[0]?.delta?.content ?? "";
assert.equal(streamed, text);
const completion = await client.completions.create({ model, prompt: "The capital of France is", temperature: 0, max_tokens: 4 });
assert.match(completion.choices[0].text, /Paris/);
await assert.rejects(client.chat.completions.create({ ...asked, model: "other" }), OpenAI.NotFoundError);
await assert.rejects(client.chat.completions.create({ ...asked, temperature: -1 }), OpenAI.BadRequestError);
const stream = await client.chat.completions.create({ ...asked, max_completion_tokens: 900, stream: true });
for await (const part of stream) { stream.controller.abort(); break; }
console.log("openai, 6 checks");
