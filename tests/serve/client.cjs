// The official client in JavaScript: asks for one text in each way, and prints what it was told as JSON.
const OpenAI = require("openai");

const [baseURL, apiKey] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const asked = { model: "helpdesk", input: "hello", max_output_tokens: 6 };

async function main() {
  const messages = [{ role: "user", content: "hello" }];
  const chat = await client.chat.completions.create({ model: "helpdesk", messages, max_tokens: 6 });
  const response = await client.responses.create(asked);
  const numbers = [];
  let streamed = "";
  for await (const event of await client.responses.create({ ...asked, stream: true })) {
    numbers.push(event.sequence_number);
    if (event.type === "response.output_text.delta") streamed += event.delta;
  }
  const next = { ...asked, input: "and?", max_output_tokens: 2 };
  const chained = await client.responses.create({ ...next, previous_response_id: response.id });
  const refused = await client.responses.create({ ...asked, background: true }).catch((error) => error);
  console.log(
    JSON.stringify({
      texts: [chat.choices[0].message.content, response.output_text, streamed],
      numbers,
      models: [chat.model, response.model, chained.model],
      chained: chained.previous_response_id === response.id,
      refused: [refused.status, refused.param],
    }),
  );
}

main();
