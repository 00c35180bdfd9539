// The openai package for JavaScript: node openai_javascript.mjs URL MODEL
import assert from "node:assert";
import OpenAI from "openai";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const chat = client.chat.completions;
const messages = [{ role: "user", content: "What is the capital of France? One word." }];
const asked = { model, messages, temperature: 0, max_completion_tokens: 16 };
let checks = 0;
const check = (what) => { assert(what); checks += 1; };

const models = await client.models.list();
check(models.data.length === 1 && models.data[0].id === model);
const whole = await chat.create(asked);
const text = whole.choices[0].message.content;
check(/Paris/.test(text));
let streamed = "";
for await (const part of await chat.create({ ...asked, stream: true }))
  streamed += part.choices[0]?.delta?.content ?? "";
check(streamed === text);
const completion = await client.completions.create({
  model, prompt: "The capital of France is", temperature: 0, max_tokens: 4,
});
check(/Paris/.test(completion.choices[0].text));
await assert.rejects(chat.create({ ...asked, model: "other" }), OpenAI.NotFoundError);
await assert.rejects(chat.create({ ...asked, temperature: -1 }), OpenAI.BadRequestError);
checks += 2;
const long = { ...asked, max_completion_tokens: 900, stream: true };
const stream = await chat.create(long);
for await (const part of stream) break; // leaves the loop: the connection is closed
const unfinished = async () => (await (await fetch(`${url}/status`)).json()).requests;
for (let i = 0; i < 100 && (await unfinished()); i++) await new Promise((r) => setTimeout(r, 50));
check((await unfinished()) === 0);
console.log(`openai, ${checks} checks`);
