// The AI SDK over both endpoints. Arguments: URL and the model's id.
import assert from 'node:assert/strict';
import { createRequire } from 'node:module';
import { COUNT, COUNTED, DESCRIBE, LONG, MODEL, PICTURE, SCHEMA, SEEN, URL, isShape, run } from './asking.mjs';

const load = createRequire(process.cwd() + '/');
const { generateText, jsonSchema, Output, streamText, tool } = load('ai');
const compatible = load('@ai-sdk/openai-compatible').createOpenAICompatible({
  name: 'epdg', baseURL: `${URL}/v1`, apiKey: 'unused', includeUsage: true, supportsStructuredOutputs: true,
});
const openai = load('@ai-sdk/openai').createOpenAI({ baseURL: `${URL}/v1`, apiKey: 'unused' });
const chat = { model: compatible(MODEL), temperature: 0, maxRetries: 0 };
const responses = { ...chat, model: openai.responses(MODEL), providerOptions: { openai: { store: false } } };
const see = [{ role: 'user', content: [
  { type: 'image', image: PICTURE, mediaType: 'image/png' }, { type: 'text', text: DESCRIBE },
] }];
const shape = tool({ description: 'tells a shape', inputSchema: jsonSchema(SCHEMA) });
const called = { messages: see, tools: { shape }, toolChoice: 'required', maxOutputTokens: LONG };

await run('ai', {
  async text() {
    assert.equal((await generateText({ ...chat, prompt: COUNT })).text, COUNTED);
  },
  async image() {
    assert.equal((await generateText({ ...chat, messages: see })).text, SEEN);
  },
  async stream() {
    const answer = streamText({ ...chat, prompt: COUNT });
    assert.equal(await answer.text, COUNTED);
    assert.ok((await answer.usage).outputTokens > 3);
  },
  async structure() {
    const output = Output.object({ schema: jsonSchema(SCHEMA) });
    isShape((await generateText({ ...chat, messages: see, output })).output);
  },
  async tools() {
    isShape((await generateText({ ...chat, ...called })).toolCalls[0].input);
    isShape((await streamText({ ...chat, ...called }).toolCalls)[0].input);
  },
  async responses() {
    assert.equal((await generateText({ ...responses, messages: see })).text, SEEN);
    assert.equal(await streamText({ ...responses, prompt: COUNT }).text, COUNTED);
    isShape((await generateText({ ...responses, ...called })).toolCalls[0].input);
    const output = Output.object({ schema: jsonSchema(SCHEMA) });
    isShape((await generateText({ ...responses, messages: see, output })).output);
  },
});
