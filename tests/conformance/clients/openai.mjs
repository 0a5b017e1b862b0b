// The JavaScript openai client: chat, text completions, responses. Arguments: URL and the model's id.
import assert from 'node:assert/strict';
import { createRequire } from 'node:module';
import { COUNT, COUNTED, DESCRIBE, LONG, MODEL, PICTURE_URI, SCHEMA, SEEN, URL, isShape, run } from './asking.mjs';

const OpenAI = createRequire(process.cwd() + '/')('openai').OpenAI;
const api = new OpenAI({ baseURL: `${URL}/v1`, apiKey: 'unused', maxRetries: 0 });
const how = { model: MODEL, temperature: 0 };
const call = { tool_choice: 'required', parallel_tool_calls: false };
const hello = [{ role: 'user', content: COUNT }];
const see = [{ role: 'user', content: [
  { type: 'image_url', image_url: { url: PICTURE_URI } }, { type: 'text', text: DESCRIBE },
] }];
const tools = [{ type: 'function', function: { name: 'shape', parameters: SCHEMA } }];

await run('openai', {
  async text() {
    const answer = await api.chat.completions.create({ ...how, messages: hello });
    assert.equal(answer.choices[0].message.content, COUNTED);
    const completed = await api.completions.create({ ...how, prompt: 'Count', max_tokens: 3 });
    assert.equal(completed.usage.completion_tokens <= 3, true);
  },
  async image() {
    const answer = await api.chat.completions.create({ ...how, messages: see });
    assert.equal(answer.choices[0].message.content, SEEN);
  },
  async stream() {
    const stream = api.chat.completions.stream({ ...how, messages: hello, stream_options: { include_usage: true } });
    assert.equal(await stream.finalContent(), COUNTED);
    assert.ok((await stream.totalUsage()).completion_tokens > 3);
  },
  async structure() {
    const response_format = { type: 'json_schema', json_schema: { name: 'shape', schema: SCHEMA, strict: true } };
    const answer = await api.chat.completions.create({ ...how, messages: see, response_format });
    isShape(JSON.parse(answer.choices[0].message.content));
  },
  async tools() {
    const stream = api.chat.completions.stream({ ...how, messages: see, tools, ...call, max_tokens: LONG });
    const message = await stream.finalMessage();
    isShape(JSON.parse(message.tool_calls[0].function.arguments));
    const results = message.tool_calls.map(({ id }) => ({ role: 'tool', tool_call_id: id, content: 'thanks' }));
    await api.chat.completions.create({ ...how, messages: [...see, message, ...results], max_tokens: 5 });
  },
  async responses() {
    const answer = await api.responses.create({ ...how, input: COUNT });
    assert.equal(answer.output_text, COUNTED);
    const functions = tools.map((tool) => ({ type: 'function', ...tool.function, strict: false }));
    const stream = api.responses.stream({ ...how, input: COUNT, tools: functions, ...call, max_output_tokens: LONG });
    const called = await stream.finalResponse();
    const made = called.output.find(({ type }) => type === 'function_call');
    isShape(JSON.parse(made.arguments));
    const results = called.output.filter(({ type }) => type === 'function_call')
      .map(({ call_id }) => ({ type: 'function_call_output', call_id, output: 'thanks' }));
    await api.responses.create({ ...how, input: [...hello, ...called.output, ...results], max_output_tokens: 5 });
  },
});
