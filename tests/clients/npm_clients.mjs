// Asks the server at argv[2] through openai's package and through Vercel's ai, and prints what came as JSON.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import OpenAI from "openai";
import { z } from "zod";

const url = process.argv[2];
const baseURL = `${url}/v1`;
const river = "Which river runs through Ostrel?";
const told = {};

async function look(name, work) {
  try {
    told[name] = await work();
  } catch (error) {
    told[name] = `failed: ${error} ${error.responseBody ?? ""}`;
  }
}

const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const asked = { model: "pocket", messages: [{ role: "user", content: river }], temperature: 0 };
const question = { model: "pocket", input: river, temperature: 0 };
await look("chat", async () => (await client.chat.completions.create(asked)).choices[0].message.content);
await look("stream", async () => {
  let text = "";
  let counted = false;
  const options = { stream: true, stream_options: { include_usage: true } };
  for await (const chunk of await client.chat.completions.create({ ...asked, ...options })) {
    text += chunk.choices[0]?.delta?.content ?? "";
    counted ||= (chunk.usage?.completion_tokens ?? 0) > 0;
  }
  return [text, counted];
});
await look("helper", () => client.chat.completions.stream(asked).finalContent());
await look("completion", async () => {
  const words = { model: "pocket", prompt: "Q: Who rules Hesper?\nA:", temperature: 0, stop: "\n", max_tokens: 24 };
  return (await client.completions.create(words)).choices[0].text;
});
await look("responses", async () => (await client.responses.create(question)).output_text);
await look("responses stream", async () => {
  let text = "";
  for await (const event of await client.responses.create({ ...question, stream: true })) {
    if (event.type === "response.output_text.delta") text += event.delta;
  }
  return text;
});
await look("models", async () => (await client.models.list()).data.map((one) => one.id));
await look("error", async () => {
  try {
    return await client.chat.completions.create({ ...asked, model: "other" });
  } catch (error) {
    return [error.status, error.code];
  }
});

const openai = createOpenAI({ baseURL, apiKey: "none" });
const options = { name: "here", baseURL, supportsStructuredOutputs: true, includeUsage: true };
const providers = {
  compatible: createOpenAICompatible(options)("pocket"),
  "openai chat": openai.chat("pocket"),
  "openai responses": openai.responses("pocket"),
};
const weather = tool({
  description: "Weather of a city",
  inputSchema: z.object({ city: z.string() }),
  execute: async () => ({ degrees: 21, sky: "sun" }),
});
for (const [name, model] of Object.entries(providers)) {
  const words = { model, prompt: river, temperature: 0, maxOutputTokens: 24 };
  const calling = {
    ...words, prompt: "What is the weather in Lisbon?", maxOutputTokens: 120,
    tools: { get_weather: weather }, stopWhen: stepCountIs(3),
  };
  await look(`ai text ${name}`, async () => (await generateText(words)).text);
  await look(`ai stream ${name}`, async () => {
    const result = streamText(words);
    let text = "";
    for await (const piece of result.textStream) text += piece;
    return [text, (await result.usage).outputTokens > 0];
  });
  await look(`ai object ${name}`, async () => {
    const schema = z.object({ yes: z.boolean() });
    return (await generateObject({ model, schema, prompt: "Is water wet?", temperature: 0 })).object;
  });
  await look(`ai tools ${name}`, async () => {
    const result = await generateText(calling);
    return [result.steps[0].toolCalls[0]?.input, result.text];
  });
  await look(`ai tools stream ${name}`, async () => {
    const result = streamText(calling);
    return [await result.text, (await result.steps).length];
  });
}
console.log(JSON.stringify(told));
